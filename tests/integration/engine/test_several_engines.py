"""Requests to several engines: the same tokens, each once, whatever becomes of an engine."""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from srm.engine.client.client import EngineClient
from srm.engine.client.spread import MAX_RUNS, PART_SAMPLES
from srm.engine.client.streams import Stream
from srm.engine.messages import (
    PROMPT,
    Done,
    Output,
    Outputs,
    Pause,
    Request,
    Resume,
    ToEngine,
    join,
)
from srm.engine.process.weights_note import SharedNote
from srm.engine.steps.tokens import step_tokens
from srm.engine.weights.weights import Weights
from srm.errors import (
    EngineUnavailable,
    InvalidRequest,
    Overloaded,
    SRMError,
    StepFailed,
    SwapInProgress,
)
from tests.kit.engines.making import IDLE, request_of
from tests.kit.engines.served_engine import (
    Serve,
    Served,
    breaks_at,
    collect,
    connected,
    connected_to_all,
    endpoint_of,
    until,
)
from tests.kit.processes.numpy_engine import seed_folder
from tests.kit.processes.run_engine import alone

N = 3 * PART_SAMPLES
LENGTHY: dict[str, Any] = {"n": N, "max_tokens": 12, "seed": 7}


@pytest.fixture
def two(serve: Serve, endpoint: str) -> tuple[Served, Served]:
    return serve(), serve(number=1)


def join_outputs(outputs: list[Output]) -> dict[int, Output]:
    """All that is said of the prompt and of each sample, in order."""
    message = defaultdict(list)
    for output in outputs:
        message[output.index].append(output)
    return {index: join(own) for index, own in message.items()}


def assert_same(entries: dict[int, Output], expected: dict[int, Output]) -> None:
    """But for ids and for what was cached, which say nothing of the text."""
    assert entries.keys() == expected.keys()
    for index, output in expected.items():
        bare = msgspec.structs.replace(entries[index], id=output.id, cached_tokens=0)
        assert bare == msgspec.structs.replace(output, cached_tokens=0)


def once(expected: dict[int, Output]) -> dict[int, tuple[bytes, int]]:
    """What `collect_tokens` returns of these."""
    samples = [(index, output) for index, output in expected.items() if index != PROMPT]
    return {index: (item.token_ids, 1) for index, item in samples}


async def collect_tokens(stream: Stream) -> dict[int, tuple[bytes, int]]:
    """The tokens of each completion, and how often it ended."""
    tokens: defaultdict[int, bytes] = defaultdict(bytes)
    ends: defaultdict[int, int] = defaultdict(int)
    while stream.unfinished:
        await stream.wait()
        new = stream.read_new().tokens
        for index, begin, end, reason in new.rows():
            tokens[index] += new.token_ids[begin:end].tobytes()
            ends[index] += bool(reason)
    return {index: (tokens[index], ends[index]) for index in tokens}


async def assert_answers(client: EngineClient, request: Request, expected: Any) -> None:
    """Ask, and compare what comes in the form that the request asks for."""
    if request.emit == "tokens":
        with client.open([request]) as stream:
            tokens = await collect_tokens(stream)
        assert tokens == once(expected)
    else:
        assert_same(join_outputs(await collect(client, request)), expected)


@pytest.mark.parametrize(
    ("emit", "params"),
    [
        ("final", {"n": 1}),
        *((emit, {"n": N}) for emit in ("final", "delta", "tokens")),
        ("final", {"n": N + 1, "logprobs": 0, "prompt": [4] * 40}),
        *((emit, {"n": N, "prompt_logprobs": 2}) for emit in ("delta", "tokens")),
        ("tokens", {"n": N, "ignore_eos": False, "min_tokens": 2, "frequency_penalty": 1.0}),
    ],
)
async def test_two_engines_say_what_one_does(
    two: tuple[Served, Served], endpoint: str, weights: Weights, emit: Any, params: dict[str, Any]
) -> None:
    request = request_of("a", **{**LENGTHY, **params}, emit=emit)
    expected = alone(msgspec.structs.replace(request, emit="final"), weights)
    async with connected_to_all(endpoint) as client:
        await assert_answers(client, request, expected)
    is_shared = params["n"] > 1 and "prompt_logprobs" not in params
    assert sum(served.engine.num_steps > 0 for served in two) == 1 + is_shared


