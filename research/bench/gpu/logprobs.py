"""`python -m research.bench.gpu.logprobs TASK`: the likeliest tokens of a whole model against
float64.

`rows` says how many prompts of which length are scored. The divergence from the model in float64
must be no more than four times that of the same model in float64 whose weights and activations are
rounded, to bfloat16 or float8, wherever a step may round them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from research.bench.engine.ops import widened
from research.bench.gpu.steps import open_runner
from research.bench.gpu.task import Lines, Task, read_task
from srm.engine.config import EngineConfig
from srm.engine.device.linear import round_bfloat16
from srm.engine.messages import MAX_LOGPROBS, SamplingParams
from srm.engine.process.engine import Engine
from srm.engine.weights.float8 import (
    float8_channel_mixer,
    from_e4m3,
    in_inner_order,
    norm_scale,
    round_e4m3,
)
from srm.engine.weights.random_model import random_tensors
from srm.engine.weights.weights import LayerWeights, Weights, fold
from tests.kernels import oracle
from tests.kit.engines.numpy_runner import F64, Kept, as_it_is, feed, in_float64, silu

MOST = 4.0


def main(argv: list[str]) -> int:
    task = read_task(argv)
    Lines.from_task(task).attempt("prompts", lambda: _measure(task))
    return 0


def _measure(task: Task) -> dict[str, Any]:
    prompts, length = task.rows
    drawn = np.random.default_rng(1).integers(task.vocab_size, size=(prompts, length))
    top, logprobs = _on_device(task, drawn.tolist())
    weights = fold(task.model, random_tensors(task.model), "random")
    exact = np.stack([_logprobs(in_float64(weights), ids) for ids in drawn.tolist()])
    rounding = as_it_is if task.dtype == "float32" else _rounded
    narrow = in_float64(weights, rounding)
    mixers = [float8_mixer(layer) for layer in weights.layers if task.dtype == "float8"]
    rounded = np.stack([_logprobs(narrow, ids, rounding, mixers) for ids in drawn.tolist()])
    # Of the scored tokens alone, no term of which is negative.
    logp, logr = (np.take_along_axis(table, top, axis=2) for table in (exact, rounded))
    ours, allowed = _divergence(logp, logprobs), _divergence(logp, logr) + 1e-9
    same = float((top[..., 0] == exact.argmax(2)).mean())
    return {
        "d_model": task.d_model,
        "dtype": task.dtype,
        "tokens": int(top.shape[0] * top.shape[1]),
        "divergence": ours,
        "divergence_of_rounding": allowed,
        "largest_difference": float(np.abs(logprobs - logp).max()),
        "same_likeliest": same,
        "same_likeliest_when_rounded": float((rounded.argmax(2) == exact.argmax(2)).mean()),
        "ok": ours < MOST * allowed,
    }


def _on_device(task: Task, prompts: list[list[int]]) -> tuple[np.ndarray, F64]:
    """Return the likeliest tokens at each place but the last, and their log-probabilities."""
    runner = open_runner(task)
    engine = Engine(task.model, runner, EngineConfig(num_slots=runner.num_slots))
    params = SamplingParams(max_tokens=0, prompt_logprobs=min(MAX_LOGPROBS, task.vocab_size))
    tops, logprobs = [], []
    for output, *_ in engine.generate(prompts, params):
        shape = (len(prompts[0]) - 1, -1)
        tops.append(np.frombuffer(output.top_ids, "<i4").reshape(shape).astype(np.int64))
        logprobs.append(np.frombuffer(output.top_logprobs, "<f4").reshape(shape))
    runner.close()
    return np.stack(tops), np.stack(logprobs).astype(np.float64)


def _logprobs(
    weights: Weights,
    ids: list[int],
    rounding: Kept = as_it_is,
    mixers: Sequence[Callable[[F64], F64]] = (),
) -> F64:
    """f64[len(ids) - 1, V]: of what follows each token but the last."""
    state, rows = np.zeros(weights.config.state_width), []
    for position, token in enumerate(ids[:-1]):
        logits, state = feed(weights, token, position, state, rounding, mixers)
        rows.append(rounding(logits) - np.logaddexp.reduce(rounding(logits)))
    return np.stack(rows)


def float8_mixer(layer: LayerWeights) -> Callable[[F64], F64]:
    """Return what a layer's channel mixer in float8 adds to a token, but for what sums lack."""
    tensors = float8_channel_mixer(layer)
    up, down = (from_e4m3(tensors[f"{name}_weight"]).astype(np.float64) for name in ("up", "down"))
    up_scale, up_bias = tensors["up_columns"].T
    down_scale, down_bias = tensors["down_columns"].T
    by = norm_scale(up.shape[1])

    def mix(x: F64) -> F64:
        normed = from_e4m3(round_e4m3(by * oracle.layer_norm(x[None])[0]))
        inner = silu(up @ normed * up_scale + up_bias) / tensors["up_divisors"]
        stored = from_e4m3(round_e4m3(in_inner_order(inner)))
        y: F64 = down @ stored * down_scale + down_bias
        return y

    return mix


def _rounded(values: F64) -> F64:
    return widened(round_bfloat16(values.astype(np.float32))).astype(np.float64)


def _divergence(logp: F64, logq: F64) -> float:
    p, q = np.exp(logp), np.exp(logq)
    return float((p * (logp - logq) - p + q).sum(2).mean())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
