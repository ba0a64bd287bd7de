"""Damages a server from outside: a full disk, a turned clock, flipped bits."""

from __future__ import annotations

import errno
import os
import random
import struct
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

FILLER = "filler"


class Clock:
    """The wall clock of all processes that were started with `environment`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.write_bytes(struct.pack("<q", 0))
        folder = Path(__file__).parent / "clock"
        self.environment = {"SRM_ATTACK_CLOCK": str(path), "PYTHONPATH": str(folder)}

    def turn(self, seconds: int) -> None:
        """Let it be so far ahead of the true time, or behind."""
        with self._path.open("r+b") as file:
            file.write(struct.pack("<q", seconds))


class Disk:
    """A small file system in memory, of which nothing is left when it is closed. Needs root."""

    def __init__(self, folder: Path, mib: int) -> None:
        folder.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mib}m", "srm", folder], check=True)
        self.folder = folder

    def fill(self) -> None:
        """Leave no byte."""
        with (self.folder / FILLER).open("wb", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise

    def free(self) -> None:
        (self.folder / FILLER).unlink(missing_ok=True)

    def close(self) -> None:
        subprocess.run(["umount", "--lazy", self.folder], check=True)


def flipped(data: bytes, most: int = 100) -> Iterator[bytes]:
    """The content with one other bit each time: about so many, all eight places of a byte among
    them; or each bit, with 0."""
    step = max(1, 8 * len(data) // most) | 1 if most else 1
    for place in range(0, 8 * len(data), step):
        changed = bytearray(data)
        changed[place // 8] ^= 1 << place % 8
        yield bytes(changed)


def flip_bit(folder: Path, rng: random.Random) -> Path | None:
    """Change one bit of a file anywhere below the folder, and say which; None if there is none."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size]
    if not paths:
        return None
    kinds = sorted({path.suffix for path in paths})  # or the many of one kind would take all
    kind = rng.choice(kinds)
    path = rng.choice([path for path in paths if path.suffix == kind])
    with path.open("r+b") as file, suppress(OSError):
        at = rng.randrange(path.stat().st_size)
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << rng.randrange(8)]))
        os.fsync(file.fileno())
    return path
