"""Part files: whole lines whatever happens, and nothing lost while the disk takes nothing."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from srm.server.batch.part_file import PartFile


def written(path: Path, *lines: bytes) -> PartFile:
    file = PartFile(path)
    for line in lines:
        file.put(line)
    file.sync()
    return file


def recovered(path: Path, is_good: bytes = b"") -> tuple[list[bytes], int]:
    """The lines that a new PartFile finds, which begin with `is_good`, and the bytes it cut."""
    results: list[bytes] = []

    def accepts(line: bytes) -> bool:
        if not line.startswith(is_good):
            return False
        results.append(line)
        return True

    file = PartFile(path)
    cut = file.recover(accepts)
    file.close()
    return results, cut


@pytest.mark.parametrize(
    ("tail", "cut"),
    [(b"", 0), (b'{"half', 6), (b"\0\0\0\nline 3\n", 11), (b"garbage\n", 8), (b"\n", 1)],
)
def test_a_broken_end_is_cut_off(tmp_path: Path, tail: bytes, cut: int) -> None:
    path = tmp_path / "part"
    path.write_bytes(b"line 1\nline 2\n" + tail)
    assert recovered(path, b"line") == ([b"line 1", b"line 2"], cut)
    assert path.read_bytes() == b"line 1\nline 2\n"


def test_long_lines_over_several_chunks(tmp_path: Path) -> None:
    lines = [b"a" * 1_500_000, b"b", b"c" * 3_000_000]
    file = written(tmp_path / "part", *lines)
    file.put(b"lost")  # at the end, since nothing syncs it
    assert file.num_pending_bytes == 5
    file.close()
    assert recovered(tmp_path / "part") == (lines, 0)


@pytest.mark.parametrize("room", [0, 3, 7, 12, 29])
def test_a_full_disk_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """It takes `room` bytes more, in pieces, and then none until it is emptied."""
    path = tmp_path / "part"
    file = written(path, b"line 1")
    real, left = os.pwrite, room

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        nonlocal left
        if not left:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = real(fd, bytes(data)[: min(left, 5)], offset)
        left -= count
        return count

    monkeypatch.setattr(os, "pwrite", pwrite)
    lines = [b"line %d" % number for number in range(2, 7)]
    for line in lines:
        file.put(line)
    with pytest.raises(OSError, match="No space"):
        file.sync()
    assert path.read_bytes().endswith(b"\n")
    assert file.num_pending_bytes == 35
    file.put(b"line 7")
    with pytest.raises(OSError, match="No space"):
        file.sync()
    left = 1000
    file.sync()
    assert file.num_pending_bytes == 0
    assert path.read_bytes().splitlines() == [b"line 1", *lines, b"line 7"]


def test_a_failed_fsync_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "part"
    file = written(path, b"line 1")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", Mock(side_effect=OSError(errno.EIO, "I/O")))
        file.put(b"line 2")
        with pytest.raises(OSError, match="I/O"):
            file.sync()
    os.truncate(path, 7)  # the kernel has dropped what it could not write
    file.sync()
    assert path.read_bytes() == b"line 1\nline 2\n"
