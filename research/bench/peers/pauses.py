"""How long `/pause` and `/resume` take while completions run, of our server or of vLLM's."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from research.bench.frame import Record
from research.bench.peers.catalog import chosen
from research.bench.peers.config import PeersConfig
from research.bench.peers.running import engine_version, serving_peer

_TIMEOUT_S = 600.0
_BETWEEN_S = 0.1
"""Time for which a server goes on between two pauses."""
_STEP = "vllm:inter_token_latency_seconds"
_PEER = "vllm-http"


def vllm_pauses(folder: str, running: int, count: int, max_tokens: int) -> Record:
    """Start the vLLM of `python -m research.bench.peers setup` and return what `pauses_of` does."""
    (peer,) = chosen((_PEER,))
    config = PeersConfig(peers_dir=Path(folder))
    version = engine_version(peer, config)
    with serving_peer(peer, config, VLLM_SERVER_DEV_MODE="1") as url:  # or it has no such routes
        measured = asyncio.run(pauses_of(url, url, running, count, max_tokens))
    return {"engine": version, "model": peer.model, **measured}


async def pauses_of(url: str, admin_url: str, running: int, count: int, max_tokens: int) -> Record:
    """Pause and resume a server while so many completions run at once.

    Returns `seconds` of each pair as its client waits for them, and `step_s`, the mean time between
    two tokens of a completion before the first pause.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with (
        httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, limits=limits) as client,
        httpx.AsyncClient(base_url=admin_url, timeout=_TIMEOUT_S) as trainer,
        asyncio.TaskGroup() as group,
    ):
        body = {"prompt": [1, 2, 3], "max_tokens": max_tokens, "ignore_eos": True}
        before = await _steps(trainer)
        await asyncio.gather(*(_ask(client, body) for _ in range(running)))
        num_steps, sum_s = np.subtract(await _steps(trainer), before)
        asking = [group.create_task(_ask_on(client, body)) for _ in range(running)]
        seconds = []
        for _ in range(count):
            await asyncio.sleep(_BETWEEN_S)
            began = time.perf_counter()
            for route in ("/pause?mode=keep", "/resume"):
                (await trainer.post(route)).raise_for_status()
            seconds.append(time.perf_counter() - began)
        for task in asking:
            task.cancel()
    return {"step_s": float(sum_s / num_steps), "seconds": seconds}


async def _ask_on(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    while True:
        await _ask(client, body)


async def _ask(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    (await client.post("/v1/completions", json=body)).raise_for_status()


async def _steps(client: httpx.AsyncClient) -> tuple[float, float]:
    """Return how many times between tokens the server has counted, and their sum in seconds."""
    lines = (await client.get("/metrics")).text.splitlines()
    count, total = (
        sum(float(line.split()[-1]) for line in lines if line.startswith(f"{_STEP}_{kind}"))
        for kind in ("count", "sum")
    )
    return count, total
