"""`srm batch` with objects in place of files, against an S3 server on this machine."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pyarrow
import pyarrow.parquet
import pytest

from srm.errors import ConfigError, SRMError
from srm.server.commands import batch_input, object_storage
from srm.server.commands.batch import check_files, locate_files
from srm.server.commands.batch_config import BatchConfig
from srm.server.commands.compression import CODECS
from srm.server.commands.object_storage import StoredObject, located
from tests.integration.batches.test_batch_command import (
    as_jsonl,
    by_number,
    long_lines,
    read,
    run,
    start,
)
from tests.kit.loads.toy import Toy
from tests.kit.serving import free_port, wait_until

BUCKET = "s3://results"
SECRET = "nobody-may-read-this"
LINES = [{"prompt": [5, number], "max_tokens": 1 + number} for number in range(20)]
LINES[6]["temperature"] = -1


@pytest.fixture(scope="module")
def s3_url() -> Iterator[str]:
    pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture
def s3(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of a server that has an empty bucket; the environment leads to it."""
    import boto3  # noqa: PLC0415 - a package of moto's

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tester")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_url)
    client = boto3.client("s3")
    client.create_bucket(Bucket="results")
    yield client
    for content in client.list_objects_v2(Bucket="results").get("Contents", []):
        client.delete_object(Bucket="results", Key=content["Key"])
    client.delete_bucket(Bucket="results")
    client.close()


class LostLink(Toy):
    """Leads to a server until the client says a word for so many times; then it leads nowhere."""

    def __init__(self, url: str, word: bytes, times: int) -> None:
        super().__init__()
        self._server = url.removeprefix("http://").split(":")
        self._word, self._left = word, times

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back_reader, back_writer = await asyncio.open_connection(*self._server)
        back = asyncio.create_task(self._copy(back_reader, writer))
        try:
            while self._left > 0 and (content := await reader.read(1 << 16)):
                self._left -= content.count(self._word)
                if self._left > 0:
                    back_writer.write(content)
                    await back_writer.drain()
        finally:
            back.cancel()
            back_writer.close()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while content := await reader.read(1 << 16):
            writer.write(content)
            await writer.drain()


class Denying(Toy):
    """Permits nothing."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()


def keys(s3: Any) -> set[str]:
    return {content["Key"] for content in s3.list_objects_v2(Bucket="results").get("Contents", [])}


@pytest.fixture(scope="module")
def expected(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, bytes]:
    """What LINES give without object storage."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "in.jsonl").write_bytes(as_jsonl(LINES))
    output = folder / "out.jsonl"
    assert run(text_model, str(folder / "in.jsonl"), "-o", str(output)) == 1
    result = by_number(output.read_bytes())
    assert sorted(result) == list(range(1, 21))
    return result


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst", ".parquet"])
def test_objects_are_read_and_written_as_files_are(
    text_model: Path,
    tmp_path: Path,
    s3: Any,
    suffix: str,
    expected: dict[int, bytes],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "srm.server")
    source, work = tmp_path / f"in{suffix}", tmp_path / "work"
    if suffix == ".parquet":
        rows = [{"body": json.dumps(line)} for line in LINES]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), source)
    else:
        codec, data = CODECS.get(source.suffix), as_jsonl(LINES)
        source.write_bytes(data if codec is None else codec.compress(data))
    s3.upload_file(str(source), "results", f"in/{source.name}")
    flags = (
        *(f"{BUCKET}/in/{source.name}", "-o", f"{BUCKET}/out{suffix}"),
        *(f"--errors={BUCKET}/a b/bad.jsonl.gz", f"--work-dir={work}"),
    )
    output, errors = tmp_path / f"out{suffix}", tmp_path / "bad.jsonl.gz"
    for more in ((), ("--resume",)):
        assert run(text_model, *flags, *more) == 1
        assert not [*work.iterdir()]
        s3.download_file("results", output.name, str(output))
        s3.download_file("results", f"a b/{errors.name}", str(errors))
        failed = by_number(read(errors))
        assert sorted(failed) == [7]
        if suffix == ".parquet":  # its first line is another, so its ids are
            rows = pyarrow.parquet.read_table(output).to_pylist()
            entries = {int(row["custom_id"]): choices(row["response"]) for row in rows}
            assert entries == {number: choices(expected[number]) for number in {*expected} - {7}}
        else:
            assert failed | by_number(read(output)) == expected
    with pytest.raises(ConfigError, match=f"output = {BUCKET}/{output.name} is there already"):
        run(text_model, *flags)
    assert SECRET not in caplog.text


