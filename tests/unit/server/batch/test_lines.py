"""Lines of a batch: read, parsed, looked through as a whole, answered, and known again."""

from __future__ import annotations

import asyncio
import io
import json
import math
import tracemalloc
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from srm.errors import EngineUnavailable, InvalidRequest, Overloaded, SRMError, TimedOut
from srm.server.batch import job_input
from srm.server.batch.job_input import Stopped, check_input
from srm.server.batch.lines import (
    BatchLine,
    LineUsage,
    RawLine,
    answer_line,
    decode_kept,
    never_run,
    parse_line,
    read_lines,
)
from srm.server.generation.engine_request import RequestOwner
from srm.server.schema.completion_request import parse_completion
from srm.server.storage.records import LineError

GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


def parsed(line: Any = None, endpoint: str = "/v1/completions", **fields: Any) -> Any:
    given = {**GOOD, **fields} if line is None else line
    raw = given if isinstance(given, bytes) else json.dumps(given).encode()
    return parse_line(raw, 7, endpoint)


@pytest.mark.parametrize(
    ("line", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"\xff\xfe", "invalid_json_line", None),
        (
            b'{"custom_id": "a", "method": "POST", "url": "/", "body": {"x": "\xff"}}',
            "invalid_json_line",
            None,
        ),
        (b'{"body":' + b"[" * 100_000, "invalid_json_line", None),
        (b"[1]", "invalid_json_line", None),
        (b"1", "invalid_type", None),
        *(
            ({key: GOOD[key] for key in GOOD if key != name}, "missing_required_parameter", name)
            for name in GOOD
        ),
        ({**GOOD, "bodys": {}}, "unknown_parameter", "bodys"),
        ({**GOOD, "custom_id": True}, "invalid_type", "custom_id"),
        ({**GOOD, "custom_id": None}, "invalid_type", "custom_id"),
        ({**GOOD, "custom_id": 1.5}, "invalid_custom_id", "custom_id"),
        ({**GOOD, "custom_id": 2.0**53}, "invalid_custom_id", "custom_id"),
        ({**GOOD, "custom_id": ""}, "invalid_custom_id", "custom_id"),
        ({**GOOD, "custom_id": "a" * 513}, "invalid_custom_id", "custom_id"),
        ({**GOOD, "method": "GET"}, "invalid_method", "method"),
        ({**GOOD, "url": "/v1/chat/completions"}, "url_mismatch", "url"),
        ({**GOOD, "body": "text"}, "invalid_type", "body"),
    ],
)
def test_what_a_line_may_not_be(line: Any, code: str, param: str | None) -> None:
    error = parsed(line)
    assert isinstance(error, LineError), error
    assert (error.code, error.param, error.line) == (code, param, 7)


def with_body(body: str) -> BatchLine | LineError:
    asked = '"custom_id": "a", "method": "POST", "url": "/v1/completions"'
    return parse_line(f'{{{asked}, "body": {body}}}'.encode(), 7)


NUMBERS = (
    "0",
    "-1.5",
    "1e308",
    "9" * 309,
    "0.000001e310",
    "-1e309",
    "1E+400",
    "1.5e9999",
    "1" * 400,
)


@pytest.mark.parametrize("number", NUMBERS)
def test_numbers_that_no_double_holds_fail_the_check(number: str) -> None:
    """They passed it, since values are decoded only when the line runs."""
    is_infinite = math.isinf(float(number))
    places = ('"temperature": {}', '"n": 1, "x": [0, {{"y": [{}]}}]', '"{}": 1, "x": 1, "y":{}')
    for place in places:
        body = f"{{{place.format(number, number)}}}"
        line = with_body(body)
        assert isinstance(line, LineError) == is_infinite, place
        if isinstance(line, LineError):
            assert (line.code, line.line) == ("invalid_json_line", 7)
            assert line.param in ("temperature", "x", "y") and f"{line.param} has " in line.message
    for text in (number, f'\\"{number}', f"{number}\\\\"):
        assert isinstance(with_body(f'{{"prompt": "{text}", "{number}": 1}}'), BatchLine)
    fields = ",".join(f'"{i}": 1' for i in range(2000))
    for body in (f'{{{fields}, "x": 1e400}}', '{"x": 1e400, "x": 1}'):
        line = with_body(body)
        assert isinstance(line, LineError) and line.param == "body"


