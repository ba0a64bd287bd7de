"""`srm bench rollouts`: rollouts while weights change and the engine is killed, token by token.

A trainer changes the weights again and again, deletes each folder as soon as it has its answer, and
the engine is killed at random moments. Rollouts whose engine dies are asked for again. Afterwards
the log-probability of every token is computed again by torch's recurrent form in float32, with
other weights from where the reply's spans say so; and that of every eighth with the weights of a
version beside the right one, which must not agree.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import numpy as np
import numpy.typing as npt
import torch

from bench.frame import Record, Settings, run, table
from bench.host.processes import children_of_server, processes
from bench.host.serving import free_port, serving
from srm.engine.config import DEMO_MODEL, ModelConfig, parse_model_config
from srm.engine.errors import ConfigError
from srm.engine.weights.random_model import random_tensors, write_random_model
from srm.training.model import SRM

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

WITHIN = 1e-4
"""Nats by which a log-probability may differ from torch's, in float32."""
OFF = 1e-2
"""Nats by which it must differ from that of other weights."""
_EVERY = 8
"""One token in this many is also computed with other weights."""
_TIMEOUT_S = 600.0
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


def main(argv: list[str]) -> int:
    """Run, write a record, print its table."""
    return run(RolloutsBenchConfig, argv, "rollouts", measure, markdown)


def measure(config: RolloutsBenchConfig) -> Record:
    """Return what became of rollouts and changes, and how far log-probabilities are off."""
    path = config.model / "config.json"
    shape = parse_model_config(path, path.read_bytes())
    if config.prompt_tokens + config.max_tokens > shape.n_ctx:
        raise ConfigError(
            f"prompt_tokens + max_tokens = {config.prompt_tokens + config.max_tokens} must be at "
            f"most n_ctx = {shape.n_ctx} of {config.model}"
        )
    with tempfile.TemporaryDirectory() as name:
        soak = _Soak(config, shape, Path(name))
        write_random_model(Path(name) / "model", shape, soak.seed(0))
        rows = max(config.rollouts, config.samples)
        admin_port = free_port()
        with serving(
            *(f"--model={name}/model", f"--data-dir={name}/data", f"--num-slots={rows}"),
            *(f"--max-step-rows={rows}", f"--admin-port={admin_port}", "--log-level=warning"),
        ) as server:
            asyncio.run(soak.run(server.pid, server.url, f"http://127.0.0.1:{admin_port}"))
    began = time.monotonic()
    numbers = sorted(soak.seeds)
    seeds = soak.seeds

    def load(version: int) -> SRM:
        model = SRM(shape)
        tensors = random_tensors(shape, soak.seed(seeds[version]))
        model.load_state_dict({key: torch.tensor(value) for key, value in tensors.items()})
        return model

    right, wrong = recompute(soak.rollouts, load, len(numbers))
    given = np.concatenate([np.array(rollout.logprobs) for rollout in soak.rollouts])
    errors, wrong_errors = np.abs(right - given), np.abs(wrong - given)[~np.isnan(wrong)]
    spans = [len(set(rollout.versions)) for rollout in soak.rollouts]
    return {
        "rollouts": len(soak.rollouts),
        "unanswered": soak.num_unanswered,
        "asked_again": dict(soak.failures),
        "tokens": len(given),
        "versions": len(numbers),
        "spans": {"mean": float(np.mean(spans)), "most": max(spans)},
        "changes": soak.changes,
        "change_failures": dict(soak.change_failures),
        "kills": soak.num_kills,
        "seconds": soak.seconds,
        "mean_step_s": soak.mean_step_s,
        "largest_error": float(errors.max()),
        "beyond": int(np.count_nonzero(errors > WITHIN)),
        "compared": len(wrong_errors),
        "wrong_off_share": float(np.mean(wrong_errors > OFF)),
        "recompute_s": time.monotonic() - began,
    }


