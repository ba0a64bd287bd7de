"""`srm batch` as a user calls it, with the numpy engine: every line once, whatever happens."""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from rich.console import Console

from srm.errors import ConfigError
from srm.server.commands.batch import main
from srm.server.commands.batch_input import Input, open_input
from srm.server.commands.compression import CODECS
from srm.server.commands.standard_output import BROKEN_PIPE, INTERRUPTED
from tests.kit.serving import ROOT, wait_until

FLAGS = ("--num-slots=16", "--max-step-rows=16", "--max-step-tokens=64")
Record = dict[str, Any]


def line_of(number: int) -> Record:
    """Every kind that is answered: of a batch and plain, texts and ids, several samples, chats."""
    kinds: list[Callable[[], Record]] = [
        lambda: {"prompt": [5, number], "max_tokens": 1 + number % 30},
        lambda: {"custom_id": f"c{number}", "prompt": "the cat", "n": 3, "max_tokens": 9},
        lambda: {
            "custom_id": f"batch {number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": ["the mat", "é"], "logprobs": 2, "stop": [" t"]},
        },
        lambda: {"messages": [{"role": "user", "content": f"the {number}"}], "max_tokens": 5},
        lambda: {"custom_id": f"d{number}", "body": {"prompt": "a", "seed": number}},
        lambda: {"input": f"the {number}", "max_output_tokens": 5},
    ]
    return kinds[number % len(kinds)]()


LINES = [line_of(number) for number in range(40)]
BAD = [b"nonsense", b'{"prompt": 7}', b'{"prompt": "a", "temperature": -1}', b"[]"]


def as_jsonl(lines: list[Record]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def run(folder: Path, *flags: str, engine: str = "tests.kit.processes.numpy_engine") -> int:
    """In this process, with an engine of its own."""
    return main([f"--model={folder}", *FLAGS, *flags], engine_module=engine)


def start(
    folder: Path, *flags: str, engine: str = "tests.kit.processes.numpy_engine", **options: Any
) -> subprocess.Popen[bytes]:
    program = (
        "import sys; from srm.server.commands.batch import main\n"
        "from srm.errors import SRMError\n"
        f"try: code = main(sys.argv[1:], engine_module={engine!r})\n"
        "except SRMError as error: code = error.exit_code; print(error.message, file=sys.stderr)\n"
        "sys.exit(code)"
    )
    command = [sys.executable, "-c", program, f"--model={folder}", *FLAGS, *flags]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, **options)


def read(path: Path) -> bytes:
    data = path.read_bytes()
    if path.suffix == ".gz":
        return gzip.decompress(data)
    if path.suffix == ".zst":
        reader = zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True)
        return reader.readall()
    return data


def by_number(results: bytes) -> dict[int, bytes]:
    """The lines as they are, each by the number of the line that it answers."""
    entries: dict[int, bytes] = {}
    for line in results.splitlines():
        number = int(json.loads(line)["id"].rpartition("_")[2])
        assert number not in entries
        entries[number] = line
    return entries


@pytest.fixture(scope="module")
def expected(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, bytes]:
    """What an undisturbed run makes of LINES."""
    folder = tmp_path_factory.mktemp("batch")
    (folder / "in.jsonl").write_bytes(as_jsonl(LINES))
    output = folder / "out.jsonl"
    assert run(text_model, str(folder / "in.jsonl"), "-o", str(output)) == 0
    result = by_number(output.read_bytes())
    assert sorted(result) == list(range(1, 41))
    return result


def test_results_are_those_of_batches(expected: dict[int, bytes]) -> None:
    records = {number: json.loads(line) for number, line in expected.items()}
    for number, line in enumerate(LINES, 1):
        record = records[number]
        assert record["custom_id"] == line.get("custom_id", str(number))
        assert record["error"] is None and record["response"]["status_code"] == 200
        body = record["response"]["body"]
        kinds = {"messages": "chat.completion", "input": "response"}
        kind = next((kinds[name] for name in kinds if name in line), "text_completion")
        assert body["object"] == kind
        assert body["model"] == "tiny"
    assert len(records[2]["response"]["body"]["choices"]) == 3
    assert len(records[3]["response"]["body"]["choices"]) == 2
    texts = [choice["text"] for choice in records[2]["response"]["body"]["choices"]]
    other = [choice["text"] for choice in records[8]["response"]["body"]["choices"]]
    assert texts != other, "lines without a seed draw one each"


