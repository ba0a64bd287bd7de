"""Snapshot files: what was written is read, and nothing else ever is."""

from __future__ import annotations

import multiprocessing
import os
import resource
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pytest

from srm.engine.messages import Request, SamplingParams
from srm.engine.process.snapshot import NAME, PREAMBLE, SECTIONS, SnapshotFile, Stamp
from srm.engine.process.snapshot_writer import PARTIAL, SnapshotWriter
from srm.engine.state.parked import Parked
from srm.engine.steps.batch import SlotStates
from srm.errors import SnapshotError

STAMP = Stamp(fingerprint="f00d", arithmetic="cpu float32", state_width=3, state_dtype="<f4")


class Record(NamedTuple):
    request: Request
    parked: Parked


def record(name: str, count: int, *, logprobs: bool = False) -> Record:
    """A request of 10 samples and what `count` of them have sampled, each another length."""
    rng, lengths = np.random.default_rng(count), range(1, count + 1)
    request = Request(
        id=name,
        prompt_token_ids=rng.integers(0, 9, 5, np.int32).tobytes(),
        params=SamplingParams(n=10, logit_bias={3: 1.0, 1: 2.0}),
        durable=True,
    )
    states = rng.random((count, 3), np.float32), rng.integers(0, 9, count, dtype=np.int32)
    parked = Parked(
        indices=np.sort(rng.permutation(10)[:count]),
        positions=4 + np.array(lengths, np.int32),
        states=SlotStates(*states),
        tokens=tuple(rng.integers(0, 9, length, np.int32).tobytes() for length in lengths),
        logprobs=tuple(rng.random(length * logprobs, np.float32).tobytes() for length in lengths),
    )
    return Record(request, parked)


CHUNKS = [
    [record("a", 3), record("b", 1, logprobs=True)],
    [record("c", 10)],
    [record("d", 2), record("e", 4, logprobs=True), record("f", 5)],
]


def write(folder: Path, chunks: list[list[Record]] = CHUNKS, stamp: Stamp = STAMP) -> Path:
    writer = SnapshotWriter(folder, stamp)
    for chunk in chunks:
        writer.add(chunk)
    assert writer.finish() == (folder / NAME).stat().st_size
    assert list(folder.iterdir()) == [folder / NAME]
    return folder / NAME


@contextmanager
def opened(path: Path) -> Iterator[SnapshotFile]:
    with closing(SnapshotFile(path, STAMP)) as result:
        yield result


def assert_same(result: Parked, expected: Parked) -> None:
    for name in ("indices", "positions"):
        np.testing.assert_array_equal(getattr(result, name), getattr(expected, name))
    np.testing.assert_array_equal(result.states.states, expected.states.states)
    np.testing.assert_array_equal(result.states.last_tokens, expected.states.last_tokens)
    assert (result.tokens, result.logprobs) == (expected.tokens, expected.logprobs)


def has(file: SnapshotFile, *records: Record) -> None:
    for request, parked in records:
        progress = file.progress(request)
        assert progress is not None
        assert_same(progress, parked)


def read_all(path: Path) -> None:
    """Everything, as CHUNKS has it; raises SnapshotError."""
    with opened(path) as result:
        has(result, *chain(*CHUNKS))


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """Also over what a killed engine left, and when a new one takes its place for new readers."""
    folder = tmp_path / "made" / "when needed"
    path = write(folder)
    (folder / PARTIAL).write_bytes(b"x" * 10_000)
    read_all(write(folder))
    with opened(path) as old:
        assert old.header.num_sequences == 25
        write(folder, [[record("x", 2)]])
        has(old, CHUNKS[1][0])
        with opened(path) as new:
            has(new, record("x", 2))
            assert new.progress(CHUNKS[1][0].request) is None


