"""Input that is small as a file and large in memory: what is read of it at once is bounded."""

from __future__ import annotations

import random
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from srm.server.commands import compression
from srm.server.commands.batch_input import open_input
from srm.server.commands.compression import CODECS, DamagedArchive, decompressed

MIB = 1024 * 1024
LONGEST = MIB
"""Most bytes of a line."""


def compressed(suffix: str, piece: bytes, count: int) -> bytes:
    """One frame of so many of these pieces."""
    made: Any = (
        zlib.compressobj(9, zlib.DEFLATED, 31)
        if suffix == ".gz"
        else zstandard.ZstdCompressor().compressobj()
    )
    return b"".join([*(made.compress(piece) for _ in range(count)), made.flush()])


def peak_of(read: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        read()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("suffix", CODECS)
def test_a_small_compressed_file_does_not_fill_memory(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"in.jsonl{suffix}"
    path.write_bytes(compressed(suffix, bytes(MIB), 300))
    lines: list[tuple[int, bytes | None]] = []

    def read() -> None:
        for some in open_input(path, LONGEST).lines:
            lines.extend(some)

    assert peak_of(read) < 4 * compression.MOST_MADE
    assert lines == [(1, None)]  # too long


def test_rows_with_one_large_value_do_not_fill_memory(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "in.parquet"
    parquet.write_table(arrow.table({"prompt": ["a" * MIB] * 500}), path)
    assert path.stat().st_size < MIB // 8
    seen: list[int] = []

    def read() -> None:
        seen.append(sum(len(some) for some in open_input(path, 2 * MIB).lines))

    assert peak_of(read) < 192 * MIB
    assert seen == [500]


@pytest.mark.parametrize("suffix", CODECS)
def test_reads_frames_in_whatever_pieces(suffix: str, tmp_path: Path) -> None:
    rng, codec = random.Random(2), CODECS[suffix]
    frames = [rng.randbytes(rng.randrange(3_000)) * rng.randrange(1, 400) for _ in range(20)]
    packed = [codec.compress(frame) for frame in frames]
    data = b"".join(frame + codec.padding * rng.randrange(9) for frame in packed)
    for size in (1, 7, 1_000, len(data)):
        chunks = [data[i : i + size] for i in range(0, len(data), size)]
        result = list(decompressed(chunks, codec))
        assert b"".join(result) == b"".join(frames)
        assert max(map(len, result)) <= compression.CHUNK
    ends = [end for _, end in compression.find_frames([data], codec) if end is not None]
    assert len(ends) == len(frames)
    assert data[: ends[-1]].rstrip(codec.padding or b"x") == data.rstrip(codec.padding or b"x")
    path = tmp_path / "frames"
    path.write_bytes(b"".join(packed)[:-1])
    with pytest.raises(DamagedArchive, match="ends in the middle"):
        b"".join(decompressed([path.read_bytes()], codec))
    with path.open("rb") as file:
        assert compression.whole_size(file.fileno(), codec) == sum(map(len, packed[:-1]))
    some = bytearray()
    with pytest.raises(DamagedArchive):
        for piece in decompressed([codec.compress(b"a" * 100), b"no frame"], codec):
            some += piece
    assert some == b"a" * 100
