"""`srm_sample` against the oracle: token by token, kept set by kept set, and in distribution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from engine.messages import LEAST_TOP_P
from engine.steps.batch import F32, I32
from tests.kernels import oracle
from tests.kernels.harness import Array, Ops, untouched

F64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Settings:
    """Sampling parameters of one row."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


GREEDY = Settings(temperature=0)
COMBINATIONS = [
    Settings(),
    Settings(temperature=0.3),
    Settings(temperature=4),
    Settings(top_k=5),
    Settings(top_p=0.6),
    Settings(top_p=LEAST_TOP_P),
    Settings(min_p=0.2),
    Settings(temperature=1.7, top_k=7),
    Settings(temperature=0.8, top_p=0.9),
    Settings(temperature=2, min_p=0.1),
    Settings(top_k=9, top_p=0.7),
    Settings(temperature=1.5, top_k=8, top_p=0.8, min_p=0.05),
]


def columns(rows: list[Settings]) -> list[Array]:
    """As the kernels get them."""
    kinds = {"temperature": np.float32, "top_k": np.int32, "top_p": np.float32, "min_p": np.float32}
    return [np.array([getattr(row, name) for row in rows], kind) for name, kind in kinds.items()]


def run(
    ops: Ops,
    logits: F32,
    settings: Settings | list[Settings],
    seeds: npt.NDArray[np.integer[Any]] | None = None,
    positions: npt.NDArray[np.integer[Any]] | None = None,
) -> tuple[I32, F32]:
    """Sample rows; row i writes slot i. By default its seed is i and its position 0."""
    num_rows = len(logits)
    rows = settings if isinstance(settings, list) else [settings] * num_rows
    last_token = np.full(num_rows, -7, np.int32)
    tokens, logprobs = ops.run(
        "sample",
        last_token,
        np.ascontiguousarray(logits, np.float32),
        *columns(rows),
        (np.arange(num_rows) if seeds is None else seeds).astype(np.uint64),
        (np.zeros(num_rows) if positions is None else positions).astype(np.int32),
        np.arange(num_rows, dtype=np.int32),
    )
    np.testing.assert_array_equal(last_token, np.maximum(tokens, 0))
    return tokens, logprobs


def random_settings(rng: np.random.Generator, vocab: int) -> Settings:
    """Every truncation is on for half of all rows. In float32, as the op gets them."""
    return Settings(
        float(np.float32(rng.choice([0, 0.5, 1, 1, 2.5]))),
        int(rng.integers(1, vocab + 2)) if rng.random() < 0.5 else 0,
        float(np.float32(rng.random())) if rng.random() < 0.5 else 1,
        float(np.float32(rng.random() ** 4)) if rng.random() < 0.5 else 0,
    )


