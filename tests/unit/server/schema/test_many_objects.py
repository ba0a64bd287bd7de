"""Bodies of a few bytes an object: what is refused is never made, and what is honest is taken."""

from __future__ import annotations

import json
import random
import threading
import tracemalloc
from array import array
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from srm.errors import InvalidRequest
from srm.server.batch.lines import BatchLine, parse_line
from srm.server.commands import batch_input
from srm.server.dialects.chat.request import parse_chat, parse_chats
from srm.server.dialects.chat.tokenize import parse_detokenize, parse_tokenize
from srm.server.dialects.messages.request import parse_count
from srm.server.http.bodies import parsed
from srm.server.routes.batches import parse_batch
from srm.server.schema import json_parts
from srm.server.schema.completion_request import parse_completion
from tests.kit.bodies.refusals import parse_response

SIZE = 1_500_000
"""Bytes of the large value in a body."""
USER = b'"role": "user", "content": "x"'
TEXT, PART = b'{"type": "text", "text": "x"}', b'{"type": "input_text", "text": "x"}'


def many(item: bytes, around: bytes = b"[]") -> bytes:
    """A list, or with `around` an object, of so many of these that it has SIZE bytes."""
    items = b",".join([item] * (SIZE // (len(item) + 1)))
    return around[:1] + items + around[1:]


def names(value: bytes) -> bytes:
    """Fields of different names, for an object of SIZE bytes."""
    return b",".join(b'"%06d": %b' % (i, value) for i in range(SIZE // (len(value) + 11)))


def body(**fields: bytes) -> bytes:
    return b"{" + b", ".join(b'"%b": %b' % (n.encode(), v) for n, v in fields.items()) + b"}"


def message(fields: bytes) -> bytes:
    return body(messages=b"[{" + USER + b", " + fields + b"}]")


def spoken(content: bytes) -> bytes:
    """A list of one message with this content."""
    return b"[" + body(role=b'"user"', content=content) + b"]"


MESSAGE = b"{" + USER + b"}"
CALL = b'"tool_calls": [{"function": {"name": "f", "arguments": "{\\"a\\": %b}"}}]' % many(b"[]")
RESULT = b'[{"type": "tool_result", "tool_use_id": "a", "content": %b}]' % many(TEXT)
PARTS = b'[{"role": "user", "content": [' + b",".join([b'{"text": ""}'] * 4_000) + b"]}]"
NEW_BATCH = {
    **{"input_file_id": b'"x"', "endpoint": b'"/v1/completions"', "completion_window": b'"24h"'},
}
REFUSED: dict[str, tuple[Callable[[bytes], Any], bytes, str]] = {
    **{f"prompt {item!r}": (parse_completion, body(prompt=many(item)), "prompt")
       for item in (b"[]", b"{}", b"[[]]", b"true", b"1.5", b"[" * 50 + b"]" * 50)},
    **{f"{name} {what}": (parse_completion, body(prompt=b'"x"', **{name: value}), name)
       for name in ("stop", "metadata", "logit_bias", "until", "suffix", "user", "unknown", "n")
       for what, value in (("of lists", many(b"[]")), ("of objects", many(b"{}")),
                           ("of strings", many(b'""')), ("of fields", b"{" + names(b"0") + b"}"))},
    "fields": (parse_completion, b'{"prompt": "x", ' + names(b"null") + b"}", ""),
    "messages": (parse_chat, body(messages=many(MESSAGE)), "messages"),
    "chats": (parse_chats, body(messages=many(b"[" + MESSAGE + b"]")), "messages"),
    "chats of parts": (parse_chats, body(messages=many(PARTS)), "messages"),
    "items": (parse_response, body(input=many(MESSAGE)), "input"),
    "parts of an item": (parse_response, body(input=spoken(many(PART))), "input"),
    "turns": (parse_count, body(messages=many(MESSAGE)), "messages"),
    "blocks": (parse_count, body(messages=spoken(many(TEXT))), "messages"),
    "blocks of a result": (parse_count, body(messages=spoken(RESULT)), "messages"),
    "functions": (parse_response, body(input=b'"x"', tools=many(b"{}")), "tools"),
    "tools": (parse_chat, body(messages=b"[" + MESSAGE + b"]", tools=many(b"{}")), "tools"),
    "template": (parse_chat, body(messages=b"[" + MESSAGE + b"]",
                                  chat_template_kwargs=body(a=many(b"[]"))),
                 "chat_template_kwargs"),
    "keys of a message": (parse_chat, message(names(b"0")), "messages"),
    "lists of a message": (parse_chat, message(b'"more": ' + many(b"[]")), "messages"),
    "parts": (parse_chat, body(messages=spoken(many(TEXT))), "messages"),
    "arguments": (parse_chat, message(CALL), "messages"),
    "tokens": (parse_detokenize, body(tokens=many(b"[]")), "tokens"),
    "texts": (parse_tokenize, body(prompt=many(b'""')), "prompt"),
    "batch": (parse_batch, body(**NEW_BATCH, metadata=b"{" + names(b'""') + b"}"), "metadata"),
}  # fmt: skip


def peak_of(parse: Callable[[], Any]) -> int:
    """The most bytes that are held at once meanwhile."""
    tracemalloc.start()
    try:
        parse()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", REFUSED, ids=range(len(REFUSED)))
def test_a_body_of_many_objects_is_refused_before_they_are_made(name: str) -> None:
    parse, given, param = REFUSED[name]
    requests: list[InvalidRequest] = []

    def refuse() -> None:
        with pytest.raises(InvalidRequest) as caught:
            parse(given)
        requests.append(caught.value)

    json_parts.items_of(b"[" + b" " * json_parts.SMALL + b"]", 4096)  # the decoder is kept
    assert peak_of(refuse) < 5 * len(given)
    assert (requests[0].param or "") == param
    assert len(requests[0].message) < 500


def test_labels_of_messages_are_not_made_however_many_they_are() -> None:
    labelled = message(b'"cache_control": ' + many(b"[]"))
    assert peak_of(lambda: parse_chat(labelled)) < 5 * len(labelled)


@pytest.mark.parametrize("item", [b"0", b'""', b"[0]", b"[]"])
def test_a_line_of_many_objects_is_counted_without_making_them(item: bytes) -> None:
    prompt, url = many(item), b'"/v1/completions"'
    line = body(custom_id=b'"a"', method=b'"POST"', url=url, body=body(prompt=prompt))
    results: list[object] = []
    assert peak_of(lambda: results.append(parse_line(line, 1))) < 5 * len(line)
    (made,) = results
    assert isinstance(made, BatchLine)
    several = prompt[1:2] in b'"['
    assert made.size == (len(json.loads(prompt)) if several else 1)


def test_a_line_of_srm_batch_has_a_bounded_number_of_fields() -> None:
    line = b"{" + names(b"0") + b"}"
    assert peak_of(lambda: batch_input.parse(line, 7)) < 5 * len(line)
    assert "fields" in str(batch_input.parse(line, 7))


def ids_of(prompts: list[Any]) -> list[list[int]]:
    return [list(array("i", prompt)) for prompt in prompts]


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (" ,\n\t", ": ")])
def test_honest_prompts_are_taken_however_long(separators: tuple[str, str]) -> None:
    rng = random.Random(1)

    def parse(prompt: Any) -> list[Any]:
        given = json.dumps({"prompt": prompt}, separators=separators).encode()
        return parse_completion(given).prompt

    long = [rng.randrange(2**31) for _ in range(150_000)]
    assert ids_of(parse(long)) == [long]
    lists = [long[i : i + rng.randrange(1, 900)] for i in range(0, 20_000, 50)]
    assert ids_of(parse([*lists, long, [7], long, *lists])) == [*lists, long, [7], long, *lists]
    texts = ['"[,\\' * (i % 50) for i in range(20_000)]
    assert parse(texts) == texts
    assert parse("é\0\\" * 200_000) == ["é\0\\" * 200_000]


@pytest.mark.parametrize("wrong", ["1", [], 1.5, -1, 2**31, None, {}, True, [1], "],[", "a,b]"])
def test_what_is_wrong_is_found_wherever_it_stands(wrong: Any) -> None:
    for at in (0, 1, 60_000, 119_999):
        ids: list[Any] = [1] * 120_000
        ids[at] = wrong
        lists: list[Any] = [[1, 2]] * 120_000
        lists[at] = [wrong]
        for prompt in (ids, lists, [[1], ids, [1]]):
            with pytest.raises(InvalidRequest) as caught:
                parse_completion(json.dumps({"prompt": prompt}).encode())
            assert caught.value.param == "prompt"


def test_text_is_found_without_making_what_it_is_in() -> None:
    texts: list[Any] = ["x", {"": "x"}, ["", {'a"': ["x"]}], {'":': ['"']}]
    for value in (1, "", {"a": 1}, ["", {"a\\": ""}], *texts):
        for indent in (None, 2):
            is_text = json_parts.has_text(json.dumps(value, indent=indent).encode())
            assert is_text == (value in texts), value


def test_a_large_object_is_read_as_a_small_one_is() -> None:
    large = b'{"a": 1, "a\\u00e9": [2], "a": ' + many(b"1") + b"}"
    fields = json_parts.fields_of(large)
    assert list(fields) == ["a", "aé"] and all(type(name) is str for name in fields)
    assert bytes(fields["a"]) == many(b"1")
    with pytest.raises(msgspec.ValidationError):
        json_parts.fields_of(many(b"1"))
    items = json_parts.items_of(b"[1, " + many(b"{}") + b"]", 2)
    assert items is not None and bytes(items[0]) == b"1"
    assert json_parts.items_of(b"[1, 1, " + many(b"{}") + b"]", 2) is None


async def test_a_large_body_is_parsed_beside_the_event_loop() -> None:
    threads: list[str] = []

    def parse(given: bytes) -> int:
        threads.append(threading.current_thread().name)
        return len(given)

    assert await parsed(parse, b"{}") == 2
    assert await parsed(parse, b" " * (json_parts.SMALL + 1)) == json_parts.SMALL + 1
    here = threading.current_thread().name
    assert threads[0] == here and threads[1].startswith("large bodies")
