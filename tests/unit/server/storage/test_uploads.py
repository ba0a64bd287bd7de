"""A form in whatever pieces it comes; a download from wherever it is asked for."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from engine.client.client import EngineClient
from engine.errors import InvalidRequest
from server.config import ServerConfig
from server.routes.app import create_app
from server.storage import uploads
from server.storage.downloads import Download
from server.storage.upload_form import UploadForm
from server.text.text import Text

BOUNDARY = "x-y"
NAMES = frozenset({"purpose", "expires_after[seconds]"})
KIND = f"multipart/form-data; boundary={BOUNDARY}"


def part(name: str, data: bytes, filename: str | None = None) -> bytes:
    of_file = f'; filename="{filename}"' if filename is not None else ""
    head = f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="{name}"{of_file}\r\n\r\n'
    return head.encode() + data + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


PURPOSE = part("purpose", b"batch")
SMALL = part("file", b"{}\n", "in.jsonl")


@given(
    st.binary(max_size=300).filter(lambda data: b"--" + BOUNDARY.encode() not in data),
    st.lists(st.integers(1, 40), min_size=1),
    st.booleans(),
)
def test_a_form_is_the_same_however_it_is_cut(
    data: bytes, sizes: list[int], is_file_first: bool
) -> None:
    parts = [part("file", data, "a b.jsonl"), part("purpose", b"batch")]
    body = form(*parts if is_file_first else reversed(parts))
    one = UploadForm(KIND, NAMES)
    found, at, turn = b"", 0, 0
    while at < len(body):
        size = sizes[turn % len(sizes)]
        found += b"".join(one.feed(body[at : at + size]))
        at, turn = at + size, turn + 1
    assert one.finish() == "a b.jsonl"
    assert (found, one.fields) == (data, {"purpose": "batch"})


@pytest.mark.parametrize(
    ("kind", "body", "param", "message"),
    [
        ("application/json", form(SMALL), "content-type", "must be multipart/form-data"),
        ("multipart/form-data", form(SMALL), "content-type", "with a boundary"),
        (KIND + "y" * 500, form(SMALL), "content-type", "boundary"),
        (KIND, b"garbage", None, "no multipart form"),
        (KIND, form(PURPOSE), "file", "file is required"),
        (KIND, form(SMALL, SMALL), "file", "there twice"),
        (KIND, form(PURPOSE, PURPOSE, SMALL), "purpose", "there twice"),
        (KIND, form(part("file", b"x")), "file", "must have a filename"),
        (KIND, form(part("file", b"x", "n" * 256)), "file", "at most 255 characters; got 256"),
        (KIND, form(part("other", b"x"), SMALL), "other", "is not a field"),
        (KIND, form(part("purpose", b"x" * 5_000), SMALL), "purpose", "at most 4096 bytes"),
        (KIND, form(SMALL)[:-6], None, "ends in the middle"),
        (KIND, b"--x-y\r\nfoo: bar\r\n\r\nx\r\n--x-y--\r\n", None, "content-disposition"),
        (KIND, b"--x-y\r\n" + b"h: " + b"x" * 10_000, None, "no multipart form"),
    ],
)
def test_what_is_wrong_with_a_form_is_said(
    kind: str, body: bytes, param: str | None, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message) as refused:
        one = UploadForm(kind, NAMES)
        one.feed(body)
        one.finish()
    assert refused.value.param == param


# The same through the routes, in this process, so that the disk can be made to fail


@pytest.fixture
async def http(tmp_path: Path, text_model: Path) -> AsyncIterator[httpx.AsyncClient]:
    config = ServerConfig(data_dir=str(tmp_path / "data"), max_store_bytes=8 * 1024**2)
    app = create_app(config, EngineClient("tcp://127.0.0.1:1"), Text(text_model))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


async def send(http: httpx.AsyncClient, data: bytes = b"{}\n") -> httpx.Response:
    file = {"file": ("in.jsonl", data)}
    return await http.post("/v1/files", files=file, data={"purpose": "batch"})


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "data" / "files").iterdir())


@pytest.mark.parametrize(
    ("number", "status", "code"),
    [(errno.ENOSPC, 507, "store_full"), (errno.EDQUOT, 507, "store_full"),
     (errno.EROFS, 503, "store_unavailable"), (errno.EIO, 503, "store_unavailable")],
)  # fmt: skip
@pytest.mark.parametrize("fails", ["write", "fsync", "open"])
async def test_a_disk_that_fails_is_said_and_nothing_is_left(
    http: httpx.AsyncClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fails: str,
    number: int,
    status: int,
    code: str,
) -> None:
    assert (await send(http)).status_code == 200
    before = names_in(tmp_path)

    def refuse(*_args: object) -> None:
        raise OSError(number, "refused")

    monkeypatch.setattr(f"server.storage.uploads.os.{fails}", refuse)
    reply = await send(http, b"x" * 3_000_000)
    monkeypatch.undo()
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
    assert names_in(tmp_path) == before
    assert len((await http.get("/v1/files")).json()["data"]) == 1


async def test_a_folder_that_cannot_be_written_is_said(text_model: Path) -> None:
    app = create_app(
        ServerConfig(data_dir="/sys/srm"), EngineClient("tcp://127.0.0.1:1"), Text(text_model)
    )
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://localhost"
    ) as http:
        reply = await send(http)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "store_unavailable")
        assert "/sys/srm cannot be written" in reply.json()["error"]["message"]
        assert (await http.get("/v1/files")).json()["data"] == []
        assert "srm_files_bytes 0.0" in (await http.get("/metrics")).text


async def test_metrics_do_without_a_store_that_does_not_work(
    http: httpx.AsyncClient, tmp_path: Path
) -> None:
    (tmp_path / "data").write_bytes(b"no folder")
    text = (await http.get("/metrics")).text
    assert "srm_files_bytes NaN" in text
    assert 'srm_batches{status="validating"} NaN' in text


async def test_uploads_leave_some_of_the_disk(
    http: httpx.AsyncClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "LEAST_FREE_BYTES", 2**62)
    reply = await send(http)
    assert reply.status_code == 507
    assert reply.headers["x-should-retry"] == "false"
    assert names_in(tmp_path) == []


async def test_so_many_uploads_at_once(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "MAX_UPLOADS", 0)
    reply = await send(http)
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "5")
    monkeypatch.undo()
    for _ in range(uploads.MAX_UPLOADS + 1):  # each gives its place back
        assert (await send(http)).status_code == 200


async def test_what_comes_counts_for_the_quota_while_it_comes(
    http: httpx.AsyncClient, tmp_path: Path
) -> None:
    sent = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal sent
        yield PURPOSE + part("file", b"", "in.jsonl")[:-2]
        for _ in range(1_000):
            sent += 1
            yield b"x" * 1024**2

    reply = await http.post("/v1/files", content=body(), headers={"content-type": KIND})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (403, "quota_exceeded")
    assert sent <= 12
    assert names_in(tmp_path) == []


async def test_a_purpose_is_refused_before_the_file_is_here(http: httpx.AsyncClient) -> None:
    sent = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal sent
        yield part("purpose", b"vision") + part("file", b"", "in.jsonl")[:-2] + b"x"
        sent += 1
        yield form()

    reply = await http.post("/v1/files", content=body(), headers={"content-type": KIND})
    error = reply.json()["error"]
    assert (error["param"], error["message"]) == ("purpose", 'purpose must be batch; got "vision"')
    assert sent == 0


@given(begin=st.integers(0, 12), end=st.integers(0, 12))
def test_ranges_agree_with_slices(begin: int, end: int) -> None:
    data = b"0123456789"
    with ThreadPoolExecutor(1) as threads:
        reply = Download(BytesIO(data), len(data), "tag", "name", threads)

        def wanted(asked: str) -> bytes:
            first, last = reply._wanted(Headers({"range": asked}))
            return data[first:last]

        for asked, expected in (
            (f"bytes={begin}-{end}", data[begin : end + 1] if begin <= end else data),
            (f"bytes={begin}-", data[begin:]),
            (f"bytes=-{end}", data[len(data) - min(end, len(data)) :]),
        ):
            if expected:
                assert wanted(asked) == expected
            else:
                with pytest.raises(HTTPException):
                    wanted(asked)
        for asked in ("", "bytes=-", "bytes=x-1", "lines=1-2", "bytes=1-2,4-5", "bytes=9" * 99):
            assert wanted(asked) == data
        reply.close()


@pytest.mark.parametrize("digits", [19, 20, 5_000])
def test_a_range_far_behind_the_end_is_none_of_the_file(digits: int) -> None:
    with ThreadPoolExecutor(1) as threads:
        reply = Download(BytesIO(b"0123456789"), 10, "tag", "name", threads)
        far = "9" * digits
        with pytest.raises(HTTPException) as refused:
            reply._wanted(Headers({"range": f"bytes={far}-"}))
        assert refused.value.status_code == 416
        assert reply._wanted(Headers({"range": f"bytes=2-{far}"})) == (2, 10)
        assert reply._wanted(Headers({"range": f"bytes=-{far}"})) == (0, 10)
        assert reply._wanted(Headers({"range": f"bytes={'0' * digits}3-"})) == (3, 10)
        reply.close()