def test_parquet_in_and_out(text_model: Path, tmp_path: Path) -> None:
    """Rows that are bodies as they are, and rows with a body of JSON; one of them is at fault."""
    bodies = [
        {"prompt": "the cat", "max_tokens": 5 + i, "n": 1 + i % 2, "seed": None if i % 3 else i}
        for i in range(12)
    ]
    bodies[3]["temperature"] = -1
    rows = [body if i % 2 else {"body": json.dumps(body)} for i, body in enumerate(bodies)]
    source, output = tmp_path / "in.parquet", tmp_path / "out.parquet"
    names = {name: None for row in rows for name in row}
    table = pyarrow.Table.from_pylist(
        [{"custom_id": f"row {i}", **names, **row} for i, row in enumerate(rows)]
    )
    pyarrow.parquet.write_table(table, source, row_group_size=5)
    assert run(text_model, str(source), "-o", str(output)) == 1
    entries = {row["custom_id"]: row for row in pyarrow.parquet.read_table(output).to_pylist()}
    assert not output.with_name("out.parquet.part").exists()
    for number, body in enumerate(bodies):
        row = entries.pop(f"row {number}")
        assert row["id"].endswith(f"_{number + 1}") and row["error"] is None
        reply = json.loads(row["response"])
        if "temperature" in body:
            assert (row["status_code"], row["texts"]) == (400, None)
            assert reply["error"]["param"] == "temperature"
            continue
        assert row["status_code"] == 200 and len(row["texts"]) == body["n"]
        assert row["texts"] == [choice["text"] for choice in reply["choices"]]
        assert row["finish_reasons"] == [choice["finish_reason"] for choice in reply["choices"]]
        assert row["completion_tokens"] == reply["usage"]["completion_tokens"] > 0
        assert row["prompt_tokens"] == reply["usage"]["prompt_tokens"] > 0
    assert not entries
    assert run(text_model, str(source), "-o", str(output), "--resume") == 1
    apart = (str(source), "-o", str(tmp_path / "apart.parquet"), f"--errors={tmp_path / 'bad'}")
    for more in ((), ("--resume",)):  # which missed the line that is among the errors
        assert run(text_model, *apart, *more) == 1
        assert [*by_number((tmp_path / "bad").read_bytes())] == [4]
    with pytest.raises(ConfigError, match=r"out\.parquet is there already"):
        run(text_model, str(source), "-o", str(output))
    for flag, message in (("--shard=2/2", "is not of shard"), ("--seed=1", "of another input")):
        with pytest.raises(ConfigError, match=message):
            run(text_model, str(source), "-o", str(output), "--resume", flag)


