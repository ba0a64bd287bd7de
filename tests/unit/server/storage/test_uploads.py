"""A form in whatever pieces it comes; a download from wherever it is asked for."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from io import BytesIO
from itertools import cycle, product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from srm.errors import Overloaded
from srm.server.storage import uploads
from srm.server.storage.downloads import Download
from srm.server.storage.store import Store
from srm.server.storage.upload_form import UploadForm
from tests.kit.bodies.refusals import refusal
from tests.unit.server.conftest import Served

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
def test_reads_a_form_however_it_is_cut(data: bytes, sizes: list[int], is_file_first: bool) -> None:
    parts = [part("file", data, "a b.jsonl"), part("purpose", b"batch")]
    body = form(*parts if is_file_first else reversed(parts))
    one = UploadForm(KIND, NAMES)
    result, turns = b"", cycle(sizes)
    while body:
        size = next(turns)
        result += b"".join(one.parse(body[:size]))
        body = body[size:]
    assert one.finish() == "a b.jsonl"
    assert (result, one.fields) == (data, {"purpose": "batch"})


WRONG: list[tuple[str, bytes, str | None, str]] = [
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
]


@pytest.mark.parametrize(("kind", "body", "param", "message"), WRONG)
def test_names_what_is_wrong(kind: str, body: bytes, param: str | None, message: str) -> None:
    def read() -> str:
        one = UploadForm(kind, NAMES)
        one.parse(body)
        return one.finish()

    error = refusal(read)
    assert error.param == param and message in error.message


# The same through the routes, in this process, so that the disk can be made to fail


@pytest.fixture
async def http(tmp_path: Path, served: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with served(data_dir=str(tmp_path / "data"), max_store_bytes=8 * 1024**2) as client:
        yield client


async def send(http: httpx.AsyncClient, data: bytes = b"{}\n") -> httpx.Response:
    file = {"file": ("in.jsonl", data)}
    return await http.post("/v1/files", files=file, data={"purpose": "batch"})


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "data" / "files").iterdir())


async def test_a_failing_disk_leaves_nothing(http: httpx.AsyncClient, tmp_path: Path) -> None:
    assert (await send(http)).status_code == 200
    before = names_in(tmp_path)
    full, failed = (507, "store_full"), (503, "store_unavailable")
    numbers = {errno.ENOSPC: full, errno.EDQUOT: full, errno.EROFS: failed, errno.EIO: failed}
    for fails, (number, message) in product(("write", "fsync", "open"), numbers.items()):
        refuse = Mock(side_effect=OSError(number, "refused"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(f"server.storage.uploads.os.{fails}", refuse)
            reply = await send(http, b"x" * 3_000_000)
        assert (reply.status_code, reply.json()["error"]["code"]) == message, (fails, number)
        assert names_in(tmp_path) == before
    assert len((await http.get("/v1/files")).json()["data"]) == 1


@pytest.mark.parametrize(
    ("folder", "why", "num_bytes"),
    [("/sys/srm", "cannot be written", "0.0"), ("/proc/version", "failed: Not a directory", "NaN")],
)
async def test_names_a_wrong_folder(served: Served, folder: str, why: str, num_bytes: str) -> None:
    async with served(data_dir=folder) as http:
        reply = await send(http)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "store_unavailable")
        assert f"{folder} {why}" in reply.json()["error"]["message"]
        text = (await http.get("/metrics")).text
        assert f"srm_files_bytes {num_bytes}" in text
        assert f'srm_batches{{status="validating"}} {num_bytes}' in text


async def test_uploads_leave_some_of_the_disk_and_are_so_many_at_once(
    http: httpx.AsyncClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(uploads, "LEAST_FREE_BYTES", 2**62)
        reply = await send(http)
        assert (reply.status_code, reply.headers["x-should-retry"]) == (507, "false")
        assert names_in(tmp_path) == []
    monkeypatch.setattr(uploads, "MAX_UPLOADS", 2)
    for _ in range(3):  # each gives its place back
        assert (await send(http)).status_code == 200
    monkeypatch.setattr(uploads, "MAX_UPLOADS", 0)
    reply = await send(http)
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "5")


def test_one_key_takes_no_more_than_half_of_the_places(tmp_path: Path) -> None:
    with closing(Store(tmp_path)) as store, ThreadPoolExecutor(1) as threads:
        places = uploads.Uploads(store, threads, 10, 0)
        begun = [places.begin("a") for _ in range(uploads.MAX_UPLOADS // 2)]
        with pytest.raises(Overloaded, match="32 files are being uploaded with this key"):
            places.begin("a")
        places.begin("b").end()
        for upload in begun:
            upload.end()
        for _ in range(uploads.MAX_UPLOADS):  # without keys, all are one
            places.begin("")


async def test_checks_quota_and_purpose_early(http: httpx.AsyncClient, tmp_path: Path) -> None:
    sent = 0

    async def body(purpose: bytes) -> AsyncIterator[bytes]:
        nonlocal sent
        yield part("purpose", purpose) + part("file", b"", "in.jsonl")[:-2] + b"x"
        for _ in range(1_000):
            sent += 1
            yield b"x" * 1024**2

    async def error(purpose: bytes) -> Any:
        reply = await http.post("/v1/files", content=body(purpose), headers={"content-type": KIND})
        return reply.json()["error"]

    refused = await error(b"vision")
    assert (refused["param"], sent) == ("purpose", 0)
    assert refused["message"] == 'purpose must be batch; got "vision"'
    assert (await error(b"batch"))["code"] == "quota_exceeded"
    assert sent <= 12
    assert names_in(tmp_path) == []


# A download, from wherever it is asked for


def wanted(asked: str) -> tuple[int, int]:
    """The range of ten bytes that a header leads to."""
    with ThreadPoolExecutor(1) as threads:
        reply = Download(BytesIO(b"0123456789"), 10, "tag", "name", threads)
        try:
            return reply.parse_range(Headers({"range": asked}))
        finally:
            reply.close()


@given(begin=st.integers(0, 12), end=st.integers(0, 12))
def test_ranges_agree_with_slices(begin: int, end: int) -> None:
    data = range(10)
    for asked, expected in (
        (f"bytes={begin}-{end}", data[begin : end + 1] if begin <= end else data),
        (f"bytes={begin}-", data[begin:]),
        (f"bytes=-{end}", data[10 - min(end, 10) :]),
    ):
        if expected:
            assert range(*wanted(asked)) == expected
        else:
            with pytest.raises(HTTPException):
                wanted(asked)


def test_a_wrong_range_is_the_whole_file() -> None:
    for asked in ("", "bytes=-", "bytes=x-1", "lines=1-2", "bytes=1-2,4-5", "bytes=9" * 99):
        assert wanted(asked) == (0, 10)
    for far in ("9" * 19, "9" * 20, "9" * 5_000):
        with pytest.raises(HTTPException) as refused:
            wanted(f"bytes={far}-")
        assert refused.value.status_code == 416
        assert wanted(f"bytes=2-{far}") == (2, 10)
        assert wanted(f"bytes=-{far}") == (0, 10)
        assert wanted(f"bytes={'0' * len(far)}3-") == (3, 10)
