"""Lines of the log, for a person and for a program."""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from srm.logs import MAX_LINE, PROCESS_NAME, JsonLines, TextLines, printable
from tests.kit.serving import ROOT, run_python


def record(message: str, *args: object, **extra: object) -> logging.LogRecord:
    log = logging.getLogger("srm.server.http.request_middleware")
    return log.makeRecord(log.name, logging.INFO, "file", 1, message, args, None, extra=extra)


def test_a_json_line_has_the_fields_of_its_message() -> None:
    made = record("answered %d", 2, fields={"status": 200, "request_id": 'a"b\n'})
    line = JsonLines().format(made)
    assert "\n" not in line
    parsed = json.loads(line)
    assert parsed["time"].endswith("Z")
    assert {name: parsed[name] for name in ("level", "logger", "message", "status")} == {
        "level": "info",
        "logger": "srm.server.http.request_middleware",
        "message": "answered 2",
        "status": 200,
    }
    assert parsed["request_id"] == 'a"b\n'
    try:
        raise ValueError("why")
    except ValueError:
        made.exc_info = sys.exc_info()
    assert "ValueError: why" in json.loads(JsonLines().format(made))["exception"]


def test_a_text_line_ends_in_the_fields() -> None:
    made = record("answered", fields={"status": 200, "seconds": 0.5})
    message = f" INFO {made.name}: answered status=200 seconds=0.5"
    assert TextLines().format(made).endswith(message)


@pytest.mark.parametrize("form", ["json", "text"])
def test_configuring_sets_level_form_and_the_process_that_speaks(form: str) -> None:
    script = f"import logging; from srm import logs; logs.configure('warning', '{form}'); "
    script += "logging.info('no'); logging.warning('hello %s', 1)"
    done = run_python(script, env={**os.environ, PROCESS_NAME: "engine 1%s"})
    (line,) = done.stderr.splitlines()
    if form == "json":
        parsed = json.loads(line)
        assert (parsed["process_name"], parsed["message"]) == ("engine 1%s", "hello 1")
    else:
        assert line.endswith(" WARNING [engine 1%s] root: hello 1")


LOGGING = """
import logging, os, sys
from srm import logs
logs.configure("info", "text")
for number in range(3_000):
    logging.info("line %d: %s", number, "x" * (9_000 if number == 7 else 90))
print("served", flush=True)
sys.stdin.readline()
logging.info("again")
"""


def test_a_log_that_nobody_reads_holds_up_nobody_and_says_what_was_lost() -> None:
    """The process stood in its write, and answered nobody, until somebody read."""
    command = [sys.executable, "-c", LOGGING]
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with process:
        assert process.stdin and process.stdout and process.stderr
        ended = threading.Timer(120, process.kill)
        ended.start()
        assert process.stdout.readline() == b"served\n"
        # All that the pipe holds is read, as whoever comes back does.
        seen = b""
        while select.select([process.stderr], [], [], 0)[0]:
            seen += os.read(process.stderr.fileno(), 65_536)
        process.stdin.write(b"\n")
        process.stdin.close()
        seen += process.stderr.read()
        ended.cancel()
    lost, last = seen.decode().splitlines()[-2:]
    assert lost.endswith(" lines of the log were lost: they could not be written")
    assert int(lost.split()[0]) > 1_000
    assert last.endswith("root: again")


@pytest.mark.parametrize("target", ["closed pipe", "full disk", "none"])
def test_a_log_that_cannot_be_written_ends_nothing(target: str) -> None:
    close = "os.close(2)\n" if target == "none" else ""
    read, write = os.pipe()
    os.close(read)
    with Path("/dev/full").open("wb") as full:
        done = run_python(
            LOGGING.replace("logs.configure", close + "logs.configure"),
            **{"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "capture_output": False},
            stderr=full if target == "full disk" else write,
        )
    os.close(write)
    assert done.stdout == "served\n"


EVIL = "a\n2026-01-01 00:00:00,000 ERROR root: b\r\x1b[2Jc\x9b2Kd\x85e\u2028f\u202eg\x00h\ttab"
"""What a client may call a field: a line of its own, orders to a terminal, an end of a line."""


def evil_record() -> logging.LogRecord:
    made = record(f"{EVIL}: %s", ValueError(EVIL), fields={"custom_id": EVIL})
    try:
        raise ValueError(EVIL)
    except ValueError:
        made.exc_info = sys.exc_info()
    made.stack_info = EVIL
    return made


def test_what_a_client_wrote_makes_no_line_of_its_own() -> None:
    first, *traceback = TextLines().format(evil_record()).splitlines()
    assert first.count("a\\n2026-01-01 00:00:00,000 ERROR root: b\\r\\x1b[2Jc\\x9b2Kd\\x85e") == 3
    assert traceback and all(line.startswith("  ") for line in traceback)
    assert "  Traceback (most recent call last):" in traceback
    assert all(character.isprintable() for line in (first, *traceback) for character in line)
    bare = TextLines(is_bare=True).format(record(EVIL))
    assert bare.startswith("a\\n2026") and bare.isprintable()


def test_a_json_line_is_one_for_every_reader_of_lines() -> None:
    line = JsonLines().format(evil_record())
    assert line.isprintable() and len(line.splitlines()) == 1
    assert json.loads(line)["custom_id"] == EVIL
    assert json.loads(line)["message"] == f"{EVIL}: {EVIL}"


def test_a_name_that_is_no_utf8_is_logged() -> None:
    name = b"caf\xe9.jsonl".decode("utf-8", "surrogateescape")
    assert json.loads(JsonLines().format(record("%s", name)))["message"] == "caf\\udce9.jsonl"
    assert TextLines().format(record("%s", name)).endswith("caf\\udce9.jsonl")


def test_a_long_message_is_cut() -> None:
    for form in (TextLines(), JsonLines()):
        assert len(form.format(record("%s", "x" * 10**6))) < 2 * MAX_LINE


def test_what_is_printed_keeps_its_lines_and_has_nothing_that_a_terminal_obeys() -> None:
    assert printable("one\ntwo\x1b[31m\rthree") == "one\ntwo\\x1b[31m\\rthree"
