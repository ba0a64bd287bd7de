"""Gives every Python that starts with this folder on its path a wall clock that can be turned.

`time.time()` and `time.time_ns()` are off by the seconds in the file that SRM_ATTACK_CLOCK names;
monotonic clocks, and the times of files, are left alone.
"""

import mmap
import os
import struct
import time
from pathlib import Path

if "SRM_ATTACK_CLOCK" in os.environ:
    with Path(os.environ["SRM_ATTACK_CLOCK"]).open("rb") as _file:
        _offset = mmap.mmap(_file.fileno(), 8, access=mmap.ACCESS_READ)
    _time_ns = time.time_ns

    def time_ns() -> int:
        """Nanoseconds since 1970, and what the file says."""
        ahead_s: int = struct.unpack("<q", _offset[:8])[0]
        return _time_ns() + ahead_s * 10**9

    time.time_ns = time_ns
    time.time = lambda: time_ns() / 1e9
