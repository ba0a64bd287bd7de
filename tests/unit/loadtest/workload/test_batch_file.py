"""Lines of a batch as they are written, and what is counted of those that come back."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest

from srm.errors import ConfigError
from srm.loadtest.workload import batch_file
from srm.loadtest.workload.batch_file import BatchClient, BatchOutput

USAGE = {"prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11}
ANSWERED = {"choices": [{"text": "a"}, {"text": "b\\n"}], "usage": USAGE}
LINES: list[dict[str, Any]] = [
    {"response": {"status_code": 200, "body": ANSWERED}, "error": None},
    {"response": {"status_code": 400, "body": {"error": {"message": "no"}}}, "error": None},
    {"response": {"status_code": 200, "body": ANSWERED}, "error": None},
    {"response": None, "error": {"code": "batch_expired"}},
    {"response": {"status_code": 200, "body": {"choices": [{"text": ""}]}}},
]


def client(content: bytes, status: int = 200) -> BatchClient:
    """Of a server that answers everything so, in pieces that end anywhere."""

    def answer(request: httpx.Request) -> httpx.Response:
        pieces = (content[at : at + 7] for at in range(0, len(content), 7))
        return httpx.Response(status, content=pieces)

    return BatchClient("http://a", transport=httpx.MockTransport(answer))


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_lines_are_added_up(end: bytes) -> None:
    content = b"\n".join(msgspec.json.encode(line) for line in LINES) + end
    output = BatchOutput()
    with client(content) as server:
        server.read("f", output)
    assert (output.lines, output.failed, output.without_usage) == (3, 2, 1)
    assert (output.choices, output.prompt_tokens, output.output_tokens) == (5, 6, 16)
    assert output.num_bytes == len(content)
    assert '"status_code":400' in output.first_error


def test_a_line_without_a_token_is_not_answered_and_null_is_no_usage() -> None:
    bodies: list[dict[str, Any]] = [
        {"choices": [{"text": ""}], "usage": {"prompt_tokens": 3, "completion_tokens": 0}},
        {"choices": []},
        {"choices": None},
        {"choices": [{"text": "a"}], "usage": {"prompt_tokens": None, "completion_tokens": None}},
    ]
    lines = [{"response": {"status_code": 200, "body": body}} for body in bodies]
    output = BatchOutput()
    with client(b"\n".join(map(msgspec.json.encode, lines))) as server:
        server.read("f", output)
    assert (output.lines, output.failed, output.without_usage) == (1, 3, 1)


@pytest.mark.parametrize(("content", "status"), [(b"<html>\n", 200), (b"gone", 404)])
def test_what_is_no_output_file_is_an_error(content: bytes, status: int) -> None:
    message = "404" if status == 404 else "http://a"
    with client(content, status) as server, pytest.raises(ConfigError, match=message):
        server.read("f", BatchOutput())


def test_no_server_is_named() -> None:
    nobody, message = BatchClient("http://127.0.0.1:9"), r"127\.0\.0\.1:9"
    with nobody, pytest.raises(ConfigError, match=message):
        nobody.start("f", "/v1/completions")
    assert batch_file.UNDER_WAY.isdisjoint({"completed", "failed", "expired", "cancelled"})
