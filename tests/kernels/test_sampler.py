"""`srm_sample` against the oracle: token by token and kept set by kept set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from srm.engine.steps.batch import F32, I32, SAMPLING
from tests.kernels import oracle
from tests.kernels.harness import Array, Ops, odd_rows, untouched

F64 = npt.NDArray[np.float64]


class Settings(NamedTuple):
    """Sampling parameters of one row."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


GREEDY = Settings(temperature=0)


def columns(rows: list[Settings]) -> list[Array]:
    """As the kernels get them."""
    kinds = np.float32, np.int32, np.float32, np.float32
    each = np.array(rows, np.float64).reshape(-1, len(kinds)).T
    return [values.astype(kind) for values, kind in zip(each, kinds, strict=True)]


def records(rows: list[Settings], seeds: npt.NDArray[np.integer[Any]]) -> I32:
    """As a device keeps them, the first for slot 0."""
    zeros = np.zeros(len(rows), SAMPLING)
    for name, values in zip(Settings._fields, columns(rows), strict=True):
        zeros[name] = values
    zeros["seed"] = seeds.astype(np.uint64)
    return zeros.view(np.int32).reshape(len(rows), SAMPLING.itemsize // 4)


def run(
    ops: Ops,
    logits: F32,
    rows: Settings | list[Settings],
    seeds: npt.NDArray[np.integer[Any]] | None = None,
    positions: npt.NDArray[np.integer[Any]] | None = None,
    op: str = "sample",
) -> tuple[I32, F32]:
    """Sample rows; row i writes slot i. By default its seed is i and its position 0."""
    num_rows = len(logits)
    rows = [rows] * num_rows if isinstance(rows, Settings) else rows
    last_token = np.full(num_rows, -7, np.int32)
    tokens, logprobs = ops.run(
        op,
        last_token,
        np.ascontiguousarray(logits, np.float32),
        records(rows, np.arange(num_rows) if seeds is None else seeds),
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
    of_pi = 0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0
    for given, expected in (
        ((0,) * 6, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 6, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (of_pi, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ):
        assert oracle.philox(given[:4], given[4:]) == expected


OPS: dict[str, Callable[[int, int], float | F64]] = {
    "sample": oracle.uniform,
    "reject": oracle.uniforms,
}
"""Both ways of sampling, and what is random in them."""
LIMITS = [2047, 2048, 2049, 8191, 8192, 8193]
"""Vocabularies on both sides of what each kernel of a GPU holds."""


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("vocab", [1, 2, 17, 255, 256, 257, 1000, *LIMITS, 65_000])
def test_tokens_and_logprobs(ops: Ops, vocab: int, op: str) -> None:
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
    ran = run(ops, logits, settings, seeds, positions, op)
    uniforms = [OPS[op](int(s), int(p)) for s, p in zip(seeds, positions, strict=True)]
    check(logits, settings, uniforms, *ran, decided=0.9 if op == "sample" else 0.7)


def check(
    logits: F32,
    settings: list[Settings],
    uniforms: Sequence[float | F64],
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
                (row.top_p + 2e-6, min(row.min_p * (1 + 1e-5), 1), u),
                (row.top_p - 2e-6 if row.top_p < 1 else 1, row.min_p * (1 - 1e-5), u),
            )
        }
        if nearby == {expected}:
            compared += 1
            assert tokens[i] == expected, (row, u)
            assert logprobs[i] == pytest.approx(logprob, rel=1e-5, abs=1e-5)
    assert compared >= decided * len(settings)


def expect(logits: F32, row: Settings, u: float | F64) -> tuple[int, float]:
    """For one uniform the token of "sample", for many that of "reject"."""
    choose: Any = oracle.reject if np.ndim(u) else oracle.sample
    token, logprob = choose(logits.astype(np.float64), *row, np.clip(u, 0, 1 - 2**-53))
    return token, logprob


@pytest.mark.parametrize("op", OPS)
def test_exactly_the_kept_tokens_are_drawn(ops: Ops, op: str) -> None:
    """Random settings over 16 tokens with ties; no kept token has less than 1 % of the mass."""
    rng = np.random.default_rng(0)
    draws, vocab = 2000, 16
    drawn_from = [
        row for row in (random_settings(rng, vocab) for _ in range(60)) if row.temperature
    ]
    temperatures = np.array([[row.temperature] for row in drawn_from], np.float32)
    levels = rng.integers(8, size=(len(drawn_from), vocab)) * (temperatures / 4)
    each = [row for row in drawn_from for _ in range(draws)]
    tokens = run(ops, np.repeat(levels, draws, axis=0), each, op=op)[0].reshape(-1, draws)
    for row, logits, drawn in zip(drawn_from, levels, tokens, strict=True):
        retained = oracle.truncated(logits.astype(np.float32).astype(np.float64), *row) > 0
        np.testing.assert_array_equal(np.unique(drawn), np.flatnonzero(retained), err_msg=str(row))


@pytest.mark.parametrize("top_k", [1, 300, 599])
def test_a_threshold_is_found_among_numbers_of_any_size(ops: Ops, top_k: int) -> None:
    """Between magnitudes of 1e-20 and 1e20, at a temperature that makes all about as likely."""
    rng = np.random.default_rng(top_k)
    draws, vocab = 12_000, 600
    logits = rng.choice([-1, 1], vocab) * 10 ** rng.uniform(-20, 20, vocab)
    rows = np.tile(logits.astype(np.float32), (draws, 1))
    tokens, _ = run(ops, rows, Settings(temperature=1e21, top_k=top_k))
    np.testing.assert_array_equal(np.unique(tokens), np.sort(np.argsort(-rows[0])[:top_k]))


ROWS: dict[str, Callable[[np.random.Generator], F64]] = {
    "flat": lambda rng: np.zeros(40),
    "normal": lambda rng: rng.normal(0, 2, 40),
    "peaked": lambda rng: np.where(np.arange(40) == 7, 4, rng.normal(0, 1, 40)),
    "ties": lambda rng: rng.integers(-3, 3, 40) / 2,
    "zeros": lambda rng: np.where(rng.random(40) < 0.5, -0.0, rng.choice([0, 0.5, -0.5], 40)),
}


@pytest.mark.parametrize("kind", ROWS)
def test_rejection_draws_from_the_same_distribution(ops: Ops, kind: str) -> None:
    """By the sum of squared deviations of what was counted; in some rows most rounds are vain."""
    draws, logits = 20_000, ROWS[kind](np.random.default_rng(1)).astype(np.float32)
    for row in (
        *(Settings(top_p=number) for number in (1, 0.9, 0.5, 0.1, 1e-6)),
        *(Settings(2, top_k=number) for number in (1, 3, 30)),
        *(Settings(0.7, min_p=number) for number in (0.02, 0.5, 1)),
        *(Settings(1.5, 9, 0.6), Settings(1, 5, 1, 0.2), Settings(1, 0, 0.6, 0.1)),
    ):
        tokens, _ = run(ops, np.tile(logits, (draws, 1)), row, op="reject")
        expected = draws * oracle.truncated(logits.astype(np.float64), *row)
        counts, retained = np.bincount(tokens, minlength=len(logits)), expected > 0
        assert counts[~retained].sum() == 0, row
        squares = ((counts - expected)[retained] ** 2 / expected[retained]).sum()
        free = retained.sum() - 1
        assert squares <= free + 4 * np.sqrt(2 * free) + 8, row


@pytest.mark.parametrize("op", OPS)
def test_a_row_does_not_depend_on_the_others(ops: Ops, op: str) -> None:
    rng = np.random.default_rng(2)
    num_rows, vocab = 2000, 300
    every = [GREEDY, Settings(), *(random_settings(rng, vocab) for _ in range(11))]
    logits = rng.normal(0, 2, (num_rows, vocab)).astype(np.float32)
    mixed = [every[i % len(every)] for i in range(num_rows)]
    seeds, positions = rng.integers(2**63, size=num_rows), rng.integers(2**31, size=num_rows)
    tokens, logprobs = run(ops, logits, mixed, seeds, positions, op)
    for row in (*range(13), *range(990, 1003), *range(num_rows - 13, num_rows)):
        one = slice(row, row + 1)
        alone = run(ops, logits[one], [mixed[row]], seeds[one], positions[one], op)
        assert alone == (tokens[row], logprobs[row])


EXTREMES = [
    GREEDY,
    Settings(),
    Settings(top_k=4, top_p=0.5, min_p=0.1),
    Settings(temperature=1e-6),
    Settings(temperature=1e-37),
    Settings(top_k=1),
    Settings(top_p=0),
    Settings(min_p=1),
    Settings(temperature=50, top_k=1, top_p=0.1, min_p=0.9),
]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("vocab", [1, 5, 700, 2500, 9000])
def test_odd_rows_under_extreme_settings(ops: Ops, vocab: int, op: str) -> None:
    """Of ties both stay; what is minus infinity is never drawn."""
    logits = odd_rows(vocab)
    for settings in EXTREMES:
        rows = [settings] * len(logits)
        uniforms = [OPS[op](i, 0) for i in range(len(logits))]
        tokens, logprobs = run(ops, logits, rows, op=op)
        check(logits, rows, uniforms, tokens, logprobs, decided=0.8)
        assert (tokens[:5] == -1).all() and not logprobs[:5].any()


def sample_greedily(ops: Ops, last_token: I32, logits: F32, slots: I32) -> I32:
    """The tokens, which are written to slots. There may be more logits than slots."""
    sampling = untouched((len(last_token), SAMPLING.itemsize // 4), np.int32)  # temperature 0
    tokens: I32 = ops.run("sample", last_token, logits, sampling, np.zeros_like(slots), slots)[0]
    return tokens


def test_only_the_slots_of_decode_rows_are_written(ops: Ops) -> None:
    """Logits of prompts that are scored, here the last two, are not sampled."""
    logits = np.eye(4, dtype=np.float32)[[3, 1, 2, 0, 0]]
    last_token = np.arange(100, 110, dtype=np.int32)
    tokens = sample_greedily(ops, last_token, logits, np.array([8, 2, 5], np.int32))
    np.testing.assert_array_equal(tokens, [3, 1, 2])
    np.testing.assert_array_equal(last_token, [100, 101, 1, 103, 104, 2, 106, 107, 3, 109])


def test_a_row_samples_as_its_own_slot_does(ops: Ops) -> None:
    rng = np.random.default_rng(3)
    slots, vocab = rng.permutation(500)[:40].astype(np.int32), 50
    results = [random_settings(rng, vocab) for _ in range(500)]
    seeds = rng.integers(2**64, size=500, dtype=np.uint64)
    logits = rng.normal(0, 3, (40, vocab)).astype(np.float32)
    last_token, positions = np.zeros(500, np.int32), rng.integers(2**31, size=40, dtype=np.int32)
    ran = ops.run("sample", last_token, logits, records(results, seeds), positions, slots)
    own = [results[slot] for slot in slots]
    expected = run(ops, logits, own, seeds[slots], positions)
    for array, other in zip(ran, expected, strict=True):
        np.testing.assert_array_equal(array, other)


def test_offsets_of_last_tokens_and_records_are_64_bit(cpu_ops: Ops) -> None:
    """Last tokens of more than 2^32 bytes, and records of more than 2^31 values."""
    slots = 2**30 + 2
    last_token, ends = untouched((slots,), np.int32), np.array([0, slots - 1], np.int32)
    sample_greedily(cpu_ops, last_token, np.eye(3, dtype=np.float32)[1:], ends)
    assert last_token[ends].tolist() == [1, 2]