async def test_many_requests_are_spread_over_both(
    two: tuple[Served, Served], serve: Serve, endpoint: str
) -> None:
    requests = [
        request_of(f"{number}", [number % 30 + 1, 5], max_tokens=2, seed=number)
        for number in range(100)
    ]
    serve(number=2)
    async with connected_to_all(endpoint) as client, connected(endpoint_of(endpoint, 2)) as one:
        result = await asyncio.gather(*(collect(client, request) for request in requests))
        expected = await asyncio.gather(*(collect(one, request) for request in requests))
    assert result == expected
    assert all(served.engine.num_steps for served in two)


async def test_stops_and_cuts_reach_the_engines_that_have_them(
    two: tuple[Served, Served], endpoint: str, weights: Weights
) -> None:
    request = request_of("a", **{**LENGTHY, "n": 64, "max_tokens": 40}, emit="tokens")
    expected = alone(msgspec.structs.replace(request, emit="final"), weights)
    async with connected_to_all(endpoint) as client:
        with client.open([request]) as stream:
            stream.stop(np.array([0, 3]))
            stream.cut(0, 7)
            tokens = await collect_tokens(stream)
            await until(lambda: not any(served.engine.has_work for served in two))
    # Those that waited for a slot when they were stopped run on, and nobody hears of it.
    assert tokens == {index: (expected[index].token_ids, 1) for index in (1, 2, 4, 5, 6)}


@pytest.mark.parametrize("emit", ["final", "tokens"])
async def test_held_samples_start_in_the_engines_that_have_them(
    two: tuple[Served, Served], endpoint: str, weights: Weights, emit: Any
) -> None:
    request = request_of("a", **LENGTHY, first_wave=3, emit=emit)
    expected = alone(msgspec.structs.replace(request, emit="final", first_wave=None), weights)
    tokens: dict[int, bytes] = {}
    async with connected_to_all(endpoint) as client:
        with client.open([request]) as stream:
            for below in (3, 4, 4, N):
                stream.start_below(0, below)
                while len(tokens) < below:
                    await stream.wait()
                    new = stream.read_new(only_ended=True).tokens
                    tokens |= {i: new.token_ids[a:b].tobytes() for i, a, b, _ in new.rows()}
                await until(lambda: not any(served.engine.has_work for served in two))
                assert sorted(tokens) == list(range(below))
    assert tokens == {index: output.token_ids for index, output in expected.items()}


async def test_leaving_aborts_it_everywhere(two: tuple[Served, Served], endpoint: str) -> None:
    async with connected_to_all(endpoint) as client:
        with client.open([request_of("a", n=100, max_tokens=50, emit="tokens")]) as stream:
            await stream.wait()
            await until(lambda: all(served.engine.has_work for served in two))
        await until(lambda: not any(served.engine.has_work for served in two))


async def test_what_one_engine_refuses_is_over_everywhere(serve: Serve, endpoint: str) -> None:
    served = serve(), serve(number=1, max_waiting=30)
    async with connected_to_all(endpoint) as client:
        assert client.status is not None and client.status.max_waiting == 130
        with pytest.raises(InvalidRequest, match="max_waiting = 30"):
            await collect(client, request_of("a", n=100, max_tokens=50))
        running = asyncio.create_task(collect(client, request_of("b", n=60, max_tokens=50)))
        await until(lambda: all(peer.engine.scheduler.num_waiting for peer in served))
        with pytest.raises(Overloaded):
            await collect(client, request_of("c", n=60, max_tokens=50))
        await until(lambda: all(peer.engine.scheduler.num_requests == 1 for peer in served))
        running.cancel()


Breaks = breaks_at(6)