def test_shards_make_the_whole_and_a_terminal_sees_a_bar(
    text_model: Path, tmp_path: Path, expected: dict[int, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a compressed file, of several members, cut inside a line, into another."""
    source, data, drawn = tmp_path / "in.jsonl.gz", as_jsonl(LINES), io.StringIO()
    parts = (data[:77], data[77:500], data[500:])
    source.write_bytes(b"".join(map(CODECS[".gz"].compress, parts)))
    console = Console(file=drawn, force_terminal=True, width=150)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr("srm.server.commands.batch_progress.Console", lambda **_: console)
    entries: dict[int, bytes] = {}
    for shard in ("1/2", "2/2"):
        output = tmp_path / f"{shard[0]}.jsonl.zst"
        assert run(text_model, str(source), "-o", str(output), f"--shard={shard}") == 0
        part = by_number(read(output))
        assert {(number - 1) % 2 for number in part} == {int(shard[0]) - 1}
        entries |= part
    assert entries == expected
    assert "of 20 lines" in drawn.getvalue() and "tok/s" in drawn.getvalue()


def test_refuses_equal_custom_ids_before_the_start(text_model: Path, tmp_path: Path) -> None:
    """Both lines were answered, in silence. The second line of the first file has its number."""
    rows = [{"custom_id": "2", "prompt": "a"}, {"prompt": "b"}, *LINES[:3]]
    lines, table, output = (tmp_path / name for name in ("in.jsonl.gz", "in.parquet", "out.jsonl"))
    lines.write_bytes(gzip.compress(as_jsonl(rows)))
    columns = {"custom_id": [7, 8, 7], "prompt": ["a", "b", "c"]}
    pyarrow.parquet.write_table(pyarrow.table(columns), table)
    for path, second, message in ((lines, 2, "'2' is that of"), (table, 3, "'7' is that of")):
        with pytest.raises(ConfigError, match=f"line {second}: custom_id {message} line 1 too"):
            run(text_model, str(path), "-o", str(output), "--shard=1/2")
    assert not output.exists()


@pytest.mark.parametrize("is_pipe", [False, True])
def test_a_wrong_line_keeps_no_custom_id(
    is_pipe: bool, text_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second line was answered from a file, and refused as a duplicate from a pipe."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    bad = {"custom_id": "x", "method": "GET", "url": "/v1/completions", "body": {}}
    source.write_bytes(as_jsonl([bad, {"custom_id": "x", "prompt": "a", "max_tokens": 1}]))
    if is_pipe:
        monkeypatch.setattr("srm.server.commands.batch.open_input", read_once)
    assert run(text_model, str(source), "-o", str(output)) == 1
    errors = [json.loads(line)["error"] for _, line in sorted(by_number(read(output)).items())]
    assert errors[0]["code"] == "invalid_method" and errors[1] is None


def read_once(path: Path, max_line_bytes: int) -> Input:
    return dataclasses.replace(open_input(path, max_line_bytes), again=None)


def test_fails_equal_custom_ids_of_a_pipe(
    text_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(as_jsonl([*LINES[:3], LINES[1], LINES[2]]))

    monkeypatch.setattr("srm.server.commands.batch.open_input", read_once)
    monkeypatch.setattr("srm.server.batch.job_input._MAX_NEW", 2)  # sorted among the others early
    assert run(text_model, str(source), "-o", str(output)) == 1
    errors = {number: json.loads(line)["error"] for number, line in by_number(read(output)).items()}
    assert [errors.pop(number) for number in (1, 2, 3)] == [None] * 3
    assert {error["code"] for error in errors.values()} == {"duplicate_custom_id"}
    assert {number: error["message"] for number, error in errors.items()} == {
        4: "custom_id 'c1' is that of line 2 too",
        5: "custom_id 'batch 2' is that of line 3 too",
    }
    output.write_bytes(b"".join(output.read_bytes().splitlines(True)[:2]))
    assert run(text_model, str(source), "-o", str(output), "--resume") == 1
    results = by_number(read(output)).items()
    assert {number for number, line in results if json.loads(line)["error"]} == {4, 5}


def test_lines_that_fail_are_named_and_do_not_stop_the_others(
    text_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    source, output, errors = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "bad.jsonl.gz"))
    source.write_bytes(b"\n".join([*BAD, b"", as_jsonl(LINES[:3]), b'{"prompt": "' + b"x" * 5000]))
    flags = (str(source), "-o", str(output), "--max-body-bytes=4096", f"--errors={errors}")
    assert run(text_model, *flags) == 1
    failed = {number: json.loads(line) for number, line in by_number(read(errors)).items()}
    assert sorted(by_number(read(output))) == [6, 7, 8]
    assert sorted(failed) == [1, 2, 3, 4, 10]
    assert failed[1]["error"]["code"] == "invalid_json_line"
    assert failed[3]["response"]["status_code"] == 400
    assert failed[3]["response"]["body"]["error"]["param"] == "temperature"
    assert (failed[3]["custom_id"], failed[10]["error"]["code"]) == ("3", "line_too_long")
    written = output.read_bytes(), errors.read_bytes()
    assert run(text_model, *flags, "--resume") == 1
    assert (output.read_bytes(), errors.read_bytes()) == written, "there was nothing left to do"
    reasons = [text for text in caplog.messages if f"what failed is in {errors}" in text]
    first = f"line 1 failed: {failed[1]['error']['message']}; what failed is in {errors}"
    assert reasons == [first] * 2


def wait_for(output: Path, size: int = 1) -> None:
    wait_until(lambda: output.exists() and output.stat().st_size >= size)


def endless(count: int) -> bytes:
    return b"".join(
        b'{"custom_id": "%d", "prompt": [5, %d], "max_tokens": %d}\n' % (i, i % 300, 1 + i % 40)
        for i in range(count)
    )


def long_lines(lengths: list[int], n: int = 1) -> bytes:
    line = b'{"prompt": [5, %d], "n": %d, "max_tokens": %d, "ignore_eos": true}\n'
    return b"".join(line % (number, n, length) for number, length in enumerate(lengths))


def test_lines_under_way_go_on_at_their_tokens(text_model: Path, tmp_path: Path) -> None:
    """What was sampled for lines that had not ended was lost: 30 s of 16,384 sequences.

    After SIGKILL, after Ctrl-C, and after a death of the engine alone."""
    source, output, whole = (tmp_path / name for name in ("in.jsonl", "out.jsonl.zst", "whole"))
    source.write_bytes(long_lines([1, *[100] * 60]))
    assert run(text_model, str(source), "-o", str(whole)) == 0
    snapshot = tmp_path / "out.jsonl.zst.snapshot" / "durable.snapshot"
    engine = "tests.kit.processes.slow_engine"
    flags = (str(source), "-o", str(output), "--resume", "--snapshot-interval-s=0.05")
    with start(text_model, *flags, engine=engine) as process:
        wait_for(snapshot)
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    assert children and not psutil.wait_procs(children, timeout=120)[1]
    with start(text_model, *flags, engine=engine) as process:
        wait_for(output)
        snapshot.unlink()
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == INTERRUPTED
        assert process.stderr is not None
        decoded = process.stderr.read().decode()
    assert children and not psutil.wait_procs(children, timeout=120)[1]
    ended = len(by_number(read(output)))
    assert f"{ended} of 61 lines are written to {output}; to go on" in decoded
    assert f"  srm batch --model={text_model} " in decoded and decoded.endswith("=0.05\n")
    assert snapshot.exists(), "written at the stop"
    with pytest.raises(ConfigError, match="is there already: --resume"):
        run(text_model, str(source), "-o", str(output))
    with start(text_model, *flags, engine=engine) as process:
        wait_for(output, output.stat().st_size + 1)
        children = psutil.Process(process.pid).children()
        (child,) = (child for child in children if engine in child.cmdline())
        child.kill()
        assert process.stderr is not None
        last = process.stderr.read().decode()
        assert process.wait(120) == 0
    assert "the engine ended (SIGKILL: out of memory" in last
    for log in (decoded, *last.split("restart in")):
        assert re.search(r"has [1-9]\d* sequences to go on with", log)
    assert by_number(read(output)) == by_number(whole.read_bytes())
    assert not snapshot.parent.exists()


def test_what_began_first_ends_first(text_model: Path, tmp_path: Path) -> None:
    """All lines that fitted ran at once and took turns, so all were half done for very long."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(long_lines([60] * 24 + [1] * 40, n=4))
    assert run(text_model, str(source), "-o", str(output), "--num-slots=0") == 0
    numbers = list(by_number(output.read_bytes()))
    at_once = 24 // 4  # slots, one and a half times --max-step-rows, by samples of a line
    overtaken = max(number - 1 - place for place, number in enumerate(numbers))
    assert len(numbers) == 64 and overtaken <= 2 * at_once


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet"])
def test_random_kills_lose_nothing(text_model: Path, tmp_path: Path, suffix: str) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / f"out{suffix}"
    source.write_bytes(endless(4_000))
    undisturbed = tmp_path / "undisturbed.jsonl"
    assert run(text_model, str(source), "-o", str(undisturbed)) == 0
    rng, kills = random.Random(suffix), 0
    for _ in range(40):
        with start(text_model, str(source), "-o", str(output), "--resume") as process:
            try:
                code = process.wait(rng.uniform(0.2, 4))
                break
            except subprocess.TimeoutExpired:
                children = psutil.Process(process.pid).children(recursive=True)
                if children and rng.random() < 0.5:  # what goes first is not always the command
                    rng.choice(children).kill()
                    time.sleep(rng.uniform(0, 1))
                process.kill()
                process.wait()
                kills += 1
    else:
        assert run(text_model, str(source), "-o", str(output), "--resume") == (code := 0)
    assert code == 0 and kills
    if suffix == ".parquet":
        rows = pyarrow.parquet.read_table(output, columns=["id", "response"]).to_pylist()
        expected = by_number(undisturbed.read_bytes())
        assert len(rows) == len({row["id"] for row in rows}) == 4_000
        for row in rows:
            number = int(row["id"].rpartition("_")[2])
            assert json.loads(row["response"]) == json.loads(expected[number])["response"]["body"]
    else:
        assert by_number(read(output)) == by_number(undisturbed.read_bytes())


def test_lines_of_a_pipe_are_answered_as_they_come(text_model: Path) -> None:
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with start(text_model, **pipes) as process:
        assert process.stdin is not None and process.stdout is not None
        for number in (1, 2):
            process.stdin.write(b'{"prompt": [5, 6]}\n')
            process.stdin.flush()
            answer = json.loads(process.stdout.readline())
            assert answer["custom_id"] == str(number)
            assert answer["response"]["status_code"] == 200
        process.send_signal(signal.SIGINT)  # while it waits for more
        assert process.wait(120) == INTERRUPTED


def test_a_reader_that_goes_ends_it_quietly(text_model: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(endless(3_000))
    with start(text_model, str(source), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith(b'{"id":"batch_req_')
        process.stdout.close()
        assert process.wait(120) == BROKEN_PIPE
        lines = process.stderr.read().splitlines()
        assert not [line for line in lines if not line.endswith(b" left")]  # of a slow machine


def test_refuses_before_it_starts(
    text_model: Path, tmp_path: Path, expected: dict[int, bytes]
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(as_jsonl(LINES))
    lines = [*expected.values()]
    output.write_bytes(b"\n".join(lines[:5]) + b"\n")
    broken = tmp_path / "cut.jsonl.gz"
    (tmp_path / "no.parquet").write_text("a text without rows")
    broken.write_bytes(gzip.compress(as_jsonl(LINES))[:60])
    other = tmp_path / "other.jsonl"
    other.write_bytes(as_jsonl(LINES[1:]))
    for flags, message in (
        (("nowhere.jsonl",), "input = nowhere.jsonl: No such file"),
        ((str(source), "-o", str(source)), "output = .* is the input, and would be lost"),
        ((str(source), "-o", str(tmp_path)), "Is a directory"),
        ((str(source), "-o", str(output)), "out.jsonl is there already: --resume goes on"),
        ((str(source), "--resume"), "resume needs an output that is a file"),
        ((str(other), "-o", str(output), "--resume"), "of another input, model"),
        ((str(source), "-o", str(output), "--resume", "--seed=1"), "of another input, model"),
        ((str(source), "--shard=0/3"), "shard must be i/k with 1 ≤ i ≤ k, got '0/3'"),
        ((str(source), "--shard=2"), "shard must be i/k"),
        ((str(source), "--seed=-1"), "seed must be 0"),
        ((str(source), "--errors=e.parquet"), "errors must be a file of lines"),
        ((str(broken),), "cut.jsonl.gz: it ends in the middle"),
        ((str(tmp_path / "no.parquet"),), "no.parquet: .*magic bytes"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(text_model, *flags)
    assert output.read_bytes() == b"\n".join(lines[:5]) + b"\n"
