"""The files of `srm batch`: what is read of any format, and what is left of an output that was cut
anywhere."""

from __future__ import annotations

import itertools
import json
import os
import random
import threading
import zlib
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from srm.engine.config import EngineConfig
from srm.errors import ConfigError, InvalidRequest
from srm.server.batch.lines import BatchLine
from srm.server.commands import batch_parquet
from srm.server.commands.batch import check_files, locate_files
from srm.server.commands.batch_config import BatchConfig
from srm.server.commands.batch_input import STANDARD, check_custom_ids, open_input, parse
from srm.server.commands.batch_output import StreamPart, open_part
from srm.server.commands.batch_progress import BatchMeter, Level
from srm.server.commands.batch_results import BatchResults, job_name
from srm.server.commands.compression import CODECS
from srm.server.schema.completion_request import parse_completion

JOB = "batch_0123456789abcdef"


def record(number: int, is_failed: bool = False) -> bytes:
    status = 400 if is_failed else 200
    return (
        b'{"id":"batch_req_0123456789abcdef_%d","custom_id":"%d","response":'
        b'{"status_code":%d,"request_id":"r-%d","body":{"%s":1}},"error":null}'
    ) % (number, number, status, number, b"x" * (number * 37 % 300))


def results(path: Path, job: str = JOB, shard: str = "1/1") -> BatchResults:
    return BatchResults(BatchConfig(shard=shard), job, open_part(path), None, fsync_s=0)


def write(path: Path, groups: list[range]) -> None:
    part = open_part(path)
    for group in groups:
        for number in group:
            part.put(record(number, number % 5 == 0))
        part.sync()
    part.close()


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_an_output_cut_anywhere_is_gone_on_with(tmp_path: Path, suffix: str) -> None:
    whole = tmp_path / f"whole.jsonl{suffix}"
    groups = [range(1, 4), range(4, 5), range(5, 30), range(30, 60)]
    write(whole, groups)
    data, rng = whole.read_bytes(), random.Random(0)
    sizes = [0, 1, len(data) - 1, len(data), *(rng.randrange(len(data)) for _ in range(30))]
    before = 0
    for size in sorted(sizes):
        path = tmp_path / f"cut.jsonl{suffix}"
        path.write_bytes(data[:size])
        with closing(results(path)) as result:
            result.recover()
            done = [number for number in range(1, 60) if number in result.done]
            assert done == list(range(1, len(done) + 1)) and len(done) >= before
            assert result.counts.failed == len([number for number in done if number % 5 == 0])
            before = len(done)
            result.output.put(record(100))
            result.output.sync()
        with closing(results(path)) as again:
            again.recover()
            assert again.num_ended == len(done) + 1 and 100 in again.done
    assert before == 59


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_what_is_somebody_elses_is_left_as_it_is(tmp_path: Path, suffix: str) -> None:
    path, whole = tmp_path / f"out.jsonl{suffix}", tmp_path / f"whole.jsonl{suffix}"
    codec = CODECS.get(suffix)
    write(whole, [range(1, 3)])
    for start, more, message in (
        (b"", b"do not lose me", "another input"),
        (b"", b'{"a": 1}\n{"b": 2}\n', "another input"),
        (b"", b'{"id":"batch_req_ffff', "another input"),
        (whole.read_bytes(), record(1) + b"\n", "line 1 has two results"),
        (whole.read_bytes(), b"{}\n", "is no result"),
    ):
        data = start + (more if codec is None else codec.compress(more))
        path.write_bytes(data)
        with closing(results(path)) as result, pytest.raises(ConfigError, match=message):
            result.recover()
        assert path.read_bytes() == data


