"""One file in memory for the metrics of all processes of a server, a region of it for each.

No disk or folder is behind it, and its size never changes: nobody else's doing makes a write fail.
A restarted process goes on from the counts of the one before it, so there is nothing to merge or to
remove; its gauges begin anew. The library's own way is a file for each process in a folder: where
that disk is full, a write is a SIGBUS.
"""

from __future__ import annotations

import functools
import logging
import mmap
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Annotated, Literal, NamedTuple

import msgspec
from prometheus_client import values

from srm.errors import UNDECODABLE, ConfigError

log = logging.getLogger(__name__)

VARIABLE = "METRICS_MEMORY"
"""Environment variable: the region of a process, as JSON."""
COUNTS_BYTES = 15 * 2**20
"""Room for the counters and histograms of a process; no label has values of a caller's choice, and
pages that nobody has written take no memory."""
GAUGES_BYTES = 2**20
_REGION_BYTES = COUNTS_BYTES + GAUGES_BYTES
STARTING_SINCE, COMPILING = "srm_engine_starting_since_seconds", "srm_engine_compiling"
"""Gauges by which API processes see what an engine does that does not answer yet."""
COMPILES = "compiling the graph (once per model and machine, usually 30 to 240 s)"
"""Text of `/ready` and of 503 replies while the gauge `COMPILING` is set."""
FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
COUNTS = tuple(digit * 10**power for power in range(7) for digit in (1, 2, 5))
"""Bounds of histograms that engine and API processes have."""
_UNIT = 8  # bytes of a number: all places are whole ones
_SIZES = struct.Struct("<q")


Kind = Literal["counter", "gauge", "histogram", "summary"]
_Described = tuple[Kind, str, str, Sequence[str], Sequence[str], str]
"""Of a value: its kind, family and name, the names and values of its labels, and its help text."""
Name = Annotated[str, msgspec.Meta(pattern="^[a-zA-Z_:][a-zA-Z0-9_:]*$")]


class Key(msgspec.Struct, frozen=True, array_like=True):
    """What a value is one of. `labels` are sorted."""

    kind: Kind
    mode: str
    """How a gauge's values of several processes are made one."""
    family: Name
    name: Name
    labels: tuple[tuple[Name, str], ...]
    meaning: str

    def __post_init__(self) -> None:
        for name, value in self.labels:
            if name == "le":
                float(value)  # or it is no bucket's bound


class Read(NamedTuple):
    """A value of one process."""

    key: Key
    value: float
    timestamp: float


class Region(msgspec.Struct, frozen=True):
    """The part of the memory that one process after another has."""

    fd: int
    number: int
    labels: tuple[str, ...]
    """What samples of each region are called by, by number; empty: nothing."""

    @property
    def environment(self) -> dict[str, str]:
        """With this and `fd`, a process joins the memory."""
        return {VARIABLE: msgspec.json.encode(self).decode()}

    def forget_gauges(self) -> None:
        """Call this when its process has ended: what it held is not so any more."""
        os.pwrite(self.fd, _SIZES.pack(0), self.number * _REGION_BYTES + COUNTS_BYTES)

    def read(self) -> Iterator[tuple[str, list[Read]]]:
        """Yield the label and the values of each region; one that is damaged is left out."""
        for number, label in enumerate(self.labels):
            start = number * _REGION_BYTES
            try:
                reads = [
                    *self._read_table(start, COUNTS_BYTES),
                    *self._read_table(start + COUNTS_BYTES, GAUGES_BYTES),
                ]
            except UNDECODABLE as error:
                log.warning("metrics of region %d are damaged and left out: %s", number, error)
            else:
                yield label, reads

    def gauge(self, name: str, label: str) -> tuple[float, float]:
        """Return the largest value of a gauge in the regions of a label, and when it was set, in
        Unix time; zeros where it is not."""
        readings = [(0.0, 0.0)]
        for number, own in enumerate(self.labels):
            if own == label:
                with suppress(*UNDECODABLE):
                    gauges = self._read_table(number * _REGION_BYTES + COUNTS_BYTES, GAUGES_BYTES)
                    readings += [entry[1:] for entry in gauges if entry.key.name == name]
        return max(readings)

    def _read_table(self, place: int, size: int) -> Iterator[Read]:
        used = min(*_SIZES.unpack(os.pread(self.fd, _SIZES.size, place)), size)
        for entry, _ in _entries(os.pread(self.fd, max(used, 0), place)):
            yield entry


def create(labels: Sequence[str]) -> list[Region]:
    """Make the memory, with a region for each label. Raises ConfigError if there can be none."""
    try:
        fd = os.memfd_create("srm-metrics")
        os.ftruncate(fd, len(labels) * _REGION_BYTES)
    except OSError as error:
        size = len(labels) * _REGION_BYTES
        raise ConfigError(f"metrics need a file in memory of {size} bytes: {error}") from None
    return [Region(fd, number, tuple(labels)) for number in range(len(labels))]


