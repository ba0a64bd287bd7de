"""5,000 sequences of the real engine in mid-flight: killed, restored, token-identical."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from srm.engine.client.client import EngineClient
from srm.engine.config import DEMO_MODEL, EngineConfig
from srm.engine.messages import Request, SamplingParams
from srm.engine.weights.checkpoint import load_checkpoint
from srm.errors import EngineUnavailable
from tests.kit.engines.making import request_of
from tests.kit.engines.served_engine import collect, connected
from tests.kit.models.demo import START_S, engine_on_max
from tests.kit.serving import ROOT

COUNT = 5_000
MAX_TOKENS = 48


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Engine processes; those that a test appends are killed after it."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for popen in started:
        popen.kill()
        popen.wait()


def start(tmp_path: Path) -> subprocess.Popen[bytes]:
    flags = [
        f"--model={DEMO_MODEL}",
        f"--num-slots={COUNT}",
        f"--endpoint=ipc://{tmp_path}/engine",
        f"--snapshot-dir={tmp_path}/snapshots",
    ]
    return subprocess.Popen([sys.executable, "-m", "srm.engine", *flags], cwd=ROOT)


async def collect_all(client: EngineClient, wanted: list[Request]) -> list[bytes]:
    answered = await asyncio.gather(*(collect(client, request) for request in wanted))
    return [outputs[0].token_ids for outputs in answered]


@pytest.mark.slow
async def test_five_thousand_sequences_go_on_after_a_kill(
    tmp_path: Path, engines: list[subprocess.Popen[bytes]]
) -> None:
    weights, rng = load_checkpoint(DEMO_MODEL), np.random.default_rng(7)
    prompts: list[list[int]] = rng.integers(2, weights.config.vocab_size, (COUNT, 4)).tolist()
    own = {"max_tokens": MAX_TOKENS, "priority": -1, "durable": True}
    wanted = [request_of(f"batch-{i}", prompt, seed=i, **own) for i, prompt in enumerate(prompts)]
    engines.append(start(tmp_path))
    async with connected(f"ipc://{tmp_path}/engine", ready_s=START_S) as client:
        first = asyncio.create_task(collect_all(client, wanted))
        steps = -(-COUNT // EngineConfig().step_limits(weights.config)[0])  # for a token of all
        while client.status is None or client.status.steps < steps * MAX_TOKENS // 2:
            await asyncio.sleep(0.05)
        snapshot = await client.snapshot()
        engines[0].kill()
        with pytest.raises(EngineUnavailable):
            await first
        engines.append(start(tmp_path))
        await client.wait_until_ready(START_S)
        result = await collect_all(client, wanted)
        await asyncio.sleep(2)  # a heartbeat or more
        assert client.status is not None
        total_steps = client.status.steps
    assert snapshot.detail["sequences"] == COUNT
    assert total_steps < steps * MAX_TOKENS * 3 // 4
    params = SamplingParams(max_tokens=MAX_TOKENS, seed=0, ignore_eos=True)
    with engine_on_max(weights, num_slots=COUNT) as engine:
        alone = engine.generate(prompts, params)
    expected = [outputs[0].token_ids for outputs in alone]
    differing = [at for at in range(COUNT) if result[at] != expected[at]]
    assert not differing, f"{len(differing)} differ, such as {differing[:5]}"
