"""`srm_constrain` against the oracle: random tables, rows with and without one, near their ends."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from srm.engine.device.linear import round_bfloat16
from srm.engine.steps.batch import I32, SAMPLING, U16, Records
from tests.kernels import oracle
from tests.kernels.harness import Ops, untouched, widened
from tests.kit.engines.numpy_runner import ints

MAX_CLASSES, UNREACHABLE = 8192, 65_535
SHAPES = [(vocab, 12) for vocab in (1, 2, 33, 256, 8191, 20_000)] + [(250, 300)]
"""Vocabularies, and decode rows: the last is more than a core's share of rows."""
OTHERS = 3
"""Rows of the logits that are no decode rows."""


class Rows(NamedTuple):
    """What the op is asked, but for the logits."""

    last_token: I32
    records: Records
    positions: I32
    slots: I32
    tables: U16


def draw(rng: np.random.Generator, vocab: int, decode: int = 12) -> Rows:
    """Rows in states of four tables, or of none, first rows and others; some can reach no end."""
    parts, places, sizes = [np.zeros(8, np.uint16)], [], []
    for most in (1, 2, 40, MAX_CLASSES):
        classes, states = int(rng.integers(most) + 1), int(rng.integers(2, 12))
        places.append(sum(map(len, parts)))
        sizes.append(states)
        distance = rng.choice([0, 1, 2, 5, UNREACHABLE - 1, UNREACHABLE], states)
        numbers = [[classes, states, *[0] * 6], rng.integers(classes, size=-(-vocab // 8) * 8)]
        numbers += [rng.integers(states, size=states * classes), distance]
        parts += [np.array(own, np.uint16) for own in numbers]
        parts.append(np.zeros(-sum(map(len, parts)) % 8, np.uint16))
    slots = rng.permutation(3 * decode)[:decode].astype(np.int32)
    records = np.zeros(3 * decode, SAMPLING)
    which = rng.integers(len(places), size=len(records))
    records["table"] = np.where(rng.random(len(records)) < 0.2, 0, np.array(places)[which])
    known = rng.integers(np.array(sizes)[which])
    records["state"] = np.where(rng.random(len(records)) < 0.5, known, ~known)
    positions = rng.integers(100, size=decode).astype(np.int32)
    records["last_position"][slots] = positions + rng.choice([0, 1, 3, 70_000], decode)
    last_token = rng.integers(vocab, size=len(records), dtype=np.int32)
    return Rows(last_token, records, positions, slots, np.concatenate(parts))


def run(
    ops: Ops,
    logits: npt.NDArray[np.generic],
    asked: Rows,
    name: str,
    *more: npt.NDArray[np.float32],
) -> None:
    """Changes the logits and the records."""
    records = ints(asked.records)
    ops.run(name, asked.last_token, records, logits, *asked[2:], *more)


def expect(
    logits: npt.NDArray[np.float64], asked: Rows
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """New logits, and new states of all slots."""
    new, states = logits.copy(), asked.records["state"].astype(np.int64)
    for row, (slot, position) in enumerate(zip(asked.slots, asked.positions, strict=True)):
        last = int(asked.last_token[slot])
        record = asked.records[slot]
        new[row], states[slot] = oracle.constrain(
            logits[row], record, last, int(position), asked.tables
        )
    return new, states


@pytest.mark.parametrize(("vocab", "decode"), SHAPES)
@pytest.mark.parametrize("seed", [0, 1])
def test_rows_are_the_oracles_and_do_not_depend_on_others(
    ops: Ops, vocab: int, decode: int, seed: int
) -> None:
    rng = np.random.default_rng([vocab, seed])
    asked = draw(rng, vocab, decode)
    before = rng.normal(0, 4, (decode + OTHERS, vocab)).astype(np.float32)
    expected, states = expect(before.astype(np.float64), asked)
    for part in (slice(None), slice(0), slice(3, 4)):
        some = asked._replace(
            records=asked.records.copy(), positions=asked.positions[part], slots=asked.slots[part]
        )
        logits = before[part].copy() if part != slice(None) else before.copy()
        run(ops, logits, some, "constrain")
        np.testing.assert_array_equal(logits, expected[part].astype(np.float32))
        changed = np.isin(np.arange(len(states)), some.slots)
        np.testing.assert_array_equal(
            some.records["state"], np.where(changed, states, asked.records["state"])
        )


def test_without_tables_nothing_is_read(ops: Ops) -> None:
    rng = np.random.default_rng(0)
    asked = draw(rng, 50)._replace(tables=np.zeros(1, np.uint16))
    before = rng.normal(0, 4, (15, 50)).astype(np.float32)
    logits, records = before.copy(), asked.records.copy()
    run(ops, logits, asked, "constrain")
    np.testing.assert_array_equal(logits, before)
    np.testing.assert_array_equal(asked.records, records)


def test_bfloat16_logits_are_kept_or_banned(ops: Ops) -> None:
    rng = np.random.default_rng(1)
    asked = draw(rng, 333)
    bits = round_bfloat16(rng.normal(0, 4, (15, 333)).astype(np.float32))
    expected, _ = expect(widened(bits).astype(np.float64), asked)
    run(ops, bits, asked, "constrain_bfloat16")
    np.testing.assert_array_equal(widened(bits), expected.astype(np.float32))


def test_slices_of_constrained_rows_no_longer_hold(ops: Ops) -> None:
    rng = np.random.default_rng(0)
    asked = draw(rng, 512)
    logits = rng.normal(0, 4, (15, 512)).astype(np.float32)
    slices = rng.normal(0, 4, (15, 2, 2)).astype(np.float32)
    expected = slices.copy()
    expected[np.flatnonzero(asked.records["table"][asked.slots]), 0, 0] = np.nan
    run(ops, logits, asked, "constrain_slices", slices)
    np.testing.assert_array_equal(slices, expected)


def test_rows_that_are_no_distribution_stay_so(ops: Ops) -> None:
    """A broken model is not hidden by constraints, but where they ban."""
    asked = draw(np.random.default_rng(0), 50)
    logits = np.full((15, 50), np.nan, np.float32)
    banned = np.isneginf(expect(np.zeros((15, 50)), asked)[0])
    run(ops, logits, asked, "constrain")
    np.testing.assert_array_equal(logits, np.where(banned, -np.inf, np.nan))


def test_offsets_are_64_bit(cpu_ops: Ops) -> None:
    """Logits of more than 2^31 values, of which the first and the last row are constrained."""
    vocab, count = 8192, 2**31 // 8192 + 1
    logits = untouched((count, vocab), np.float32)
    records = np.zeros(count, SAMPLING)
    records[[0, -1]] = (1, 0, 1, 0, 0, 8, 5, ~1)
    class_of = np.zeros(vocab, np.uint16)
    class_of[7] = 1
    after = np.array([0, 0, 0, 2, 0, 0], np.uint16)  # of three states, by two classes
    distance = np.array([UNREACHABLE, 1, 0], np.uint16)
    head = np.array([*[0] * 8, 2, 3, *[0] * 6], np.uint16)
    table = np.concatenate([head, class_of, after, distance])
    positions, slots = np.zeros(count, np.int32), np.arange(count, dtype=np.int32)
    run(cpu_ops, logits, Rows(positions, records, positions, slots, table), "constrain")
    for row in (0, count - 1):
        assert (logits[row, 7], logits[row, 8]) == (0, -np.inf)
    assert records["state"][-1] == 1
