"""The recording of a run: timestamps of requests and of received tokens, nothing derived.

Every time is in seconds since the start of the run, on the one monotonic clock that all processes
of a machine share. All measures are computed from this (`loadtest/analysis/measures.py`), so a
saved run can be reported again with another window or other objectives.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from srm.errors import UNDECODABLE, ConfigError
from srm.files import open_file
from srm.loadtest.scenario import Scenario, as_path

Times = NDArray[np.float64]
Counts = NDArray[np.int64]
Flags = NDArray[np.bool_]
Rows = NDArray[np.void]

ERRORS = (
    "none",
    "connect",  # no connection
    "timeout",  # none or not all of the reply within timeout_s
    "disconnected",  # the server ended the connection before the reply was whole
    "rejected",  # 429 or 503, and no retries left
    "client",  # another 4xx
    "server",  # another 5xx
    "protocol",  # what came is no HTTP, no event stream, no JSON, or says that it failed
    "cut",  # under way when the run ended
    "empty",  # the reply was whole and had no token
)
"""How requests end; a recording has the index into this."""

REQUEST = np.dtype(
    [
        ("index", np.int64),  # in the plan
        ("worker", np.int32),
        ("planned", np.float64),  # fixed before the run; in a closed loop, when its turn came
        ("sent", np.float64),  # its first bytes were given to the socket; NaN: never
        ("first_byte", np.float64),  # of the reply's body; NaN: none
        ("ended", np.float64),  # the reply was whole, or it failed
        ("error", np.int8),  # of ERRORS
        ("status", np.int16),  # of HTTP, the last one; 0: none
        ("retries", np.int16),  # how often it was sent again
        ("n", np.int32),  # samples asked for
        ("prompt_tokens", np.int32),  # as the client made them; -1: unknown
        ("max_tokens", np.int32),  # asked for, each sample
        ("output_tokens", np.int64),  # as the client counts them; -1: it cannot
        ("usage_prompt_tokens", np.int64),  # as the server says; -1: it does not
        ("usage_output_tokens", np.int64),
        ("usage_cached_tokens", np.int64),  # of the prompt, from the server's prefix cache
        ("queue_s", np.float64),  # how long it waited, as the server says; NaN: it does not
        ("num_bytes", np.int64),  # of the reply's body
    ]
)
"""One row per request, sorted by index."""

EVENT = np.dtype(
    [
        ("request", np.int64),  # its index
        ("choice", np.int32),  # the sample of it
        ("time", np.float64),  # when it was read off the socket
        ("tokens", np.int32),  # new ones; 1 where the event does not say
    ]
)
"""One row per part of a reply that brought tokens (of streams, each event), sorted by time."""

CLIENT = np.dtype(
    [
        ("worker", np.int32),
        ("time", np.float64),  # end of the interval
        ("cpu_s", np.float64),  # of this process in the interval
        ("lag_s", np.float64),  # how late its event loop was, at worst
        ("in_flight", np.int32),
    ]
)
"""How busy each client process was, about once a second."""

_ARRAYS = {"requests": REQUEST, "events": EVENT, "clients": CLIENT}


class RowBuffer:
    """Rows of one of these types, appended by the million: packed bytes, no object per row.

    Values come in the order of the type's fields.
    """

    def __init__(self, dtype: np.dtype[np.void]) -> None:
        codes = [dtype[name].char for name in dtype.names or ()]
        layout = struct.Struct("<" + "".join("q" if code == "l" else code for code in codes))
        assert layout.size == dtype.itemsize, "rows are packed, and so must the type be"
        self._dtype = dtype
        self._pack = layout.pack
        self._bytes = bytearray()

    def append(self, *values: Any) -> None:
        self._bytes += self._pack(*values)

    def __len__(self) -> int:
        return len(self._bytes) // self._dtype.itemsize

    def to_bytes(self) -> bytes:
        return bytes(self._bytes)

    def since(self, count: int) -> Rows:
        """Return a copy of the rows after the first `count`."""
        return np.frombuffer(bytes(self._bytes[count * self._dtype.itemsize :]), self._dtype)

    def array(self) -> Rows:
        """Return a copy of all rows."""
        return np.frombuffer(self.to_bytes(), self._dtype).copy()


class MetricSample(msgspec.Struct):
    """The server's /metrics at one time, as far as they were read: sums over labels, by name."""

    time: float
    values: dict[str, float]


class About(msgspec.Struct):
    """Conditions under which a run was made."""

    scenario: Scenario
    command: str
    started_unix: float
    """Unix time at the zero of the run's clock."""
    seconds: float
    """Seconds until the last request ended."""
    stopped_by: str
    """`duration`, `requests`, `trace` or `interrupt`."""
    machine: str
    versions: dict[str, str]
    """Versions of the harness and its packages, and of the server if it says."""
    server_metrics: list[MetricSample]
    reasons: dict[str, str] = {}
    """By kind of error: what the first such request was answered, or why it failed."""


class Recording(msgspec.Struct, eq=False):
    """The recording of a whole run."""

    about: About
    requests: Rows
    """[requests] of REQUEST."""
    events: Rows
    """[events] of EVENT."""
    clients: Rows
    """[intervals] of CLIENT."""

    def save(self, folder: Path) -> None:
        """Write `recording.npz` and `recording.json` into the folder, made if need be."""
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / "recording.npz.part"
        with part.open("wb") as file:
            np.savez_compressed(file, **{name: getattr(self, name) for name in _ARRAYS})
        part.replace(folder / "recording.npz")
        (folder / "recording.json").write_bytes(
            msgspec.json.format(msgspec.json.encode(self.about, enc_hook=os.fspath), indent=1)
        )


def load(folder: Path) -> Recording:
    """Load a recording. Raises ConfigError for a folder without a recording of this version."""
    try:
        with open_file(folder / "recording.json") as opened:
            about = msgspec.json.decode(opened.read(), type=About, dec_hook=as_path)
        with open_file(folder / "recording.npz") as opened, np.load(opened) as file:
            arrays: dict[str, Any] = {name: file[name] for name in _ARRAYS}
    except (OSError, *UNDECODABLE, KeyError) as error:
        raise ConfigError(f"cannot read the recording in {folder}: {error}") from None
    for name, dtype in _ARRAYS.items():
        if arrays[name].dtype != dtype:
            raise ConfigError(f"{folder / 'recording.npz'}: {name} are of another version")
    return Recording(about, **arrays)
