"""The least operations and bytes that work takes, counted and not measured.

**Operations** of a product [M, K] × [K, N] are 2·M·K·N; bias, SiLU and residual are not counted, as
in `ModelConfig.flops_per_token`. Of every other op each addition, multiplication, comparison,
division and exponential is one, for each value it is done to.

**Bytes** of an op are those of its inputs and outputs, each read or written once, wherever they lie
when it begins: a weight once a call, a state and an activation once a row. An op whose data is in
the cache can thus exceed the memory's peak. Bytes of a step are in
`engine.weights.step_bytes`.
"""

from __future__ import annotations

from typing import NamedTuple

from srm.engine.config import Dtype, ModelConfig
from srm.engine.device.products import SLICE
from srm.engine.weights.step_bytes import FLOAT8, SIZES, STATE, logit_size

KERNEL_SIZE = 4
"""Neighbouring channels that the measured `taps` mixes."""
PROMPT = 64
"""Tokens of a prompt in ops that mix prompts."""
STATES, CLASSES = 400, 80
"""Sizes of the table that constrained rows follow."""
BIASED, SAMPLED, TOP = 8, 64, 5
"""Per edited row: tokens with a bias, tokens sampled so far; likeliest tokens that are scored."""


class Count(NamedTuple):
    """The least operations and bytes of a call."""

    flops: int
    bytes: int


def prefill_bytes(model: ModelConfig, dtype: Dtype, tokens: int, prompts: int) -> int:
    """Count the bytes of a step of whole prompts: no output head, and states are only written."""
    weights = SIZES[dtype] * model.prefill_flops_per_token // 2
    return weights + tokens * SIZES[dtype] * model.d_model + prompts * STATE * model.state_width


def count_op(name: str, model: ModelConfig, dtype: Dtype, device: str, rows: int) -> Count:
    """Count a call of an op of `research.bench.engine.ops` on so many rows (of "mix_prompts":
    tokens)."""
    d, vocab, size = model.d_model, model.vocab_size, SIZES[dtype]
    # Of a channel mixer's factors, and what goes with a column of its weights: in float8 two
    # float32, and divisors of the inner channels; else a bias.
    in_float8 = dtype == "float8"
    factor, of_up, of_down = (FLOAT8, 3 * STATE, 2 * STATE) if in_float8 else (size, size, size)
    logits = rows * vocab * logit_size(dtype, device)
    scalars = 3 * STATE * model.num_heads  # of a token: alpha_in, alpha_out, beta
    match name:
        case "expand":  # slot and position in; token, two slots, position and offset out
            return Count(0, rows * 7 * STATE)
        case "embed":  # an id, a row of the table in, a row out
            return Count(0, rows * (STATE + 2 * size * d))
        case "norm":  # mean 1, variance 3, output 4; x in, y out, weight and bias once
            once = 0 if in_float8 else 2 * size * d
            return Count(8 * rows * d, rows * (size + factor) * d + once)
        case "up":
            return _Product(factor, factor, of_up).count_call(rows, d, 4 * d)
        case "down":
            return _Product(factor, size, of_down, has_residual=True).count_call(rows, 4 * d, d)
        case "proj_in":
            return _Product(size, size, size).count_call(rows, d, d)
        case "proj_out":
            return _Product(size, size, size, has_residual=True).count_call(rows, d, d)
        case "head":
            return _Product(size, logit_size(dtype, device), 0).count_call(rows, d, vocab)
        case "mix":  # two fused and a product into the state, one fused out of it; slots, position
            state = 2 * STATE * d
            return Count(7 * rows * d, rows * (2 * size * d + state + scalars + 4 * STATE))
        case "mix_prompts":  # the same for every token; a prompt's state is written alone
            prompts = -(-rows // PROMPT)
            tokens = rows * (2 * size * d + scalars)
            return Count(7 * rows * d, tokens + prompts * STATE * (d + 4))
        case "taps":  # a multiply-add for each tap, beta and the residual; q and residual in, y out
            return Count((2 * KERNEL_SIZE + 2) * rows * d, rows * 3 * size * d)
        case "edit":  # a bias, or count, product and two sums; ids and biases in, logits changed
            touched = (BIASED + SAMPLED) * (STATE + 2 * logit_size(dtype, device))
            return Count(rows * (BIASED + 4 * SAMPLED), rows * (touched + STATE * BIASED))
        case "constrain":  # each token's class, and what is banned: nearly all
            per_class = CLASSES * (2 + 2) + vocab * (2 + logit_size(dtype, device))
            return Count(rows * (CLASSES + vocab), rows * per_class)
        case "sample" | "sample_top_p":  # largest, scaled, shifted, exponential, sum; read once
            return Count(5 * rows * vocab, logits)
        case "sample_slices":  # two numbers of each slice, and the logits of one
            slices, one = -(-vocab // SLICE), SLICE * logit_size(dtype, device)
            return Count(5 * rows * (slices + SLICE), rows * (slices * 2 * STATE + one))
        case "score":  # the same, and compared with the target
            return Count(6 * rows * vocab, logits + rows * 2 * STATE * (1 + TOP))
    raise KeyError(name)


class _Product(NamedTuple):
    """The bytes of a matrix product's values."""

    factor: int
    result: int
    of_column: int
    """The values of an epilogue that each column of the weights has."""
    has_residual: bool = False

    def count_call(self, rows: int, inner: int, columns: int) -> Count:
        weights = columns * (self.factor * inner + self.of_column)
        row = self.factor * inner + self.result * columns * (1 + self.has_residual)
        return Count(2 * rows * inner * columns, weights + rows * row)
