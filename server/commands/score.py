"""`srm score`: how likely the texts of a file are, line by line, and how likely their completions.

Starts an engine process of its own, as `srm serve` does. A window of lines is in flight at a time,
so memory does not grow with the file; results come in the order of the lines. A line that cannot be
scored is answered with its error and does not stop the others.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from codecs import BOM_UTF8
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec

from srm.engine.client.client import EngineClient
from srm.errors import ConfigError, RequestError, SRMError
from srm.progress import Tell, show_progress
from srm.server.commands.score_lines import Failure, LineScore, failure, next_line, parse, score
from srm.server.commands.standard_output import BROKEN_PIPE, INTERRUPTED, leave_broken_pipe
from srm.server.supervise.embedded_engine import PRIVATE, command_settings, with_engine
from srm.server.text.text import Text
from srm.settings import Command
from srm.tasks import task_group

log = logging.getLogger(__name__)

_STANDARD = Path("-")
_WINDOW = 1_024
"""Most lines in flight."""
_Landed = tuple[int, LineScore | Failure]
"""The bytes of a line that has ended, and its result."""


class ScoreConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm score`, besides those of the engine."""

    input: Path = _STANDARD
    """File of JSON lines to score, named with or without the flag; -: standard input."""
    output: Path = _STANDARD
    """File for the results, a line for each line of the input; -o for short; -: standard output."""


@dataclass
class ScoreFile:
    """The lines of one file on their way to their results."""

    source: BinaryIO
    sink: BinaryIO
    size: int | None
    text: Text
    window: int
    num_bytes: int = 0
    num_tokens: int = 0
    num_failed: int = 0

    async def score(self, client: EngineClient) -> None:
        """Score every line; all results are written when this returns."""
        flying: deque[asyncio.Task[_Landed]] = deque()
        number = 0
        with show_progress("scoring", self.size) as tell:
            try:
                async with task_group() as group:
                    while line := await asyncio.to_thread(next_line, self.source):
                        number += 1
                        if number == 1:
                            line = line.removeprefix(BOM_UTF8)
                        if not line.strip():
                            self.num_bytes += len(line)
                            continue
                        if len(flying) >= self.window:
                            self._land(await flying.popleft(), tell)
                        flying.append(group.create_task(self._score_line(client, line, number)))
                    while flying:
                        self._land(await flying.popleft(), tell)
            finally:
                self.sink.flush()

    async def _score_line(self, client: EngineClient, line: bytes, number: int) -> _Landed:
        try:
            scoring = parse(line, number, self.text)
            return len(line), await score(client, scoring, number, self.text)
        except RequestError as error:
            return len(line), failure(line, number, error)

    def _land(self, landed: _Landed, tell: Tell) -> None:
        num_bytes, result = landed
        self.sink.write(msgspec.json.encode(result) + b"\n")
        if isinstance(result, Failure):
            self.num_failed += 1
        else:
            self.num_tokens += len(result.token_ids)
        self.num_bytes += num_bytes
        tell(self.num_bytes, f"{self.num_tokens:,} tokens")


def main(argv: list[str], engine_module: str = "srm.engine") -> int:
    """Score a file. Returns 1 if a line of it could not be scored; raises SRMError."""
    command = Command(
        "srm score",
        "Write the log-probabilities of given texts.",
        "srm score in.jsonl -o out.jsonl",
        "model input output",
        private=PRIVATE,
        positional="input",
        short={"output": "-o"},
        variables=None,
    )
    files, engine = command_settings(ScoreConfig, argv, command, is_quiet=False)
    if files.input == _STANDARD and (sys.stdin is None or sys.stdin.isatty()):
        raise ConfigError("input is missing: srm score FILE")
    if files.input != _STANDARD and files.output.exists() and files.output.samefile(files.input):
        raise ConfigError(f"output = {files.output} is the input, and would be lost")
    text = Text(engine.model)
    try:
        with ExitStack() as stack:
            source = _open(stack, "input", files.input, "rb")
            file = ScoreFile(
                source=source,
                sink=_open(stack, "output", files.output, "wb"),
                size=files.input.stat().st_size if files.input != _STANDARD else None,
                text=text,
                window=min(_WINDOW, engine.max_waiting),
            )
            try:
                asyncio.run(with_engine(engine, engine_module, file.score))
            except KeyboardInterrupt:
                return INTERRUPTED
    except BrokenPipeError:
        leave_broken_pipe()
        return BROKEN_PIPE
    except OSError as error:  # a full disk, which closing the file finds again
        raise SRMError(f"input or output: {error.strerror or error}") from None
    if file.num_failed:
        log.error("srm score: %d lines could not be scored", file.num_failed)
    return 1 if file.num_failed else 0


def _open(stack: ExitStack, name: str, path: Path, mode: Literal["rb", "wb"]) -> BinaryIO:
    if path == _STANDARD:
        return sys.stdin.buffer if name == "input" else sys.stdout.buffer
    try:
        return stack.enter_context(path.open(mode))
    except OSError as error:
        raise ConfigError(f"{name} = {path}: {error.strerror}") from None
