"""5,000 sequences of the real engine in mid-flight: killed, restored, token-identical."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from engine.client.client import EngineClient
from engine.config import DEMO_MODEL, EngineConfig
from engine.device.runner import ModelRunner
from engine.errors import EngineUnavailable
from engine.messages import Request, SamplingParams
from engine.process.engine import Engine
from engine.process.snapshot import NAME
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


def prompts(vocab_size: int) -> list[list[int]]:
    found: list[list[int]] = np.random.default_rng(7).integers(2, vocab_size, (COUNT, 4)).tolist()
    return found


def params(seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=MAX_TOKENS, seed=seed, ignore_eos=True)


async def collect_all(client: EngineClient, wanted: list[Request]) -> list[bytes]:
    answered = await asyncio.gather(*(collect(client, one) for one in wanted))
    return [outputs[0].token_ids for outputs in answered]


@pytest.mark.slow
async def test_five_thousand_sequences_go_on_after_a_kill(
    tmp_path: Path, engines: list[subprocess.Popen[bytes]]
) -> None:
    weights = load_checkpoint(DEMO_MODEL)
    wanted = [
        Request(
            id=f"batch-{number}",
            prompt_token_ids=np.array(prompt, "<i4").tobytes(),
            params=params(number),
            priority=-1,
            durable=True,
        )
        for number, prompt in enumerate(prompts(weights.config.vocab_size))
    ]
    engines.append(start(tmp_path))
    async with connected(f"ipc://{tmp_path}/engine", ready_s=START_S) as client:
        first = asyncio.create_task(collect_all(client, wanted))
        steps = -(-COUNT // EngineConfig().step_limits(weights.config)[0])  # for a token of all
        while client.status is None or client.status.steps < steps * MAX_TOKENS // 2:
            await asyncio.sleep(0.05)
        done = await client.snapshot()
        detail = done.detail
        engines[0].kill()
        with pytest.raises(EngineUnavailable):
            await first
        engines.append(start(tmp_path))
        await client.wait_until_ready(START_S)
        found = await collect_all(client, wanted)
        await asyncio.sleep(2)  # a heartbeat or more
        assert client.status is not None
        total_steps = client.status.steps
    print(
        f"{detail}; the disk alone: {_plain_write_s(tmp_path / NAME, int(detail['bytes'])):.3f} s"
    )
    assert detail["sequences"] == COUNT
    assert total_steps < steps * MAX_TOKENS * 3 // 4
    config = EngineConfig(num_slots=COUNT)
    runner = ModelRunner(weights, config)
    alone = Engine(weights.config, runner, config).generate(
        prompts(weights.config.vocab_size), params(0)
    )
    runner.close()
    expected = [outputs[0].token_ids for outputs in alone]
    differing = [at for at in range(COUNT) if found[at] != expected[at]]
    assert not differing, f"{len(differing)} differ, such as {differing[:5]}"


def _plain_write_s(path: Path, size: int) -> float:
    started = time.perf_counter()
    with path.open("wb") as file:
        file.write(bytes(size))
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - started
