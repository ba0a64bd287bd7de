"""`python -m research.bench.gpu.ops TASK`: every op of a step held against float64, then timed.

Products are checked at each of `rows`, the other ops at each of `op_rows`; of many rows some are
looked at, the first and the last among them. A line has `error`, the largest of all that was looked
at as a part of what rounding allows, so that 1 is the limit, `ok`, and what a call takes. A wrong
op's line has `wrong` elements, to mend it by where no GPU is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from research.bench.engine.counts import count_op
from research.bench.engine.feeds import Array
from research.bench.engine.ops import Ops, Variant, widened
from research.bench.gpu.task import Lines, Task, read_task
from research.bench.peaks.timing import seconds_per_call
from srm.engine.device.linear import graph_dtype
from srm.engine.device.products import FLOAT8, choose_product
from srm.engine.device.runner import open_device
from srm.engine.messages import MAX_LOGPROBS
from srm.engine.steps.batch import SAMPLING
from srm.engine.weights.float8 import from_e4m3, in_inner_order, norm_scale
from tests.kernels import oracle

F64 = npt.NDArray[np.float64]
Found = tuple[F64, F64, F64]
"""An op's output, the expected output, and how far rounding may move one from the other."""

PRODUCTS = {"up", "down", "proj_in", "proj_out", "head"}
RESIDUAL = {"down", "proj_out"}
"""Products that a residual is added to."""
LOST_OF_SUMS = 2.0**-11
"""Largest error of a product in FLOAT8, as a part of the magnitudes that are summed: tensor cores
are said to keep 14 bits of a sum, and K is 4,096."""
LOOKED_AT = 24
"""Rows that are compared."""
MOST_WRONG, WRONG_COLUMNS = 64, 64
"""Wrong elements that a line names, and columns that are counted together."""


def main(argv: list[str]) -> int:
    task = read_task(argv)
    lines, device = Lines.from_task(task), open_device(task.device)
    dtype = graph_dtype(task.dtype)
    by = choose_product(task.product, task.model, dtype, device)
    variant = Variant(task.model, dtype, by, bound=True)
    ops = Ops(variant, device, Path(task.cache_dir), task.ops)
    for name in ops.ops:
        for rows in task.rows if name in PRODUCTS else task.op_rows if name != "call" else ():
            known = {"op": name, "dtype": task.dtype, "d_model": task.d_model, "rows": rows}
            known |= {"product": (by or "cpu") if name in PRODUCTS else None}
            lines.attempt(f"{name} {rows}", partial(_attempt, ops, task, name, rows), **known)
    return 0


def _attempt(ops: Ops, task: Task, name: str, rows: int) -> dict[str, Any]:
    compared, columns, compared_values = compare(ops, name, rows)
    error = largest_error(compared_values)
    facts: dict[str, Any] = {"error": error, "ok": error <= 1}  # NaN is not
    if not facts["ok"]:
        return facts | {"wrong": wrong_elements(compared, columns, compared_values)}
    if rows == 0:
        return facts
    wait = ops.device.synchronize
    raw = seconds_per_call(ops.prepare(name, rows), wait, task.repetitions, task.seconds)
    count = count_op(name, task.model, task.dtype, task.device, rows)
    return facts | {"seconds": median(raw), "raw": raw} | count._asdict()


def compare(ops: Ops, name: str, rows: int) -> tuple[npt.NDArray[np.int64], int, Found]:
    """Run an op on so many rows. Return which are compared, the columns of each, and with what."""
    before, outputs, after = ops.run(name, rows)
    if ops.dtype == FLOAT8:
        compared_values = check_float8(name, ops.weights.get(name), before, outputs)
    elif name in ops.weights:
        compared_values = check_product(name, ops.weights[name], before, outputs)
    else:
        compared_values = CHECKS[name](before, outputs, after)
    got, expected, _ = compared_values
    if got.shape != expected.shape:
        raise ValueError(f"{name} of {rows} rows gave {got.shape}, not {expected.shape}")
    return looked_at(rows), outputs[0].shape[-1] if outputs else 1, compared_values


def largest_error(compared_values: Found) -> float:
    """Return the largest error as a part of what is allowed."""
    got, expected, allowed = compared_values
    return float((np.abs(got - expected) / allowed).max()) if got.size else 0.0


