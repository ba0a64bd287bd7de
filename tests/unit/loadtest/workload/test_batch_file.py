"""Lines of a batch as they are written, and what is counted of those that come back."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import msgspec
import pytest

from engine.errors import ConfigError
from loadtest.workload import batch_file
from loadtest.workload.batch_file import BatchClient, BatchOutput, write_lines

ANSWERED = {
    "response": {
        "status_code": 200,
        "body": {
            "choices": [{"text": "a"}, {"text": "b\\n"}],
            "usage": {"prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11},
        },
    },
    "error": None,
}
REFUSED = {"response": {"status_code": 400, "body": {"error": {"message": "no"}}}, "error": None}
EXPIRED = {"response": None, "error": {"code": "batch_expired"}}
UNCOUNTED = {"response": {"status_code": 200, "body": {"choices": [{"text": ""}]}}}


def client(content: bytes, status: int = 200) -> BatchClient:
    """Of a server that answers everything so, in pieces that end anywhere."""

    def answer(request: httpx.Request) -> httpx.Response:
        pieces = (content[at : at + 7] for at in range(0, len(content), 7))
        return httpx.Response(status, content=pieces)

    return BatchClient("http://a", transport=httpx.MockTransport(answer))


def test_lines_are_those_that_the_files_api_wants(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    bodies = [{"prompt": [1, number], "max_tokens": 4} for number in range(3)]
    write_lines(path, "/v1/completions", iter(bodies))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["body"] for line in lines] == bodies
    assert [line["custom_id"] for line in lines] == ["1", "2", "3"]
    assert {(line["method"], line["url"]) for line in lines} == {("POST", "/v1/completions")}


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_lines_are_added_up(end: bytes) -> None:
    lines = [ANSWERED, REFUSED, ANSWERED, EXPIRED, UNCOUNTED]
    content = b"\n".join(msgspec.json.encode(line) for line in lines) + end
    output = BatchOutput()
    with client(content) as server:
        server.read("f", output)
    assert (output.lines, output.failed, output.without_usage) == (3, 2, 1)
    assert (output.choices, output.prompt_tokens, output.output_tokens) == (5, 6, 16)
    assert output.num_bytes == len(content)
    assert '"status_code":400' in output.first_error


def test_what_is_no_output_file_is_an_error() -> None:
    with client(b"<html>\n") as server, pytest.raises(ConfigError, match="http://a"):
        server.read("f", BatchOutput())
    with client(b"gone", 404) as server, pytest.raises(ConfigError, match="404"):
        server.read("f", BatchOutput())


def test_a_server_without_files_or_none_at_all_is_named(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"{}\n")
    with (
        client(b'{"detail":"Not Found"}', 404) as server,
        pytest.raises(ConfigError, match=r"POST http://a/v1/files: 404 .*Not Found"),
    ):
        server.upload(path)
    with (
        BatchClient("http://127.0.0.1:9") as nobody,
        pytest.raises(ConfigError, match=r"127\.0\.0\.1:9"),
    ):
        nobody.start("f", "/v1/completions")
    assert batch_file._UNDER_WAY.isdisjoint({"completed", "failed", "expired", "cancelled"})
