"""`srm batch`: answers a file of requests without a server, by the code that answers batch jobs.

Starts an engine process of its own, and restarts it if it crashes. The output holds whole lines at
any moment and is also the journal: `--resume` goes on behind them. Lines that were under way go on
at their tokens, which are in a snapshot beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from srm.engine.config import EngineConfig
from srm.errors import ConfigError, EngineUnavailable, SRMError
from srm.files import open_file
from srm.progress import count_seconds
from srm.server.batch.lines import RawLine, record_id
from srm.server.batch.part_file import PartFile
from srm.server.batch.result_files import LineSet
from srm.server.commands import batch_parquet
from srm.server.commands.batch_config import BatchConfig
from srm.server.commands.batch_input import STANDARD, Input, check_custom_ids, open_input, peek
from srm.server.commands.batch_output import StreamPart, open_part
from srm.server.commands.batch_parquet import is_parquet
from srm.server.commands.batch_results import PARTS, BatchResults, job_name
from srm.server.commands.batch_run import BatchRun, most_slots
from srm.server.commands.object_storage import Source, StoredObject, located
from srm.server.commands.standard_output import BROKEN_PIPE, INTERRUPTED, leave_broken_pipe
from srm.server.model_identity import digest
from srm.server.supervise.embedded_engine import PRIVATE, command_settings, with_engine
from srm.server.text.text import Text
from srm.settings import Command

log = logging.getLogger(__name__)

_FSYNC_S = 1.0
"""Seconds results may wait to be written together."""
_FINISHED = {0, 1}
"""Exit codes of a run that has a result of every line."""


def main(argv: list[str], engine_module: str = "srm.engine") -> int:
    """Answer the lines of a file; returns the exit code. Raises SRMError."""
    private = PRIVATE - {"snapshot_interval_s", "snapshot_s"}
    given = Command(
        "srm batch",
        "Answer a file of prompts, whatever interrupts it.",
        'srm batch in.jsonl -o out.jsonl.zst   # a line: {"prompt": "…", "max_tokens": 64}',
        "model input output resume shard work_dir dtype device",
        private=private,
        positional="input",
        short={"output": "-o"},
        variables=None,
    )
    config, engine = command_settings(BatchConfig, argv, given)
    files = locate_files(config)
    check_files(files, config.resume)
    text = Text(engine.model)
    engine = _frugal(config, files.output, engine, text)
    source = open_input(files.input, config.max_body_bytes)
    first, lines = peek(source.lines)
    job = job_name(config, engine, first)
    _prepare_uploads(files, config.resume)
    again = shlex.join(["srm", "batch", *argv, *([] if config.resume else ["--resume"])])
    try:
        if config.resume and _is_finished(files.output):
            code = _look_through(config, files, job, lines)
        else:
            last = check_custom_ids(source, files.input)
            total = None if last is None else config.count(last)
            command = _Command(config, files, engine, text, source, lines, job, again, total)
            code = asyncio.run(command.run(engine_module))
        if code in _FINISHED:
            _upload(files)
        return code
    except KeyboardInterrupt:  # the second one, or during an upload
        return INTERRUPTED


@dataclass(frozen=True)
class _Files:
    """Files that are read and written. Results that are to become objects are kept in local files
    until they are complete."""

    input: Source
    output: Path
    errors: Path | None
    objects: dict[Path, StoredObject]
    """Objects that local files are uploaded to."""


@dataclass
class _Command:
    """One run of the command, from the engine's start to the last result."""

    config: BatchConfig
    files: _Files
    engine: EngineConfig
    text: Text
    source: Input
    lines: Iterator[list[RawLine]]
    job: str
    again: str
    """The command that goes on with what this one leaves."""
    total: int | None
    """Lines of the shard; None if the input can be read only once."""

    async def run(self, engine_module: str) -> int:
        """Run the command and return the exit code. Whatever ends it, all results so far are
        written."""
        loop = asyncio.get_running_loop()
        stopped: asyncio.Future[int] = loop.create_future()

        def stop(code: int) -> None:
            if not stopped.done():
                stopped.set_result(code)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop, INTERRUPTED)
        results = self._open(partial(loop.call_soon_threadsafe, stop, BROKEN_PIPE))
        run = BatchRun(
            self.config, self.engine, self.text, self.job, self.lines, results, self.total
        )
        task = asyncio.create_task(
            with_engine(self.engine, engine_module, run.answer, lambda: results.num_put)
        )
        try:
            waited: set[asyncio.Future[Any]] = {task, stopped}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
                return self._finish(results)
            return stopped.result()
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):  # the second one ends it at once
                loop.remove_signal_handler(number)
            is_stopped = not task.done() and stopped.done() and stopped.result() == INTERRUPTED
            if is_stopped:
                log.info("stopping: what is under way is written down; Ctrl-C again leaves at once")
            self.source.close()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self._close(results)
            if stopped.done() and stopped.result() == BROKEN_PIPE:
                leave_broken_pipe()
            error = None if task.cancelled() else task.exception()
            if is_stopped or (results.num_put and isinstance(error, EngineUnavailable)):
                self._say_how_to_go_on(results)

    def _say_how_to_go_on(self, results: BatchResults) -> None:
        output, of = self.files.output, "" if self.total is None else f" of {self.total:,}"
        message = f"{results.num_ended:,}{of} lines are written"
        if _is_stream(output):
            log.info("%s", message)
        else:
            log.info("%s to %s; to go on with the others:", message, output)
            log.info("  %s", self.again)

    def _open(self, on_broken: Callable[[], object]) -> BatchResults:
        files = self.files
        errors = _part(files.errors, on_broken) if files.errors else None
        output = _part(_journal(files.output), on_broken)
        results = BatchResults(self.config, self.job, output, errors, _FSYNC_S)
        try:
            with count_seconds(f"reading the results in {files.output}"):
                results.recover()
        except SRMError:
            results.close()
            raise
        return results

    def _finish(self, results: BatchResults) -> int:
        counts, output = results.counts, self.files.output
        _forget_snapshots(self.engine)
        if (journal := _journal(output)) != output:
            try:
                with open_file(journal) as records:
                    batch_parquet.write_results(records, output)
                journal.unlink()
            except OSError as error:
                raise SRMError(
                    f"output = {output}: {error.strerror or error}; all results are in {journal}, "
                    "and --resume tries again"
                ) from None
        log.info(
            "%s lines: %s answered, %s failed; %s tokens sampled",
            *(f"{counts.completed + counts.failed:,}", f"{counts.completed:,}"),
            *(f"{counts.failed:,}", f"{results.num_tokens:,}"),
        )
        if counts.failed:
            place = self.files.errors or output
            shown = "the output" if place == STANDARD else self.files.objects.get(place, place)
            log.info("%s; what failed is in %s", results.first_fault, shown)
        return 1 if counts.failed else 0

    async def _close(self, results: BatchResults) -> None:
        try:
            await results.flush()
        except OSError as error:
            log.error("some results cannot be written: %s; --resume makes them again", error)
        results.close()