def test_refuses_an_input_that_changed_under_its_output(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    write(path, [range(1, 4)])
    with closing(results(path)) as result:
        result.recover()
        result.check_names([(1, b'{"custom_id": "1", "prompt": "a"}'), (9, b"{}")])
        with pytest.raises(ConfigError, match="line 2 has another custom_id"):
            result.check_names([(2, b'{"custom_id": "x", "prompt": "a"}')])
        result.check_end(3)
        with pytest.raises(ConfigError, match="it has line 3, the input ends at 2"):
            result.check_end(2)


def test_an_output_of_another_shard_is_left_as_it_is(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    write(output, [range(1, 10, 2)])
    data = output.read_bytes()
    for shard, number in (("2/2", 1), ("1/4", 3)):
        with (
            closing(results(output, shard=shard)) as again,
            pytest.raises(ConfigError, match=f"has line {number}, which is not of shard = {shard}"),
        ):
            again.recover()
        assert output.read_bytes() == data
    for shard in ("1/2", "1/1"):
        with closing(results(output, shard=shard)) as again:
            again.recover()
            assert again.num_ended == 5


def test_results_of_another_model_name_are_another_jobs(text_model: Path) -> None:
    engine = EngineConfig(model=text_model)

    def job(**given: Any) -> str:
        return job_name(BatchConfig(**given), engine, b"{}")

    assert job(served_model_name="other") != job()
    assert job(served_model_name=text_model.name) == job() == job(shard="2/3", resume=True)


def test_an_output_has_one_writer(tmp_path: Path) -> None:
    part = open_part(tmp_path / "out.jsonl")
    with pytest.raises(ConfigError, match="is being written by another process"):
        open_part(tmp_path / "out.jsonl")
    part.close()
    open_part(tmp_path / "out.jsonl").close()


def test_a_full_disk_leaves_whole_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.jsonl.zst"
    part = open_part(path)
    part.put(record(1))
    part.sync()
    size, written = path.stat().st_size, os.pwrite

    def full(file: int, data: memoryview, at: int) -> int:
        if at > size:
            raise OSError(28, "No space left on device")
        return written(file, data[: len(data) // 2], at)

    part.put(record(2))
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        part.sync()
    assert path.stat().st_size == size and part.num_pending_bytes == len(record(2)) + 1
    monkeypatch.undo()
    part.sync()
    part.close()
    with closing(results(path)) as result:
        result.recover()
        assert 1 in result.done and 2 in result.done


def test_a_stream_tells_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what could not be written yet is written once."""
    reader, writer = os.pipe()
    gone: list[int] = []
    part = StreamPart(writer, lambda: gone.append(1))
    part.put(b"line")
    write, takes = os.write, iter([2, 1])
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda file, data: write(file, data[: next(takes)]))
        with pytest.raises(StopIteration):
            part.sync()
    part.put(b"next")
    part.sync()
    assert os.read(reader, 100) == b"line\nnext\n" and not gone
    assert part.num_pending_bytes == 0
    os.close(reader)
    part.put(b"line")
    part.sync()
    assert gone == [1] and part.num_pending_bytes == 0
    os.close(writer)


def test_files_of_other_tools_are_read(tmp_path: Path) -> None:
    lines = b'{"prompt": "a"}\n' * 1000
    other = zlib.compressobj(9, zlib.DEFLATED, 31)
    gz = other.compress(lines) + other.flush() + b"\0" * 512  # as tape archives pad it
    (tmp_path / "a.gz").write_bytes(gz)
    skippable = b"\x50\x2a\x4d\x18\x04\0\0\0skip"  # as pzstd writes it
    (tmp_path / "a.zst").write_bytes(skippable + zstandard.ZstdCompressor().compress(lines))
    for name in ("a.gz", "a.zst"):
        source = open_input(tmp_path / name, 4096)
        assert check_custom_ids(source, tmp_path / name) == 1000
        listed = [line for some in source.lines for line in some]
        assert [number for number, _ in listed] == list(range(1, 1001))


def test_a_table_of_pandas_is_read_as_meant(tmp_path: Path) -> None:
    path = tmp_path / "frame.parquet"
    columns = {"custom_id": [17, 18], "prompt": ["a", "b"], "__index_level_0__": [5, 7]}
    parquet.write_table(pyarrow.table(columns), path)
    (raw,) = open_input(path, 4096).lines
    lines = [parse(line, number) for number, line in raw]
    assert lines == [
        BatchLine(number, custom_id, "POST", "/v1/completions", b'{"prompt":"%b"}' % prompt, 1)
        for number, custom_id, prompt in ((1, "17", b"a"), (2, "18", b"b"))
    ]


def read_table(path: Path, columns: dict[str, Any]) -> list[bytes | None]:
    parquet.write_table(pyarrow.table(columns), path)
    return [line for some in open_input(path, 4096).lines for _, line in some]


def test_what_json_lacks_reaches_the_check_of_its_field(tmp_path: Path) -> None:
    """`prompt` of Spark, which has no mark of text, was answered as base64; inf by the default."""
    lines = read_table(
        tmp_path / "in.parquet",
        {
            "prompt": [b"caf\xc3\xa9", b"\xff\x00", None, b"a"],
            "temperature": [float("inf"), float("-inf"), float("nan"), 0.5],
            "logit_bias": pyarrow.array(
                [[(b"5", 1.0)]] + [None] * 3, pyarrow.map_(pyarrow.binary(), pyarrow.float64())
            ),
        },
    )
    assert lines == [
        '{"prompt":"café","temperature":1e999,"logit_bias":{"5":1.0}}'.encode(),
        b'{"prompt":{"bytes that are not UTF-8":"ff00"},"temperature":-1e999}',
        b"{}",
        b'{"prompt":"a","temperature":0.5}',
    ]
    for line, fault in zip(
        lines, ("temperature must be .*1e999", "prompt must .*UTF-8"), strict=False
    ):
        with pytest.raises(InvalidRequest, match=fault):
            parse_completion(line or b"")


_MAP = pyarrow.map_(pyarrow.string(), pyarrow.float64())
_NAN = float("nan")


@pytest.mark.parametrize(
    ("column", "values", "place"),
    [
        ("structured_outputs", [{"json": {"const": None}}], "json.const"),
        ("structured_outputs", [{"json": {"const": {"a": None}}}], "json.const.a"),
        ("structured_outputs", [{"json": {"enum": [{"a": None}]}}], "json.enum[].a"),
        ("structured_outputs", [{"json": {"enum": [1.0, _NAN]}}], "json.enum[]"),
        ("structured_outputs", [{"json": {"anyOf": [{"const": 1}, {}]}}], "json.anyOf[].const"),
        ("tools", [[{"function": {"parameters": {"default": None}}}]], "[].function.para"),
        ("chat_template_kwargs", [{"a": True, "b": None}], "b"),
        ("chat_template_kwargs", pyarrow.array([[("a", _NAN)]], _MAP), "a"),
        ("verify", [{"pointer": "/a", "equals": None}], "equals"),
        ("verify", [{"any": [{"equals": {"x": None}}]}], "any[].equals.x"),
        ("body", [{"response_format": {"json_schema": {"schema": {"const": None}}}}], "response_"),
    ],
)
def test_refuses_a_null_that_may_be_it(
    tmp_path: Path, column: str, values: Any, place: str
) -> None:
    """`const: null` of a struct was "anything", since nulls of structs were fields left out. The
    row behind many others is refused before the first of them is handed out."""
    path = tmp_path / "in.parquet"
    rows = pyarrow.concat_arrays([pyarrow.nulls(99, (own := pyarrow.array(values)).type), own])
    parquet.write_table(pyarrow.table({"custom_id": list(range(100)), column: rows}), path)
    with pytest.raises(ConfigError) as raised:
        next(open_input(path, 4096).lines)
    message = raised.value.message
    assert f"column '{column}'" in message and f": {place}" in message
    assert message.endswith("or a field left out: write the column as JSON in strings")
    text = msgspec.json.encode({"const": None, "x": {"a": None}}).decode()
    (line,) = read_table(path, {column: [text]})
    assert line == f'{{"{column}":{text}}}'.encode()


def test_nulls_that_can_mean_one_thing_are_taken_so(tmp_path: Path) -> None:
    tools = [
        [{"name": "a", "parameters": {"properties": {name: {"type": "string"}}}}] for name in "xy"
    ]
    for column, values, expected in (
        ("logit_bias", [{"5": 1.0}, {"7": None}], [{"5": 1.0}, {}]),
        ("logit_bias", pyarrow.array([[("5", None)]], _MAP), [{"5": None}]),
        ("chat_template_kwargs", pyarrow.array([[("a", None)]], _MAP), [{"a": None}]),
        ("structured_outputs", [{"json": {"enum": [None, 1]}}], [{"json": {"enum": [None, 1]}}]),
        ("tools", tools, tools),
        ("temperature", [Decimal("0.50")], [0.5]),
        ("input", ["[hi]"], ["[hi]"]),
    ):
        lines = read_table(tmp_path / "in.parquet", {column: values})
        assert [json.loads(line or b"")[column] for line in lines] == expected, column


def test_text_that_is_no_json_stays_one_field(tmp_path: Path) -> None:
    for column, text in (
        ("body", '{"prompt": "a"}, "custom_id": "9"'),
        ("tools", "[{]"),
        ("logit_bias", '"5"'),
        ("prompt", "[1, 2]"),
        ("stop", '["a"]'),
    ):
        (line,) = read_table(tmp_path / "in.parquet", {column: [text]})
        assert json.loads(line or b"") == {column: text}


def test_what_a_row_cannot_be_made_of_names_its_column(tmp_path: Path) -> None:
    """A column of times in ns ended in a traceback that asked for pandas; equal keys in one too."""
    numbers = pyarrow.map_(pyarrow.string(), pyarrow.int64())
    for values, fault in (
        (pyarrow.array([1], pyarrow.timestamp("ns")), r"\(timestamp\[ns\]\): Nano(?!.*pandas)"),
        (pyarrow.array([[("5", 1), ("5", 2)]], numbers), r"\(map<.*5"),
        (pyarrow.array([b"\xff"]).view(pyarrow.string()), r"\(string\): .*utf-8"),
    ):
        with pytest.raises(ConfigError, match=rf"in\.parquet: column 'stop' {fault}"):
            read_table(tmp_path / "in.parquet", {"prompt": ["a"], "stop": values})


def test_equal_ids_decode_no_other_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All columns of 300,000 rows took four times as long as lines did."""
    path, read = tmp_path / "in.parquet", parquet.ParquetFile.iter_batches
    asked: list[list[str]] = []

    def iter_batches(file: Any, batch_size: int, columns: list[str]) -> Any:
        asked.append(columns)
        return read(file, batch_size, columns=columns)

    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", iter_batches)
    for columns, wanted in (({"custom_id": ["a", "b"]}, ["custom_id"]), ({}, [])):
        parquet.write_table(pyarrow.table({"prompt": ["x", "y"], **columns}), path)
        assert check_custom_ids(open_input(path, 4096), path) == 2
        assert asked.pop() == wanted


def test_a_named_pipe_is_opened_once_and_its_wait_can_be_ended(tmp_path: Path) -> None:
    pipe = tmp_path / "in.gz"
    os.mkfifo(pipe)
    data = CODECS[".gz"].compress(b'{"prompt": "a"}\n{"prompt": "b"}')
    writer = threading.Thread(target=lambda: pipe.write_bytes(data))
    writer.start()
    source = open_input(pipe, 4096)
    assert [number for some in source.lines for number, _ in some] == [1, 2]
    assert check_custom_ids(source, pipe) is None
    writer.join()
    opened = os.open(pipe, os.O_RDWR)  # a writer that says nothing
    waiting = open_input(pipe, 4096)
    waiting.close()
    assert not any(waiting.lines)
    os.close(opened)


def test_bodies_become_lines_of_a_batch() -> None:
    line = parse(b'{"prompt": "a", "n": 3}', 7)
    assert line == BatchLine(7, "7", "POST", "/v1/completions", b'{"prompt":"a","n":3}', 3)
    for raw, expected in (
        (b'{"custom_id": "x", "messages": []}', "/v1/chat/completions"),
        (b'{"body": {"prompt": "say \\"messages\\""}}', "/v1/completions"),
        (b"nonsense", "invalid_json_line"),
        (None, "line_too_long"),
        (b'{"custom_id": "x", "method": "GET", "url": "x", "body": {}}', "invalid_method"),
        (b'{"custom_id": 5, "prompt": "a"}', "/v1/completions"),
        (b'{"custom_id": 5.5, "prompt": "a"}', "invalid_custom_id"),
        (b'{"custom_id": "x", "body": [1]}', "invalid_type"),
        (b'{"body": {}, "url": "/v1/embeddings"}', "url_mismatch"),
        (b'{"body": {}, "prompt": "a"}', "unknown_parameter"),
    ):
        line = parse(raw, 7)
        result = line.url if isinstance(line, BatchLine) else line.code
        assert result == expected, raw


@pytest.mark.parametrize("shard", ["1/1", "2/3", "3/3", "5/7"])
def test_a_shard_is_every_kth_line(shard: str) -> None:
    config = BatchConfig(shard=shard)
    index, count = map(int, shard.split("/"))
    for total in range(30):
        mine = [number for number in range(1, total + 1) if config.has(number)]
        assert mine == list(range(index, total + 1, count))
        assert config.count(total) == len(mine)


def test_rates_are_those_of_the_last_seconds() -> None:
    now = 0.0
    meter = BatchMeter(lambda: now)
    message = meter.describe(Level(0, 0, 0, 0), None)
    assert message == "0 lines, 0 tokens, 0 tok/s, 0 sequences running"
    now = 10.0
    message = meter.describe(Level(100, 5_000, 5_000, 64), 1_100)
    assert (
        message == "100 of 1,100 lines, 5,000 tokens, 500 tok/s, 64 sequences running, 0:01:40 left"
    )
    now = 1000.0
    assert " 0 tok/s" in meter.describe(Level(100, 5_000, 5_000, 64), 1_100)
    now = 1010.0
    assert "1,000 tok/s" in meter.describe(Level(200, 15_000, 15_000, 64), 1_100)


def test_the_time_left_goes_by_tokens() -> None:
    """Of 1,000 lines of 400 tokens all were half done, 5 had ended: "1 day, 9:26:34 left"."""
    now = 0.0
    meter = BatchMeter(lambda: now)
    meter.describe(Level(0, 0, 0, 0), 1_000)
    now = 10.0
    assert "left" not in meter.describe(Level(0, 0, 200_000, 64), 1_000), "no line tells how long"
    message = meter.describe(Level(5, 2_000, 200_000, 64), 1_000)
    assert message.endswith("200,000 tokens, 20,000 tok/s, 64 sequences running, 0:00:10 left")
    assert "left" not in meter.describe(Level(1_000, 400_000, 400_000, 0), 1_000)
    assert Level(5, 2_000, 500_000, 64).expected(1_000) == 500_000, "never less than there are"


def test_large_results_have_their_own_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_parquet, "_BYTES_WRITTEN", 1_000)
    path = tmp_path / "out.parquet"
    batch_parquet.write_results((record(number) for number in range(1, 40)), path)
    with parquet.ParquetFile(path) as file:
        assert file.metadata.num_rows == 39
        assert 3 < file.metadata.num_row_groups < 39
    assert [name for name, _ in batch_parquet.read_ids(path)] == [
        f"batch_req_0123456789abcdef_{number}" for number in range(1, 40)
    ]
    parquet.write_table(pyarrow.table({"id": [1], "status_code": [200]}), path)
    with pytest.raises(ConfigError, match=r"out.parquet is no file of results: id 1"):
        list(batch_parquet.read_ids(path))


def test_responses_become_rows_as_chats_do(tmp_path: Path) -> None:
    def answered(number: int, status: str, *items: dict[str, Any]) -> bytes:
        usage = {"input_tokens": 3, "output_tokens": 5, "total_tokens": 8}
        body = {"status": status, "output": items, "usage": usage}
        response = {"status_code": 200, "request_id": f"x-{number}", "body": body}
        return msgspec.json.encode(
            {"id": f"x_{number}", "custom_id": "a", "response": response, "error": None}
        )

    text = {"type": "message", "content": [{"type": "output_text", "text": "y"}]}
    records = [
        answered(1, "completed", text),
        answered(2, "incomplete", text),
        answered(3, "completed", {"type": "function_call", "arguments": "{}"}),
    ]
    batch_parquet.write_results(records, tmp_path / "out.parquet")
    rows = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert [(row["texts"], row["finish_reasons"]) for row in rows] == [
        (["y"], ["stop"]), (["y"], ["length"]), ([None], ["tool_calls"])
    ]  # fmt: skip
    assert {(row["prompt_tokens"], row["completion_tokens"]) for row in rows} == {(3, 5)}


def test_outputs_that_cannot_be_are_refused_before_the_job(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("{}")
    (tmp_path / "folder.parquet").mkdir()
    os.mkfifo(tmp_path / "pipe.parquet")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for name, fault in (
        ("folder.parquet", "is there, and is no file"),
        ("pipe.parquet", "is there, and is no file"),
        ("circle", "Too many levels of symbolic links"),
        ("x" * 300, "File name too long"),
    ):
        files = locate_files(BatchConfig(input=str(source), output=str(tmp_path / name)))
        with pytest.raises(ConfigError, match=f"^output = .*({fault})"):
            check_files(files, False)


def test_a_closed_standard_input_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(ConfigError, match="input is missing"):
        open_input(STANDARD, 100)


def test_a_long_look_through_the_input_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, hours = tmp_path / "in.jsonl", itertools.count(0.0, 4.0)
    path.write_bytes(b'{"prompt": "a"}\n' * 7)
    caplog.set_level("INFO")
    check_custom_ids(open_input(path, 1_000), path, lambda: next(hours))
    numbers = [message.split()[2] for message in caplog.messages]
    assert numbers == ["3", "6"], "twelve seconds each"
