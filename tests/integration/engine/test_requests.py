"""A request across the process boundary: EngineClient against EngineProcess on the numpy runner."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import msgspec
import numpy as np
import pytest

from srm.engine.client.streams import Stream
from srm.engine.config import EngineConfig
from srm.engine.messages import REASONS, Abort, Hello, Refusal, SamplingParams, Status, StopSamples
from srm.engine.process.engine import Engine
from srm.engine.steps.tokens import Tokens, join
from srm.engine.weights.weights import Weights
from srm.errors import ContextTooLong, InvalidRequest, Overloaded
from tests.conftest import MakeRequest
from tests.kit.engines.numpy_runner import NumpyRunner
from tests.kit.engines.served_engine import NUM_SLOTS, RawClient, Serve, collect, connected, until


async def rest_of(stream: Stream) -> Tokens:
    """All tokens that are still to come."""
    parts = [stream.read_new().tokens]
    while stream.unfinished:
        await stream.wait()
        parts.append(stream.read_new().tokens)
    return join(parts)


async def test_each_client_gets_what_an_engine_in_process_returns_in_each_form(
    serve: Serve, endpoint: str, weights: Weights, make_request: MakeRequest
) -> None:
    served = serve()
    params: dict[str, Any] = {"n": 3, "max_tokens": 9, "seed": 4, "logprobs": 0}
    params |= {"ignore_eos": True}
    local = Engine(weights.config, NumpyRunner(weights, NUM_SLOTS), EngineConfig())
    ours, theirs = (
        local.generate([prompt], SamplingParams(**params))[0] for prompt in ([5, 6, 7], [5, 8])
    )
    async with connected(endpoint) as client, connected(endpoint) as other:
        final = await collect(client, make_request("a", **params))
        deltas = await collect(client, make_request("b", **params, emit="delta"))
        asked = [make_request(name, emit="tokens", **params) for name in "cd"]
        more = make_request("e", prompt=[5, 8], emit="tokens", **params)
        with client.open(asked) as stream, other.open([more]) as single:
            whole, rest = await rest_of(stream), await rest_of(single)
    assert sorted(final, key=lambda output: output.index) == [
        msgspec.structs.replace(output, id="a") for output in ours
    ]
    for index, expected in enumerate(ours):
        own = [delta for delta in deltas if delta.index == index]
        assert [delta.finish_reason for delta in own] == [None] * 8 + ["length"]
        assert b"".join(delta.token_ids for delta in own) == expected.token_ids
        assert b"".join(delta.logprobs for delta in own) == expected.logprobs
    for tokens, outputs in ((whole, [*ours, *ours]), (rest, theirs)):
        assert sorted(tokens.owners.tolist()) == list(range(len(outputs)))
        for index, begin, end, reason in tokens.rows():
            assert tokens.token_ids[begin:end].tobytes() == outputs[index].token_ids
            assert tokens.logprobs[begin:end].tobytes() == outputs[index].logprobs
            assert REASONS[reason] == "length"
    assert not served.engine.has_work


async def test_status_says_what_the_engine_is(serve: Serve, endpoint: str) -> None:
    serve()
    async with connected(endpoint) as client:
        assert client.status == Status(
            state="ready",
            num_slots=NUM_SLOTS,
            running=0,
            waiting=0,
            max_waiting=100,
            retry_after_s=1,
            steps=0,
            n_ctx=64,
            vocab_size=32,
            fingerprint="tiny-0",
            arithmetic="cpu float32",
        )


async def test_refusals_arrive_as_the_errors_they_were(
    serve: Serve, endpoint: str, make_request: MakeRequest
) -> None:
    served = serve(max_waiting=10)
    async with connected(endpoint) as client:
        with pytest.raises(ContextTooLong, match=r"is 64 tokens.* has 65 tokens"):
            await collect(client, make_request(prompt=[3] * 65))
        with pytest.raises(InvalidRequest, match="top_p") as invalid:
            await collect(client, make_request(top_p=-0.1))
        assert invalid.value.param == "top_p"
        served.engine.scheduler.is_held = True  # "a" waits
        waiting = asyncio.create_task(collect(client, make_request("a", n=10, max_tokens=60)))
        await asyncio.sleep(0)  # lets it send first
        with pytest.raises(Overloaded) as overloaded:
            await collect(client, make_request("b", n=10))
        assert overloaded.value.retry_after_s > 0
        served.engine.scheduler.is_held = False
        assert len(await waiting) == 10


async def test_leaving_early_and_cancelling_the_reader_abort(
    serve: Serve, endpoint: str, make_request: MakeRequest
) -> None:
    served = serve()
    async with connected(endpoint) as client:
        request = make_request(n=20, max_tokens=60, emit="delta")
        async with aclosing(client.generate(request)) as outputs:
            await anext(outputs)
        await until(lambda: not served.engine.has_work)
        assert served.engine.scheduler.table.num_free == NUM_SLOTS
        task = asyncio.create_task(collect(client, make_request(n=50, max_tokens=60)))
        await until(lambda: served.engine.has_work)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not served.engine.has_work)


async def test_the_same_id_twice_is_refused_and_the_first_goes_on(
    serve: Serve, endpoint: str, make_request: MakeRequest
) -> None:
    served = serve()
    async with connected(endpoint) as client, connected(endpoint) as other:
        first = asyncio.create_task(collect(client, make_request(n=20, max_tokens=50)))
        await until(lambda: served.engine.has_work)
        for item in (client, other):
            with pytest.raises(InvalidRequest, match="in use"):
                await collect(item, make_request())
        assert len(await first) == 20


def test_a_malformed_message_does_not_stop_the_engine(serve: Serve, raw: RawClient) -> None:
    serve()
    encode = msgspec.msgpack.encode
    for payload in (
        b"",
        b"\xc1",
        b"\xff" * 100,
        b"\x91" * 100_000,
        b"\xa4\xff\xff\xff\xff",
        encode({"type": "request"}),
        encode({"type": "outputs", "outputs": []}),
        encode({"type": "hello", "surplus": 1}),
        encode(["request"]),
        encode({"type": "abort", "id": 3}),
        b"\x82\xa4type\xa5abort\xa2id\xa2\xff\xfe",
    ):
        raw.socket.send(payload)
        raw.socket.send_multipart([payload, b"", payload])
        raw.send(Hello())
        assert isinstance(raw.receive(), Status), payload[:20]
    raw.socket.send(encode({"type": "request", "id": "a", "prompt": 1}))
    refusal = raw.receive()
    assert isinstance(refusal, Refusal)
    assert (refusal.id, refusal.code) == ("a", "invalid_request")
    assert "prompt" in refusal.message


async def test_only_the_sender_can_abort_a_request_or_stop_samples(
    serve: Serve, raw: RawClient, endpoint: str, make_request: MakeRequest
) -> None:
    served = serve()
    async with connected(endpoint) as client:
        running = asyncio.create_task(collect(client, make_request(n=30, max_tokens=60)))
        await until(lambda: served.engine.has_work)
        indices = (b"", b"\0\0\0\0\1", np.arange(-2, 9, dtype="<i4").tobytes())
        for message in (Abort("a"), *(StopSamples("a", index) for index in indices), Hello()):
            raw.send(message)
        assert isinstance(await asyncio.to_thread(raw.receive), Status)
        assert len(await running) == 30


async def test_a_durable_request_goes_on_for_whoever_sends_it_again(
    serve: Serve, raw: RawClient, endpoint: str, make_request: MakeRequest
) -> None:
    served = serve()
    request = make_request(n=4, max_tokens=58, emit="delta", durable=True)
    raw.send(request)
    await until(lambda: served.engine.num_steps > 9)
    async with connected(endpoint) as client:
        outputs = await collect(client, request)
        whole = msgspec.structs.replace(request, id="b", emit="final")
        expected = {item.index: item.token_ids for item in await collect(client, whole)}
    for index in range(4):
        own = [output.token_ids for output in outputs if output.index == index]
        assert b"".join(own) == expected[index]
    assert not served.engine.has_work
