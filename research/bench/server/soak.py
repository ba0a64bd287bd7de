"""Rollouts of a running server while its weights change and its engine is killed."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec

from research.bench.frame import Settings
from research.bench.host.processes import children_of_server, processes
from srm.engine.config import DEMO_MODEL, ModelConfig
from srm.engine.weights.random_model import write_random_model
from srm.errors import ConfigError

_TIMEOUT_S = 600.0
_ANSWER_S = 120.0
"""Time to answer the rollouts that are open after the last change."""
_RETRY_S = 0.2


class RolloutsBenchConfig(Settings, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm bench rollouts`."""

    model: Path = DEMO_MODEL
    """Folder whose config.json says the shape of the models, which have random weights."""
    rollouts: int = 1_000
    """Completions that run at once."""
    samples: int = 4
    """Completions of each request."""
    prompt_tokens: int = 8
    """Tokens of each prompt."""
    max_tokens: int = 64
    """Most tokens of a completion; each request draws its own number."""
    changes: int = 200
    """Changes of weights."""
    seconds: float = 300.0
    """Time in which these are to be made."""
    kills: int = 10
    """How often the engine is killed meanwhile."""
    seed: int = 0
    """Draws weights, prompts, lengths and the moments of kills."""
    pauses: int = 100
    """How often the server is then paused and resumed."""
    paused_rollouts: int = 64
    """Completions that run at once meanwhile."""
    peers_dir: str = ""
    """Folder of `python -m research.bench.peers setup`, whose vLLM is paused too; empty: it is
    left out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kills > self.changes:
            raise ValueError(f"kills must be at most changes = {self.changes}, got {self.kills}")


class CheckedRollout(NamedTuple):
    """One completion as the server replied."""

    prompt: list[int]
    prompt_version: int
    """Version of the weights that were fed the prompt but for its last token."""
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    """Versions of the weights that made each token, in order."""


class Soak:
    """Asks for rollouts, changes weights, kills the engine."""

    def __init__(self, config: RolloutsBenchConfig, shape: ModelConfig, folder: Path) -> None:
        self._config, self._shape, self._folder = config, shape, folder
        self._rng = random.Random(config.seed)
        self.rollouts: list[CheckedRollout] = []
        self.num_unanswered = self.num_kills = 0  # of the first: asked for and not answered yet
        self.failures: Counter[str] = Counter()
        """Answers after which rollouts were asked for again."""
        self.change_failures: Counter[str] = Counter()
        self.changes: list[dict[str, float]] = []
        self.seeds = {1: 0}
        """Which weights a version is."""
        self.seconds = self.mean_step_s = 0.0
        self._steps, self._last_steps = {"sum": 0.0, "count": 0.0}, {"sum": 0.0, "count": 0.0}
        self._is_over = False

    def seed(self, number: int) -> int:
        """Seed of the weights of a change."""
        return 1_000_000 * self._config.seed + number

    async def run(self, pid: int, url: str, admin_url: str) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with (
            httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, limits=limits) as client,
            httpx.AsyncClient(base_url=admin_url, timeout=_TIMEOUT_S) as trainer,
        ):
            count = -(-self._config.rollouts // self._config.samples)
            asking = [asyncio.create_task(self._ask(client, who)) for who in range(count)]
            began = time.monotonic()
            await self._change_all(trainer, pid)
            self.seconds = time.monotonic() - began
            self._is_over = True
            answered, unanswered = await asyncio.wait(asking, timeout=_ANSWER_S)
            for task in unanswered:
                task.cancel()
            for task in answered:
                task.result()  # raises what it raised

    async def _ask(self, client: httpx.AsyncClient, who: int) -> None:
        """Ask for rollouts one after another, each until it is answered."""
        config = self._config
        rng = random.Random(f"{config.seed} {who}")
        while not self._is_over:
            prompt = [rng.randrange(self._shape.vocab_size) for _ in range(config.prompt_tokens)]
            params = {
                "n": config.samples,
                "max_tokens": rng.randint(max(1, config.max_tokens // 4), config.max_tokens),
                "ignore_eos": True,
                "logprobs": 0,
                "temperature": 1.0,
                "seed": rng.randrange(2**32),
            }
            self.num_unanswered += config.samples
            body = {"token_ids": prompt, "sampling_params": params}
            while (reply := await self._post(client, body)) is None:
                await asyncio.sleep(_RETRY_S)
            self.num_unanswered -= config.samples
            self._add(prompt, reply)

    async def _post(self, client: httpx.AsyncClient, body: dict[str, Any]) -> Any:
        try:
            reply = await client.post("/inference/v1/generate", json=body)
        except httpx.TransportError as error:
            self.failures[type(error).__name__] += 1
            return None
        if reply.is_success:
            return msgspec.json.decode(reply.content)
        if reply.status_code != httpx.codes.SERVICE_UNAVAILABLE:
            raise ConfigError(f"a rollout was answered with {reply.status_code}: {reply.text}")
        self.failures[reply.json()["error"]["message"][:80]] += 1
        return None

    def _add(self, prompt: list[int], reply: Any) -> None:
        for choice in reply["choices"]:
            versions: list[int] = []
            for span in choice["weight_versions"]:
                versions += [span["version"]] * (span["end"] - span["start"])
            tokens = choice["token_ids"]
            logprobs = [item["logprob"] for item in choice["logprobs"]["content"]]
            if not len(tokens) == len(logprobs) == len(versions):
                raise ConfigError(f"a choice has spans of other tokens: {choice}")
            begun = reply.get("first_weights_version") or versions[0]
            self.rollouts.append(CheckedRollout(prompt, begun, tokens, logprobs, versions))

    async def _change_all(self, trainer: httpx.AsyncClient, pid: int) -> None:
        config = self._config
        period_s = config.seconds / config.changes
        to_kill = set(self._rng.sample(range(config.changes), config.kills))
        began = time.monotonic()
        async with asyncio.TaskGroup() as killing:
            for number in range(config.changes):
                await asyncio.sleep(began + number * period_s - time.monotonic())
                if number in to_kill:
                    killing.create_task(self._kill(pid, self._rng.uniform(0, period_s)))
                await self._change(trainer, number + 1)
                await self._note_steps(trainer)
        self.mean_step_s = self._steps["sum"] / max(1, self._steps["count"])

    async def _change(self, trainer: httpx.AsyncClient, number: int) -> None:
        """Have the server use other weights, and delete their folder once it has answered."""
        folder = self._folder / f"weights-{number}"
        write_random_model(folder, self._shape, self.seed(number))
        before = max(self.seeds)
        body = {"path": str(folder), "running": "continue"}
        while True:
            reply = await trainer.post("/v1/admin/weights", json=body)
            if reply.is_success:
                shutil.rmtree(folder)
                done = reply.json()
                version = done["weights_version"]
                self.changes.append({key: done[key] for key in ("pause_seconds", "seconds")})
            else:
                self.change_failures[reply.json()["error"]["message"][:80]] += 1
                if (version := await self._version(trainer)) < before:
                    raise ConfigError(f"version {before} was in use, and now {version} is")
            # An engine that was killed after it had been asked may have made the change, or twice.
            self.seeds |= dict.fromkeys(range(before + 1, version + 1), number)
            if reply.is_success or version > before:
                shutil.rmtree(folder, ignore_errors=True)
                return
            await asyncio.sleep(_RETRY_S)

    async def _version(self, trainer: httpx.AsyncClient) -> int:
        """Return the version in use once an engine answers."""
        deadline = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < deadline:
            reply = await trainer.get("/v1/admin/state")
            if reply.is_success:
                return int(reply.json()["weights_version"])
            await asyncio.sleep(_RETRY_S)
        raise ConfigError("the engine did not come back")

    async def _kill(self, pid: int, after_s: float) -> None:
        """End the engine's process, at once, wherever it is."""
        await asyncio.sleep(after_s)
        while True:
            with suppress(OSError, ValueError):  # one ends meanwhile
                kinds = children_of_server(pid, processes())
                engines = [child for child, kind in kinds.items() if kind == "engine"]
                if engines:
                    os.kill(engines[0], signal.SIGKILL)
                    self.num_kills += 1
                    return
            await asyncio.sleep(_RETRY_S)

    async def _note_steps(self, trainer: httpx.AsyncClient) -> None:
        """Add up the engine's steps, whose counts begin anew with each engine."""
        seen = {"sum": 0.0, "count": 0.0}
        for line in (await trainer.get("/metrics")).text.splitlines():
            for key in seen:
                if line.startswith(f"srm_engine_step_seconds_{key}"):
                    seen[key] += float(line.split()[-1])
        is_same = seen["count"] >= self._last_steps["count"]
        for key, value in seen.items():
            self._steps[key] += value - self._last_steps[key] if is_same else value
        self._last_steps = seen
