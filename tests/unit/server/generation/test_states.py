"""States as the server makes them: what is not finite, and an engine that has no room."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec import Raw

from srm.engine.messages import PROMPT, Output, Request
from srm.engine.state_file import StateContent, from_file, to_file
from srm.errors import ContextTooLong, EngineUnavailable, InvalidRequest, Overloaded
from srm.server.errors import Conflict, NotFinite, QuotaExceeded
from srm.server.generation.engine_request import RequestOwner
from srm.server.generation.states import States
from srm.server.schema.states import DEFAULT_TTL_S
from srm.server.storage.states import StateRecord, StateStore, new_state_id
from tests.kit.engines.making import IDLE
from tests.kit.engines.numpy_runner import TINY

STATUS = msgspec.structs.replace(IDLE, fingerprint="f", arithmetic="a")
OWNER = RequestOwner(key="own")
STATE = np.ones(TINY.state_width, "<f4")


class Engine:
    """Stands in for the engine's client: it says what it is given, and then that it has ended."""

    def __init__(self) -> None:
        self.fingerprints = {1: "f"}
        self.state = STATE.tobytes()
        self.refusals = 0
        """Requests that find no room from now on."""
        self.open_now = self.most_open = 0
        self.is_away_after = 1_000
        self.names: list[str] = []
        """By which requests can be ended."""

    def require_status(self) -> Any:
        return STATUS

    def open(self, requests: list[Request]) -> Engine:
        if self.refusals:
            self.refusals -= 1
            raise Overloaded("no room", retry_after_s=0)
        self.is_away_after -= 1
        if self.is_away_after < 0:
            raise EngineUnavailable("it has gone")
        self.names += [request.name for request in requests]
        return self

    def __enter__(self) -> Any:
        self.open_now += 1
        self.most_open = max(self.most_open, self.open_now)
        stream = SimpleNamespace(unfinished=True, first_version=1)

        async def wait() -> None:
            await asyncio.sleep(0.001)
            stream.unfinished = False

        outputs = [Output("", PROMPT, state=self.state), Output("", 0, finish_reason="length")]
        stream.wait, stream.take_outputs = wait, lambda: [(0, output) for output in outputs]
        return stream

    def __exit__(self, *_: object) -> None:
        self.open_now -= 1


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def states(engine: Engine, store: StateStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[States]:
    with ThreadPoolExecutor(4) as threads:
        client: Any = engine
        yield States(store, client, TINY, threads, max_bytes=100_000)


def ids_of(*tokens: int) -> bytes:
    return np.array(tokens, "<i4").tobytes()


MANY = [ids_of(3, number) for number in range(20)]


async def test_a_state_that_is_not_finite_is_not_kept(
    states: States, engine: Engine, store: StateStore
) -> None:
    for wrong in (np.nan, np.inf, -np.inf):
        engine.state = np.append(STATE[1:], np.float32(wrong)).tobytes()
        with pytest.raises(NotFinite, match="not finite"):
            await states.make(ids_of(3, 4), OWNER)
    assert store.bytes_of("own") == 0


async def test_states_of_a_reply_wait_for_an_engine_without_room(
    states: States, engine: Engine, store: StateStore
) -> None:
    engine.refusals = 30
    made = await asyncio.wait_for(states.make_all(MANY, OWNER), 60)
    assert 1 < engine.most_open <= 8 and engine.open_now == 0
    contents = [store.get(id, "own") for id in made]
    assert [content and content[1].token_ids for content in contents] == MANY


async def test_of_a_reply_all_states_are_made_or_none(
    states: States, engine: Engine, store: StateStore
) -> None:
    engine.is_away_after = 13
    with pytest.raises(EngineUnavailable):
        await states.make_all(MANY, OWNER)
    assert store.list("own", 99) == [] and store.bytes_of("own") == 0
    engine.is_away_after = 1_000
    with pytest.raises(QuotaExceeded):
        await states.make_all(MANY * 10, OWNER)
    assert store.list("own", 99) == [] and engine.open_now == 0


async def test_a_reply_that_nobody_waits_for_leaves_no_state(
    states: States, engine: Engine, store: StateStore
) -> None:
    task = asyncio.create_task(states.make_all(MANY, OWNER))
    while not store.bytes_of("own"):
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert store.list("own", 99) == [] and engine.open_now == 0


async def test_of_a_response_that_has_ended_no_state_is_made(
    states: States, engine: Engine, store: StateStore
) -> None:
    ids, turn = [f"resp_{digit * 32}" for digit in "012"], Raw(b"{}")
    for id in ids:
        await states.begin(id, OWNER, turn)
    (pending, _) = store.get(ids[0], OWNER.key) or (None, None)
    assert pending is not None and pending.expires_at == pending.created_at + DEFAULT_TTL_S
    await states.end(ids[1], OWNER, turn)
    await states.delete(ids[2], OWNER, "response_id")
    for id in ids:
        await states.keep(id, ids_of(3, 4), OWNER, None, turn, is_pending=True)
    assert engine.names == ids[:1]  # by which a cancel ends it
    there = [store.get(id, OWNER.key) for id in ids]
    assert [pair and pair[0].num_tokens for pair in there] == [2, 0, None]


@pytest.mark.parametrize(
    ("tokens", "state", "message"),
    [
        ([3, 4], np.append(STATE[1:], np.float32(np.nan)), "state must be finite"),
        ([3, 4], np.append(STATE[1:], np.float32(np.inf)), "state must be finite"),
        ([3, 4], STATE[1:], "state must have"),
        ([3], STATE, "state must have 0 values"),
        ([3, 4], STATE[:0], "state must have"),
        ([], STATE, "token_ids must be 0 … 31, at least one; got none"),
        ([3, TINY.vocab_size], STATE, "token_ids must be 0 … 31, at least one; got 3 … 32"),
        ([3, -1], STATE, "token_ids must be 0 … 31, at least one; got -1 … 3"),
        ([3] * (TINY.n_ctx + 1), STATE, "This model's maximum context length"),
    ],
)
async def test_a_file_that_agrees_with_itself_may_be_wrong(
    states: States, store: StateStore, tokens: list[int], state: Any, message: str
) -> None:
    file = file_of(StateContent(ids_of(*tokens), state.tobytes()))
    with pytest.raises((InvalidRequest, ContextTooLong)) as raised:
        await states.put(new_state_id(), file, OWNER)
    assert raised.value.message.startswith(message) and store.bytes_of("own") == 0
    assert raised.value.param == ("state" if message.startswith("state") else "token_ids")


def file_of(content: StateContent, fingerprint: str = "f") -> bytes:
    return to_file(content, fingerprint, "a")


async def test_two_that_put_one_id_at_once_agree(states: States, store: StateStore) -> None:
    id = new_state_id()
    contents = [StateContent(ids_of(3, last), STATE.tobytes()) for last in (4, 5)]
    putting = [states.put(id, file_of(content), OWNER) for content in contents * 10]
    replies = await asyncio.gather(*putting, return_exceptions=True)
    there = store.get(id, "own")
    assert there is not None
    winner = contents.index(there[1])
    for number, reply in enumerate(replies):
        assert isinstance(reply, StateRecord if number % 2 == winner else Conflict)
    assert from_file(to_file(there[1], "f", "a")) == (there[1], "f", "a")