@pytest.mark.parametrize(
    ("emit", "params"),
    [
        *((emit, {"logprobs": 2}) for emit in ("delta", "tokens")),
        *((emit, {"logprobs": 2, "logprob_token_ids": (30, 3)}) for emit in ("delta", "tokens")),
        *((emit, {}) for emit in ("final", "delta", "tokens")),
        *((emit, {"logprobs": 0, "prompt_logprobs": 2}) for emit in ("final", "delta", "tokens")),
    ],
)
async def test_what_a_broken_engine_had_is_run_by_another(
    serve: Serve, endpoint: str, weights: Weights, emit: Any, params: dict[str, Any]
) -> None:
    broken, other = serve(Breaks), serve(number=1)
    request = request_of("a", **LENGTHY, **params, emit=emit)
    bare = msgspec.structs.replace(request, emit="delta" if params.get("logprobs") else "final")
    expected = alone(bare, weights)
    async with connected_to_all(endpoint) as client:
        await assert_answers(client, request, expected)
        await until(lambda: client.engines[0].status is None)
        assert client.status is not None and client.losses == 1
    assert broken.join() == StepFailed.exit_code
    assert other.engine.num_steps and not other.engine.has_work


async def test_a_frozen_engine_that_goes_on_says_nothing_more(
    serve: Serve, endpoint: str, weights: Weights
) -> None:
    """Its tokens would be among those of the engine that runs its samples by then."""
    serve(number=1)
    request = request_of("a", **LENGTHY, emit="tokens")
    expected = once(alone(msgspec.structs.replace(request, emit="final"), weights))
    context = zmq.Context()
    frozen = context.socket(zmq.ROUTER)
    frozen.bind(endpoint)

    def heard() -> tuple[bytes, Any]:
        client, data = frozen.recv_multipart()
        return client, msgspec.msgpack.decode(data, type=ToEngine)

    client = EngineClient(f"{endpoint},{endpoint_of(endpoint, 1)}", 0.02, 120)
    await client.connect()
    try:
        identity, _ = await asyncio.to_thread(heard)
        status = msgspec.structs.replace(IDLE, fingerprint=weights.fingerprint)
        frozen.send_multipart([identity, msgspec.msgpack.encode(status)])
        await until(lambda: client.status is not None)
        with client.open([request]) as stream:
            result = asyncio.create_task(collect_tokens(stream))
            message: Any = None
            while not isinstance(message, Request):
                _, message = await asyncio.to_thread(heard)
            own = np.frombuffer(message.samples, "<i4")
            assert len(own) == N // 2

            def say(place: int) -> None:
                """A token of each of its samples."""
                ids = b"".join(expected[index][0][4 * place :][:4] for index in own.tolist())
                streams = message.stream + own.astype("<i8")
                reasons = np.zeros(len(own), np.uint8)
                text = step_tokens(streams, np.frombuffer(ids, "<i4"), reasons)
                outputs = Outputs([], text.to_wire())
                frozen.send_multipart([identity, msgspec.msgpack.encode(outputs)])

            for place in range(3):
                say(place)
            await until(lambda: bool(stream.first_version))
            client.engines[0].engine_timeout_s = 0.1
            await until(lambda: client.engines[0].status is None)
            for place in range(3, 9):
                say(place)
            assert await result == expected
    finally:
        await client.close()
        context.destroy(linger=0)


async def test_what_breaks_every_engine_is_given_up(serve: Serve, endpoint: str) -> None:
    for number in range(MAX_RUNS):
        serve(Breaks, number=number)
    left = serve(number=MAX_RUNS)
    async with connected_to_all(endpoint, MAX_RUNS + 1) as client:
        spread = client.streams.spread
        spread.given[MAX_RUNS] = 10**6
        with pytest.raises((StepFailed, EngineUnavailable)):
            await collect(client, request_of("a", max_tokens=40))
        spread.given[MAX_RUNS] = 0
        assert len(await collect(client, request_of("c", max_tokens=9))) == 1
    assert not left.engine.has_work


async def test_durable_requests_are_their_senders_to_send_again(
    serve: Serve, endpoint: str, weights: Weights
) -> None:
    broken, other = serve(Breaks), serve(number=1)
    request = request_of("a", **LENGTHY, durable=True)
    async with connected_to_all(endpoint) as client:
        with pytest.raises(SRMError):
            await collect(client, request)
        broken.join()
        await until(lambda: client.engines[0].status is None)
        again = asyncio.create_task(collect(client, request))
        await until(lambda: not other.engine.has_work)
        serve()
        assert_same(join_outputs(await again), alone(request, weights))


