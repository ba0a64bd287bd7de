"""Replies of calls, whole and as streams: the shapes that OpenAI's clients read."""

from __future__ import annotations

import copy
import json
from array import array
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srm.server.dialects.chat.tools import ToolFormat
from srm.server.reply.call_reader import CallReader
from srm.server.schema.tools import Calls, Function
from srm.server.text.text import Text
from tests.kit.serving import parts_of
from tests.unit.server.reply.test_stream_writer import LENGTH, SPECIAL, STOP, Served, turns

ADD, NOW = Function("add"), Function("now-2")
ARGUMENTS = '{"x": "a}\\" é"}'
NAMED = Calls([ADD], is_named=True, are_several=False)
ONLY = Calls([ADD], is_named=False, are_several=False)
ANY = Calls([ADD, NOW], is_named=False, are_several=False)
SEVERAL = Calls([ADD, NOW], is_named=False, are_several=True)
MAYBE = Calls([ADD], is_named=False, are_several=False, may_be_text=True)
MAYBE_SEVERAL = Calls([ADD, NOW], is_named=False, are_several=True, may_be_text=True)
ADDING = f'{{"name":"add","arguments":{ARGUMENTS}}}'
TEXTS = [
    (NAMED, ARGUMENTS, [("add", ARGUMENTS)], "stop"),
    (ONLY, ARGUMENTS, [("add", ARGUMENTS)], "tool_calls"),
    (ANY, ADDING, [("add", ARGUMENTS)], "tool_calls"),
    (
        SEVERAL,
        f'[{ADDING},{{"name":"now-2","arguments":{{}}}},{ADDING}]',
        [("add", ARGUMENTS), ("now-2", "{}"), ("add", ARGUMENTS)],
        "tool_calls",
    ),
    (MAYBE, ADDING, [("add", ARGUMENTS)], "tool_calls"),
    (MAYBE_SEVERAL, f"[{ADDING}]", [("add", ARGUMENTS)], "tool_calls"),
]
FIELDS: list[dict[str, Any]] = [
    {},
    {"logprobs": 1},
    {"return_token_ids": True},
    {"n": 3, "stream_options": {"include_usage": True}},
    {"stream_interval": 4},
    {"stream_whole": True},
    {"n": 20},
]


def tokens_of(text: Text, of: str) -> list[int]:
    [encoded] = text.encode([of], adds_special=False)
    return array("i", encoded).tolist()


async def stream(
    text: Text, calls: Calls, spoken: str, reason: int = STOP, **fields: Any
) -> tuple[list[dict[str, Any]], Served]:
    """The events of a stream of this text, which ends with a token that is not in it."""
    served, dialect = Served(text), partial(ToolFormat, calls=calls)
    tokens = [*tokens_of(text, spoken), SPECIAL]
    reply = await served.stream(tokens, reason, dialect=dialect, **fields)
    return reply.events, served


