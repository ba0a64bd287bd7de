"""The journal of a run: its description, and a line for each reply, so that a killed run can be
resumed.

A line is a checksum and JSON. Each is on the disk before the next request of its problem is sent. A
last line that is damaged was being written, and is dropped; its samples are drawn again.
"""

from __future__ import annotations

import fcntl
import os
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from srm.errors import UNDECODABLE, ConfigError


class JournalEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of one request."""

    problem: int
    """Index of the problem, from 0."""
    part: int
    """Index of the request among those of its problem, from 0."""
    drawn: int
    """Number of samples that estimates use; samples after the last right one that was wanted are
    not counted."""
    right: int
    sampled: int
    """Number of samples whose tokens `completion_tokens` counts."""
    completion_tokens: int
    prompt_tokens: int
    texts_scored: int
    """Number of distinct texts that were scored."""
    session: int
    """Index of the session (start of the command) that it came in, from 0."""
    session_s: float
    """Seconds from the first request of that session to this reply."""
    is_enough: bool = False
    """Whether drawing ended with these samples, because `until` are right."""
    fingerprint: str | None = None
    """Fingerprint of the server's weights, if the reply has one."""
    texts: list[tuple[str, int, float]] = []
    """Text, count and reward of each distinct text; empty without `keep_texts`."""


class Journal:
    """The open journal of a run; closed by `with`."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        """Open the journal at `path`, or begin one; `about` describes the run as JSON.

        A run without an answer may go on with any settings. Raises ConfigError if it is a different
        run's, is damaged, another process is writing it, or the disk refuses it.
        """
        self.path = path
        self.answers: dict[tuple[int, int], JournalEntry] = {}
        """Answers by problem and part."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b")
        except OSError as error:
            raise ConfigError(f"output: {path}: {error.strerror}") from error
        try:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"output: another run is writing {path}") from None
            self._read(msgspec.json.decode(msgspec.json.encode(about)))
        except ConfigError:
            self.__exit__()
            raise

    @property
    def next_session(self) -> int:
        return max((answer.session for answer in self.answers.values()), default=-1) + 1

    def add(self, answer: JournalEntry) -> None:
        """Write an answer; when this returns, it is on the disk."""
        self._write(msgspec.json.encode(answer))
        self.answers[answer.problem, answer.part] = answer

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # of a line that the disk refused, which was said
            self._file.close()

    def _read(self, about: dict[str, Any]) -> None:
        self._file.seek(0)
        lines = self._file.read().splitlines(keepends=True)
        at = 0
        for number, line in enumerate(lines, 1):
            content = _checked(line)
            if content is None:
                if number < len(lines) or (number == 1 and line.endswith(b"\n")):
                    raise ConfigError(
                        f"output: {self.path}, line {number} is damaged: its checksum is another "
                        "one. Remove it and what is behind it, and the samples are drawn again"
                    )
                self._file.truncate(at)
                break
            at += len(line)
            if number == 1 < len(lines):
                self._compare(msgspec.json.decode(content), about)
            elif number > 1:
                answer = msgspec.json.decode(content, type=JournalEntry)
                self.answers[answer.problem, answer.part] = answer
        if not self.answers:
            self._file.truncate(0)
            self._write(msgspec.json.encode(about))

    def _compare(self, header: dict[str, Any], about: dict[str, Any]) -> None:
        for name in {**header, **about}:
            if header.get(name) != about.get(name):
                differing = (
                    f"{name} = {header.get(name)!r:.200}, this one has {about.get(name)!r:.200}"
                )
                if name == "problems":  # a digest, which says nothing to who reads it
                    differing = "other problems"
                raise ConfigError(
                    f"output: {self.path} is of a run with {differing}: choose another output"
                )

    def _write(self, content: bytes) -> None:
        try:
            self._file.write(b"%08x %b\n" % (zlib.crc32(content), content))
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise ConfigError(f"output: {self.path} cannot be written: {error.strerror}") from error


def _checked(line: bytes) -> bytes | None:
    """Return the JSON of a line; None if it is not as it was written."""
    checksum, _, content = line.removesuffix(b"\n").partition(b" ")
    try:
        is_whole = line.endswith(b"\n") and int(checksum, 16) == zlib.crc32(content)
    except UNDECODABLE:
        return None
    return content if is_whole else None