async def test_a_snapshot_is_all_engines_or_none(
    serve: Serve, endpoint: str, tmp_path: Path
) -> None:
    folders = [tmp_path / "0", tmp_path / "1"]
    for number, folder in enumerate(folders):
        serve(number=number, snapshot_dir=str(folder), snapshot_interval_s=0)
    async with connected_to_all(endpoint) as client:
        request = request_of("a", n=64, max_tokens=50, durable=True)
        running = asyncio.create_task(collect(client, request))
        await until(
            lambda: all(engine.status and engine.status.running for engine in client.engines)
        )
        done = await client.snapshot()
        assert done.detail["requests"] == 2 and int(done.detail["sequences"]) >= 2
        assert all(list(folder.iterdir()) for folder in folders)
        running.cancel()


@pytest.fixture
def new(tmp_path: Path) -> str:
    """A folder with other weights."""
    return str(seed_folder(tmp_path / "seed 3", 3))


def weights_in_use(served: tuple[Served, Served]) -> list[tuple[int, str]]:
    return [(peer.engine.weights_version, peer.engine.status().fingerprint) for peer in served]


@pytest.mark.parametrize("running", ["finish", "continue", "drop"])
async def test_weights_change_on_all_engines(
    two: tuple[Served, Served], endpoint: str, new: str, running: Any
) -> None:
    before = weights_in_use(two)
    async with connected_to_all(endpoint) as client:
        asked = asyncio.create_task(collect(client, request_of("a", n=64, max_tokens=50)))
        await until(
            lambda: all(engine.status and engine.status.running for engine in client.engines)
        )
        done = await client.load_weights(new, running)
        if running == "drop":
            with pytest.raises(EngineUnavailable, match="other weights"):
                await asked
        else:
            assert len(await asked) == 64
        (one, other) = weights_in_use(two)
        assert one == other and one[0] == 2 and one != before[0]
        assert (done.detail["weights_version"], done.detail["fingerprint"]) == one
        assert client.status is not None and client.status.weights_version == 2
        assert client.fingerprints[2] == one[1]


async def test_weights_that_an_engine_cannot_use_are_used_by_none(
    serve: Serve, endpoint: str, new: str
) -> None:
    two = serve(), serve(number=1, weights_copies="/no/such/folder/copies")
    before = weights_in_use(two)
    async with connected_to_all(endpoint) as client:
        for _ in range(2):
            with pytest.raises(SRMError, match="cannot write /no/such/folder"):
                await client.load_weights(new, "continue")
            await until(lambda: not any(item.process.weight_reload.current for item in two))
        assert weights_in_use(two) == before
        assert len(await collect(client, request_of("a", n=64, max_tokens=5))) == 64


def cannot_use(served: Served) -> None:
    def fail(_weights: Weights) -> None:
        raise ValueError("out of memory")

    served.engine.runner.use_weights = fail  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize("running", ["continue", "drop", "abort"])
async def test_weights_that_cannot_be_put_to_use_end_no_request(
    serve: Serve, endpoint: str, weights: Weights, new: str, running: Any
) -> None:
    note = SharedNote(fd := os.memfd_create("note"))
    served = serve(weights_note_fd=fd)
    cannot_use(served)
    request = request_of("a", n=4, max_tokens=50)
    async with connected(endpoint) as client:
        await client.control(Pause("pause", 1_000))
        asked = asyncio.create_task(collect(client, request))
        await until(lambda: served.engine.has_work)
        with pytest.raises(SRMError, match=r"seed 3'.* cannot be put to use: .*out of memory"):
            await client.load_weights(new, running)
        assert note.read() is None and served.engine.weights_version == 1
        await client.control(Resume("resume"))
        assert_same(join_outputs(await asked), alone(request, weights))


