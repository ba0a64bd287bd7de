"""Lines of the log, for a person and for a program."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys

import pytest

from engine.logs import PROCESS_NAME, JsonLines, TextLines


def record(message: str, *args: object, **extra: object) -> logging.LogRecord:
    log = logging.getLogger("server.http.request_middleware")
    return log.makeRecord(log.name, logging.INFO, "file", 1, message, args, None, extra=extra)


def test_a_json_line_has_the_fields_of_its_message() -> None:
    made = record("answered %d", 2, fields={"status": 200, "request_id": 'a"b\n'})
    line = JsonLines().format(made)
    assert "\n" not in line
    parsed = json.loads(line)
    assert parsed["time"].endswith("Z")
    assert {name: parsed[name] for name in ("level", "logger", "message", "status")} == {
        "level": "info",
        "logger": "server.http.request_middleware",
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
    said = f" INFO {made.name}: answered status=200 seconds=0.5"
    assert TextLines().format(made).endswith(said)


@pytest.mark.parametrize("form", ["json", "text"])
def test_lines_say_which_process_speaks(form: str) -> None:
    script = f"import logging; from engine import logs; logs.configure('info', '{form}'); "
    done = subprocess.run(
        [sys.executable, "-c", script + "logging.info('hello')"],
        capture_output=True,
        check=True,
        env={**os.environ, PROCESS_NAME: "engine 1%s"},
    )
    said = done.stderr.decode()
    if form == "json":
        assert json.loads(said)["process_name"] == "engine 1%s"
    else:
        assert said.endswith(" INFO [engine 1%s] root: hello\n")


def test_configuring_sets_level_and_form() -> None:
    script = (
        "import logging; from engine import logs; logs.configure('warning', 'json'); "
        "logging.info('no'); logging.warning('yes %s', 1)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert json.loads(done.stderr)["message"] == "yes 1"