def markdown(record: Record) -> list[str]:
    """Render the table."""
    pauses = np.array([change["pause_seconds"] for change in record["changes"]])
    whole = np.array([change["seconds"] for change in record["changes"]])
    step_s = record["mean_step_s"]

    def pause(quantile: float) -> str:
        seconds = float(np.quantile(pauses, quantile))
        return f"{1e3 * seconds:.1f} ms, {seconds / step_s:.2f} steps"

    tokens, spans = record["tokens"], record["spans"]
    rows = {
        "rollouts answered": f"{record['rollouts']:,}",
        "rollouts not answered": f"{record['unanswered']:,}",
        "requests asked again": f"{sum(record['asked_again'].values()):,}",
        "changes of weights": f"{len(pauses):,} in {record['seconds']:.0f} s",
        "kills of the engine": str(record["kills"]),
        "versions in a rollout": f"{spans['mean']:.1f}, {spans['most']} at most",
        "tokens": f"{tokens:,}",
        f"off by more than {WITHIN:g} nats": f"{record['beyond']:,}",
        "largest error": f"{record['largest_error']:.1e} nats",
        f"off by more than {OFF:g} with other weights": f"{record['wrong_off_share']:.2%}",
        "mean step": f"{1e3 * step_s:.1f} ms",
        "pause p50": pause(0.5),
        "pause p99": pause(0.99),
        "from asking to use, p50": f"{float(np.median(whole)):.2f} s",
    }
    return table(" | ", (f"{name} | {value}" for name, value in rows.items()))


def recompute(
    rollouts: Sequence[CheckedRollout], load: Callable[[int], SRM], newest: int
) -> tuple[F64, F64]:
    """Compute all tokens' log-probabilities, rollout by rollout, at temperature 1: with the weights
    that their versions name, and every eighth with those of the version before instead (the first:
    after); others are NaN there.

    `load` returns a version's model, of versions 1 … `newest`. All prompts have the same length.
    """
    first = len(rollouts[0].prompt) - 1
    lengths = np.array([len(rollout.tokens) for rollout in rollouts])
    shape = len(rollouts), first + int(lengths.max())
    fed, made = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    version_at = np.zeros(shape, np.int64)  # 0: nothing is fed
    for row, rollout in enumerate(rollouts):
        stop = first + len(rollout.tokens)
        fed[row, :stop] = [*rollout.prompt, *rollout.tokens[:-1]]
        made[row, first:stop] = rollout.tokens
        version_at[row, :stop] = [rollout.prompt_version] * first + rollout.versions
    if (np.diff(np.where(version_at == 0, np.iinfo(np.int64).max, version_at)) < 0).any():
        raise ConfigError("the versions of a rollout's tokens fall")
    right, wrong = np.zeros(shape), np.full(shape, np.nan)
    models: dict[int, SRM] = {}
    state = None
    for version in np.unique(version_at[version_at > 0]).tolist():  # a rollout's versions ascend
        other = version - 1 or min(2, newest)
        models = {number: models.get(number) or load(number) for number in (other, version)}
        if state is None:
            state = models[version].empty_state(len(rollouts))
        for position in range(shape[1]):
            rows = np.flatnonzero(version_at[:, position] == version)
            if not len(rows):
                continue
            tokens, before = torch.tensor(fed[rows, position]), state[:, :, rows]
            target = torch.tensor(made[rows, position])[:, None]
            uses = [(version, right)]
            if position % _EVERY == version % _EVERY:
                uses.append((other, wrong))
            for number, logprobs in uses:
                with torch.inference_mode():
                    logits, after = models[number].step(tokens, before, position)
                if number == version:
                    state[:, :, rows] = after
                at_target = logits.log_softmax(-1).gather(1, target)[:, 0]
                logprobs[rows, position] = at_target.numpy()
    is_made = np.arange(shape[1]) >= first
    is_made = is_made & (np.arange(shape[1]) < first + lengths[:, None])
    return right[is_made], wrong[is_made]


class _Soak:
    """Asks for rollouts, changes weights, kills the engine."""

    def __init__(self, config: RolloutsBenchConfig, shape: ModelConfig, folder: Path) -> None:
        self._config, self._shape, self._folder = config, shape, folder
        self._rng = random.Random(config.seed)
        self.rollouts: list[CheckedRollout] = []
        self.num_unanswered = self.num_kills = 0
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
            await asyncio.gather(*asking)

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