async def test_weights_stay_while_an_engine_is_away(serve: Serve, endpoint: str, new: str) -> None:
    broken, other = serve(Breaks), serve(number=1)
    async with connected_to_all(endpoint) as client:
        await collect(client, request_of("a", **LENGTHY))
        broken.join()
        await until(lambda: client.engines[0].status is None)
        with pytest.raises(EngineUnavailable, match="engine 0: the engine does not answer"):
            await client.load_weights(new, "continue")
    assert other.engine.weights_version == 1


async def test_an_engine_that_is_away_for_long_holds_up_no_change(
    serve: Serve, endpoint: str, new: str
) -> None:
    """A lost GPU kept a trainer from changing the weights of all others."""
    own = {"weights_note_fd": os.memfd_create("note"), "pause_fd": os.memfd_create("pause")}
    broken, other = serve(Breaks, **own), serve(number=1, **own)
    async with connected_to_all(endpoint, away_s=0.2) as client:
        await collect(client, request_of("a", **LENGTHY))
        broken.join()
        await until(lambda: client.streams.spread.is_away[0])
        await client.control(Pause("pause", 1_000))
        done = await client.load_weights(new, "continue", "policy-2")
        assert done.detail["weights_version"] == other.engine.weights_version == 2
        assert client.status is not None and client.status.paused
        late = serve(**own)  # with the weights from before
        assert await asyncio.to_thread(late.join) == StepFailed.exit_code
        await until(lambda: client.streams.spread.is_away[0])  # as it hardly was there
        await client.control(Resume("resume"))
        assert len(await collect(client, request_of("b", n=64, max_tokens=3))) == 64


async def test_an_engine_that_missed_a_change_starts_again(
    serve: Serve, endpoint: str, tmp_path: Path, new: str
) -> None:
    own = {"weights_note_fd": os.memfd_create("note"), "weights_copies": str(tmp_path / "copies")}
    one, late = serve(**own), serve(number=1, **own)
    unaware = connected(endpoint_of(endpoint, 1), heartbeat_s=0.02)
    async with connected(endpoint) as client, unaware as away:
        await client.load_weights(new, "continue")
        await until(lambda: away.status is None)
    assert late.join() == StepFailed.exit_code
    assert one.engine.weights_version == 2


async def test_at_most_a_change_of_two_at_once_is_made(
    two: tuple[Served, Served], endpoint: str, new: str, tmp_path: Path
) -> None:
    folders = [new, str(seed_folder(tmp_path / "seed 4", 4))]
    async with connected_to_all(endpoint) as one, connected_to_all(endpoint) as other:
        changes = [
            client.load_weights(folder, "continue")
            for client, folder in zip((one, other), folders, strict=True)
        ]
        results = await asyncio.gather(*changes, return_exceptions=True)
        assert all(isinstance(result, Done | SwapInProgress) for result in results), results
        made = [result for result in results if isinstance(result, Done)]
        await until(lambda: not any(served.process.weight_reload.current for served in two))
        assert len(set(weights_in_use(two))) == 1
        assert two[0].engine.weights_version == 1 + len(made)
        done = await one.load_weights(folders[0], "continue")
        assert done.detail["weights_version"] == 2 + len(made)


def test_a_request_says_which_samples_it_is_for(weights: Weights) -> None:
    both = alone(request_of("a", **LENGTHY), weights)
    odd = np.arange(1, N, 2)
    request = request_of("a", **{**LENGTHY, "n": len(odd)})
    own = msgspec.structs.replace(request, samples=odd.astype("<i4").tobytes())
    result = alone(own, weights)
    for index, sample in enumerate(odd.tolist()):
        assert result[index].token_ids == both[sample].token_ids


@pytest.mark.parametrize(
    ("samples", "why"),
    [([1], "n = 2 int32, got 4 bytes"), ([3, 3], "ascend"), ([-1, 2], "begin at 0")],
)
def test_samples_that_are_none_are_refused(weights: Weights, samples: list[int], why: str) -> None:
    request: Request = msgspec.structs.replace(
        request_of("a", n=2), samples=np.array(samples, "<i4").tobytes()
    )
    with pytest.raises(InvalidRequest, match=why):
        alone(request, weights)
