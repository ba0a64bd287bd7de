"""How our processes log: lines for a person, or a JSON object each. A message that has parts worth
finding again gives them as `extra={"fields": {...}}`."""

from __future__ import annotations

import faulthandler
import io
import logging
import os
import select
import signal
import sys
import time

import msgspec

from engine.config import LogFormat, LogLevel

PROCESS_NAME = "LOG_PROCESS_NAME"
"""Environment variable: what lines call the process, where several write to one log."""

PATIENCE_S = 1.0
"""Seconds that whoever reads the log may leave a full pipe as it is, once, before lines are lost:
whoever logs does not serve meanwhile."""

_STANDARD_ERROR = 2
_encode = msgspec.json.Encoder(enc_hook=str).encode


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


class TextLines(logging.Formatter):
    """`2026-01-31 12:00:00,000 INFO [api 0] server.http.request_middleware: message name=value`."""

    def __init__(self, process_name: str = "") -> None:
        who = f"[{process_name}] ".replace("%", "%%") if process_name else ""
        super().__init__(f"%(asctime)s %(levelname)s {who}%(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # the library's name
        parts = (f" {name}={value}" for name, value in _fields(record).items())
        return super().formatMessage(record) + "".join(parts)


class JsonLines(logging.Formatter):
    """One object a line: time in UTC, level, logger, message, process, and the message's fields."""

    def __init__(self, process_name: str = "") -> None:
        super().__init__()
        self._name = {"process_name": process_name} if process_name else {}

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{clock}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "process": record.process,
            **self._name,
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _encode(line).decode()


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return getattr(record, "fields", {})
