"""Pausing, resuming and ending of requests as an API process asks engines for it."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from contextlib import aclosing
from functools import partial
from pathlib import Path

import msgspec
import pytest

from srm.engine.client.client import EngineClient
from srm.engine.constraints.grammars import Grammars
from srm.engine.messages import (
    Abort,
    Control,
    Done,
    DropPrefixes,
    EndRequests,
    HoldWeights,
    LoadWeights,
    Output,
    Pause,
    Resume,
)
from srm.engine.process.engine import Engine
from srm.engine.tree_search import Tree, TreeSearch
from srm.errors import (
    EngineUnavailable,
    InvalidRequest,
    NotFound,
    SRMError,
    SwapInProgress,
    TimedOut,
)
from srm.server.generation.trees import grow
from tests.kit.engines.making import request_of, sample_value
from tests.kit.engines.served_engine import (
    Serve,
    Served,
    collect,
    connected,
    connected_to_all,
    endpoint_of,
    until,
)

PAUSE = Pause("pause", 1_000.0)


def are_paused(client: EngineClient) -> list[bool]:
    return [engine.status is not None and engine.status.paused for engine in client.engines]


def staged(folder: Path) -> LoadWeights:
    """A change that waits for what runs, and then for its sender."""
    return LoadWeights("change", str(folder), "finish", is_staged=True)


async def test_who_changes_weights_elsewhere_does_not_prolong_a_pause(
    serve: Serve, endpoint: str
) -> None:
    serve()
    async with connected(endpoint, heartbeat_s=0.02) as client, asyncio.timeout(120):
        await client.control(Pause("pause", 0.2))
        while any(are_paused(client)):
            client.engines[0].send(HoldWeights("change"))
            await asyncio.sleep(0.01)


async def test_what_a_change_of_weights_waits_for_is_not_paused(
    serve: Serve, endpoint: str, tiny_folder: Path
) -> None:
    served = serve()
    async with connected(endpoint, heartbeat_s=0.02) as client:
        await client.engines[0].ask(staged(tiny_folder))
        with pytest.raises(SwapInProgress, match=r"'finish', which waits .* pause when they are"):
            await client.control(PAUSE)
        assert are_paused(client) == [False]
        client.engines[0].send(Abort("change"))
        await until(lambda: served.process.weight_reload.current is None)
        await client.control(PAUSE)
        assert are_paused(client) == [True]


async def test_a_pause_that_one_engine_refuses_is_nobodys(
    serve: Serve, endpoint: str, tiny_folder: Path
) -> None:
    serve(), serve(number=1)
    async with connected_to_all(endpoint) as client:
        await client.engines[1].ask(staged(tiny_folder))
        with pytest.raises(SwapInProgress):
            await client.control(PAUSE)
        assert are_paused(client) == [False, False]


async def leave(served: Served, client: EngineClient) -> None:
    served.process.drain()
    served.process.drain()
    served.join()
    await until(lambda: client.engines[-1].status is None)


ENDS = EndRequests("control")


@pytest.mark.parametrize("message", [Resume("control"), ENDS, DropPrefixes("control")])
async def test_engines_do_what_they_can_while_another_is_away(
    serve: Serve, endpoint: str, message: Control
) -> None:
    one, other = serve(), serve(number=1)
    async with connected_to_all(endpoint) as client:
        await collect(client, request_of("z", list(range(1, 20)), max_tokens=1))
        assert one.engine.scheduler.prefixes.num_used
        await client.control(PAUSE)
        await leave(other, client)
        asked = asyncio.create_task(collect(client, request_of("a", n=4, max_tokens=9)))
        await until(lambda: one.engine.has_work)
        why = "engine 1: .*; the others have done it"
        with pytest.raises(EngineUnavailable, match=why):
            await client.control(message)
        if isinstance(message, DropPrefixes):
            assert not one.engine.scheduler.prefixes.num_used
            with pytest.raises(EngineUnavailable, match=why):
                await client.control(Resume("resume"))
        reasons = [output.finish_reason for output in await asked]
        assert reasons == ["abort" if message == ENDS else "length"] * 4
        with pytest.raises(EngineUnavailable, match="engine 1: the engine does not answer"):
            await client.control(PAUSE)


async def test_a_resume_reaches_the_engine_that_takes_the_place_of_a_lost_one(
    serve: Serve, endpoint: str
) -> None:
    memory = os.memfd_create("pause")
    served = serve(pause_fd=memory)
    async with connected(endpoint) as client:
        await client.control(PAUSE)
        await leave(served, client)
        with pytest.raises(EngineUnavailable, match=r"does not answer|has not answered"):
            await client.control(Resume("resume"))
        served = serve(pause_fd=memory)
        await until(lambda: client.status is not None)
        assert await collect(client, request_of("a", max_tokens=3))
        await leave(served, client)
    os.close(memory)


async def test_a_change_that_another_process_made_is_known_when_asked_for(
    serve: Serve, endpoint: str, tiny_folder: Path
) -> None:
    serve(), serve(number=1)
    endpoints = f"{endpoint},{endpoint_of(endpoint, 1)}"
    async with connected_to_all(endpoint) as one, connected(endpoints, heartbeat_s=1_000) as other:
        for version in range(2, 6):
            await one.load_weights(str(tiny_folder), "continue", f"policy-{version}")
            await one.control(PAUSE)
            status = await other.refresh()
            assert (status.weights_version, status.paused) == (version, True)
            assert other.label(version) == f"policy-{version}"
            await one.control(Resume("resume"))


async def test_batches_are_not_ended_by_name(serve: Serve, endpoint: str) -> None:
    served = serve()
    requests = [
        msgspec.structs.replace(request_of(id, max_tokens=9, durable=id == "batch"), name="mine")
        for id in ("batch", "mine")
    ]
    async with connected(endpoint) as client:
        await client.control(PAUSE)
        asked = [asyncio.create_task(collect(client, request)) for request in requests]
        await until(lambda: served.engine.scheduler.num_requests == 2)
        done = await client.control(EndRequests("ends", frozenset({"mine", "unknown"})))
        assert done.detail["requests"] == 1
        await client.control(Resume("resume"))
        ends = [(await outputs)[-1].finish_reason for outputs in asked]
    assert ends == ["length", "abort"]


@pytest.mark.parametrize("way", ["all", "name", "weights", "time"])
async def test_a_search_is_ended_between_its_rounds(
    serve: Serve, endpoint: str, tiny_folder: Path, way: str
) -> None:
    served = serve(request_timeout_s=1_000)
    asked = msgspec.structs.replace(request_of(), name="mine")
    search = TreeSearch(Tree(depth=9), served.engine.model, asked, repr)
    async with (
        connected(endpoint) as client,
        aclosing(grow(client, search, list[int]().append)) as growing,
    ):
        search.add(await anext(growing))
        await until(lambda: served.engine.scheduler.is_quiet)
        error: type[SRMError] = EngineUnavailable
        if way == "weights":
            await client.load_weights(str(tiny_folder), "drop")
        elif way == "time":
            error, late = TimedOut, served.process._time_out
            served.process._time_out = deque((0.0, own, id) for _, own, id in late)
            await until(lambda: not served.engine.scheduler.num_requests)
            # The answer comes behind the refusal, which the client has read then.
            await client.control(EndRequests("later", frozenset({"unknown"})))
        else:
            names = frozenset({"mine"}) if way == "name" else None
            done = await client.control(EndRequests("ends", names))
            assert done.detail == {"requests": 1, "sequences": 1}
        assert not served.engine.scheduler.num_requests
        steps = served.engine.num_steps
        with pytest.raises(error):
            await anext(growing)
        assert served.engine.num_steps == steps


class StandingEngine(Engine):
    """Makes no step once it has sampled 12 tokens."""

    def step_overlapped(self) -> list[Output]:
        if self.scheduler.latencies.num_sampled < 12:
            return super().step_overlapped()
        time.sleep(0.002)
        return self.settle()


@pytest.mark.parametrize("way", ["all", "drop", "time", "left"])
async def test_a_round_that_ends_early_is_charged(
    serve: Serve, endpoint: str, tiny_folder: Path, way: str
) -> None:
    served = serve(make_engine=StandingEngine, request_timeout_s=1_000)
    engine, charged = served.engine, list[int]()
    tree = Tree(branching=4, node_tokens=50, depth=1)
    search = TreeSearch(tree, engine.model, msgspec.structs.replace(request_of(), name="b"), repr)
    async with connected(endpoint) as client:
        nodes = asyncio.ensure_future(anext(grow(client, search, charged.append)))
        sampled = engine.scheduler.latencies
        await until(lambda: sampled.num_sampled >= 12 and engine._in_flight is None)
        for id in "ab":  # no fork is of a search, whose samples are of any node
            with pytest.raises(NotFound):
                await client.read_sample(id, 0, 0, "")
        if way == "all":
            await client.control(EndRequests("ends"))
        elif way == "drop":
            await client.load_weights(str(tiny_folder), "drop")
        elif way == "time":
            late = served.process._time_out
            served.process._time_out = deque((0.0, own, id) for _, own, id in late)
        else:
            nodes.cancel()
        await asyncio.wait([nodes])
        await until(lambda: bool(charged))
    assert sum(charged) == sampled.num_sampled
    assert way == "left" or isinstance(nodes.exception(), SRMError)


async def test_a_search_leaves_no_request(serve: Serve, endpoint: str) -> None:
    served = serve()
    aborted = partial(sample_value, "srm_engine_requests_total", outcome="aborted")
    before = aborted()
    for durable in (False, True):  # of which nobody ends any
        asked = request_of(durable=durable)
        search = TreeSearch(Tree(depth=2), served.engine.model, asked, repr)
        async with connected(endpoint) as client:
            charged: list[int] = []
            async for nodes in grow(client, search, charged.append):
                search.add(nodes)
                assert served.engine.scheduler.num_requests <= (not durable)
            await until(lambda: not served.engine.scheduler.num_requests)
        assert len(search.nodes) == 2 + 4 and sum(charged) == search.num_tokens
    assert aborted() == before


@pytest.mark.parametrize("names", [None, frozenset({"mine"})])
async def test_what_waits_for_its_constraint_is_ended_too(
    serve: Serve, endpoint: str, names: frozenset[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()

    def hang(*_: object) -> None:
        assert goes_on.wait(120)
        raise InvalidRequest("it hung", "constraint")

    monkeypatch.setattr(Grammars, "build", hang)
    served = serve()
    asked = {}
    async with connected(endpoint) as client:
        for id, name, emit in (
            ("mine", "mine", "final"),
            ("deltas", "mine", "delta"),
            ("other", "other", "final"),
            ("batch", "mine", "final"),
        ):
            request = request_of(id, n=3, emit=emit, durable=id == "batch", constraint="{}")
            request = msgspec.structs.replace(request, name=name)
            asked[id] = asyncio.create_task(collect(client, request))
        await until(lambda: len(served.process._compiling._waiting) == 4)
        done = await client.control(EndRequests("ends", names))
        count = 2 if names else 3
        assert done.detail == {"requests": count, "sequences": 3 * count}
        for id in list(asked)[:count]:
            outputs = await asked.pop(id)
            assert [(own.index, own.token_ids, own.finish_reason) for own in outputs] == [
                (index, b"", "abort") for index in range(3)
            ]
        again = await client.control(EndRequests("again", frozenset({"mine"})))
        assert again.detail["requests"] == 0, "batches never are"
        goes_on.set()
        for rest in asked.values():
            with pytest.raises(InvalidRequest, match="it hung"):
                await rest


async def test_who_leaves_lets_what_is_paused_go_on_and_pauses_nothing(
    serve: Serve, endpoint: str
) -> None:
    serve()
    async with connected(endpoint) as client:
        await client.control(PAUSE)
        asked = asyncio.create_task(collect(client, request_of("a", max_tokens=9)))
        client.leave()
        assert len(await asked) == 1
        with pytest.raises(EngineUnavailable, match="is stopping"):
            await client.control(PAUSE)
        assert isinstance(await client.control(Resume("resume")), Done)
