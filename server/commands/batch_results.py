"""The results of `srm batch`: one file or two, whatever their format, and what earlier runs left
there. Refuses what is another job's.
"""

from __future__ import annotations

import asyncio
import zlib

import msgspec

from srm.engine.config import EngineConfig
from srm.errors import ConfigError
from srm.server.batch.lines import LineResult, RawLine, decode_kept, record_id
from srm.server.batch.part_file import PartFile
from srm.server.batch.result_files import ResultCounts, ResultFiles
from srm.server.commands import batch_input
from srm.server.commands.batch_config import BatchConfig
from srm.server.commands.batch_output import beginning
from srm.server.model_identity import digest, model_parts
from srm.server.text.tokenizer_files import chat_template

PARTS = "input, model, served_model_name, dtype, chat template or seed"
"""The parts that a job's name is made from, for messages."""
_REMEMBERED = 10_000
"""Most lines of earlier runs whose custom_ids are compared with the input's."""


def job_name(config: BatchConfig, engine: EngineConfig, first: bytes) -> str:
    """Return a name that is the same whenever the same results are made: each line of an output
    has it, so no file beside it says whose it is. It is made from the input's first line, the
    model, and what else a result depends on. All shards have one name; a folder's own name is not
    in it, so that the model may move."""
    parts = [
        *(first, str(config.seed).encode(), engine.compute_dtype.encode()),
        *model_parts(engine.model),
        (chat_template(engine.model, config.chat_template) or "").encode(),
    ]
    if config.served_model_name not in ("", engine.model.resolve().name):
        parts.append(config.served_model_name.encode())
    return f"batch_{digest(parts)}"


class _Reason(msgspec.Struct):
    message: str


class _Body(msgspec.Struct):
    error: _Reason


class _Response(msgspec.Struct):
    body: _Body


class _Failed(msgspec.Struct):
    """The fields of a record that say why its line failed."""

    response: _Response | None
    error: _Reason | None


class BatchResults(ResultFiles):
    """Results in `output`; those of lines that failed there too, or in `errors`."""

    def __init__(
        self,
        config: BatchConfig,
        job: str,
        output: PartFile,
        errors: PartFile | None,
        fsync_s: float,
    ) -> None:
        self._config = config
        super().__init__(output, errors or output, fsync_s, job)
        self._is_one = errors is None
        self._names: dict[int, int] = {}  # of some lines that are done: a checksum of custom_id
        self._last_done = 0
        self._first_failed: tuple[int, bytes] | None = None
        self._num_earlier = 0
        self.num_put = 0
        """Lines that have ended in this run."""
        self.num_tokens = 0
        """Tokens sampled for them."""

    def recover(self) -> None:
        """Read what earlier runs have written and cut off a broken end. Raises ConfigError for what
        is not of this job, and leaves it as it is."""
        for part in [self.output] if self._is_one else [self.output, self.errors]:
            if part.num_bytes:
                self._check_beginning(beginning(part.path))
            part.recover(self._remember)
        self._num_earlier = self.counts.completed + self.counts.failed

    @property
    def num_ended(self) -> int:
        """Lines that have ended, in earlier runs too, whether they are on the disk or not."""
        return self._num_earlier + self.num_put

    @property
    def first_fault(self) -> str:
        """Which line of those that failed is the first, and why."""
        assert self._first_failed is not None
        number, record = self._first_failed
        failed = msgspec.json.decode(record, type=_Failed)
        reason = failed.error or (failed.response and failed.response.body.error)
        return f"line {number} failed: {reason.message if reason else ''}"

    def put(self, result: LineResult) -> None:
        super().put(result)
        if result.is_failed:
            self._note_failed(result.number, result.record)
        self.num_put += 1
        self.num_tokens += result.usage.completion_tokens

    async def flush(self) -> None:
        """Write once what was put, for a run that is being left. Raises OSError."""
        await asyncio.to_thread(self._sync)

    def close(self) -> None:
        """Close the files; what has not been written is lost."""
        self.output.close()
        if not self._is_one:
            self.errors.close()

    def check_names(self, lines: list[RawLine]) -> None:
        """Raise ConfigError if lines that are done have other custom_ids in the input."""
        for number, raw in lines:
            expected = self._names.pop(number, None)
            if expected is not None and _checksum(batch_input.custom_id(raw, number)) != expected:
                raise self._foreign(f"line {number} has another custom_id there")

    def check_end(self, last: int) -> None:
        """Raise ConfigError if a line is done that is behind the input's end."""
        if self._last_done > last:
            raise self._foreign(f"it has line {self._last_done}, the input ends at {last}")

    def _note_failed(self, number: int, record: bytes) -> None:
        self._first_failed = min(self._first_failed or (number, record), (number, record))

    def _check_beginning(self, data: bytes) -> None:
        expected = f'{{"id":"{record_id(self._job, 0)[:-1]}'.encode()
        size = min(len(expected), len(data))
        if data[:size] != expected[:size]:
            raise self._foreign(f"it begins with {data[:80].decode(errors='replace')!r}")

    def _remember(self, record: bytes) -> bool:
        recalled = decode_kept(record)
        if recalled is None:
            raise self._foreign(f"{record[:80].decode(errors='replace')!r} is no result")
        if recalled.id != record_id(self._job, recalled.number):
            raise self._foreign(f"{recalled.id} is no result of this one")
        if recalled.number in self.done:
            raise ConfigError(
                f"output = {self.output.path}: line {recalled.number} has two results; "
                "it cannot be gone on with"
            )
        self._config.check_shard(self.output.path, recalled.number)
        self.done.add(recalled.number)
        self._last_done = max(self._last_done, recalled.number)
        self.counts.add(ResultCounts(not recalled.is_failed, recalled.is_failed, recalled.usage))
        if recalled.is_failed:
            self._note_failed(recalled.number, record)
        if len(self._names) < _REMEMBERED and recalled.custom_id is not None:
            self._names[recalled.number] = _checksum(recalled.custom_id)
        return True

    def _foreign(self, why: str) -> ConfigError:
        return ConfigError(
            f"output = {self.output.path} is of another {PARTS}: {why}; it can be gone on with by "
            "the same command, of the same version, or another output be named"
        )


def _checksum(custom_id: str | None) -> int:
    return zlib.crc32((custom_id or "").encode())
