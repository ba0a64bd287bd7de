"""5,000 sequences of the real engine in mid-flight: killed, restored, token-identical."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from engine.client.client import EngineClient
from engine.config import DEMO_MODEL, EngineConfig
from engine.device.runner import ModelRunner
from engine.errors import EngineUnavailable
from engine.messages import Request, SamplingParams
from engine.process.engine import Engine
from engine.weights.checkpoint import load_checkpoint
from tests.engines.served_engine import collect, connected
from tests.serving import ROOT

COUNT = 5_000
MAX_TOKENS = 48
START_S = 300


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Engine processes; those that a test appends are killed after it."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for one in started:
        one.kill()
        one.wait()


def start(tmp_path: Path) -> subprocess.Popen[bytes]:
    flags = [
        f"--model={DEMO_MODEL}",
        f"--num-slots={COUNT}",
        f"--endpoint=ipc://{tmp_path}/engine",
        f"--snapshot-dir={tmp_path}/snapshots",
    ]
    return subprocess.Popen([sys.executable, "-m", "engine", *flags], cwd=ROOT)


async def collect_all(client: EngineClient, wanted: list[Request]) -> list[bytes]:
    answered = await asyncio.gather(*(collect(client, one) for one in wanted))
    return [outputs[0].token_ids for outputs in answered]


@pytest.mark.slow
async def test_five_thousand_sequences_go_on_after_a_kill(
    tmp_path: Path, engines: list[subprocess.Popen[bytes]]
) -> None:
    weights = load_checkpoint(DEMO_MODEL)
    rng = np.random.default_rng(7)
    prompts: list[list[int]] = rng.integers(2, weights.config.vocab_size, (COUNT, 4)).tolist()
    params = SamplingParams(max_tokens=MAX_TOKENS, seed=0, ignore_eos=True)
    wanted = [
        Request(
            id=f"batch-{number}",
            prompt_token_ids=np.array(prompt, "<i4").tobytes(),
            params=msgspec.structs.replace(params, seed=number),
            priority=-1,
            durable=True,
        )
        for number, prompt in enumerate(prompts)
    ]
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
        found = await collect_all(client, wanted)
        await asyncio.sleep(2)  # a heartbeat or more
        assert client.status is not None
        total_steps = client.status.steps
    assert snapshot.detail["sequences"] == COUNT
    assert total_steps < steps * MAX_TOKENS * 3 // 4
    config = EngineConfig(num_slots=COUNT)
    runner = ModelRunner(weights, config)
    alone = Engine(weights.config, runner, config).generate(prompts, params)
    runner.close()
    expected = [outputs[0].token_ids for outputs in alone]
    differing = [at for at in range(COUNT) if found[at] != expected[at]]
    assert not differing, f"{len(differing)} differ, such as {differing[:5]}"
