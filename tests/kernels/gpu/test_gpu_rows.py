"""The GPU's own code for samples, scores and constraints, run without a GPU, against the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from srm.engine.device.linear import round_bfloat16
from srm.engine.steps.batch import F32, I32, SAMPLING
from tests.kernels import oracle
from tests.kernels.harness import odd_rows, widened
from tests.kernels.test_constraints import draw as draw_tables
from tests.kernels.test_constraints import expect as expect_constrained
from tests.kernels.test_sampler import GREEDY, Settings, columns, random_settings
from tests.kernels.test_sampler import check as check_tokens
from tests.kit.engines.numpy_runner import ints
from tests.kit.ptx.ptx import Counts, Kernel, compiled

THREADS, WARPS = 256, 8
SHORT, LONG = 8 * THREADS, 32 * THREADS
"""The longest rows that the first and the second kernel hold; the third takes any."""
TOP = 5
VOCAB = 8192


@pytest.fixture(scope="module")
def kernels() -> dict[str, Kernel]:
    """Kernels by op, dtype of the logits and logits to a thread."""
    return compiled("row_kernels.mojo")


def kernel_for(kernels: dict[str, Kernel], op: str, vocab: int, dtype: str = "bfloat16") -> Kernel:
    share = 0 if vocab > LONG else 32 if vocab > SHORT else 8
    return kernels[f"{op} {dtype} {share}"]


def rounded(logits: npt.NDArray[np.floating[Any]]) -> tuple[npt.NDArray[np.uint16], F32]:
    """As bfloat16, and what these are."""
    bits = round_bfloat16(logits.astype(np.float32))
    return bits, widened(bits)


def draw(kernel: Kernel, logits: npt.NDArray[np.generic], rows: list[Settings]) -> tuple[I32, F32]:
    """Sample; row i has seed 100 + i."""
    return counted(kernel, logits, rows)[:2]


def counted(
    kernel: Kernel,
    logits: npt.NDArray[np.generic],
    rows: list[Settings],
    slices: F32 | None = None,
    of_a_block: int = 1,
    padding: int = 0,
) -> tuple[I32, F32, Counts]:
    """Sample, and count what that took. With slices a block has some rows, and rows end in
    padding."""
    count, vocab = len(logits), logits.shape[1] - padding
    tokens, logprobs = np.full(count, -9, np.int32), np.full(count, 9, np.float32)
    ran = kernel.launch(
        *(-(-count // of_a_block), THREADS, np.ascontiguousarray(logits)),
        *(np.zeros(2, np.float32) if slices is None else slices, vocab, count, of_a_block),
        *columns(rows),
        np.arange(100, 100 + count, dtype=np.uint64),
        *(tokens, logprobs),
    )
    return tokens, logprobs, ran


def check(
    logits: F32, rows: list[Settings], tokens: I32, logprobs: F32, places: range | None = None
) -> None:
    """`places` are those that the rows had among all."""
    uniforms = [oracle.uniform(100 + i, i) for i in places or range(len(rows))]
    check_tokens(logits, rows, uniforms, tokens, logprobs, decided=0.8)


@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [
        *((vocab, "bfloat16") for vocab in (1, 255, 256, 257, 2048, 2049, 8191, 8192, 8193)),
        (5000, "float32"),
    ],
)
def test_tokens_and_logprobs(kernels: dict[str, Kernel], vocab: int, dtype: str) -> None:
    rng = np.random.default_rng(vocab)
    count = 8 if vocab in {8191, 8192} else 6
    logits = rng.normal(0, 3, (count, vocab)).astype(np.float32)
    given, logits = rounded(logits) if dtype == "bfloat16" else (logits, logits)
    rows = [Settings(top_p=0.9), *(random_settings(rng, vocab) for _ in range(count - 1))]
    check(logits, rows, *draw(kernel_for(kernels, "sample", vocab, dtype), given, rows))


ROWS: dict[str, Callable[[np.random.Generator, int], npt.NDArray[np.floating[Any]]]] = {
    "normal": lambda rng, vocab: rng.normal(0, 2, vocab),
    "flat": lambda rng, vocab: np.full(vocab, 1.25),
    "nearly flat": lambda rng, vocab: rng.normal(0, 0.01, vocab),
    "uniform": lambda rng, vocab: rng.uniform(-3, 3, vocab),
    "peaked": lambda rng, vocab: np.where(np.arange(vocab) == 77, 20, rng.normal(0, 1, vocab)),
    "a few": lambda rng, vocab: np.where(np.arange(vocab) % 800, rng.normal(-8, 2, vocab), 3),
    "ties": lambda rng, vocab: rng.integers(-4, 4, vocab) / 4,
    "ranks": lambda rng, vocab: -1.1 * np.log(1 + rng.permutation(vocab)),
    "offset": lambda rng, vocab: rng.normal(100, 2, vocab),
    "edited": lambda rng, vocab: np.where(np.arange(vocab) % 9, -np.inf, rng.normal(0, 3, vocab)),
    "any size": lambda rng, vocab: rng.choice([-1, 1], vocab) * 10 ** rng.uniform(-20, 2, vocab),
    "denormal": lambda rng, vocab: rng.normal(0, 1e-38, vocab),
}


def slices_of(logits: F32, rows: list[Settings]) -> F32:
    """What the head leaves of logits."""
    temperatures = np.array([row.temperature for row in rows])
    with np.errstate(invalid="ignore"):
        return oracle.slices(logits.astype(np.float64), temperatures).astype(np.float32)


PLAIN = [Settings(float(np.float32(number))) for number in (1, 0.5, 1, 2.5, 0.7)]


def test_a_sampler_that_starts_early_draws_the_same(kernels: dict[str, Kernel]) -> None:
    """Of variant pdl: it begins with a wait, one of two more instructions. A row is searched."""
    bits, logits = rounded(np.random.default_rng(3).normal(0, 2, (9, 512)))
    rows = [*PLAIN, Settings(top_p=0.9), GREEDY, *PLAIN[:2]]
    slices, name = slices_of(logits, rows), "sample_slices bfloat16 8"
    early, today = (
        counted(of[name], bits, rows, slices, WARPS)
        for of in (compiled("row_kernels.mojo", "pdl"), kernels)
    )
    np.testing.assert_array_equal(early[0], today[0])
    np.testing.assert_array_equal(early[1], today[1])
    assert early[2].instructions - today[2].instructions <= 2 * 2 * THREADS  # of two blocks
    assert early[2].moved == today[2].moved


@pytest.mark.parametrize("vocab", [256, 512, 2048, 2304, 8192, 8448, 17_152])
def test_rows_are_drawn_from_slices(kernels: dict[str, Kernel], vocab: int) -> None:
    """The largest have more slices than a warp has lanes. Of the logits a row reads one slice."""
    rng = np.random.default_rng(vocab)
    bits, logits = rounded(np.array([make(rng, vocab) for make in ROWS.values()] * 2, np.float32))
    rows = [PLAIN[i % len(PLAIN)] for i in range(len(logits))]
    kernel, slices = kernel_for(kernels, "sample_slices", vocab), slices_of(logits, rows)
    tokens, logprobs, ran = counted(kernel, bits, rows, slices, WARPS)
    check(logits, rows, tokens, logprobs)
    assert ran.moved[0] == len(rows) * (512 + 32)
    for row in (0, 7, 9):  # and does not depend on others
        one = slice(row, row + 1)
        again = draw_at(kernel, bits[one], rows[row], slices[one], row)
        assert again == (tokens[row], logprobs[row])


EXTREME = [
    Settings(),
    Settings(100),  # the highest temperature that is accepted
    Settings(float(np.finfo(np.float32).max)),
    Settings(100, top_k=1_000_000),
    Settings(100, top_k=1_020),
    Settings(100, top_k=1_000_000, top_p=float(np.float32(0.999999))),
    Settings(100, top_p=float(np.float32(0.999999))),
    Settings(100, min_p=float(np.finfo(np.float32).tiny)),
    GREEDY,
]
"""Settings that leave as many tokens as they may; 1,020 are more than some vocabularies have."""


@pytest.mark.parametrize("op", ["sample", "reject"])
@pytest.mark.parametrize("vocab", [1014, 1000, 1025, 50])
def test_padding_is_never_drawn(kernels: dict[str, Kernel], vocab: int, op: str) -> None:
    """Rows that are as good as flat have any token, the last one too; those not drawn from slices
    have the bits of rows without padding."""
    rng, padding = np.random.default_rng(vocab), -vocab % 256
    count = 9 * len(EXTREME)
    levels = rng.normal(0, 1, (count, vocab))
    levels[::2], levels[1::4, -1] = -9, 40
    bits, logits = rounded(levels)
    padded = np.pad(bits, ((0, 0), (0, padding)), constant_values=0xFF80)
    rows = [EXTREME[i % len(EXTREME)] for i in range(count)]
    slices = slices_of(widened(padded), rows)
    kernel = kernel_for(kernels, f"{op}_slices", vocab)
    tokens, logprobs, _ = counted(kernel, padded, rows, slices, WARPS, padding)
    assert ((tokens >= 0) & (tokens < vocab)).all()
    uniforms: list[Any] = [oracle.uniform(100 + i, i) for i in range(count)]
    if op == "reject":
        uniforms = [oracle.uniforms(100 + i, i) for i in range(count)]
    check_tokens(logits, rows, uniforms, tokens, logprobs, decided=0.7)
    expected = counted(kernel_for(kernels, op, vocab), bits, rows)
    slices[:, 0, 0] = np.nan  # as those of edited rows
    for result, plain in zip(
        counted(kernel, padded, rows, slices, WARPS, padding)[:2], expected[:2], strict=True
    ):
        np.testing.assert_array_equal(result, plain)


def draw_at(
    kernel: Kernel, bits: npt.NDArray[np.generic], row: Settings, slices: F32, place: int
) -> tuple[Any, Any]:
    """Draw a row as the last of others, which are greedy, one to a block."""
    bits, slices = (np.repeat(item, place + 1, axis=0) for item in (bits, slices))
    tokens, logprobs, _ = counted(kernel, bits, [*[GREEDY] * place, row], slices)
    return tokens[-1], logprobs[-1]


def test_rows_that_slices_do_not_tell_are_sampled_from_all_logits(
    kernels: dict[str, Kernel],
) -> None:
    """Those with truncations, greedy ones, edited ones and such that are no distribution, between
    others. What is to be left has slices that would give another token."""
    rng = np.random.default_rng(5)
    left = [GREEDY, Settings(top_k=9), Settings(top_p=0.8), Settings(0.7, min_p=0.1), Settings()]
    odd = np.array([np.nan, np.inf, -np.inf])
    rows = [item for row in (*left, *[Settings()] * len(odd)) for item in (PLAIN[1], row)]
    bits, logits = rounded(rng.normal(0, 2, (len(rows), 2048)))
    slices = slices_of(logits, rows)
    slices[1:9:2] = [0, 1]
    slices[1:9:2, 3] = [100, 1]
    bits[9, :1024], logits[9, :1024] = 0xFF80, -np.inf  # edited: the slices are of what was there
    slices[9, 0, 0] = np.nan
    for row, value in zip(range(11, 17, 2), odd, strict=True):
        part = slice(None) if value < 0 else slice(700, 701)
        logits[row, part] = value
        bits[row, part] = np.array(value, np.float32).view(np.uint32) >> 16
        slices[row] = slices_of(logits[row : row + 1], [Settings()])[0]
    whole = draw(kernel_for(kernels, "sample", 2048), bits, rows)
    assert (whole[0][11::2] == -1).all() and not whole[1][11::2].any()
    for of_a_block in (1, 3, WARPS):
        kernel = kernel_for(kernels, "sample_slices", 2048)
        tokens, logprobs, _ = counted(kernel, bits, rows, slices, of_a_block)
        for result, expected in zip((tokens, logprobs), whole, strict=True):
            np.testing.assert_array_equal(result[1::2], expected[1::2])
        check(logits[::2], rows[::2], tokens[::2], logprobs[::2], range(0, 16, 2))


def test_a_row_drawn_from_slices_takes_few_instructions(kernels: dict[str, Kernel]) -> None:
    """Of those of all logits a sixth, and a sixteenth of their bytes."""
    bits, logits = rounded(np.random.default_rng(0).normal(0, 2, (WARPS, LONG)))
    rows = [Settings()] * WARPS
    kernel, slices = kernel_for(kernels, "sample_slices", LONG), slices_of(logits, rows)
    *_, ran = counted(kernel, bits, rows, slices, WARPS)
    assert ran.warp_instructions <= 550 * WARPS and sum(ran.moved[:2]) <= WARPS * 2 * LONG / 15


USUAL = ", ".join([kind for kind in ROWS if kind != "denormal"])


@pytest.mark.parametrize(
    ("settings", "most", "kinds"),
    [
        (Settings(), 3_500, "normal"),
        (GREEDY, 4_000, "normal"),
        (Settings(top_k=50), 9_500, USUAL),
        (Settings(top_k=50, top_p=0.9), 10_000, USUAL),
        (Settings(top_k=50, top_p=0.9, min_p=0.05), 10_500, USUAL),
        (Settings(0.7, top_k=20, top_p=0.8, min_p=0.01), 10_500, USUAL),
        (Settings(top_p=0.9), 10_000, "normal, flat, peaked, a few, ties, ranks, offset, edited"),
        (Settings(top_p=0.9), 11_000, "nearly flat, uniform"),
        (Settings(0.7, top_p=0.95), 10_000, "normal, flat, nearly flat, peaked, a few, ties"),
    ],
)
def test_a_row_takes_few_instructions_of_warps(
    kernels: dict[str, Kernel], settings: Settings, most: int, kinds: str
) -> None:
    """4,600 take an H200 5 ns where it issues one in every cycle. A row is read once."""
    rng = np.random.default_rng(0)
    for kind in kinds.split(", "):
        bits, _ = rounded(ROWS[kind](rng, LONG)[None])
        *_, ran = counted(kernel_for(kernels, "sample", LONG), bits, [settings])
        assert ran.warp_instructions <= most, kind
        assert ran.moved[0] <= 1.02 * bits.nbytes  # and the token's logit


@pytest.mark.parametrize(
    ("settings", "most", "reads"),
    [
        (Settings(), 0.5, 2),
        (Settings(top_k=50), 1.1, 4),
        (Settings(top_k=50, top_p=0.9, min_p=0.05), 1.1, 4),
        (Settings(top_p=0.9), 2, 7),
    ],
)
@pytest.mark.parametrize(
    ("vocab", "kinds"), [(32_768, "normal, peaked, ranks"), (131_072, "normal")]
)
def test_a_long_row_takes_few_instructions_of_warps_for_a_logit(
    kernels: dict[str, Kernel], vocab: int, kinds: str, settings: Settings, most: float, reads: int
) -> None:
    """It is not held but read again by every pass; the warp that has the token reads its part."""
    rng = np.random.default_rng(0)
    for kind in kinds.split(", "):
        bits, _ = rounded(ROWS[kind](rng, vocab)[None])
        *_, ran = counted(kernel_for(kernels, "sample", vocab), bits, [settings])
        assert ran.warp_instructions <= most * vocab, kind
        assert ran.moved[0] <= (reads + 0.15) * bits.nbytes, kind


def few(rng: np.random.Generator, vocab: int) -> list[Settings]:
    """Settings that keep few tokens, up to the number that is compared at once and beyond it."""
    most = [1, 2, 5, 20, 50, 60, 100, 120, 128, 129, 2, 90]
    others = zip([1, 0.7, 3] * 4, [0.9, 1, 0.3, 0.99] * 3, [0, 0, 0, 0.01] * 3, strict=True)
    return [Settings(t, k, p, min_p) for k, (t, p, min_p) in zip(most, others, strict=True)]


def of_any_kind(rng: np.random.Generator, vocab: int) -> list[Settings]:
    return [random_settings(rng, vocab) for _ in ROWS]


@pytest.mark.parametrize("make_settings", [of_any_kind, few])
@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [(2048, "bfloat16"), (8192, "bfloat16"), (9000, "bfloat16"), (5000, "float32")],
)
def test_rows_of_any_shape(
    kernels: dict[str, Kernel], vocab: int, dtype: str, make_settings: Callable[..., list[Settings]]
) -> None:
    rng = np.random.default_rng(vocab)
    logits = np.array([make(rng, vocab) for make in ROWS.values()], np.float32)
    given, logits = rounded(logits) if dtype == "bfloat16" else (logits, logits)
    rows = make_settings(rng, vocab)
    check(logits, rows, *draw(kernel_for(kernels, "sample", vocab, dtype), given, rows))


def test_one_more_than_are_compared_at_once(kernels: dict[str, Kernel]) -> None:
    """So many tokens are the likeliest, all alike; the others are far away."""
    rng, counts = np.random.default_rng(0), [1, 2, 31, 33, 159, 160, 161, 162]
    likeliest = [rng.permutation(LONG) < count for count in counts]
    bits, logits = rounded(np.where(likeliest, 3, rng.normal(-9, 1, (len(counts), LONG))))
    rows = [Settings(0.5, top_k=2 + i % 2, top_p=0.9) for i in range(len(counts))]
    tokens, logprobs = draw(kernel_for(kernels, "sample", LONG), bits, rows)
    check(logits, rows, tokens, logprobs)
    assert (logits[range(len(counts)), tokens] == 3).all()


@pytest.mark.parametrize("vocab", [2048, LONG, 8200])
def test_top_p_is_of_what_top_k_keeps(kernels: dict[str, Kernel], vocab: int) -> None:
    """Where the likeliest are neighbours, one thread's, so that more of them are looked at."""
    bits, logits = rounded(np.tile(-np.arange(vocab) / 8, (12, 1)))
    rows = [Settings(4, top_k=4, top_p=0.5)] * 12
    check(logits, rows, *draw(kernel_for(kernels, "sample", vocab), bits, rows))