def test_bodies_too_deep_to_be_read_fail_the_check() -> None:
    """Of some twenty depths the check could read a body and what ran the line could not."""

    def parse_deeper(body: bytes, calls: int) -> None:
        parse_deeper(body, calls - 1) if calls else parse_completion(body)

    taken = 0
    for depth in (1, 99, 101, *range(800, 1_100, 5), 100_000):
        nested = "[" * depth + "]" * depth
        body = f'{{"prompt": "a", "structured_outputs": {{"json": {{"const": {nested}}}}}}}'
        line = with_body(body)
        if isinstance(line, BatchLine):
            parse_deeper(line.body, 50)
            taken += 1
        else:
            assert (line.code, line.line) == ("invalid_json_line", 7)
    assert taken > 3


def test_what_a_line_may_be() -> None:
    assert isinstance(parsed(url="/v1/chat/completions", endpoint=""), BatchLine)
    assert parsed(url="/v1/embeddings", endpoint="").code == "url_mismatch"
    assert parsed(custom_id="a" * 512).custom_id == "a" * 512


@pytest.mark.parametrize(
    ("body", "size"),
    [
        ({"prompt": "x"}, 1),
        ({"prompt": "x", "n": 5}, 5),
        ({"prompt": "x", "n": 2, "best_of": 8}, 8),
        ({"prompt": ["x", "y", "z"], "n": 2}, 6),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": [[1, 2], [3]]}, 2),
        ({"prompt": [], "n": None}, 1),
        ({"messages": [{"role": "user", "content": "x"}], "n": 3}, 3),
        ({"n": "many"}, 1),
    ],
)
def test_how_many_sequences_a_line_takes(body: dict[str, Any], size: int) -> None:
    assert parsed(body=body).size == size


def lines_of(data: bytes, limit: int = 100) -> list[RawLine]:
    return [line for some in read_lines(io.BytesIO(data), limit) for line in some]


def test_lines_are_numbered_as_an_editor_does() -> None:
    assert lines_of(b"\xef\xbb\xbfa\n\n  \r\nb\nc") == [(1, b"a"), (4, b"b"), (5, b"c")]
    assert lines_of(b"\xef\xbb\xbfa") == [(1, b"a")]
    assert lines_of(b"\xef\xbb\xbf\n") == lines_of(b"\xef\xbb\xbf") == []


@pytest.mark.parametrize("data", [b"a", b"a\nb", b"\na\n\nb", b"", b" \n "])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
def test_a_last_line_without_an_end_is_a_line_like_others(data: bytes, bom: bytes) -> None:
    assert lines_of(bom + data) == lines_of(bom + data + b"\n") == lines_of(data)


def test_a_line_that_is_too_long_is_told_and_not_kept() -> None:
    long = b"x" * 5_000_000  # several chunks
    lines = lines_of(b"a\n" + long + b"\nb\n" + long)
    assert lines == [(1, b"a"), (2, None), (3, b"b"), (4, None)]
    assert lines_of(b"abc\nabcd\n", limit=3) == [(1, b"abc"), (2, None)]
    assert parse_line(None, 2).code == "line_too_long"  # type: ignore[union-attr]


class Canned(NamedTuple):
    """Answers, or raises, what it was made with."""

    answer: bytes | SRMError

    async def answer_whole(self, body: bytes, id: str, owner: RequestOwner) -> bytes:
        if isinstance(self.answer, SRMError):
            raise self.answer
        return self.answer


def answered(answer: bytes | SRMError) -> tuple[Any, dict[str, Any]]:
    asked = answer_line(parsed(), {"/v1/completions": Canned(answer)}, RequestOwner(), "batch_ab")
    result = asyncio.run(asked)
    return result, json.loads(result.record)


def test_an_answer_is_a_record_with_its_usage() -> None:
    body = b'{"id":"x","usage":{"prompt_tokens":3,"completion_tokens":5,"total_tokens":8}}'
    result, record = answered(body)
    assert record == {
        "id": "batch_req_ab_7",
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "batch_ab-7", "body": json.loads(body)},
        "error": None,
    }
    assert not result.is_failed
    again = decode_kept(result.record)
    assert again is not None
    assert (again.number, again.usage, again.code) == (7, LineUsage(3, 5), "")


def test_usage_of_a_response_counts_as_that_of_a_chat() -> None:
    record = (
        b'{"id":"batch_req_ab_7","custom_id":"a","response":{"status_code":200,"request_id":"x-7",'
        b'"body":{"usage":{%b}}},"error":null}'
    )
    again = decode_kept(record % b'"input_tokens":3,"output_tokens":5')
    assert again is not None and again.usage == LineUsage(3, 5)
    assert decode_kept(record % b'"input_tokens":3,"completion_tokens":5') is None