def choices(result: bytes) -> Any:
    """Of a line of results, or of the reply in it."""
    document = json.loads(result)
    return document.get("response", {"body": document})["body"]["choices"]


def test_goes_on_with_a_killed_run(text_model: Path, tmp_path: Path, s3: Any) -> None:
    s3.put_object(Bucket="results", Key="in.jsonl", Body=(data := long_lines([1, *[100] * 40])))
    (tmp_path / "in.jsonl").write_bytes(data)
    whole, work = tmp_path / "whole.jsonl", tmp_path / "work"
    assert run(text_model, str(tmp_path / "in.jsonl"), "-o", str(whole)) == 0
    flags = (f"{BUCKET}/in.jsonl", "-o", f"{BUCKET}/out.jsonl", f"--work-dir={work}", "--resume")
    with start(text_model, *flags, engine="tests.kit.processes.slow_engine") as process:
        wait_until(lambda: any(path.stat().st_size for path in work.glob("*-out.jsonl")))
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    assert children and not psutil.wait_procs(children, timeout=120)[1]
    assert keys(s3) == {"in.jsonl"}
    with pytest.raises(ConfigError, match=f"output = {work}/.*is there already: --resume"):
        run(text_model, *flags[:-1])
    assert run(text_model, *flags) == 0
    s3.download_file("results", "out.jsonl", str(tmp_path / "got"))
    assert by_number((tmp_path / "got").read_bytes()) == by_number(whole.read_bytes())
    assert not [*work.iterdir()]