def called(deltas: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """The calls of a stream, as clients put them together."""
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        for own in delta.get("tool_calls", []):
            if "id" in own:
                assert own["index"] == len(calls) and own["type"] == "function"
                calls.append(copy.deepcopy(own))
            else:
                assert own.keys() == {"index", "function"}
                assert own["function"].keys() == {"arguments"}
                calls[own["index"]]["function"]["arguments"] += own["function"]["arguments"]
    assert len({call["id"] for call in calls}) == len(calls)
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize(("calls", "spoken", "expected", "reason"), TEXTS)
async def test_a_stream_has_its_calls_in_pieces(
    text: Text,
    calls: Calls,
    spoken: str,
    expected: list[tuple[str, str]],
    reason: str,
    fields: dict[str, Any],
) -> None:
    events, _ = await stream(text, calls, spoken, **fields)
    n, tokens = fields.get("n", 1), [*tokens_of(text, spoken), 1]
    for index in range(n):
        choices = parts_of(events, index)
        *before, last = choices
        assert {choice["finish_reason"] for choice in before} <= {None}
        assert last["finish_reason"] == reason and last["stop_reason"] is None
        deltas = [choice["delta"] for choice in choices]
        if "stream_whole" not in fields:
            begun = [own for delta in deltas for own in delta.get("tool_calls", []) if "id" in own]
            assert {own["function"]["arguments"] for own in begun} == {""}
            assert ("tool_calls" in deltas[0]) == calls.is_one_function
            assert deltas[-1] == {}
        begins_empty = calls.may_be_text and "stream_whole" not in fields
        assert (deltas[0]["role"], deltas[0]["content"]) == (
            "assistant",
            "" if begins_empty else None,
        )
        assert {name for delta in deltas[1:] for name in delta} <= {"tool_calls"}
        assert called(deltas) == expected
        if "logprobs" in fields:
            scores = [choice["logprobs"]["content"] for choice in choices if choice["logprobs"]]
            assert sum(map(len, scores)) == len(tokens)
        if "return_token_ids" in fields:
            assert [id for choice in choices for id in choice.get("token_ids", [])] == tokens
    if "stream_options" in fields:
        assert events[-1]["usage"]["completion_tokens"] == n * len(tokens)


@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("calls", [MAYBE, MAYBE_SEVERAL])
@pytest.mark.parametrize("spoken", ["é is {no} call", ""])
async def test_a_reply_that_may_be_text_is_that_of_a_chat(
    text: Text, calls: Calls, spoken: str, fields: dict[str, Any]
) -> None:
    events, _ = await stream(text, calls, spoken, **fields)
    for index in range(fields.get("n", 1)):
        choices = parts_of(events, index)
        assert choices[-1]["finish_reason"] == "stop"
        deltas = [choice["delta"] for choice in choices]
        assert not called(deltas)
        assert "".join(delta.get("content") or "" for delta in deltas) == spoken
        if "return_token_ids" in fields:
            ids = [id for choice in choices for id in choice.get("token_ids", [])]
            assert ids == [*tokens_of(text, spoken), 1]
    whole = await reply_of(text, calls, spoken, n=2)
    for choice in whole["choices"]:
        assert choice["message"]["content"] == spoken and "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"


async def test_arguments_alone_are_written_as_any_text_is(text: Text) -> None:
    """Most of their tokens cost no encoding."""
    served = Served(text)
    reply, task = await served.ask(dialect=partial(ToolFormat, calls=ONLY))
    for token in tokens_of(text, ARGUMENTS):
        served.say({(0, 0): token})
        await turns()
    assert served.outlets[0].renderer.template(0) is not None
    assert reply.num_written > 5
    task.cancel()


CUT = [
    (ONLY, '{"x": ', [("add", '{"x": ')]),
    (ANY, '{"name":"ad', []),
    (SEVERAL, f"[{ADDING},", [("add", ARGUMENTS)]),
]


@pytest.mark.parametrize(("calls", "spoken", "expected"), CUT)
async def test_a_reply_that_ends_by_its_length_has_what_there_is(
    text: Text, calls: Calls, spoken: str, expected: list[tuple[str, str]]
) -> None:
    events, _ = await stream(text, calls, spoken, LENGTH)
    choices = parts_of(events, 0)
    assert called([choice["delta"] for choice in choices]) == expected
    assert choices[-1]["finish_reason"] == "length"
    reply = await reply_of(text, calls, spoken, LENGTH)
    [choice] = reply["choices"]
    assert choice["finish_reason"] == "length"
    assert [
        (own["function"]["name"], own["function"]["arguments"])
        for own in choice["message"].get("tool_calls", [])
    ] == expected


async def reply_of(
    text: Text, calls: Calls, spoken: str, reason: int = STOP, **fields: Any
) -> dict[str, Any]:
    tokens, dialect = [*tokens_of(text, spoken), SPECIAL], partial(ToolFormat, calls=calls)
    reply: dict[str, Any] = await Served(text).render_whole(dialect, tokens, reason, **fields)
    return reply


@pytest.mark.parametrize(("calls", "spoken", "expected", "reason"), TEXTS)
async def test_a_whole_reply_has_its_calls_and_equal_ids_again(
    text: Text, calls: Calls, spoken: str, expected: list[tuple[str, str]], reason: str
) -> None:
    fields = {"n": 2, "return_token_ids": True}
    reply, again = [await reply_of(text, calls, spoken, **fields) for _ in range(2)]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    ids = set()
    for choice in reply["choices"]:
        message = choice["message"]
        assert (message["role"], message["content"], message["refusal"]) == (
            "assistant",
            None,
            None,
        )
        assert choice["finish_reason"] == reason
        assert choice["token_ids"] == [*tokens_of(text, spoken), 1]
        assert [
            (call["type"], call["function"]["name"], call["function"]["arguments"])
            for call in message["tool_calls"]
        ] == [("function", *call) for call in expected]
        ids |= {call["id"] for call in message["tool_calls"]}
    assert len(ids) == 2 * len(expected) and all(id.startswith("call_") for id in ids)
    assert reply["choices"] == again["choices"]


async def test_a_call_that_a_stop_string_cuts_is_said_to_be_stopped(text: Text) -> None:
    [choice] = (await reply_of(text, ONLY, ARGUMENTS, stop="}"))["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "}")
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"x": "a'


async def test_equal_calls_may_be_counted(text: Text) -> None:
    fields: dict[str, Any] = {"n": 3, "return": "unique"}
    reply = await reply_of(text, ANY, ADDING, **fields)
    [choice] = reply["choices"]
    assert choice["count"] == 3 and len(choice["message"]["tool_calls"]) == 1


VALUES = st.recursive(
    st.none() | st.integers() | st.text(alphabet='ab"\\{}[]é, :'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='a"\\{}'), inner),
    max_leaves=6,
)
CALLS = st.lists(
    st.tuples(st.sampled_from("fg"), st.dictionaries(st.text(), VALUES)), min_size=1, max_size=4
)


@given(calls=CALLS, cuts=st.lists(st.integers(1, 9), min_size=1), is_list=st.booleans())
def test_reads_calls_however_cut(
    calls: list[tuple[str, Any]], cuts: list[int], is_list: bool
) -> None:
    texts = [(name, json.dumps(arguments)) for name, arguments in calls[: None if is_list else 1]]
    text = ",".join(f'{{"name":"{name}","arguments":{own}}}' for name, own in texts)
    text = f"[{text}]" if is_list else text
    reader, calls_read, at = CallReader(), list[list[str]](), 0
    while at < len(text):
        end = at + cuts[at % len(cuts)]
        for part in reader.read(text[at:end]):
            if part.name is not None:
                assert part.place == len(calls_read) and not part.arguments
                calls_read.append([part.name, ""])
            else:
                assert part.place == len(calls_read) - 1 and part.arguments
                calls_read[-1][1] += part.arguments
        at = end
    assert [tuple(call) for call in calls_read] == texts


def test_reads_what_was_written_of_a_cut_call() -> None:
    for text, expected in {
        '[{"name":"f","argu': [],
        '[{"name":"f","arguments":{"x": "a}': [(0, "f", ""), (0, None, '{"x": "a}')],
        '{"name":"f","arguments":{}}': [(0, "f", ""), (0, None, "{}")],
    }.items():
        assert CallReader().read(text) == expected