@pytest.mark.parametrize("vocab", [300, 8192])
def test_ties_stay_together(kernels: dict[str, Kernel], vocab: int) -> None:
    """Eight different logits: every search ends between numbers that many tokens share."""
    rng = np.random.default_rng(vocab)
    levels = rng.integers(-4, 4, (8, vocab)) / 4
    levels[:2] = -0.0  # all the same
    bits, logits = rounded(levels)
    rows = [Settings(), Settings(top_k=3, top_p=0.5), Settings(top_p=0.3), Settings(top_k=vocab)]
    rows += [Settings(min_p=0.5), Settings(2, vocab // 2, 0.7, 0.1), GREEDY, Settings(top_k=1)]
    check(logits, rows, *draw(kernel_for(kernels, "sample", vocab), bits, rows))


@pytest.mark.parametrize("vocab", [5, 2500, 8200])
def test_odd_rows(kernels: dict[str, Kernel], vocab: int) -> None:
    bits, logits = rounded(odd_rows(vocab)[[0, 2, 3, 4, 5, 9]])
    bits[0, 0] |= 0x8000  # a NaN may have a sign
    rows = [Settings(top_k=4, top_p=0.5, min_p=0.1)] * len(bits)
    tokens, logprobs = draw(kernel_for(kernels, "sample", vocab), bits, rows)
    check(logits, rows, tokens, logprobs)
    assert tokens[:5].tolist() == [-1] * 4 + [vocab - 1] and not logprobs[:5].any()


@pytest.mark.parametrize("vocab", [3, 2048, 8192, 8193])
def test_scores(kernels: dict[str, Kernel], vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    bits, logits = rounded(rng.integers(-40, 40, (5, vocab)) / 8)
    targets = rng.integers(0, vocab, 5).astype(np.int32)
    num_top = np.array([0, 2, TOP, ~4, ~0], np.int32)
    named = np.array([3, vocab - 1, 0, 1, 1, vocab // 2], np.int32)
    temperature = np.array([1, 0.5, 2, 0.5, 3], np.float32)
    result = np.full((5, TOP), -9, np.int32), np.full((5, TOP), 9, np.float32)
    ranks, logprobs = np.zeros(5, np.int32), np.zeros(5, np.float32)
    asked = temperature, targets, num_top, named, TOP
    kernel = kernel_for(kernels, "score", vocab)
    kernel.launch(5, THREADS, bits, vocab, *asked, *result, ranks, logprobs)
    for i, (ids, top) in enumerate(zip(*result, strict=True)):
        logprob, rank, likeliest = oracle.score(
            logits[i].astype(np.float64),
            float(temperature[i]),
            int(targets[i]),
            int(num_top[i]),
            named.tolist(),
        )
        assert (logprobs[i], ranks[i]) == (pytest.approx(logprob, abs=2e-5), rank)
        likeliest += [(-1, 0.0)] * (TOP - len(likeliest))
        assert tuple(ids) == tuple(token for token, _ in likeliest)
        np.testing.assert_allclose(top, [item for _, item in likeliest], atol=2e-5)


@pytest.mark.parametrize("vocab", [1, 255, 2048, 8200])
def test_what_tables_do_not_allow_is_banned(kernels: dict[str, Kernel], vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    asked = draw_tables(rng, vocab)
    bits, logits = rounded(rng.normal(0, 4, (len(asked.slots), vocab)))
    expected, states = expect_constrained(logits.astype(np.float64), asked)
    places = np.flatnonzero(asked.records["table"][asked.slots])
    some, slots = bits[places], asked.slots[places]
    records = ints(asked.records[slots].copy())
    arrays = records, asked.last_token[slots], asked.positions[places], asked.tables
    kernels["constrain bfloat16"].launch(len(places), THREADS, some, vocab, *arrays)
    np.testing.assert_array_equal(widened(some), expected[places].astype(np.float32))
    np.testing.assert_array_equal(records[:, -1], states[slots])


def test_a_constrained_row_takes_3_ns(kernels: dict[str, Kernel]) -> None:
    """By the instructions that an H100 issues: 132 processors, four warps of each at 1.75 GHz. Most
    tokens are of a class that a state of JSON bans."""
    rng = np.random.default_rng(0)
    classes, states, count = 80, 400, 4
    class_of = np.where(rng.random(SHORT) < 0.1, rng.integers(classes, size=SHORT), 0)
    after = rng.integers(states, size=(states, classes))
    after[:, 0] = 0
    head, distance = [*[0] * 8, classes, states, *[0] * 6], [65_535, *[0] * (states - 1)]
    tables = np.concatenate([head, class_of, after.ravel(), distance]).astype(np.uint16)
    records = np.zeros(count, SAMPLING)
    records["table"], records["state"], records["last_position"] = 8, ~np.arange(1, count + 1), 9
    ids = np.zeros(count, np.int32)
    bits, _ = rounded(rng.normal(0, 4, (count, SHORT)))
    arrays = ints(records), ids, ids, tables
    ran = kernels["constrain bfloat16"].launch(count, THREADS, bits, SHORT, *arrays)
    assert ran.warp_instructions / count / (132 * 4 * 1.75e9) <= 3e-9
