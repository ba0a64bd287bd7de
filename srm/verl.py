"""Rollouts of verl's trainers by running servers, which go on with their weights.

For an environment with verl, which takes it by `VERL_USE_EXTERNAL_MODULES=srm.verl` and
`actor_rollout_ref.rollout.name=srm`: of `srm` this module needs `srm.trl` alone, and of packages
aiohttp, ray and verl besides. verl 0.9 calls it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import ray
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput
from verl.workers.rollout.utils import ensure_async_iterator

from srm.trl import RolloutServer

_MOST_ABORTED = 4_000  # ids in one request
_WAITS_S = (1, 2, 4, 8, 16)  # before a request that is refused for now is sent again
_NO_LIMIT = 2**31 - 1  # of calls in Ray, which would have control wait behind calls that wait


class RolloutActor:
    """The actor that asks a server for verl. Its methods are those that verl calls.

    It takes any number of calls, and has `max_running` of their requests run at once. A concurrency
    group of Ray's would not do for control: it has an event loop of its own, in another thread.
    """

    def __init__(self, config: Any, url: str, key: str, max_running: int) -> None:
        self._config = config
        self._url = url
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._session: aiohttp.ClientSession | None = None
        self._steps: dict[int, int | None] = {}  # trainer's step, by the server's version
        self._newest: int | None = None
        self._places = asyncio.Semaphore(max_running)
        self._running: set[str] = set()
        self._open = asyncio.Event()
        self._open.set()
        self._rejects = False

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **others: Any
    ) -> TokenOutput:
        """Sample one completion of these ids.

        `extra_fields` says of which of the trainer's steps its first and its last token are, and
        in `weight_versions` which of the server's versions made which tokens. Raises ValueError for
        what is no text, RuntimeError for what the server refuses or does not answer, and for tokens
        of weights that this trainer did not send.
        """
        params = dict(sampling_params)
        others["prompt_logprobs"] = params.pop("prompt_logprobs", None)
        if unknown := [name for name, value in others.items() if value is not None]:
            raise ValueError(f"{', '.join(unknown)}: these rollouts are of token ids alone")
        limit = params.pop("max_new_tokens", None)
        if limit is None:
            whole = self._config.prompt_length + self._config.response_length
            limit = min(self._config.response_length, max(1, whole - len(prompt_ids)))
        body = {
            "token_ids": list(prompt_ids),
            "request_id": request_id,
            "sampling_params": {
                "max_tokens": limit,
                "ignore_eos": self._config.ignore_eos,
                **params,
                "logprobs": 0 if params.get("logprobs") else None,
            },
        }
        while True:
            if self._rejects and not self._open.is_set():
                return TokenOutput(
                    token_ids=[],
                    stop_reason="aborted",
                    extra_fields={"global_steps": self._newest},
                )
            await self._open.wait()
            async with self._places:
                if not self._open.is_set():  # any more
                    continue
                self._running.add(request_id)
                try:
                    reply = await self._post("/inference/v1/generate", body)
                finally:
                    self._running.discard(request_id)
            return self._output(reply)

    def _output(self, reply: Any) -> TokenOutput:
        [choice] = reply["choices"]
        versions = [span["version"] for span in choice["weight_versions"]]
        if self._steps and not self._steps.keys() >= {*versions}:
            raise RuntimeError(
                f"tokens are of weights {versions}, and this trainer sent {sorted(self._steps)}: "
                "another trainer changes the server's weights, or it has been started anew"
            )
        steps = [self._steps.get(version) for version in versions] or [self._newest]
        scores = choice["logprobs"]
        return TokenOutput(
            token_ids=choice["token_ids"],
            log_probs=scores and [score["logprob"] for score in scores["content"]],
            stop_reason="aborted" if choice["finish_reason"] == "abort" else "completed",
            extra_fields={
                "global_steps": steps[-1],
                "min_global_steps": steps[0],
                "max_global_steps": steps[-1],
                "num_cached_tokens": reply["usage"]["prompt_tokens_details"]["cached_tokens"],
                "weight_versions": choice["weight_versions"],
            },
        )

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """End what runs, with its tokens so far. What comes waits, or is rejected."""
        self._open.clear()
        self._rejects = reject_request
        await self.check()
        while self._running:
            ids = [*self._running][:_MOST_ABORTED]
            await self._post("/abort_requests", {"request_ids": ids})
            await asyncio.sleep(0.02)  # for what had been sent and not yet been read

    async def resume_generation(self) -> None:
        self._open.set()

    async def check(self) -> None:
        """Raise RuntimeError if the server does not answer, or not as it does an operator."""
        await self._post("/abort_requests", {"request_ids": []})

    async def set_global_steps(self, global_steps: int | None, version: int) -> None:
        """Say which step of the trainer made the weights that the server calls `version`."""
        self._steps[version] = self._newest = global_steps

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=None),
            )
        url = f"{self._url}{path}"
        for wait_s in (*_WAITS_S, 0):
            try:
                async with self._session.post(url, json=body) as reply:
                    if reply.status == 200:
                        return await reply.json()
                    refusal = f"POST {url}: {reply.status} {(await reply.text())[:2_000]}"
            except (aiohttp.ClientError, OSError, ValueError) as error:  # the last for no JSON
                raise RuntimeError(f"POST {url}: {type(error).__name__}: {error}") from error
            if reply.status not in (429, 503):
                break
            await asyncio.sleep(wait_s)
        raise RuntimeError(refusal)


class SRMReplica(RolloutReplica):
    """A running `srm serve`: the one in `rollout.engine_kwargs.srm.urls` that has its number."""

    async def launch_servers(self) -> None:
        """Begin to ask the server, which runs already."""
        if self.is_reward_model or self.is_teacher_model:
            raise ValueError("rollout.name: srm makes the actor's rollouts alone")
        if self.config.full_determinism:
            raise ValueError("rollout.full_determinism: verl seeds all samples of a prompt alike")
        url, _, key = _settings(self.config, self.replica_rank)
        actor = ray.remote(RolloutActor).options(
            name=_actor_name(self.replica_rank), max_concurrency=_NO_LIMIT
        )
        self._server_handle = actor.remote(self.config, url, key, self.max_concurrency)
        self._server_address = urlsplit(url).netloc
        self.servers = [self._server_handle]
        await self._server_handle.check.remote()

    async def _no_change(self, **_others: Any) -> None:
        """A server has its memory always, drops states of prompts whenever weights change, and
        is no process that verl could profile."""

    wake_up = sleep = clear_kv_cache = release_kv_cache = resume_kv_cache = _no_change
    start_profile = stop_profile = _no_change


class WeightUpdater(BaseRollout):
    """Sends the weights of a trainer's process to a server, which goes on with them."""

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        a_replica = self.config.tensor_model_parallel_size * self.config.data_parallel_size
        rank = int(os.environ["RANK"])
        self.replica_rank = rank // a_replica if replica_rank == -1 else replica_rank
        self.is_leader_rank = rank % a_replica == 0
        url, folder, key = _settings(self.config, self.replica_rank)
        self._server = RolloutServer(url, folder, self.model_config.hf_config, key)

    async def update_weights(
        self,
        weights: Any,
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        peft_config: Any = None,
        **_others: Any,
    ) -> None:
        """Send the weights, pairs of name and tensor; of a replica's processes the first does.

        Raises ValueError for what are not whole tensors, RuntimeError with what a server refuses.
        """
        if wire_format != "named_tensors":
            raise ValueError(f"wire_format: {wire_format!r}; the server takes whole tensors")
        if peft_config is not None:
            raise ValueError("lora: the server takes whole models; set model.lora.merge=True")
        tensors = []
        async for name, tensor in ensure_async_iterator(weights):  # which all processes gather
            if self.is_leader_rank:
                tensors.append((name, tensor.detach().to("cpu", copy=True)))
        if self.is_leader_rank:
            await asyncio.to_thread(self._server.send_weights, tensors)
            actor = ray.get_actor(_actor_name(self.replica_rank))
            await actor.set_global_steps.remote(global_steps, self._server.weights_version)

    async def resume(self, tags: list[str]) -> None:
        """Nothing has been released."""

    async def release(self) -> None:
        """The server has its memory always."""


