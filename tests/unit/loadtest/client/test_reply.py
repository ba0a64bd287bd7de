"""Events of a stream, and what is counted of a reply."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from srm.loadtest.client.event_stream import EventParser
from srm.loadtest.client.reply import BadReply, Reply, TokenCounts
from tests.kit.loads.raw_server import DONE, event, text_event

SPECIAL = "||data|data:|data: |: comment|id: 7|event: x|data: [DONE]"
LINES = st.one_of(
    st.sampled_from(SPECIAL.split("|")),
    st.text(alphabet="aä€😀:{ \t", max_size=6).map("data: {}".format),
    st.text(alphabet="ad:t ", max_size=6),
).map(str.encode)
ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])
STREAMS = st.tuples(
    st.sampled_from([b"", b"\xef\xbb\xbf"]),
    st.lists(st.tuples(LINES, ENDS).map(b"".join), max_size=12).map(b"".join),
    LINES,
).map(b"".join)


def brute_force(data: bytes) -> list[bytes]:
    """The standard's description, line by line over the whole; the end ends an event."""
    results: list[bytes] = []
    event: list[bytes] | None = None
    for line in [*re.split(rb"\r\n|\n|\r", data.removeprefix(b"\xef\xbb\xbf")), b""]:
        name, _, value = line.partition(b":")
        if name == b"data":
            event = [*(event or []), value.removeprefix(b" ")]
        elif not line and event is not None:
            results.append(b"\n".join(event))
            event = None
    return results


@given(STREAMS, st.lists(st.integers(0, 80), max_size=12))
@example(b"data: a\r\n\r\ndata: b\r\n\r\n", [8, 9, 10])
@example(b"\xef\xbb\xbfdata: a\n\n", [1, 2])
@example(b"data: " + b"x" * 70 + b"\n\n", list(range(0, 80, 3)))
def test_events_are_read_from_bytes_split_anywhere(data: bytes, cuts: list[int]) -> None:
    places = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    events = EventParser()
    results = [event for a, b in pairwise(places) for event in events.parse(data[a:b])]
    assert results + events.finish() == brute_force(data)


def test_an_event_is_told_as_soon_as_it_is_whole() -> None:
    events = EventParser()
    pieces = [b"data: a\n", b"\nda", b"ta: b\r\n\r", b"\n"]
    assert [events.parse(piece) for piece in pieces] == [[], [b"a"], [b"b"], []]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_an_event_named_error_is_noticed(end: bytes) -> None:
    events = EventParser()
    events.parse(b"event: error" + end + b"data: {}" + end + end)
    assert events.named_error


TOKENS = st.fixed_dictionaries({"tokens": st.lists(st.sampled_from(["a", ","]), max_size=3)})
CHOICE = st.fixed_dictionaries(
    {"index": st.integers(0, 3)},
    optional={
        "text": st.sampled_from(["", "a", "null", "ä€😀", '"\\', None]),
        "token_ids": st.one_of(st.none(), st.lists(st.integers(0, 999), max_size=4)),
        "logprobs": st.one_of(st.none(), TOKENS),
        "finish_reason": st.sampled_from([None, "length"]),
        "prompt_token_ids": st.just([1, 2, 3]),
    },
)
DOCUMENTS = st.lists(
    st.fixed_dictionaries(
        {"choices": st.lists(CHOICE, max_size=3)},
        optional={"error": st.none(), "usage": st.none(), "model": st.just("m")},
    ),
    max_size=5,
)


def count(choice: dict[str, Any]) -> int:
    """By the rule that reply.py states, over plain Python values."""
    if choice.get("token_ids") is not None:
        return len(choice["token_ids"])
    if choice.get("logprobs") is not None:
        return len(choice["logprobs"]["tokens"])
    return int(bool(choice.get("text")))


def read(*parts: bytes, stream: bool = True, keep_text: bool = False) -> tuple[Reply, TokenCounts]:
    reply = Reply(stream, keep_text)
    counts = [data for part in parts for data in reply.read(part)]
    return reply, counts + reply.finish()


def read_whole(**fields: Any) -> tuple[Reply, TokenCounts]:
    body = json.dumps(fields).encode()
    return read(body[:9], body[9:], stream=False)


@given(DOCUMENTS, st.booleans(), st.integers(1, 40), st.booleans())
def test_tokens_of_streams_are_those_of_plain_decoding(
    documents: list[dict[str, Any]], ascii_only: bool, size: int, keep_text: bool
) -> None:
    lines = [
        f"data: {json.dumps(document, ensure_ascii=ascii_only)}\n\n".encode()
        for document in documents
    ]
    data = b"".join(lines) + DONE
    parts = [data[place : place + size] for place in range(0, len(data), size)]
    reply, counts = read(*parts, keep_text=keep_text)
    choices = [choice for document in documents for choice in document["choices"]]
    counted = [(choice["index"], count(choice)) for choice in choices]
    assert counts == [item for item in counted if item[1]]
    assert reply.tokens == sum(tokens for _, tokens in counted)
    texts: dict[int, str] = defaultdict(str)
    for choice in choices:
        if choice.get("text") and keep_text:
            texts[choice["index"]] += choice["text"]
    assert {index: "".join(pieces) for index, pieces in (reply.texts or {}).items()} == texts