def test_a_record_is_one_line_whatever_is_in_it() -> None:
    text = "".join(map(chr, [*range(0x100), 0x2028, 0x2029, 0x1F600]))
    body = json.dumps({"choices": [{"text": text}], "usage": None}, ensure_ascii=False)
    result, record = answered(body.encode())
    assert len(result.record.decode().splitlines()) == 1
    assert record["response"]["body"]["choices"][0]["text"] == text


def test_what_fails_has_an_error_with_its_status_or_no_response() -> None:
    result, record = answered(InvalidRequest("n must be 1", "n"))
    assert result.is_failed and decode_kept(result.record) is not None
    assert record["response"]["status_code"] == 400
    assert record["response"]["body"]["error"]["param"] == "n"
    assert record["error"] is None
    result, record = answered(TimedOut("too long"))
    assert result.is_failed and record["response"] is None
    assert record["error"] == {"code": "request_timeout", "message": "too long"}
    for error in (EngineUnavailable("gone"), Overloaded("full")):  # not the request's fault
        with pytest.raises(type(error)):
            answered(error)
    results = decode_kept(never_run(9, "a", "batch_ab", "batch_expired", "too late").record)
    assert results is not None
    assert (results.number, results.code) == (9, "batch_expired")


@pytest.mark.parametrize(
    "damage",
    [
        *(b"", b"\0" * 50, b'{"id":"batch_req_ab_7","custom_id":"a","resp', b'{"id":"x"}'),
        b'{"id":"batch_req_ab_7","response":null,"error":{"code":"x","message":"y"}}',
        b'{"id":"batch_req_ab_7","custom_id":"a","response":{"body":{}},"error":null}',
    ],
)
def test_a_damaged_record_is_none(damage: bytes) -> None:
    assert decode_kept(damage) is None


URL = "/v1/completions"
TWICE = "duplicate_custom_id"


def line(custom_id: str, url: str = URL) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": {}})


def codes(tmp_path: Path, *lines: str, max_lines: int = 0) -> list[tuple[str, int | None]]:
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(lines))
    result = check_input(path, URL, 1_000_000, max_lines)
    assert result.errors or result.total == len([line for line in lines if line])
    return [(error.code, error.line) for error in result.errors]


@pytest.mark.parametrize(
    ("lines", "errors"),
    [
        ([*map(line, "abcdefghij"), "", ""], []),
        ([line("a"), "{", line("b", "/v1/embeddings"), line("c")],
         [("invalid_json_line", 2), ("url_mismatch", 3)]),
        (["{"] * 250, [("invalid_json_line", 1 + i) for i in range(100)]),
        (["", "\ufeff"], [("invalid_json_line", 2)]),
        *(([text], [("empty_file", None)])
          for text in ("", "\n \n", "\ufeff", "\ufeff\n", "\ufeff\n\n", "\ufeff \n")),
        ([*map(line, "abcdefbgb")], [(TWICE, 7), (TWICE, 9)]),
        ([line("a"), line("a"), "{", line("b"), line("a")],
         [(TWICE, 2), ("invalid_json_line", 3), (TWICE, 5)]),
        ([line("a"), *[line("a"), "{"] * 100],
         [((TWICE, "invalid_json_line")[i % 2], 2 + i) for i in range(100)]),
    ],
)  # fmt: skip
def test_the_first_hundred_faults_are_told_by_their_lines(
    tmp_path: Path, lines: list[str], errors: list[tuple[str, int | None]]
) -> None:
    assert codes(tmp_path, *lines) == errors


def test_too_many_lines(tmp_path: Path) -> None:
    assert codes(tmp_path, *map(line, "abcde"), max_lines=4) == [("too_many_tasks", None)]
    assert not codes(tmp_path, *map(line, "abcde"), max_lines=5)


def test_equal_hashes_are_no_equal_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_input, "hash", lambda _: 5, raising=False)
    assert not codes(tmp_path, *map(line, "abcdef"))
    assert codes(tmp_path, *map(line, "abcba")) == [(TWICE, 4), (TWICE, 5)]


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    with path.open("w") as file:
        file.writelines(line(f"a{number}" + "-" * 400) + "\n" for number in range(10_000))
    tracemalloc.start()
    result = check_input(path, URL, 1_000_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert result.total == 10_000
    # A chunk and its lines, and 8 bytes a line, of which the growing array may hold two copies.
    assert peak < 2_000_000 < path.stat().st_size / 2
    with pytest.raises(Stopped):
        check_input(path, URL, 1_000_000, is_stopped=lambda: True)
