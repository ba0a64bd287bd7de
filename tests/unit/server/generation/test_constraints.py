"""Constraints of requests: made once each, in a process that hostile ones may bring down."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any, get_args

import msgspec
import psutil
import pytest
from msgspec import Raw

from srm.errors import InvalidRequest, Overloaded
from srm.limited_process import NICE, Answer, Died, Effort, LimitedProcess
from srm.server.generation import constraints as kept
from srm.server.generation.constraints import Constraints
from srm.server.generation.engine_request import RequestOwner
from srm.server.schema.completion_request import parse_completion
from srm.server.schema.structured_outputs import ConstraintSource, Kind
from srm.server.text.text import Text
from tests.kit.bodies.refusals import completion
from tests.kit.engines.matching import accepts
from tests.kit.engines.served_engine import until

LARGE = {"enum": list(range(100_000))}
NESTED = {
    "$defs": {f"{i}": {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(10_000)},
    "$ref": "#/$defs/0",
}
BRANCHES = {
    "$defs": {
        **{f"{i}": {"oneOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(40)},
        "40": {"type": "integer"},
    },
    "$ref": "#/$defs/0",
}
"""Comparing what these references lead to takes longer than anybody waits."""
CIRCLE = b'{"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}'
WRONG = b'{"functions":[{"name":"f","parameters":{"minimun":3},"strict":true}],"are_several":true}'
HOSTILE: list[tuple[Kind, bytes, str]] = [
    ("json", b'{"items":' * 10_000 + b"{}" + b"}" * 10_000, "it nests too deep"),
    ("json", b"[" * 10_000 + b"]" * 10_000, "it nests too deep"),
    ("json", b'{"const":' + b"[" * 500 + b"]" * 500 + b"}", "recursion limit exceeded"),
    ("json", json.dumps(LARGE).encode(), "/enum: enums have more than 10000 values"),
    ("json", json.dumps(NESTED).encode(), "references lead to more than 1000 schemas"),
    ("json", json.dumps(BRANCHES).encode(), "it cannot be compiled with 1 s"),
    ("json", b'{"a": 1, "a": 2}', "an object has 'a' twice"),
    ("json", b'{"const": 1e999}', "/const: numbers must be"),
    ("json", b'"{"', "it is not JSON"),
    ("json", b'"{\\"const\\": NaN}"', "NaN is no JSON"),
    ("json", rb'"{\"\\ud800\": 1}"', r"/\ud800: this keyword"),
    ("json", b'{"format": {}}', "/format: must be of"),
    ("json", b'{"minimum": ' + b"1" * 5_000 + b"}", "a number has 5000 digits"),
    ("json", b'{"const": "\xff"}', "it is not JSON"),
    ("json", b'{"$ref": "http://127.0.0.1/a.json"}', "/$ref: must be '#' or '#/'"),
    ("json", CIRCLE, "no JSON text that ends can meet it"),
    ("json", b'{"type": "integer", "minimum": 3, "maximum": 2}', "no value can meet"),
    ("json", b"3", "the schema: must be an object, true or false"),
    ("json", b"false", "the schema: no JSON text that ends can meet it"),
    ("regex", b'"((a{1,1000}){1,1000}){1,1000}"', "takes too much"),
    ("regex", b'"\\ud800"', "it is not JSON"),
    ("regex", b'"(a"', "unclosed group"),
    ("choice", b"[]", "at least one"),
    ("grammar", b'"root ::= x"', "no EBNF: Rule 'x' not found"),
    ("grammar", b'"a ::= \\"x\\""', "no EBNF: No 'root' rule"),
    ("grammar", b'"root ::= %b"' % (b"(" * 90_000), "no EBNF"),
    ("grammar", b'"start: \\"a\\" start"', "oo many items"),
    ("calls", WRONG, "parameters of f: /minimun: this keyword is not supported"),
]


@pytest.fixture(scope="module")
def constraints(text: Text) -> Iterator[Constraints]:
    made = Constraints(text)
    yield made
    made.close()


def source(kind: Kind, value: bytes) -> ConstraintSource:
    return ConstraintSource(f"structured_outputs.{kind}", kind, Raw(value))


async def make(constraints: Constraints, asked: ConstraintSource, share: str = "") -> str:
    return (await constraints.make(asked, RequestOwner(share))).constraint


def begin(constraints: Constraints, regex: str, share: str = "") -> asyncio.Future[str]:
    asked = source("regex", json.dumps(regex).encode())
    return asyncio.ensure_future(make(constraints, asked, share))


def hold(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, list[bytes]]:
    """Have all that is asked wait for the event; return it, and what was begun."""
    goes_on, begun, ask = threading.Event(), list[bytes](), LimitedProcess.ask_beside

    def hang(process: LimitedProcess, message: ConstraintSource, *more: Any) -> Answer:
        begun.append(bytes(message.value))
        goes_on.wait()
        return ask(process, message, *more)

    monkeypatch.setattr(LimitedProcess, "ask_beside", hang)
    return goes_on, begun


def children() -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process().children()
        if child.status() != psutil.STATUS_ZOMBIE
        and "srm.server.text.constraint_process" in child.cmdline()
    ]


async def test_what_a_request_asks_for_becomes_its_constraint(constraints: Constraints) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    named, closed = (
        {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": strict}}
        for strict in (None, True)
    )
    only = {"json": schema, "disable_additional_properties": True}
    spaced = {"json_object": True, "whitespace_pattern": " "}
    asked: list[tuple[dict[str, Any], str, str]] = [
        ({"response_format": named}, '{"a":1}', '{"a": 1}'),
        ({"response_format": closed}, '{"a":1}', '{"a":1,"b":2}'),
        ({"response_format": {"type": "json_object"}}, '{"b":[]}', "[]"),
        ({"structured_outputs": {"json": schema, "regex": None}}, '{"a":1}', '{"a":1,"b":2}'),
        ({"structured_outputs": {"json": json.dumps(schema)}}, '{"a":1}', "{}"),
        ({"structured_outputs": only}, '{"a":1}', '{"a":1,"b":2}'),
        ({"structured_outputs": spaced}, '{"a": 1}', '{"a":1}'),
        ({"structured_outputs": {"regex": "a+"}}, "aa", "b"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "no", "maybe"),
        ({"structured_outputs": {"grammar": 'start: "a" | "b" start'}}, "bba", "ab"),
    ]
    for fields, allowed, forbidden in asked:
        asked_source = completion(**fields).constraint_source()
        assert asked_source is not None
        constraint = await make(constraints, asked_source)
        assert accepts(constraint, allowed) and not accepts(constraint, forbidden)
    for free in ({}, {"response_format": {"type": "text"}}):
        assert completion(**free).constraint_source() is None


@pytest.mark.parametrize(("kind", "value", "message"), HOSTILE)
async def test_hostile_ones_are_refused_and_the_next_is_made(
    constraints: Constraints, kind: Kind, value: bytes, message: str
) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        await make(constraints, source(kind, value))
    assert refusal.value.param == "structured_outputs"
    assert refusal.value.message.startswith(f"structured_outputs.{kind}: ")
    assert message in refusal.value.message
    assert await make(constraints, source("choice", json.dumps(["a", value.hex()[:64]]).encode()))


@pytest.mark.parametrize(
    "regex", ["(a{1,100000}){1,100000}", "((a+)+)+(b{0,100000}){100000}", "(0|1)*1(0|1){30}"]
)
async def test_makes_what_is_hostile_to_others(constraints: Constraints, regex: str) -> None:
    assert await make(constraints, source("regex", json.dumps(regex).encode()))


async def test_replaces_a_killed_process_and_keeps_what_was_made(text: Text) -> None:
    constraints = Constraints(text)
    made = await asyncio.gather(*(make(constraints, source("regex", b'"a"')) for _ in range(100)))
    assert len({id(constraint) for constraint in made}) == 1
    before = children()
    child, own = max(before, key=lambda child: child.pid), os.getpriority(os.PRIO_PROCESS, 0)
    ranks = {os.getpriority(os.PRIO_PROCESS, thread.id) for thread in child.threads()}
    assert ranks == {own, own + NICE}, "its start waits less"
    for child in before:
        child.kill()
        child.wait()
    assert await make(constraints, source("regex", b'"a"')) == made[0]
    assert not children(), "what is kept needs no process"
    assert await make(constraints, source("regex", b'"b"'))
    assert len(children()) == 1
    constraints.close()
    assert not children()


async def test_refuses_too_many_of_a_share(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MAX_WAITING", 2)
    constraints = Constraints(text)
    first, second = (begin(constraints, "a") for _ in "ab")
    others = [begin(constraints, name) for name in "bd"]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match=r"2 constraints .* first of them for \d+\.\d s"):
        await make(constraints, source("regex", b'"c"'))
    theirs = begin(constraints, "d", "theirs")
    first.cancel()
    assert await asyncio.gather(second, *others, theirs)
    assert await make(constraints, source("regex", b'"c"'))
    constraints.close()


async def test_shares_have_theirs_in_turn(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "NUM_AT_ONCE", 1)
    constraints = Constraints(text)
    goes_on, begun = hold(monkeypatch)
    many = [begin(constraints, name, "many") for name in "abcd"]
    while not begun:
        await asyncio.sleep(0)
    few = [begin(constraints, name, "few") for name in "def"]
    await asyncio.sleep(0)
    for left in (many[0], many[3], few[2]):  # begun; few waits for it too; nobody does
        left.cancel()
    await asyncio.wait([many[0], many[3], few[2]])
    goes_on.set()
    assert await asyncio.gather(*many[1:3], *few[:2])
    assert begun == [b'"%b"' % name for name in (b"a", b"b", b"d", b"c", b"e")]
    assert await make(constraints, source("regex", b'"a"')) and len(begun) == 5, "it is kept"
    assert await make(constraints, source("regex", b'"f"')) and len(begun) == 6
    constraints.close()


async def test_a_share_has_one_at_a_time(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    constraints = Constraints(text)
    goes_on, begun = hold(monkeypatch)
    many = [begin(constraints, name, "many") for name in "ab"]
    few = begin(constraints, "c", "few")
    while len(begun) < 2:
        await asyncio.sleep(0)
    assert {*begun} == {b'"a"', b'"c"'}
    goes_on.set()
    assert await asyncio.gather(*many, few) and begun[2:] == [b'"b"']
    constraints.close()


async def test_short_ones_overtake_long_ones(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "NUM_AT_ONCE", 2)
    constraints, efforts, goes_on = Constraints(text), list[tuple[bytes, bool]](), threading.Event()

    def answer(_: LimitedProcess, message: ConstraintSource, effort: Effort, __: float) -> Answer:
        efforts.append((bytes(message.value), effort.is_again))
        if b"long" not in bytes(message.value):
            return Answer(text="short")
        if not effort.is_again:
            raise Died("it failed", signal.SIGPROF)
        goes_on.wait()
        return Answer(text="long")

    monkeypatch.setattr(LimitedProcess, "ask_beside", answer)
    long = [begin(constraints, f"long{name}", name) for name in "abc"]
    while not any(is_again for _, is_again in efforts):
        await asyncio.sleep(0)
    assert await begin(constraints, "short", "few") == "short"
    assert await begin(constraints, "shorter", "b") == "short"
    assert sum(is_again for _, is_again in efforts) == 1
    goes_on.set()
    assert await asyncio.gather(*long) == ["long"] * 3
    constraints.close()


async def test_tries_again_for_who_waits(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    constraints, goes_on, begun = Constraints(text), threading.Event(), list[bytes]()

    def answer(_: LimitedProcess, message: ConstraintSource, *__: object) -> Answer:
        begun.append(bytes(message.value))
        goes_on.wait()
        raise Died("it failed", signal.SIGPROF)

    monkeypatch.setattr(LimitedProcess, "ask_beside", answer)
    left = begin(constraints, "a")
    while not begun:
        await asyncio.sleep(0)
    left.cancel()
    await asyncio.wait([left])
    goes_on.set()
    with pytest.raises(InvalidRequest, match="cannot be compiled with 1 s"):
        await make(constraints, source("regex", b'"b"'))
    assert begun == [b'"a"', b'"b"', b'"b"']
    constraints.close()


async def test_the_end_cancels_who_waits(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    constraints = Constraints(text)
    goes_on, begun = hold(monkeypatch)
    first, second = begin(constraints, "a"), begin(constraints, "b")
    while not begun:
        await asyncio.sleep(0)
    constraints.close()
    with pytest.raises(asyncio.CancelledError):
        await second
    goes_on.set()
    await asyncio.wait([first])
    constraints.close()


async def test_a_slow_machine_is_no_fault(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    constraints = Constraints(text)
    slow = source("json", json.dumps(BRANCHES).encode())
    monkeypatch.setattr(kept, "WITHIN_S", 0.05)
    with pytest.raises(Overloaded, match=r"takes longer than 0\.05 s"):
        await make(constraints, slow)
    monkeypatch.undo()
    with pytest.raises(InvalidRequest, match="cannot be compiled with 1 s"):
        await make(constraints, slow)
    constraints.close()


async def test_a_killed_process_is_no_fault(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    constraints = Constraints(text)
    await make(constraints, source("regex", b'"a"'))
    ask = LimitedProcess._ask

    def kill_and_ask(of: LimitedProcess, process: Any, *asked: Any) -> Answer:
        process.kill()
        return ask(of, process, *asked)

    with monkeypatch.context() as patched:
        patched.setattr(LimitedProcess, "_ask", kill_and_ask)
        with pytest.raises(Overloaded, match="it failed"):
            await make(constraints, source("json", json.dumps(BRANCHES).encode()))
    with pytest.raises(InvalidRequest, match="cannot be compiled with 1 s"):
        await make(constraints, source("json", json.dumps(BRANCHES).encode()))
    constraints.close()


async def test_keeps_what_there_is_room_for(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MAX_KEPT_BYTES", 3_000)
    constraints = Constraints(text)
    a, b, c = (source("choice", b'["%b"]' % name) for name in (b"a", b"b", b"c"))
    made_a, made_b = await make(constraints, a), await make(constraints, b)
    assert await make(constraints, a) is made_a, "used last"
    await make(constraints, c)
    assert await make(constraints, a) is made_a
    assert await make(constraints, b) is not made_b
    constraints.close()


async def test_what_is_kept_holds_no_bodies(text: Text) -> None:
    constraints = Constraints(text)
    bodies = [b'{"a":{"const":%d},"b":"%b"}' % (number, b" " * 2**16) for number in range(8)]
    unused = [b" " * 2**16 for _ in bodies]
    for body in bodies:
        schema = msgspec.json.decode(body, type=dict[str, Raw])["a"]
        assert await make(constraints, ConstraintSource("json", "json", schema))
        assert sys.getrefcount(body) > 3, "the schema is a view of it"
    del body, schema
    await until(lambda: [*map(sys.getrefcount, bodies)] == [*map(sys.getrefcount, unused)])
    constraints.close()


def test_a_request_with_a_schema_holds_no_body() -> None:
    for fields in (
        b'"structured_outputs":{"json":{"const":1}}',
        b'"response_format":{"type":"json_schema","json_schema":{"schema":{"const":1}}}',
    ):
        body = b'{"prompt":"a",' + fields + b"}"
        before = sys.getrefcount(body)
        request = parse_completion(body)
        assert request.constraint_source() is not None and sys.getrefcount(body) == before


def test_every_kind_has_hostile_ones() -> None:
    assert {kind for kind, _, _ in HOSTILE} == {*get_args(Kind)}