@pytest.mark.parametrize(
    ("choice", "tokens", "is_counted"),
    [
        ({"text": "", "token_ids": [5]}, 1, True),
        ({"text": "abc", "token_ids": [5, 6, 7]}, 3, True),
        ({"text": "abc", "token_ids": []}, 0, True),
        ({"text": "abc", "token_ids": None}, 1, False),
        ({"text": "abc", "token_ids": "of another kind"}, 1, False),
        ({"text": "abc", "logprobs": {"tokens": ["a", "bc"]}}, 2, True),
        ({"delta": {"content": "a"}, "logprobs": {"content": [{"token": "a"}]}}, 1, True),
        ({"delta": {"role": "assistant", "content": ""}}, 0, False),
        ({"delta": {"content": None, "reasoning_content": "so"}}, 1, False),
        ({"delta": {"reasoning": "so", "reasoning_content": "so"}}, 1, False),
        ({"delta": {}}, 0, False),
        ({"text": None}, 0, False),
    ],
)
def test_tokens_of_an_event(choice: dict[str, Any], tokens: int, is_counted: bool) -> None:
    reply, counts = read(event(choices=[choice]), DONE)
    assert counts == ([(0, tokens)] if tokens else [])
    assert (reply.tokens, reply.is_counted) == (tokens, is_counted)


def test_one_guess_makes_the_count_one_and_nothing_counts_after_done() -> None:
    reply, _ = read(text_event("a", token_ids=[1]), text_event("bcd"), DONE + text_event("e"))
    assert reply.tokens == 2
    assert not reply.is_counted


def test_reasoning_under_two_names_is_kept_once() -> None:
    delta = {"reasoning": "so", "reasoning_content": "so", "content": "!"}
    reply, _ = read(event(choices=[{"delta": delta}]), DONE, keep_text=True)
    assert reply.texts == {0: ["so!"]}


def test_usage_and_waiting_are_as_the_server_says() -> None:
    usage: dict[str, Any] = {"prompt_tokens": 3, "completion_tokens": 8, "queue_time": 0.25}
    usage["prompt_tokens_details"] = {"cached_tokens": 2}
    reply, _ = read(text_event("a"), event(choices=[], usage=usage), DONE)
    assert (reply.usage_prompt_tokens, reply.usage_output_tokens, reply.queue_s) == (3, 8, 0.25)
    assert reply.usage_cached_tokens == 2
    reply, _ = read(event(choices=[], time_info={"queue_time": 0.5}), DONE)
    assert (reply.usage_output_tokens, reply.queue_s) == (-1, 0.5)


@pytest.mark.parametrize("stream", [True, False])
def test_null_and_numbers_of_another_type_are_no_protocol_error(stream: bool) -> None:
    """`index` was null in a public server's replies, and all of a run was counted as failed."""
    odd: list[dict[str, Any]] = [
        *({"index": None}, {"index": 0.0}, {"index": "0"}, {"logprobs": None}, {"token_ids": None}),
        *({"logprobs": {"tokens": None, "content": None}}, {"delta": None, "message": None}),
        *({"finish_reason": reason} for reason in (["stop"], {"type": "length"}, 3, None)),
        {"error": None},
    ]
    counts = {"completion_tokens": "1", "prompt_tokens": 2.0, "queue_time": None}
    usages: tuple[Any, ...] = (None, {}, {"index": None}, counts, {"prompt_tokens_details": None})
    about: list[dict[str, Any]] = [{"usage": usage} for usage in usages]
    nothing: tuple[Any, ...] = (None, "", False, {}, [])
    about += [{"error": error} for error in nothing]
    for choice, rest in product(odd, [*about, {"time_info": None}, {"time_info": {}}]):
        content = {"choices": [{"text": "a", **choice}], **rest}
        body = [event(**content), DONE] if stream else [json.dumps(content).encode()]
        assert read(*body, stream=stream)[1] == [(0, 1)]
        assert read(*body, stream=stream, keep_text=True)[0].texts == {0: ["a"]}


def test_the_reason_in_an_event_of_type_error_is_told() -> None:
    with pytest.raises(BadReply, match="out of memory"):
        read(text_event("a"), b'event: error\ndata: {"message": "out of memory"}\n\n', DONE)


def test_whole_replies_count_what_each_choice_says_or_share_out_their_usage() -> None:
    choices: list[dict[str, Any]] = [{"index": 1, "token_ids": [1, 2]}, {"token_ids": [3]}]
    reply, counts = read_whole(choices=choices, usage={"completion_tokens": 3})
    assert (counts, reply.is_counted) == ([(1, 2), (0, 1)], True)
    choices = [{"index": index, "text": "…"} for index in range(3)]
    reply, counts = read_whole(choices=choices, usage={"completion_tokens": 8})
    assert (counts, reply.is_counted) == ([(0, 3), (1, 3), (2, 2)], False)