def test_a_request_costs_its_own_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once its chunk has been looked at."""
    read, real = 0, os.pread

    def pread(file: int, size: int, offset: int) -> bytes:
        nonlocal read
        data = real(file, size, offset)
        read += len(data)
        return data

    with opened(write(tmp_path)) as result:
        result.progress(CHUNKS[2][0].request)
        monkeypatch.setattr(os, "pread", pread)
        for request, parked in CHUNKS[2]:
            read = 0
            result.progress(request)
            sampled = sum(map(len, (*parked.tokens, *parked.logprobs)))
            assert read == parked.states.states.nbytes + sampled


def test_another_request_of_the_same_id_gets_nothing(tmp_path: Path) -> None:
    request, replace = CHUNKS[0][0].request, msgspec.structs.replace
    same = replace(request.params, logit_bias={1: 2.0, 3: 1.0})
    with opened(write(tmp_path)) as result:
        assert result.progress(replace(request, params=same, priority=3)) is not None
        for other in (
            replace(request, id="z"),
            replace(request, params=replace(request.params, seed=1)),
            replace(request, prompt_token_ids=b"\1\0\0\0"),
        ):
            assert result.progress(other) is None


def test_of_several_records_of_a_request_the_later_ones_count(tmp_path: Path) -> None:
    request, all_of_them = record("c", 10)
    nothing = SlotStates(np.zeros((5, 3), np.float32), np.zeros(5, np.int32))
    before = Parked(
        np.arange(2, 7), np.zeros(5, np.int32), nothing, tokens=(b"",) * 5, logprobs=(b"",) * 5
    )
    odd, even = (all_of_them.only(np.arange(first, 10, 2)) for first in (1, 0))
    chunks = [[Record(request, before), Record(request, odd)], [Record(request, even)]]
    with opened(write(tmp_path, chunks)) as result:
        has(result, Record(request, all_of_them))


def test_another_model_or_arithmetic_or_format_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path)
    others = {"fingerprint": "beef", "arithmetic": "gpu", "state_width": 4, "state_dtype": "<f8"}
    for field, value in others.items():
        message = f"{path}: {field} is {getattr(STAMP, field)}, expected {value}$"
        with pytest.raises(SnapshotError, match=message):
            SnapshotFile(path, msgspec.structs.replace(STAMP, **{field: value}))
    monkeypatch.setattr("srm.engine.process.snapshot_writer.FORMAT_VERSION", 2)
    write(tmp_path)
    with pytest.raises(SnapshotError, match="format_version is 2, expected 1"):
        SnapshotFile(path, STAMP)


def test_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path)
    whole = path.read_bytes()
    fields = set()
    for at in (*range(PREAMBLE.size), *range(PREAMBLE.size, len(whole), 5)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
        with pytest.raises(
            SnapshotError, match=r"durable\.snapshot: .* is .*, expected "
        ) as raises:
            read_all(path)
        fields.add(raises.value.message.split(": ", 1)[1].split(" is ")[0])
    checksums = {f"checksum of {name} in chunk {at}" for name in SECTIONS for at in range(3)}
    checksums.remove("checksum of logprobs in chunk 1")  # it has none
    assert fields == {"magic", "preamble", "header", *checksums}


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path)
    whole = path.read_bytes()
    for size in (
        *range(PREAMBLE.size + 9),
        *range(PREAMBLE.size + 9, len(whole), 7),
        len(whole) + 1,
    ):
        path.write_bytes((whole + b"\0")[:size])
        reason = "size in bytes" if size >= PREAMBLE.size else "bytes from 0 on"
        with pytest.raises(SnapshotError, match=rf"{reason} is {size}, expected"):
            SnapshotFile(path, STAMP)
    path.write_bytes(whole)
    with opened(path) as result, pytest.raises(SnapshotError, match="bytes from"):
        os.truncate(path, 100)  # while it is open
        result.progress(CHUNKS[2][0].request)


def test_what_is_given_up_leaves_the_old_one(tmp_path: Path) -> None:
    path = write(tmp_path)
    writer = SnapshotWriter(tmp_path, STAMP)
    writer.add([record("x", 2)])
    with pytest.raises(SnapshotError, match=r"partial: another engine is writing it"):
        SnapshotWriter(tmp_path, STAMP)
    writer.discard()
    assert list(tmp_path.iterdir()) == [tmp_path / NAME]
    read_all(path)
    with pytest.raises(SnapshotError, match=r"durable\.snapshot\.partial: cannot be written"):
        SnapshotWriter(path, STAMP)  # a file is no folder


def _write_with_little_room(folder: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, 1_000))
    writer = SnapshotWriter(folder, STAMP)
    try:
        for chunk in CHUNKS * 20:
            writer.add(chunk)
        writer.finish()
    except SnapshotError as error:
        assert error.message == f"{folder / PARTIAL}: cannot be written: File too large"
        writer.discard()
        os._exit(7)


def test_a_full_disk_leaves_the_old_one(tmp_path: Path) -> None:
    path = write(tmp_path)
    process = multiprocessing.get_context("spawn").Process(
        target=_write_with_little_room, args=(tmp_path,)
    )
    process.start()
    process.join(30)
    assert process.exitcode == 7
    assert list(tmp_path.iterdir()) == [tmp_path / NAME]
    read_all(path)
