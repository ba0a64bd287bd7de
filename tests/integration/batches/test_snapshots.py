"""Durable requests when engines and clients end: what was sampled is neither lost nor changed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import get_context
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from srm.engine.client.client import EngineClient
from srm.engine.config import EngineConfig
from srm.engine.messages import Request, SamplingParams
from srm.engine.process.engine import Engine
from srm.engine.process.process import serve as serve_engine
from srm.engine.process.snapshot import NAME
from srm.engine.weights.weights import Weights
from srm.engine.wiring import EngineWiring
from srm.errors import EngineUnavailable, SnapshotError
from tests.conftest import MakeRequest
from tests.kit.engines.making import sample_value
from tests.kit.engines.numpy_runner import NumpyRunner, tiny_weights
from tests.kit.engines.served_engine import NUM_SLOTS, Serve, Served, collect, connected, until
from tests.kit.processes.held_engine import HeldEngine, held, hold, release

MAX_TOKENS = 50


def requests(count: int = NUM_SLOTS // 2, n: int = 2) -> list[Request]:
    """Of a batch: by default as many sequences as there are slots."""
    return [
        Request(
            id=f"batch-{number}",
            prompt_token_ids=np.array([3, 4 + number % 28, 7], "<i4").tobytes(),
            params=SamplingParams(n=n, max_tokens=MAX_TOKENS, seed=number, ignore_eos=True),
            priority=-1,
            durable=True,
        )
        for number in range(count)
    ]


def undisturbed(weights: Weights, wanted: list[Request]) -> dict[str, list[bytes]]:
    """Every token of every sample, by an engine that is left alone."""
    engine = Engine(weights.config, NumpyRunner(weights, NUM_SLOTS), EngineConfig(num_slots=8))
    entries: dict[str, list[bytes]] = {}
    for request in wanted:
        prompt = np.frombuffer(request.prompt_token_ids, "<i4").tolist()
        (outputs,) = engine.generate([prompt], request.params)
        entries[request.id] = [output.token_ids for output in outputs]
    return entries


async def collect_all(client: EngineClient, wanted: list[Request]) -> dict[str, list[bytes]]:
    answered = await asyncio.gather(*(collect(client, request) for request in wanted))
    by_index = (sorted(outputs, key=lambda one: one.index) for outputs in answered)
    return {outputs[0].id: [output.token_ids for output in outputs] for outputs in by_index}


def serve_with_snapshots(endpoint: str, settings: dict[str, Any]) -> None:
    """What `python -m srm.engine` does, in an engine that can be held."""
    weights = tiny_weights()
    config = EngineWiring(num_slots=NUM_SLOTS, endpoint=endpoint, **settings)
    runner = NumpyRunner(weights, NUM_SLOTS)
    engine = HeldEngine(weights.config, runner, config, weights.fingerprint)
    raise SystemExit(serve_engine(engine, config))


Start = Callable[..., SpawnProcess]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "snapshots"


@pytest.fixture
def start(endpoint: str, folder: Path) -> Iterator[Start]:
    """start(snapshot_interval_s=1, …): an engine process that has this folder."""
    started: list[SpawnProcess] = []

    def begin(**settings: Any) -> SpawnProcess:
        fields = {"snapshot_dir": str(folder), "model": folder.parent, **settings}
        process = get_context("spawn").Process(target=serve_with_snapshots, args=(endpoint, fields))
        process.start()
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.join()


asking = partial(connected, heartbeat_s=0.02)


async def steps_made(client: EngineClient, steps: int) -> None:
    await until(lambda: client.status is not None and client.status.steps >= steps)


async def lost(task: asyncio.Task[Any]) -> None:
    with pytest.raises(EngineUnavailable):
        await task


async def steps_after_all(client: EngineClient, wanted: list[Request], weights: Weights) -> int:
    """How many the engine made in all until it had answered these, as an undisturbed one does."""
    assert await collect_all(client, wanted) == undisturbed(weights, wanted)
    return await steps_now(client)


async def steps_now(client: EngineClient) -> int:
    """How many the engine has made, once it has read all that was sent."""
    for _ in range(2):  # the first may be the answer to a question from before
        known = client.status
        await until(lambda: client.status is not known)  # noqa: B023
    assert client.status is not None
    return client.status.steps


async def test_all_goes_on_from_a_snapshot_after_a_kill(
    start: Start, endpoint: str, folder: Path, weights: Weights
) -> None:
    hold(folder.parent, steps=20)
    engine = start()
    wanted = requests()
    async with asking(endpoint) as client:
        first = asyncio.create_task(collect_all(client, wanted))
        await steps_made(client, 15)
        detail = (await client.snapshot()).detail
        assert (detail["sequences"], detail["requests"]) == (NUM_SLOTS, len(wanted))
        assert detail["path"] == str(folder / NAME)
        assert detail["bytes"] == (folder / NAME).stat().st_size
        engine.kill()
        await lost(first)
        release(folder.parent)
        start()
        await client.wait_until_ready(120)
        assert await steps_after_all(client, wanted, weights) < MAX_TOKENS - 10
    assert list(folder.iterdir()) == [folder / NAME]


async def test_a_stop_waits_for_no_batches(start: Start, endpoint: str, folder: Path) -> None:
    hold(folder.parent, steps=5)
    engine = start(drain_s=1000)
    async with asking(endpoint) as client:
        batch = asyncio.create_task(collect_all(client, requests(count=100)))
        await steps_made(client, 5)
        engine.terminate()
        await lost(batch)
        await asyncio.to_thread(engine.join, 120)
    assert engine.exitcode == 0
    assert (folder / NAME).exists()


async def test_a_second_signal_leaves_at_once(
    start: Start, endpoint: str, folder: Path, make_request: MakeRequest
) -> None:
    hold(folder.parent, steps=5)
    engine = start(drain_s=1000)
    async with asking(endpoint) as client:
        batch = asyncio.create_task(collect_all(client, requests()))
        online = asyncio.create_task(collect(client, make_request("a", n=90, max_tokens=60)))
        await steps_made(client, 5)
        engine.terminate()
        await until(lambda: client.status is not None and client.status.state == "draining")
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGTERM)
        await lost(batch)
        await lost(online)
        await asyncio.to_thread(engine.join, 120)
    assert engine.exitcode == 0
    assert not folder.exists()


async def test_a_snapshot_that_cannot_be_written_disturbs_nobody(
    serve: Serve, endpoint: str, folder: Path, weights: Weights
) -> None:
    folder.write_text("in the way")
    serve(make_engine=HeldEngine, model=folder.parent, snapshot_dir=str(folder))
    before = sample_value("srm_snapshots_total", result="failed")
    wanted = requests()
    async with asking(endpoint) as client:
        with held(folder.parent, steps=5):
            batch = asyncio.create_task(collect_all(client, wanted))
            await steps_made(client, 5)
            with pytest.raises(SnapshotError, match=r"durable\.snapshot\.partial: cannot"):
                await client.snapshot()
        assert await batch == undisturbed(weights, wanted)
    assert sample_value("srm_snapshots_total", result="failed") == before + 1


@pytest.mark.parametrize(
    ("has_folder", "message"),
    [(True, r"takes \d+ bytes of memory .* 1000 are free"), (False, "snapshot_dir is not set")],
)
async def test_why_there_is_no_snapshot_is_said(
    serve: Serve,
    endpoint: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_folder: bool,
    message: str,
) -> None:
    monkeypatch.setattr("srm.engine.process.durable.available_memory", lambda: 1000)
    serve(snapshot_dir=str(folder) if has_folder else "")
    async with asking(endpoint) as client:
        with pytest.raises(SnapshotError, match=message):
            await client.snapshot()


async def test_writes_nothing_where_nothing_is_durable(
    serve: Serve, endpoint: str, folder: Path, make_request: MakeRequest
) -> None:
    served = serve(snapshot_dir=str(folder))
    async with asking(endpoint) as client:
        online = asyncio.create_task(collect(client, make_request("online", max_tokens=30)))
        await steps_made(client, 5)
        done = await client.snapshot()
        assert done.detail["sequences"] == 0
        await online
        assert not folder.exists()
        served.process.drain()
        served.join()
        with pytest.raises(EngineUnavailable):
            while True:
                await client.snapshot()


async def left_in_the_middle(
    served: Served, endpoint: str, wanted: list[Request], folder: Path
) -> None:
    """By a client that is gone, after 25 steps of the held engine, which has all from the first."""
    patience_s = served.process.clients.timeout_s
    async with connected(endpoint) as leaving:
        asked = asyncio.create_task(collect_all(leaving, wanted))
        await until(lambda: served.engine.scheduler.num_requests == len(wanted))
        hold(folder, steps=25)
        await until(lambda: served.engine.num_steps == 25)
    await lost(asked)
    served.process.clients.timeout_s = 0
    await until(lambda: not served.engine.has_work)
    served.process.clients.timeout_s = patience_s


@pytest.mark.parametrize("has_memory", [True, False])
async def test_a_successor_goes_on_with_what_a_client_left(
    serve: Serve,
    endpoint: str,
    folder: Path,
    weights: Weights,
    has_memory: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not has_memory:
        monkeypatch.setattr("srm.engine.process.durable.available_memory", lambda: 0)
    served = serve(make_engine=HeldEngine, model=folder.parent)
    wanted = requests()
    names = "srm_restored_sequences_total", "srm_engine_decode_tokens_total"
    restored, sampled = map(sample_value, names)
    with held(folder.parent):
        await left_in_the_middle(served, endpoint, wanted, folder.parent)
    assert not served.engine.has_work
    async with asking(endpoint) as client:
        await steps_after_all(client, wanted, weights)
    once = MAX_TOKENS * sum(request.params.n for request in wanted)
    restored_now, sampled_now = map(sample_value, names)
    by_both = sampled_now - sampled  # and by an undisturbed engine
    assert (by_both == 2 * once) == has_memory, "none is sampled twice"
    assert restored_now - restored == (NUM_SLOTS if has_memory else 0)


async def test_what_a_client_that_is_gone_left_is_in_the_next_snapshot(
    serve: Serve, endpoint: str, folder: Path, weights: Weights
) -> None:
    served = serve(make_engine=HeldEngine, model=folder.parent, snapshot_dir=str(folder))
    wanted = requests()
    with held(folder.parent):
        await left_in_the_middle(served, endpoint, wanted, folder.parent)
    served.process.drain()
    assert served.join() == 0
    serve(snapshot_dir=str(folder))
    async with asking(endpoint) as client:
        assert await steps_after_all(client, wanted, weights) < MAX_TOKENS - 5


async def test_durable_requests_outlive_their_client(
    serve: Serve, endpoint: str, folder: Path, weights: Weights
) -> None:
    served = serve(make_engine=HeldEngine, model=folder.parent)
    wanted = requests()
    with held(folder.parent, steps=15):
        async with connected(endpoint) as client:
            first = asyncio.create_task(collect_all(client, wanted))
            await until(lambda: served.engine.num_steps > 10)
        await lost(first)
        assert served.engine.has_work
        async with asking(endpoint) as client:
            steps = asyncio.create_task(steps_after_all(client, wanted, weights))
            await steps_now(client)
            release(folder.parent)
            assert await steps < 2 * MAX_TOKENS - 20