def _settings(config: Any, replica_rank: int) -> tuple[str, str, str]:
    """A replica's URL, the folder for weights and the key, of `engine_kwargs.srm`."""
    settings = dict(config.engine_kwargs.get("srm") or {})
    urls, folder, key = (
        settings.pop("urls", []),
        settings.pop("folder", ""),
        settings.pop("key", ""),
    )
    name = "rollout.engine_kwargs.srm"
    if settings:
        raise ValueError(f"{name}: unknown {', '.join(settings)}; it has urls, folder and key")
    if (
        isinstance(urls, str)
        or not isinstance(urls, Sequence)
        or not all(isinstance(url, str) for url in urls)
    ):
        raise ValueError(f"{name}.urls: {urls!r} is no list of strings")
    if replica_rank >= len(urls):
        raise ValueError(f"{name}.urls: replica {replica_rank} has none; each needs a server")
    if not folder:
        raise ValueError(f"{name}.folder: is missing; weights go through it")
    return urls[replica_rank].rstrip("/"), folder, key


def _actor_name(replica_rank: int) -> str:
    return f"srm_server_{replica_rank}"


RolloutReplicaRegistry.register("srm", lambda: SRMReplica)
_ROLLOUT_REGISTRY["srm", "async"] = f"{__name__}.{WeightUpdater.__name__}"