@pytest.mark.parametrize(
    ("stream", "parts"),
    [
        (True, [b"data: {\n\n"]),
        (True, [b'data: {"choices": 3}\n\n']),
        (True, [b'data: {"choices": [{"text": "\xff"}]}\n\n', DONE]),
        (True, [text_event("a")]),
        (True, []),
        (True, [event(error={"message": "no"}), DONE]),
        (True, [b"event: error\n" + event(message="no"), DONE]),
        (True, [b'{"choices": []}']),
        (True, [text_event("a"), event(object="error", message="no", code=500), DONE]),  # vLLM
        (True, [text_event("a"), b'error: {"code": 500, "message": "no"}\n\n', DONE]),  # llama.cpp
        (True, [text_event("a"), b'event: error\ndata: {"error": "no"}\n\n', DONE]),  # TGI
        (True, [text_event("a"), event(error="no", error_type="generation"), DONE]),
        (True, [text_event("a"), b'event: exception\ndata: {"reason": "no"}\n\n', DONE]),
        (True, [event(choices=[{"text": "a", "error": {"code": 502}}]), DONE]),  # OpenRouter
        (True, [event(choices=[{"text": "", "finish_reason": "abort"}]), DONE]),
        (True, [event(choices=[{"text": "", "finish_reason": {"type": "abort"}}]), DONE]),  # SGLang
        (True, [text_event("a"), DONE, event(error={"message": "no"})]),
        (True, [text_event("a"), DONE, text_event("", finish_reason="error")]),
        (True, [text_event("a"), DONE, b"Internal Server Error\n"]),
        (True, [text_event("a"), b"Internal Server Error\n\n", DONE]),
        (True, [text_event("a"), b'{"message": "no"}\n', DONE]),
        (True, [b"event: Error\n" + text_event("a"), DONE]),
        (True, [b"event: exception\n" + text_event("a"), DONE]),
        (False, [b'{"choices": [{"text": "a", "finish_reason": "error"}]}']),
        (False, [b""]),
        (False, [b"no JSON"]),
        (False, [b"[]"]),
        (False, [b'{"choices": []}']),
        (False, [b'{"error": {"code": 1}}']),
    ],
)
def test_replies_that_are_none_or_failed(stream: bool, parts: list[bytes]) -> None:
    with pytest.raises(BadReply):
        read(*parts, stream=stream)


@pytest.mark.parametrize(
    "fields",
    [
        {"object": "error", "message": "CUDA out of memory", "code": 500},
        {"detail": "no"},
        {"errors": ["no"]},
        {"error_code": 500},
        {"usage": {"completion_tokens": 1}, "object": "error"},
        {"x_groq": {"id": "1", "error": "over_capacity"}},
    ],
)
def test_an_event_without_choices_has_only_known_fields(fields: dict[str, Any]) -> None:
    with pytest.raises(BadReply, match="no part of a reply"):
        read(text_event("a"), event(**{"choices": [], **fields}), DONE)


def test_usage_comes_with_what_servers_add_to_it() -> None:
    known = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    others: list[dict[str, Any]] = [
        {"system_fingerprint": None, "service_tier": "default", "detail": None},
        {"x_groq": {"id": "1"}},
        {"timings": {"predicted_n": 2}},
        {"weights_version": 3},
    ]
    for fields in others:
        usage = event(choices=[], usage={"completion_tokens": 2}, **known, **fields)
        reply, _ = read(b"event: message\nid: 1\nretry: 5\n: \n" + text_event("a"), usage, DONE)
        assert reply.usage_output_tokens == 2


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "reason", ["server_error", "ERROR", "timeout", "evicted", ["error"], {"error": "oom"}]
)
def test_only_known_finish_reasons_are_good(reason: Any, stream: bool) -> None:
    content: dict[str, Any] = {"choices": [{"text": "a", "finish_reason": reason}]}
    parts = [event(**content), DONE] if stream else [json.dumps(content).encode()]
    with pytest.raises(BadReply, match="a choice failed"):
        read(*parts, stream=stream)


def test_a_choice_that_ends_well_is_whole() -> None:
    for reason in ("stop", "length", "tool_calls", "function_call", "content_filter", "eos", ""):
        assert read(text_event("a", finish_reason=reason), DONE)[0].is_done


@pytest.mark.parametrize("stream", [True, False])
def test_a_reply_without_end_is_none(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("srm.loadtest.client.reply.MAX_BYTES", 1_000)
    reply = Reply(stream, keep_text=False)
    with pytest.raises(BadReply, match="more than 1000 bytes"):
        for _ in range(100):
            reply.read(b"data: " + b"x" * 100)