def wrong_elements(
    rows: npt.NDArray[np.int64], columns: int, compared_values: Found
) -> dict[str, Any]:
    """Return how many elements are wrong, how many by row and by columns, and the first of them.

    An element is (row, column, got, expected). What an op gives besides its rows comes behind them,
    as more rows of -1.
    """
    got, expected, allowed = (compared_value.ravel() for compared_value in compared_values)
    places = np.flatnonzero(~(np.abs(got - expected) <= allowed))
    of = np.append(rows, np.full(-(-got.size // columns) - len(rows), -1))[places // columns]
    by_row, in_row = np.unique(of, return_counts=True)
    by_column = np.bincount(
        places % columns // WRONG_COLUMNS, minlength=-(-columns // WRONG_COLUMNS)
    )
    return {
        "elements": len(places),
        "of": got.size,
        "by_row": dict(zip(map(str, by_row.tolist()), in_row.tolist(), strict=True)),
        f"by_{WRONG_COLUMNS}_columns": by_column.tolist(),
        "first": [
            (int(row), int(place % columns), float(got[place]), float(expected[place]))
            for row, place in zip(of[:MOST_WRONG], places[:MOST_WRONG], strict=True)
        ],
    }


def looked_at(rows: int) -> npt.NDArray[np.int64]:
    """Return the rows to compare, ascending: all of a few, of more the edges and some between."""
    drawn = np.random.default_rng(rows).integers(0, max(rows, 1), LOOKED_AT)
    edges = [row for row in (0, 1, rows - 2, rows - 1) if 0 <= row < rows]
    return np.unique([*edges, *(drawn if rows else [])]).astype(np.int64)


def _wide(values: Array) -> F64:
    return widened(values).astype(np.float64)


def _rounding(values: Array, *magnitudes: F64) -> F64:
    """Return what rounding to the values' dtype after each of these intermediates may change."""
    step = 2.0**-8 if values.dtype == np.uint16 else 2.0**-23
    total: F64 = np.abs(np.stack(magnitudes)).sum(0)
    return 1e-6 + step * total


def check_product(name: str, weight: Array, before: list[Array], outputs: list[Array]) -> Found:
    """Every column of some rows. A library may round after each part of the epilogue."""
    rows = looked_at(len(before[0]))
    x, wide = _wide(before[0][rows]), weight.astype(np.float64)
    bias = np.zeros(1) if name == "head" else _wide(before[1])
    if bias.ndim == 2:  # a folded norm's columns: sums, and biases
        x, bias = oracle.layer_norm(x), bias[:, 1]
    y = x @ wide
    seen = [y]
    if name != "head":
        seen.append(y := y + bias)
    if name == "up":
        seen.append(y := y / (1 + np.exp(-y)))
    if name in RESIDUAL:
        seen.append(y := y + _wide(before[2][rows]))
    sums = np.abs(x) @ np.abs(wide)  # in float32, in any order
    allowed = 1.2 * _rounding(outputs[0], *seen) + 2e-6 * sums
    compared_values = _wide(outputs[0][rows]), y, allowed
    if name == "head":  # at temperature 1
        slices = partial(oracle.slices, temperatures=np.ones(len(rows)))
        return _with_moments(compared_values, outputs, rows, slices)
    return _with_moments(compared_values, outputs, rows)


def _with_moments(
    compared_values: Found,
    outputs: list[Array],
    rows: npt.NDArray[np.int64],
    moments_of: Callable[[F64], F64] = oracle.moments,
) -> Found:
    """Add the moments of these rows of the first output, where they are the second."""
    if len(outputs) == 1:
        return compared_values
    expected = moments_of(_wide(outputs[0][rows]))
    moments = outputs[1][rows].astype(np.float64), expected, 1e-5 * np.abs(expected) + 1e-6
    pairs = zip(compared_values, moments, strict=True)
    y, wanted, allowed = (np.concatenate([a.ravel(), b.ravel()]) for a, b in pairs)
    return y, wanted, allowed


def check_float8(
    name: str, weight: Array | None, before: list[Array], outputs: list[Array]
) -> Found:
    """The ops of `research.bench.engine.float8`: a norm has no weight, "up" writes INNER of each
    64."""
    rows = looked_at(len(before[0]))
    if weight is None:
        x = _wide(before[0][rows])
        y = norm_scale(x.shape[1]) * oracle.layer_norm(x)
        return from_e4m3(outputs[0][rows]).astype(np.float64), y, 1e-4 + _rounding_e4m3(y)
    x, wide = (array.astype(np.float64) for array in (from_e4m3(before[0][rows]), weight))
    scales, bias = before[1].T.astype(np.float64)
    y = x @ wide * scales + bias
    lost = LOST_OF_SUMS * (np.abs(x) @ np.abs(wide)) * scales
    if name == "down":
        y += _wide(before[2][rows])
        allowed = 1.2 * _rounding(outputs[0], y) + lost
        return _with_moments((_wide(outputs[0][rows]), y, allowed), outputs, rows)
    y, lost = y / (1 + np.exp(-y)) / before[2], 1.1 * lost / before[2]  # SiLU's slope, at most
    y, lost = in_inner_order(y), in_inner_order(lost)
    return from_e4m3(outputs[0][rows]).astype(np.float64), y, 1e-4 + _rounding_e4m3(y) + lost


def _rounding_e4m3(values: F64) -> F64:
    """Return what rounding to e4m3 may change: half of its steps."""
    steps: F64 = 2.0**-4 * np.abs(values) + 2.0**-10
    return steps


def _embed(before: list[Array], outputs: list[Array], _: list[Array]) -> Found:
    tokens, table = before[1], before[3]
    rows = looked_at(len(tokens))
    expected = _wide(table[tokens[rows]])
    compared_values = _wide(outputs[0][rows]), expected, np.full(expected.shape, 1e-30)
    return _with_moments(compared_values, outputs, rows)


def _norm(before: list[Array], outputs: list[Array], _: list[Array]) -> Found:
    rows = looked_at(len(before[0]))
    x, weight, bias = (_wide(array) for array in (before[0][rows], *before[1:]))
    normed = oracle.layer_norm(x)
    allowed = 1e-4 + _rounding(outputs[0], normed * weight, normed * weight + bias)
    return _wide(outputs[0][rows]), normed * weight + bias, allowed


def _mix(before: list[Array], outputs: list[Array], after: list[Array]) -> Found:
    pool, unit, x, slots, _, positions, bounds, *mixer = before
    scalars = [array.astype(np.float64) for array in mixer]
    rows, d = looked_at(len(slots)), x.shape[1]
    of = slice(int(unit) * d, (int(unit) + 1) * d)
    lengths = np.diff(bounds)[rows]
    tokens = np.concatenate([np.arange(*bounds[row : row + 2]) for row in rows])
    here = np.arange(len(rows))
    y, states = oracle.mix(
        *(pool[rows, of].astype(np.float64), 0, _wide(x[tokens]), here, here, positions[rows]),
        np.append(0, lengths.cumsum()),
        *(scalars[0], scalars[1], scalars[2], scalars[3]),
    )
    got = np.concatenate([_wide(outputs[0][tokens]).ravel(), after[0][rows, of].ravel()])
    # Sums of a prompt's many tokens are larger than their result; other states must not change.
    largest = 1e-5 * np.abs(y).max(initial=1.0)
    allowed = np.concatenate(
        [(_rounding(outputs[0], y) + largest).ravel(), (2e-6 * np.abs(states) + largest).ravel()]
    )
    others = np.delete(np.arange(pool.shape[1]), np.arange(of.start, of.stop))
    if not np.array_equal(pool[rows][:, others], after[0][rows][:, others]):
        raise ValueError("mix changed the state of another unit")
    return got, np.concatenate([y.ravel(), states.ravel()]), allowed


def _taps(before: list[Array], outputs: list[Array], _: list[Array]) -> Found:
    q, positions, weight, beta, residual = before[0], before[1], *before[3:]
    rows = looked_at(len(q))[:8]  # the oracle takes long
    expected = oracle.taps(
        *(_wide(q[rows]), positions[rows], np.arange(len(rows) + 1)),
        *(weight.astype(np.float64), beta.astype(np.float64), _wide(residual[rows])),
    )
    return _wide(outputs[0][rows]), expected, 1e-5 + 2 * _rounding(outputs[0], expected)


def _edit(before: list[Array], _: list[Array], after: list[Array]) -> Found:
    logits, spans, penalties, *lists = before[1], *before[5:]
    rows = looked_at(len(logits))[:8]
    lasts = [
        -1 if token >= 0 else int(before[0][slot])
        for token, slot in zip(*before[2:4], strict=False)
    ]
    edits = (
        oracle.edit(_wide(logits[row]), lasts[row], spans[row], penalties[row], *lists)
        for row in rows
    )
    expected = np.array([*edits])
    return _wide(after[1][rows]), expected, 2 * _rounding(logits, expected, expected)


def _constrain(before: list[Array], _: list[Array], after: list[Array]) -> Found:
    last_token, sampling, logits, positions, slots, tables = before
    rows = looked_at(len(logits))
    expected, states = [], []
    for row in rows:
        slot = slots[row]
        record = sampling[slot].view(SAMPLING)[0]
        new, state = oracle.constrain(
            _wide(logits[row]), record, int(last_token[slot]), int(positions[row]), tables
        )
        expected.append(new)
        states.append(state)
    if not np.array_equal(after[1][slots[rows]].view(SAMPLING)["state"][:, 0], states):
        raise ValueError("constrain left other states")
    got, wanted = (np.maximum(values, -1e9) for values in (_wide(after[2][rows]), expected))
    return got, wanted, np.full_like(wanted, 1e-9)  # nothing is rounded


def _sample(before: list[Array], outputs: list[Array], after: list[Array]) -> Found:
    """Tokens, by where their draws must lie, and log-probabilities; all in units of the limit."""
    _, logits, sampling, positions, slots, *_ = before
    rows = looked_at(len(slots))
    tokens, logprobs = outputs
    if not np.array_equal(after[0][slots[: len(tokens)]], tokens):
        raise ValueError("the last tokens are not those sampled")
    errors = []
    for row in rows:
        values, token = _wide(logits[row]), int(tokens[row])
        *settings, seed = sampling[slots[row]].view(SAMPLING).item()[:5]
        ends = oracle.truncated(values, *settings).cumsum()
        drawn = oracle.uniform(seed, int(positions[row]))
        begin = ends[token - 1] if token else 0.0
        outside = max(0.0, begin - drawn, drawn - ends[token])
        logprob = float(np.log(oracle.softmax(values / settings[0])[token]))
        errors += [outside / 1e-4, (float(logprobs[row]) - logprob) / 1e-3]
    return np.array(errors), np.zeros(len(errors)), np.ones(len(errors))


def _score(before: list[Array], outputs: list[Array], _: list[Array]) -> Found:
    (logits, sampling, slots, tokens), (rows, num_top) = before[:4], before[5:7]
    logprobs, ranks, top_ids, top_logprobs = outputs
    got, expected = [], []
    for place in looked_at(len(rows)):
        row, wanted = rows[place], int(num_top[place])
        temperature = sampling[slots[row]].view(SAMPLING).item()[0]
        values = _wide(logits[row])
        logprob, rank, top = oracle.score(values, temperature, int(tokens[row]), wanted)
        got += [logprobs[place], ranks[place], *top_ids[place], *top_logprobs[place]]
        none = MAX_LOGPROBS - len(top)
        expected += [logprob, rank, *(value for value, _ in top), *[-1] * none]
        expected += [*(value for _, value in top), *[0] * none]
    return np.array(got), np.array(expected), np.full(len(got), 1e-3)


def _expand(before: list[Array], outputs: list[Array], after: list[Array]) -> Found:
    rows, sampling = oracle.expand(*before)
    got, wanted = (
        np.concatenate([array.ravel() for array in each]).astype(np.float64)
        for each in ((*outputs, after[0]), (*rows, sampling))
    )
    return got, wanted, np.full(len(got), 0.5)


CHECKS: dict[str, Callable[[list[Array], list[Array], list[Array]], Found]] = {
    "expand": _expand,
    "embed": _embed,
    "norm": _norm,
    "mix": _mix,
    "mix_prompts": _mix,
    "taps": _taps,
    "edit": _edit,
    "constrain": _constrain,
    "sample": _sample,
    "sample_top_p": _sample,
    "sample_slices": _sample,
    "score": _score,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
