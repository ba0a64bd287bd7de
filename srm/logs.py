"""How our processes log: lines for a person, or a JSON object each. A message that has parts worth
finding again gives them as `extra={"fields": {...}}`.

Whatever is logged may be a client's words. So a message is one line, and has nothing that a
terminal obeys: what could end the line or move the cursor is escaped here, once, and a traceback's
lines are indented, so that none of them looks like an entry.
"""

from __future__ import annotations

import faulthandler
import io
import logging
import os
import re
import select
import signal
import sys
import time
from typing import Any, Literal

import msgspec

from srm.errors import cut

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
PROCESS_NAME = "LOG_PROCESS_NAME"
"""Environment variable: what lines call the process, where several write to one log."""

PATIENCE_S = 1.0
"""Seconds that whoever reads the log may leave a full pipe as it is, once, before lines are lost:
whoever logs does not serve meanwhile."""

_STANDARD_ERROR = 2
MAX_LINE = 10_000
"""Most characters of a message, and of each line of a traceback."""
_encode = msgspec.json.Encoder(enc_hook=str).encode
_ENDS_OR_MOVES = (
    "\x00-\x1f\x7f-\x9f"  # control characters: newline, escape, and the C1 that terminals obey too
    "\u2028\u2029"  # ends of lines to `str.splitlines` and browsers
    "\u200e\u200f\u202a-\u202e\u2066-\u2069"  # what follows is shown in another order
    "\ud800-\udfff"  # no UTF-8
)
_UNSAFE = re.compile(f"[{_ENDS_OR_MOVES}]")
_UNSAFE_LINES = re.compile(f"(?!\n)[{_ENDS_OR_MOVES}]")


def escaped(text: str) -> str:
    """A text as one line without anything that a terminal obeys: a newline reads `\\n`."""
    return _UNSAFE.sub(_escape, text)


def printable(text: str) -> str:
    """As `escaped`, of each line of a text: for what is printed and is no line of a log."""
    return _UNSAFE_LINES.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


def configure(level: LogLevel, form: LogFormat) -> None:
    """Log to standard error from now on; what was configured before is replaced. SIGUSR1 writes the
    stacks of all threads there, whatever they do."""
    faulthandler.register(signal.SIGUSR1, file=_STANDARD_ERROR)
    name = os.environ.get(PROCESS_NAME, "")
    handler = logging.StreamHandler(_PatientError())
    handler.setFormatter(JsonLines(name) if form == "json" else TextLines(name))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it says every request that it sends
    logging.captureWarnings(capture=True)


class _PatientError(io.TextIOBase):
    """Standard error. A full disk, or a pipe that nobody empties, costs lines, and holds up nobody
    for longer than PATIENCE_S; how many is said once lines are taken again."""

    def __init__(self) -> None:
        self._lost = 0
        self._is_torn = False
        """Whether the last line that was lost was written in part."""

    def write(self, text: str) -> int:
        try:
            file = sys.stderr.fileno()
        except io.UnsupportedOperation:  # it is no file
            return sys.stderr.write(text)
        note = (
            f"{self._lost} lines of the log were lost: they could not be written\n"
            if self._lost
            else ""
        )
        data = ("\n" * self._is_torn + note + text).encode(errors="backslashreplace")
        ready, written = select.poll(), 0
        ready.register(file, select.POLLOUT)
        while written < len(data):
            try:
                if ready.poll(0 if self._lost else PATIENCE_S * 1000):
                    # A pipe that is ready takes so much without waiting for its reader.
                    written += os.write(file, data[written : written + select.PIPE_BUF])
                    continue
            except OSError:  # its reader is gone, or its disk full
                pass
            self._lost += 1
            self._is_torn |= written > 0
            return 0
        self._lost, self._is_torn = 0, False
        return len(text)


def configure_command() -> None:
    """Log messages alone to standard error, for who has typed a command, unless that is configured
    already."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TextLines(is_bare=True))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


class TextLines(logging.Formatter):
    """`2026-01-31 12:00:00,000 INFO [api 0] server.http.request_middleware: message name=value`."""

    def __init__(self, process_name: str = "", is_bare: bool = False) -> None:
        """`is_bare`: a line is the message alone."""
        who = f"[{process_name}] ".replace("%", "%%") if process_name else ""
        before = "" if is_bare else f"%(asctime)s %(levelname)s {who}%(name)s: "
        super().__init__(f"{before}%(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # the library's name
        parts = (f" {name}={value}" for name, value in _fields(record).items())
        return escaped(cut(super().formatMessage(record) + "".join(parts), MAX_LINE))

    def formatException(self, ei: Any) -> str:  # the library's names
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:  # the library's name
        return _indented(super().formatStack(stack_info))


def _indented(traceback: str) -> str:
    return "\n".join(f"  {escaped(cut(line, MAX_LINE))}" for line in traceback.split("\n"))


class JsonLines(logging.Formatter):
    """One object a line: time in UTC, level, logger, message, process, and the message's fields."""

    def __init__(self, process_name: str = "") -> None:
        super().__init__()
        self._name = {"process_name": process_name} if process_name else {}

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{clock}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": cut(record.getMessage(), MAX_LINE),
            "process": record.process,
            **self._name,
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        try:
            data = _encode(line).decode()
        except UnicodeEncodeError:  # half a character, as in a file's name that is no UTF-8
            data = _encode({name: escaped(str(value)) for name, value in line.items()}).decode()
        return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", data)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return getattr(record, "fields", {})