def test_philox_known_answers() -> None:
    """The vectors published with Random123."""
    ones = 0xFFFFFFFF
    assert oracle.philox((0, 0, 0, 0), (0, 0)) == (
        *(0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    )
    assert oracle.philox((ones, ones, ones, ones), (ones, ones)) == (
        *(0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    )
    assert oracle.philox(
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    ) == (*(0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),)


LIMITS = [2047, 2048, 2049, 8191, 8192, 8193]
"""Vocabularies on both sides of what each kernel of a GPU holds."""


@pytest.mark.parametrize("vocab", [1, 2, 17, 255, 256, 257, 1000, *LIMITS, 65_000])
def test_tokens_and_logprobs(ops: Ops, vocab: int) -> None:
    """In a third of the rows many tokens are as likely as others: the first maximum is greedy's."""
    rng = np.random.default_rng(vocab)
    num_rows = 40 if vocab < 10_000 else 10
    logits = rng.normal(0, 3, (num_rows, vocab)).astype(np.float32)
    logits[::3] = np.round(logits[::3]) / 4
    logits[3, : vocab // 2], logits[3, vocab // 2 :] = -0.0, 0.0
    settings = [random_settings(rng, vocab) for _ in range(num_rows)]
    settings[3] = GREEDY
    seeds = rng.integers(2**64, size=num_rows, dtype=np.uint64)
    positions = rng.integers(2**31, size=num_rows)
    found = run(ops, logits, settings, seeds, positions)
    uniforms = [oracle.uniform(int(s), int(p)) for s, p in zip(seeds, positions, strict=True)]
    check(logits, settings, uniforms, *found, decided=0.9)


def check(
    logits: F32,
    settings: list[Settings],
    uniforms: list[float],
    tokens: I32,
    logprobs: F32,
    decided: float,
) -> None:
    """Every row has the oracle's token, but for a share where rounding may decide between two."""
    compared = 0
    for i, (row, u) in enumerate(zip(settings, uniforms, strict=True)):
        expected, logprob = expect(logits[i], row, u)
        nearby = {
            expect(logits[i], Settings(row.temperature, row.top_k, top_p, min_p), v)[0]
            for top_p, min_p, v in (
                (row.top_p, row.min_p, u + 2e-6),
                (row.top_p, row.min_p, u - 2e-6),
                (row.top_p + 2e-6, row.min_p * (1 + 1e-5), u),
                (row.top_p - 2e-6 if row.top_p < 1 else 1, row.min_p * (1 - 1e-5), u),
            )
        }
        if nearby == {expected}:
            compared += 1
            assert tokens[i] == expected, (row, u)
            assert logprobs[i] == pytest.approx(logprob, rel=1e-5, abs=1e-5)
    assert compared >= decided * len(settings)


def expect(logits: F32, row: Settings, u: float) -> tuple[int, float]:
    return oracle.sample(
        logits.astype(np.float64),
        row.temperature,
        row.top_k,
        row.top_p,
        row.min_p,
        min(max(u, 0), 1 - 2**-53),
    )


def test_exactly_the_kept_tokens_are_drawn(ops: Ops) -> None:
    """Random settings over 16 tokens with ties; no kept token has less than 1 % of the mass."""
    rng = np.random.default_rng(0)
    draws, vocab = 2000, 16
    cases = []
    for _ in range(60):
        row = random_settings(rng, vocab)
        if row.temperature == 0:
            continue
        levels = rng.integers(8, size=vocab).astype(np.float32)
        cases.append((row, levels * np.float32(row.temperature / 4)))
    logits = np.repeat([case for _, case in cases], draws, axis=0)
    settings = [row for row, _ in cases for _ in range(draws)]
    tokens = run(ops, logits, settings)[0].reshape(len(cases), draws)
    for (row, case), drawn in zip(cases, tokens, strict=True):
        kept = probabilities(case, row) > 0
        np.testing.assert_array_equal(np.unique(drawn), np.flatnonzero(kept), err_msg=str(row))


@pytest.mark.parametrize("top_k", [1, 300, 599])
def test_a_threshold_is_found_among_numbers_of_any_size(ops: Ops, top_k: int) -> None:
    """Between magnitudes of 1e-20 and 1e20, at a temperature that makes all about as likely."""
    rng = np.random.default_rng(top_k)
    draws, vocab = 12_000, 600
    logits = rng.choice([-1, 1], vocab) * 10 ** rng.uniform(-20, 20, vocab)
    rows = np.tile(logits.astype(np.float32), (draws, 1))
    tokens, _ = run(ops, rows, Settings(temperature=1e21, top_k=top_k))
    np.testing.assert_array_equal(np.unique(tokens), np.sort(np.argsort(-rows[0])[:top_k]))


def probabilities(logits: F32, row: Settings) -> F64:
    return oracle.truncated(
        logits.astype(np.float64), row.temperature, row.top_k, row.top_p, row.min_p
    )


def chi_square_exceeds(counts: npt.NDArray[np.int64], p: F64) -> bool:
    """Whether counts this far from p have a chance below 1e-4 (Wilson and Hilferty)."""
    assert not counts[p == 0].any()
    if (p > 0).sum() == 1:  # and nothing else was drawn
        return False
    expected = counts.sum() * p[p > 0]
    statistic = ((counts[p > 0] - expected) ** 2 / expected).sum()
    degrees = len(expected) - 1
    spread = 2 / (9 * degrees)
    return bool(statistic > degrees * (1 - spread + 3.719 * spread**0.5) ** 3)


@pytest.mark.parametrize("settings", COMBINATIONS, ids=str)
def test_distribution(ops: Ops, settings: Settings) -> None:
    """100,000 draws: one of each of as many streams, or, for every other one, of one stream."""
    draws = 100_000
    logits = np.random.default_rng(1).normal(0, 1.5, 24).astype(np.float32)
    streams = np.arange(draws), np.full(draws, 12345)
    seeds, positions = streams if COMBINATIONS.index(settings) % 2 else streams[::-1]
    tokens, _ = run(ops, np.tile(logits, (draws, 1)), [settings] * draws, seeds, positions)
    counts = np.bincount(tokens, minlength=len(logits))
    assert not chi_square_exceeds(counts, probabilities(logits, settings))


@pytest.mark.parametrize("vocab", [2, 100, 1000])
def test_equal_logits_are_drawn_equally_often(ops: Ops, vocab: int) -> None:
    tokens, logprobs = run(ops, np.zeros((100_000, vocab), np.float32), Settings())
    assert not chi_square_exceeds(np.bincount(tokens, minlength=vocab), np.full(vocab, 1 / vocab))
    np.testing.assert_allclose(logprobs, -np.log(vocab), rtol=1e-6)


def test_a_row_does_not_depend_on_the_others(ops: Ops) -> None:
    rng = np.random.default_rng(2)
    num_rows, vocab, every = 2000, 300, [*COMBINATIONS, GREEDY]
    logits = rng.normal(0, 2, (num_rows, vocab)).astype(np.float32)
    mixed = [every[i % len(every)] for i in range(num_rows)]
    seeds, positions = rng.integers(2**63, size=num_rows), rng.integers(2**31, size=num_rows)
    tokens, logprobs = run(ops, logits, mixed, seeds, positions)
    for row in (*range(13), *range(990, 1003), *range(num_rows - 13, num_rows)):
        one = slice(row, row + 1)
        alone = run(ops, logits[one], [mixed[row]], seeds[one], positions[one])
        assert alone == (tokens[row], logprobs[row])


@pytest.mark.parametrize("vocab", [1, 5, 700, 2500, 9000])
def test_rows_that_are_no_distribution(ops: Ops, vocab: int) -> None:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((6, vocab)).astype(np.float32)
    logits[0, 0] = np.nan
    logits[1, -1] = -np.float32(np.nan)
    logits[2, vocab // 2] = np.inf
    logits[3, :] = -np.inf
    logits[4, :] = np.nan
    for settings in (GREEDY, Settings(), Settings(top_k=4, top_p=0.5, min_p=0.1)):
        tokens, logprobs = run(ops, logits, settings)
        np.testing.assert_array_equal(tokens[:5], -1)
        np.testing.assert_array_equal(logprobs[:5], 0)
        assert 0 <= tokens[5] < vocab


def test_minus_infinity_is_never_drawn(ops: Ops) -> None:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((3000, 40)).astype(np.float32)
    logits[:, rng.permutation(40)[:37]] = -np.inf
    for settings in [*COMBINATIONS, GREEDY]:
        tokens, logprobs = run(ops, logits, settings)
        assert np.isfinite(logits[np.arange(3000), tokens]).all(), settings
        assert np.isfinite(logprobs).all(), settings


def test_extreme_settings_leave_the_most_likely(ops: Ops) -> None:
    logits = np.random.default_rng(0).standard_normal((200, 300)).astype(np.float32)
    logits[:, 7] = logits[:, 200] = 6  # a tie: both stay
    for settings in (
        Settings(temperature=1e-6),
        Settings(temperature=1e-37),
        Settings(top_k=1),
        Settings(top_p=0),
        Settings(min_p=1),
        Settings(temperature=50, top_k=1, top_p=0.1, min_p=0.9),
    ):
        assert set(run(ops, logits, settings)[0]) == {7, 200}, settings


def test_extreme_logits(ops: Ops) -> None:
    largest = np.finfo(np.float32).max
    logits = np.zeros((4, 300), np.float32)
    logits[0, 5] = largest
    logits[1] = -largest
    logits[1, 6] = -1e38
    logits[2] = largest
    logits[2, 7:] = -largest
    logits[3, 8:] = 1e-40  # denormal: as good as 0
    for settings in (Settings(), Settings(top_k=9, top_p=0.9, min_p=0.5)):
        tokens, logprobs = run(ops, logits, settings)
        assert tokens[0] == 5 and tokens[1] == 6 and tokens[2] < 7 and 0 <= tokens[3] < 300
        np.testing.assert_allclose(logprobs, [0, 0, -np.log(7), -np.log(300)], atol=1e-5)


def sample_greedily(ops: Ops, last_token: I32, logits: F32, write_slots: I32) -> I32:
    """The tokens, which are written to slots. There may be more slots than logits."""
    ones, zeros = np.ones(len(logits), np.float32), np.zeros(len(logits), np.float32)
    plain: list[Array] = [zeros, zeros.astype(np.int32), ones, zeros, zeros.astype(np.uint64)]
    positions = np.arange(len(write_slots), dtype=np.int32)
    tokens: I32 = ops.run("sample", last_token, logits, *plain, positions, write_slots)[0]
    return tokens


def test_only_the_slots_of_decode_rows_are_written(ops: Ops) -> None:
    """The batch's prefill rows, here the last two, neither sample nor remember."""
    logits = np.zeros((3, 4), np.float32)
    logits[[0, 1, 2], [3, 1, 2]] = 9
    last_token = np.arange(100, 110, dtype=np.int32)
    tokens = sample_greedily(ops, last_token, logits, np.array([8, 2, 5, 1, 0], np.int32))
    np.testing.assert_array_equal(tokens, [3, 1, 2])
    np.testing.assert_array_equal(last_token, [100, 101, 1, 103, 104, 2, 106, 107, 3, 109])


def test_offsets_of_last_tokens_are_64_bit(cpu_ops: Ops) -> None:
    """Last tokens of more than 2^32 bytes."""
    slots = 2**30 + 2
    last_token, ends = untouched((slots,), np.int32), np.array([0, slots - 1], np.int32)
    sample_greedily(cpu_ops, last_token, np.array([[0, 9, 0], [0, 0, 9]], np.float32), ends)
    assert last_token[ends].tolist() == [1, 2]