def _frugal(config: BatchConfig, output: Path, engine: EngineConfig, text: Text) -> EngineConfig:
    """Limit slots to those that raise throughput, and put snapshots beside the output."""
    return msgspec.structs.replace(
        engine,
        max_slots=most_slots(engine, text),
        snapshot_dir="" if _is_stream(output) else str(output.absolute()) + ".snapshot",
        snapshot_interval_s=config.snapshot_interval_s,
    )


def _forget_snapshots(engine: EngineConfig) -> None:
    """Delete the snapshots: all lines have their results, so nothing goes on from them."""
    if engine.snapshot_dir:
        folder = Path(engine.snapshot_dir)
        with contextlib.suppress(OSError):  # there is none, or it is not ours alone
            for file in folder.glob("durable.snapshot*"):
                file.unlink()
            folder.rmdir()


def locate_files(config: BatchConfig) -> _Files:
    """Find out what settings name, and where results are collected. Raises ConfigError."""
    source, output, errors = (
        located(name, getattr(config, name)) for name in ("input", "output", "errors")
    )
    folder = Path(config.work_dir or "srm-batch")
    objects: dict[Path, StoredObject] = {}

    def local(place: Source) -> Path:
        if isinstance(place, Path):
            return place
        if str(place) == str(source):
            raise ConfigError(f"{place.field} = {place} is the input, and would be lost")
        path = folder / f"{digest([str(place).encode()])}-{place.name}"
        objects[path] = place
        return path

    files = _Files(source, local(output), local(errors) if config.errors else None, objects)
    if config.work_dir and not objects:
        raise ConfigError(
            f"work_dir needs output or errors that begin with s3:// or gs://, got {config.work_dir}"
        )
    return files


