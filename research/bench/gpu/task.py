"""The settings of a measurement of `deploy/gpu`, and the lines that it writes.

A measurement is `python -m research.bench.gpu.NAME TASK`, with a `Task` as JSON. It is a list of
attempts,
each with a key. An attempt that raises ends the process; when it is started again with the same
file, what was attempted is left out. So a size that fails, even one that leaves the GPU unusable,
costs no other size, and neither does one that never ends: its process ends at the attempt's limit.
A size at which the whole call broke off is tried once more.
"""

from __future__ import annotations

import faulthandler
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from deploy.gpu.lines import BROKE_OFF, open_lines, parse_lines
from srm.engine.config import Dtype, ModelConfig, ProductSetting


class Task(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A measurement of a random model; each uses those of the settings that it needs."""

    part: str
    """Name of the part in the lines."""
    lines: str
    """The file that lines are appended to."""
    device: Literal["cpu", "gpu"]
    cache_dir: str
    """Folder of compiled graphs."""
    dtype: Dtype = "bfloat16"
    product: ProductSetting = "auto"
    """Kernel that multiplies matrices on a GPU: the engine's setting of this name."""
    d_model: int = 1024
    num_layers: int = 8
    num_heads: int = 4
    n_ctx: int = 512
    vocab_size: int = 8192
    rows: tuple[int, ...] = ()
    """Rows of a product, of an op or of a step."""
    op_rows: tuple[int, ...] = ()
    """Rows of ops that are no products."""
    ops: tuple[str, ...] = ()
    """The ops to measure; empty: all."""
    slots: int = 0
    """Slots of the state pool; 0: as many as rows need."""
    servers: int = 1
    """Servers that share the device, each with an engine of its own."""
    products: tuple[tuple[int, int, int], ...] = ()
    """Matrix products [rows, inner] x [inner, columns] to measure the peak of."""
    forms: tuple[str, ...] = ()
    """Forms of the PyTorch recurrence to time: see `research.bench.model.recurrence_rate`."""
    gib: float = 4.0
    """Size of the timed copy, in GiB."""
    attempt_s: float = 20.0
    """Seconds after which an attempt ends its process, with the traceback of every thread."""
    only: str = ""
    """The key of the one attempt to make; empty: all."""
    seconds: float = 1.0
    """Least time of a repetition, in seconds."""
    repetitions: int = 3

    @property
    def model(self) -> ModelConfig:
        return ModelConfig(
            d_model=self.d_model,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            n_ctx=self.n_ctx,
            vocab_size=self.vocab_size,
        )


def read_task(argv: list[str]) -> Task:
    return msgspec.json.decode(argv[0], type=Task)


class Lines:
    """Appends JSON lines `{part, key, at, …}`, each on disk before the next is measured.

    An attempt has two: `"begun": true` and then its result.
    """

    def __init__(self, path: Path, part: str, limit_s: float = 0.0, only: str = "") -> None:
        self._file, self._part, self._limit_s, self._only = open_lines(path), part, limit_s, only
        mine = [line for line in read_lines(path) if line["part"] == part]
        begun = Counter(line["key"] for line in mine if line.get("begun"))
        broke_off = {line["key"] for line in mine if line.get("died") == BROKE_OFF}
        self._attempted = {key for key, times in begun.items() if times > 1 or key not in broke_off}

    @classmethod
    def from_task(cls, task: Task) -> Lines:
        return cls(Path(task.lines), task.part, task.attempt_s, task.only)

    def attempt(self, key: str, measure: Callable[[], dict[str, Any]], **known: Any) -> None:
        """Measure and write it and what is `known`, unless this was attempted before."""
        if key in self._attempted or self._only not in ("", key):
            return
        self.write(key, begun=True, **known)
        if self._limit_s:  # a thread of C's, which no call that waits for a GPU can stop
            faulthandler.dump_traceback_later(self._limit_s, exit=True)
        try:
            measured = measure()
        finally:
            faulthandler.cancel_dump_traceback_later()
        self.write(key, **known, **measured)

    def write(self, key: str, **facts: Any) -> None:
        line = {"part": self._part, "key": key, "at": time.time()} | facts
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a file that are whole."""
    return parse_lines(path.read_bytes())[0]