def test_a_link_that_is_lost_while_lines_are_read_loses_none(
    text_model: Path,
    tmp_path: Path,
    s3: Any,
    expected: dict[int, bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batch_input, "CHUNK", 256)  # of one request each
    monkeypatch.setattr(object_storage, "_BLOCK", 0)
    s3.put_object(Bucket="results", Key="in.jsonl", Body=as_jsonl(LINES))
    output = tmp_path / "out.jsonl"
    flags = (f"{BUCKET}/in.jsonl", "-o", str(output), "--resume")
    with (
        LostLink(s3.meta.endpoint_url, b"GET /", 3) as link,
        monkeypatch.context() as during,
        pytest.raises(ConfigError, match=f"input = {BUCKET}/in.jsonl: \\w+: .") as lost,
    ):
        during.setenv("AWS_ENDPOINT_URL", link.url)
        run(text_model, *flags)
    assert SECRET not in str(lost.value)
    assert run(text_model, *flags) == 1
    assert by_number(output.read_bytes()) == expected


def test_mixes_no_object_with_its_successor(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_storage, "_BLOCK", 0)
    s3.put_object(Bucket="results", Key="in", Body=b"first")
    source = located("input", f"{BUCKET}/in")
    with pytest.raises(OSError, match="FileExpired: "), source.open("rb") as file:
        assert file.read(2) == b"fi"
        s3.put_object(Bucket="results", Key="in", Body=b"other")
        file.read(2)


def test_a_lost_upload_leaves_no_part_of_an_object(
    text_model: Path, tmp_path: Path, s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, work = tmp_path / "in.jsonl", tmp_path / "work"
    source.write_bytes(as_jsonl(LINES[:5]))
    flags = (str(source), "-o", f"{BUCKET}/out.jsonl", f"--work-dir={work}", "--resume")
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(101 * 1024**2)  # more than is sent as one part
    for word in (b"PUT /", b"partNumber=2"):
        with LostLink(s3.meta.endpoint_url, word, 1) as link, monkeypatch.context() as during:
            during.setenv("AWS_ENDPOINT_URL", link.url)
            if word == b"PUT /":
                with pytest.raises(SRMError, match=f"{BUCKET}/out.jsonl: .*; all results are in "):
                    run(text_model, *flags)
            else:
                target = located("output", f"{BUCKET}/large")
                assert isinstance(target, StoredObject)
                with pytest.raises(OSError, match=r"\w+: ."):
                    target.upload(large)
        assert not keys(s3)
    assert run(text_model, *flags) == 0
    assert keys(s3) == {"out.jsonl"} and not [*work.iterdir()]


def test_names_what_is_missing_or_denied_first(
    text_model: Path, tmp_path: Path, s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in.jsonl").write_bytes(as_jsonl(LINES[:1]))
    source, work = str(tmp_path / "in.jsonl"), f"--work-dir={tmp_path / 'work'}"
    missing = "there is no such object or bucket"
    engine = "there.is.no.engine"
    for flags, message in (
        ((f"{BUCKET}/none.jsonl",), f"input = {BUCKET}/none.jsonl: {missing}"),
        (("s3://no-bucket/in.parquet",), f"input = s3://no-bucket/in.parquet: {missing}"),
        ((source, "-o", "s3://no-bucket/o", work), f"output = s3://no-bucket/o: {missing}"),
        ((source, f"--errors={BUCKET}/o/", work), "errors must be s3://BUCKET/KEY, got"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(text_model, *flags, engine=engine)
    with Denying() as denying:
        monkeypatch.setenv("AWS_ENDPOINT_URL", denying.url)
        for flags in ((f"{BUCKET}/in.jsonl",), (source, "-o", f"{BUCKET}/out.jsonl", work)):
            with pytest.raises(
                ConfigError, match=f"put = {BUCKET}/.*: permission denied"
            ) as raises:
                run(text_model, *flags, engine=engine)
            assert SECRET not in str(raises.value)


def test_reads_and_writes_at_google(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gcsfs")
    emulator = pytest.importorskip("gcp_storage_emulator.server")
    server = emulator.create_server(
        "127.0.0.1", port := free_port(), in_memory=True, default_bucket="results"
    )
    server.start()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
    try:
        for size in (0, 1_000):
            target = located("output", f"gs://results/a/{size}")
            assert isinstance(target, StoredObject) and not target.exists()
            (source := tmp_path / "source").write_bytes(data := bytes(range(250)) * (size // 250))
            target.upload(source)
            target.download(tmp_path / "copy")
            with target.open("rb") as file:
                assert (tmp_path / "copy").read_bytes() == data == file.read()
            assert target.exists()
        missing = located("input", "gs://none/key")
        with pytest.raises(OSError, match="no such object or bucket"), missing.open("rb") as file:
            file.read(1)
    finally:
        server.stop()


def test_urls_that_cannot_be_are_refused(
    text_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for url, message in (
        ("http://host/in.jsonl", "input must be a path or begin with .*, got http://$"),
        (f"s3://key:{SECRET}@bucket/in.jsonl", "BUCKET/KEY without credentials"),
        (f"s3://key:a/{SECRET}@bucket/in.jsonl", "BUCKET/KEY without credentials"),
        ("file://host/in.jsonl", r"got file://$"),
        ("s3://bucket", "input must be s3://BUCKET/KEY, got s3://bucket$"),
        ("gs:///key", "input must be gs://BUCKET/KEY"),
    ):
        with pytest.raises(ConfigError, match=message) as refused:
            run(text_model, url)
        assert SECRET not in str(refused.value)
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ConfigError, match="needs gcsfs, which is not installed: pip install gcsfs"):
        run(text_model, "gs://bucket/in.jsonl")
    source = tmp_path / "the input.jsonl"
    source.write_bytes(as_jsonl(LINES[:2]))
    with pytest.raises(ConfigError, match="work_dir needs output or errors that begin with"):
        run(text_model, str(source), f"--work-dir={tmp_path}")
    url, output = f"file://{tmp_path}/the%20input.jsonl", tmp_path / "out.jsonl"
    assert run(text_model, url, "-o", f"file://localhost{output}") == 0
    assert sorted(by_number(output.read_bytes())) == [1, 2]


def test_refuses_an_object_that_is_named_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = SimpleNamespace(filesystem=lambda *_, **__: None)
    monkeypatch.setattr(object_storage, "import_module", lambda _: storage)
    settings = BatchConfig(input="in", output="s3://b/out", errors="S3://b/out")
    with pytest.raises(ConfigError, match="is the output, and would be lost"):
        check_files(locate_files(settings), False)