def _prepare_uploads(files: _Files, resume: bool) -> None:
    """Get what earlier runs have uploaded, if it is to be gone on with. Raises ConfigError."""
    for path, target in files.objects.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"work_dir = {path.parent}: {error.strerror}") from None
        try:
            is_there = target.exists()
            if is_there and not resume:
                raise ConfigError(
                    f"{target.field} = {target} is there already: --resume goes on with it, or "
                    "name another"
                )
            if is_there and not path.exists() and not _journal(path).exists():
                target.download(path)
        except OSError as error:
            raise ConfigError(f"{target.field} = {target}: {error}") from None


def _upload(files: _Files) -> None:
    """Make objects of the local files and delete these. Raises SRMError."""
    for path, target in files.objects.items():
        log.info("uploading %s to %s", path, target)
        try:
            target.upload(path)
        except OSError as error:
            raise SRMError(
                f"{target.field} = {target}: {error}; all results are in {path}, and --resume "
                "tries again"
            ) from None
    for path in files.objects:
        path.unlink()


def check_files(files: _Files, resume: bool) -> None:
    """Raise ConfigError for files that do not go together."""
    output, errors = files.output, files.errors
    if is_parquet(files.input) or is_parquet(output):
        batch_parquet.check_installed()
    if errors is not None and (errors == STANDARD or is_parquet(errors)):
        raise ConfigError(f"errors must be a file of lines, .gz or .zst at most; got {errors}")
    if resume and _is_stream(output):
        raise ConfigError(f"resume needs an output that is a file, got output = {output}")
    paths = {"input": files.input, "output": output, "errors": errors}
    seen: dict[Path, str] = {}
    for name, path in paths.items():
        if not isinstance(path, Path) or path == STANDARD:
            continue
        try:
            path.stat()
        except FileNotFoundError:
            pass
        except OSError as error:  # a name that is too long, links in a circle
            raise ConfigError(f"{name} = {path}: {error.strerror}") from None
        if _is_stream(path):
            if name == "output" and is_parquet(path):
                raise ConfigError(f"output = {path} is there, and is no file")
            continue
        other = seen.setdefault(path.resolve(), name)
        if other != name:
            raise ConfigError(f"{name} = {path} is the {other}, and would be lost")
        for file in {path, _journal(path)} if name != "input" else ():
            if file.exists() and file.stat().st_size and not resume:
                raise ConfigError(
                    f"{name} = {file} is there already: --resume goes on with it, or name another"
                )


def _is_stream(path: Path) -> bool:
    """Whether it can only be written from beginning to end."""
    return path == STANDARD or (path.exists() and not stat.S_ISREG(path.stat().st_mode))


def _journal(output: Path) -> Path:
    """Return the file in which results are collected: the output itself, if it has lines."""
    return output.with_name(f"{output.name}.part") if is_parquet(output) else output


def _part(path: Path, on_broken: Callable[[], object]) -> PartFile:
    if path == STANDARD:
        return StreamPart(sys.stdout.fileno(), on_broken)
    if path.is_dir():
        raise ConfigError(f"output = {path}: Is a directory")
    if _is_stream(path):
        return StreamPart(os.open(path, os.O_WRONLY | os.O_CLOEXEC), on_broken)
    return open_part(path)


def _is_finished(output: Path) -> bool:
    """Whether it is no journal, and was made from the whole of one."""
    return _journal(output) != output and output.exists() and not _journal(output).exists()


def _look_through(
    config: BatchConfig, files: _Files, job: str, lines: Iterator[list[RawLine]]
) -> int:
    """Check a finished Parquet file and return the exit code. Raises ConfigError if it is not this
    job's, or has not all of its lines but for those that are among the errors."""
    output, done, failed = files.output, LineSet(), 0
    if files.errors is not None:
        with contextlib.closing(
            BatchResults(config, job, open_part(files.errors), None, 0)
        ) as errors:
            errors.recover()
            done, failed = errors.done, errors.counts.failed
    count, start = failed, record_id(job, 0)[:-1]
    for name, is_failed in batch_parquet.read_ids(output):
        if not name.startswith(start):
            raise ConfigError(f"output = {output} is of another {PARTS}")
        number = int(name.removeprefix(start))
        config.check_shard(output, number)
        done.add(number)
        failed += is_failed
        count += 1
    for number, _ in chain.from_iterable(lines):
        if config.has(number) and number not in done:
            raise ConfigError(f"output = {output} is whole, and has no line {number}")
    log.info("%s is whole: %s lines, %s failed", output, f"{count:,}", f"{failed:,}")
    return 1 if failed else 0