def _entries(data: bytes) -> Iterator[tuple[Read, int]]:
    """Yield what a table holds, with the place of each value. Raises ValueError for damage."""
    if len(data) % _UNIT:
        raise ValueError(f"it has a length of {len(data)} bytes")
    place = _UNIT
    while place < len(data):
        (size,) = _SIZES.unpack_from(data, place)
        end = place + _UNIT + _padded(size)
        if size <= 0 or end + 2 * _UNIT > len(data):
            raise ValueError(f"the entry at byte {place} has a length of {size}")
        key = _decode(data[place + _UNIT : place + _UNIT + size])
        yield Read(key, *struct.unpack_from("=dd", data, end)), end
        place = end + 2 * _UNIT


@functools.cache
def _decode(key: bytes) -> Key:
    return msgspec.json.decode(key, type=Key)


def _padded(size: int) -> int:
    return -(-size // _UNIT) * _UNIT


class _Table:
    """Counts or gauges of this process."""

    def __init__(self, memory: memoryview, keeps: bool) -> None:
        """Go on from what is there if `keeps`, else from nothing."""
        self._memory = memory
        self._numbers = memory.cast("d")
        self._places: dict[Key, int] = {}
        self._used = _UNIT
        (used,) = _SIZES.unpack_from(memory)
        self.is_new = not used
        """Whether no process had it before."""
        if keeps and used:
            try:
                data = bytes(memory[: max(used, _UNIT)])
                self._places = {entry.key: place for entry, place in _entries(data)}
                self._used = len(data)
            except UNDECODABLE as error:
                log.warning("metrics of the process before are damaged, and begin anew: %s", error)
        _SIZES.pack_into(memory, 0, self._used)

    def place(self, key: Key) -> tuple[memoryview[float], int]:
        """Return where the value of this key is, as numbers and an index: its time is behind it."""
        if key not in self._places:
            encoded = msgspec.json.encode(key)
            start, place = self._used, self._used + _UNIT + _padded(len(encoded))
            if place + 2 * _UNIT > len(self._memory):
                log.warning("there is no room for more metrics: %s is not shown", key.name)
                return memoryview(bytearray(2 * _UNIT)).cast("d"), 0
            _SIZES.pack_into(self._memory, start, len(encoded))
            self._memory[start + _UNIT : start + _UNIT + len(encoded)] = encoded
            self._numbers[place // _UNIT] = self._numbers[place // _UNIT + 1] = 0.0
            self._places[key], self._used = place, place + 2 * _UNIT
            _SIZES.pack_into(self._memory, 0, self._used)  # last: whoever reads sees it whole
        return self._numbers, self._places[key] // _UNIT


class JoinedRegion:
    """What this process has of the memory."""

    def __init__(self, region: Region) -> None:
        self.region = region
        whole = memoryview(
            mmap.mmap(region.fd, _REGION_BYTES, offset=region.number * _REGION_BYTES)
        )
        self.counts = _Table(whole[:COUNTS_BYTES], keeps=True)
        self.gauges = _Table(whole[COUNTS_BYTES:], keeps=False)
        self.lock = threading.Lock()

    def new_value(
        self, *described: *_Described, multiprocess_mode: str = "", **_: object
    ) -> _Value:
        """Return the place of a value; called by the library, for each."""
        kind, family, name, label_names, label_values, meaning = described
        labels = tuple(sorted(zip(label_names, label_values, strict=True)))
        key = Key(kind, multiprocess_mode, family, name, labels, meaning)
        with self.lock:
            return _Value(self.lock, *(self.gauges if kind == "gauge" else self.counts).place(key))


class _Value:
    """A number in the memory; the methods are the library's."""

    def __init__(self, lock: threading.Lock, numbers: memoryview[float], index: int) -> None:
        self._lock, self._numbers, self._index = lock, numbers, index

    def inc(self, amount: float) -> None:
        with self._lock:
            self._numbers[self._index] += amount

    def set(self, value: float, timestamp: float | None = None) -> None:
        with self._lock:
            self._numbers[self._index + 1] = timestamp or 0.0
            self._numbers[self._index] = value

    def get(self) -> float:
        return float(self._numbers[self._index])

    def set_exemplar(self, exemplar: object) -> None:
        """There is no room for one."""

    def get_exemplar(self) -> None:
        return None


_regions: list[Region] = []
"""That of this process, if it has one."""


def join() -> bool:
    """Have all metrics that are declared from now on in the memory that the environment names.

    Without one they are this process's own. Processes that this one starts have none. Returns
    whether an earlier process counted there.
    """
    if not (given := os.environ.pop(VARIABLE, "")):
        return False
    try:
        joined = JoinedRegion(msgspec.json.decode(given, type=Region))
    except (OSError, *UNDECODABLE) as error:
        log.warning("%s = %s: metrics of this process are not shown: %s", VARIABLE, given, error)
    else:
        values.ValueClass = joined.new_value
        _regions.append(joined.region)
        return not joined.counts.is_new
    return False


def own_region() -> Region | None:
    """Return the region of this process, if it has one."""
    return _regions[0] if _regions else None
