"""/v1/files against a server: OpenAI's SDK, large and cut-off uploads, ids nobody gave out."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, product
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from openai.types import FileDeleted, FileObject

from tests.kit.serving import SERVER_FLAGS, Server, error_of, processes, wait_until

MIB = 1024**2
MAX_FILE_BYTES = 64 * MIB
KEYS = "alice sk-aaaaaaaaaaaaaaaa\nbob sk-bbbbbbbbbbbbbbbb\n"
BODY_LIMITS = ("--max-body-bytes=1000000", "--max-waiting-bytes=1000000")


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept") / "data"


@pytest.fixture(scope="module")
def server(text_model: Path, data_dir: Path) -> Iterator[Server]:
    keys = data_dir.parent / "keys"
    keys.write_text(KEYS)
    flags = [*SERVER_FLAGS, *BODY_LIMITS, f"--max-file-bytes={MAX_FILE_BYTES}"]
    flags += [f"--data-dir={data_dir}", f"--api-keys-file={keys}", "--api-processes=2"]
    with Server(text_model, *flags, "--receive-timeout-s=3") as running:
        running.http.headers["authorization"] = "Bearer sk-aaaaaaaaaaaaaaaa"
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="sk-aaaaaaaaaaaaaaaa", max_retries=0
    ) as client:
        yield client


def upload(server: Server, data: bytes = b"{}\n", **fields: str) -> httpx.Response:
    form = {"purpose": "batch", **fields}
    return server.http.post("/v1/files", files={"file": ("in.jsonl", data)}, data=form)


def list_kept(data_dir: Path) -> set[str]:
    folder = data_dir / "files"
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def until_kept(data_dir: Path, names: set[str]) -> None:
    """The server notices a while after the client has gone."""
    wait_until(lambda: list_kept(data_dir) == names)


def test_the_sdk_keeps_files(client: openai.OpenAI) -> None:
    data = b'{"custom_id": "a"}\n' * 1_000
    made = client.files.create(
        file=("naïve in.jsonl", data),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    FileObject.model_validate(made.model_dump(), strict=True)
    assert (made.bytes, made.filename, made.purpose) == (len(data), "naïve in.jsonl", "batch")
    assert made.expires_at == made.created_at + 3600
    assert client.files.retrieve(made.id) == client.files.wait_for_processing(made.id) == made
    assert client.files.content(made.id).read() == data
    gone = client.files.delete(made.id)
    assert FileDeleted.model_validate(gone.model_dump(), strict=True).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError) as refused:
            call(made.id)
        assert refused.value.param == "file_id"


def test_the_sdk_walks_lists(client: openai.OpenAI) -> None:
    made = [client.files.create(file=b"x", purpose="batch").id for _ in range(5)]
    for order, expected in (("asc", made), ("desc", made[::-1])):
        result = client.files.list(limit=2, order=order)  # type: ignore[arg-type]  # a plain str
        assert [item.id for item in result] == expected
    page = client.files.list(limit=5, purpose="batch")
    assert not page.has_more
    assert not client.files.list(purpose="batch_output").data
    for id in made:
        client.files.delete(id)
    assert client.files.list().data == []


def test_fields_and_queries_are_refused_by_name(server: Server, data_dir: Path) -> None:
    anchor, seconds = "expires_after[anchor]", "expires_after[seconds]"
    before = list_kept(data_dir)
    for fields, param in (
        ({"purpose": "fine-tune"}, "purpose"),
        ({"purpose": "batch_output"}, "purpose"),
        ({"other": "1"}, "other"),
        ({anchor: "created_at"}, seconds),
        ({seconds: "3600"}, anchor),
        ({anchor: "now", seconds: "3600"}, anchor),
        ({anchor: "created_at", seconds: "3599"}, seconds),
        ({anchor: "null", seconds: "null"}, anchor),
        ({anchor: "created_at", seconds: "1e9"}, seconds),
    ):
        assert error_of(upload(server, b"{}\n", **fields))["param"] == param, fields
    assert list_kept(data_dir) == before
    for query in (
        *("limit=0", "limit=10001", "limit=x", "limit=null", "after=null", "limit=1&limit=2"),
        *("order=up", "after=file-1", "before=x"),
    ):
        error = error_of(server.get(f"/v1/files?{query}"))
        assert error["param"] == query.partition("=")[0], query


def test_ids_that_are_none_are_not_there(server: Server, data_dir: Path) -> None:
    record = upload(server).json()
    assert record["expires_at"] == record["created_at"] + 30 * 24 * 3600
    assert record["status"] == "processed"
    before = list_kept(data_dir)
    for id, (method, path) in product(
        (
            *("..%2f..%2fstore.sqlite3", "%2e%2e%2f%2e%2e%2fetc%2fpasswd", "..", "%2e%2e", "."),
            *("%00", "file-%00", "..%5c..%5cx", "%2fetc%2fpasswd", "file-" + "0" * 32, "%c3%28"),
            *("file-" + "0" * 32 + ".json", "store.lock", "%0d%0aset-cookie:%20x", "*", "~"),
            *("null", "x" * 8_000),
        ),
        (("GET", ""), ("GET", "/content"), ("DELETE", "")),
    ):
        # httpx would resolve dots itself
        with raw_request(server, f"{method} /v1/files/{id}{path}", "connection: close") as raw:
            reply = raw.makefile("rb").read()
        assert int(reply.split()[1]) in {404, 405}, (id, reply[:500])
        assert b"passwd:" not in reply and b"SQLite" not in reply
        assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["code"]
    assert list_kept(data_dir) == before


def test_each_key_sees_its_own(server: Server) -> None:
    id = upload(server).json()["id"]
    bob = {"authorization": "Bearer sk-bbbbbbbbbbbbbbbb"}
    assert server.http.get("/v1/files", headers=bob).json()["data"] == []
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        reply = server.http.request(method, f"/v1/files/{id}{path}", headers=bob)
        assert reply.status_code == 404
        assert "there is no file" in reply.json()["error"]["message"]
    assert server.http.get(f"/v1/files?after={id}", headers=bob).status_code == 400
    assert server.get(f"/v1/files/{id}").status_code == 200


def test_parts_of_a_file(server: Server) -> None:
    id = upload(server, b"0123456789").json()["id"]

    def part(asked: str, **headers: str) -> httpx.Response:
        return server.http.get(f"/v1/files/{id}/content", headers={"range": asked, **headers})

    result = part("bytes=2-4")
    assert (result.status_code, result.content) == (206, b"234")
    assert result.headers["content-range"] == "bytes 2-4/10"
    assert part("bytes=7-", **{"if-range": result.headers["etag"]}).content == b"789"
    whole = part("bytes=7-", **{"if-range": '"another"'})
    assert (whole.status_code, whole.content) == (200, b"0123456789")
    beyond = part("bytes=10-")
    assert (beyond.status_code, beyond.headers["content-range"]) == (416, "bytes */10")
    assert beyond.json()["error"]["code"] == "requested_range_not_satisfiable"
    head = server.http.head(f"/v1/files/{id}/content").headers
    assert (head["content-length"], head["x-content-type-options"]) == ("10", "nosniff")


def test_both_processes_have_the_same_files(server: Server) -> None:
    """Every request has a connection of its own, so that either process may get it."""
    url, headers = f"{server.url}/v1/files", dict(server.http.headers)
    part, form = {"file": ("a.jsonl", b"x")}, {"purpose": "batch"}
    ids = {httpx.post(url, files=part, data=form, headers=headers).json()["id"] for _ in range(12)}
    for _ in range(4):
        data = httpx.get(url, headers=headers).json()["data"]
        assert ids <= {record["id"] for record in data}


# Uploads of any size


def chunks(size: int) -> Iterator[bytes]:
    yield (
        b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'
    )
    for _ in range(size // MIB):
        yield b"x" * MIB
    yield b"x" * (size % MIB)
    yield b"\r\n--b--\r\n"


FORM = {"content-type": "multipart/form-data; boundary=b"}


def test_a_file_is_never_whole_in_memory(server: Server) -> None:
    """Bodies may have a megabyte here, and so may all of them together."""
    apis = [psutil.Process(pid) for name, pid in processes(server) if name == "api"]
    assert len(apis) == 2
    before = sum(api.memory_info().rss for api in apis)
    reply = server.http.post("/v1/files", content=chunks(MAX_FILE_BYTES), headers=FORM)
    assert reply.status_code == 200, reply.text
    record = reply.json()
    assert record["bytes"] == MAX_FILE_BYTES
    with server.http.stream("GET", f"/v1/files/{record['id']}/content") as content:
        assert sum(map(len, content.iter_bytes())) == MAX_FILE_BYTES
    assert sum(api.memory_info().rss for api in apis) - before < MAX_FILE_BYTES / 4
    assert server.http.delete(f"/v1/files/{record['id']}").status_code == 200


def raw_request(server: Server, target: str, *head: str) -> socket.socket:
    url = httpx.URL(server.url)
    raw = socket.create_connection((url.host, url.port or 0), timeout=600)
    lines = (f"{target} HTTP/1.1", "host: x", "authorization: Bearer sk-aaaaaaaaaaaaaaaa", *head)
    raw.sendall("".join(f"{line}\r\n" for line in (*lines, "")).encode())
    return raw


def raw_upload(server: Server, head: str, *parts: bytes) -> socket.socket:
    raw = raw_request(server, "POST /v1/files", f"content-type: {FORM['content-type']}", head)
    for part in parts:
        raw.sendall(part)
    return raw


def test_an_upload_that_is_cut_off_leaves_nothing(server: Server, data_dir: Path) -> None:
    before = list_kept(data_dir)
    raw = raw_upload(server, "content-length: 9000000", *islice(chunks(5 * MIB), 4))
    wait_until(lambda: list_kept(data_dir) - before)  # until there is half a file
    raw.close()
    until_kept(data_dir, before)


def too_many() -> Iterator[bytes]:
    """All but the end of the last chunk: the client goes on waiting to send the rest."""
    pieces = [b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks(MAX_FILE_BYTES + 1)]
    yield from pieces[:-1]


TOO_LARGE = "413 Request Entity Too Large"
WRONG: dict[str, tuple[str, Callable[[], Iterable[bytes]], str]] = {
    "stops": ("content-length: 9000000", lambda: islice(chunks(MIB), 1), "408 Request Timeout"),
    "too large, announced": (f"content-length: {2 * MAX_FILE_BYTES}", tuple, TOO_LARGE),
    "too large": ("transfer-encoding: chunked", too_many, TOO_LARGE),
    "short": ("content-length: 1000", lambda: [b"".join(chunks(1_000))[:1_000]], "400 Bad Request"),
}


@pytest.mark.parametrize("what", WRONG)
def test_refuses_a_wrong_upload_at_once(server: Server, data_dir: Path, what: str) -> None:
    """And nothing of it is left."""
    (head, parts, status), before = WRONG[what], list_kept(data_dir)
    with raw_upload(server, head, *parts()) as raw:
        assert raw.makefile("rb").readline() == f"HTTP/1.1 {status}\r\n".encode()
    until_kept(data_dir, before)


def test_other_bodies_are_as_small_as_before(server: Server) -> None:
    reply = server.http.post("/v1/batches", content=b" " * 1_000_001)
    assert reply.status_code == 413
    assert server.http.post("/v1/files/", content=chunks(2 * MIB), headers=FORM).status_code == 200
