"""The ops of a channel mixer in FLOAT8 or int8, on an sm_90 GPU alone: a norm and two products.

Weights are bound, as in a step, and are those of a random layer: scales and divisors are as a model
has them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np
from max.dtype import DType
from max.graph import DeviceRef, TensorType, TensorValue, Weight

from research.bench.engine.feeds import DISTINCT, Array, Feeds
from research.bench.engine.op import Feed, Op
from srm.engine.config import ModelConfig
from srm.engine.device.linear import layer_norm_8bit
from srm.engine.device.products import (
    FLOAT8,
    NO_VARIANTS,
    Variants,
    dtype_of_mixers,
    multiply_8bit,
    multiply_8bit_into_stream,
)
from srm.engine.weights.float8 import (
    LARGEST_INT8,
    float8_channel_mixer,
    int8_channel_mixer,
    norm_scale,
    round_e4m3,
    round_int8,
    turned,
)
from srm.engine.weights.random_model import random_tensors
from srm.engine.weights.weights import fold

INNER_SCALE = 8
"""Largest value between the products in these trials, about; float8 holds at most 448."""


def float8_ops(
    model: ModelConfig, on: DeviceRef, variants: Variants = NO_VARIANTS
) -> dict[str, Op]:
    """Return the ops by name."""
    d, made = model.d_model, Feeds(model, is_narrow=True, narrow_logits=True)
    one_layer = msgspec.structs.replace(model, num_layers=1)
    (layer,) = fold(one_layer, random_tensors(one_layer), "random").layers
    dtype = dtype_of_mixers(variants)
    in_int8 = dtype != FLOAT8
    tensors = int8_channel_mixer(layer) if in_int8 else float8_channel_mixer(layer)

    def make_type(dtype: DType, *shape: int | str) -> TensorType:
        return TensorType(dtype, shape, on)

    def factor(rows: int, inner: int, scale: int) -> tuple[Array, Array]:
        """Rows, and the scales that rows in int8 have."""
        few = made.values(min(rows, DISTINCT), inner)
        if not in_int8:
            return np.resize(round_e4m3(scale * few), (rows, inner)), np.zeros(0, np.float32)
        few = turned(few)
        scales = np.abs(few).max(axis=1) / LARGEST_INT8
        codes = round_int8(few / scales[:, None])
        return np.resize(codes, (rows, inner)), np.resize(scales, rows).astype(np.float32)

    def product(
        name: str,
        multiply: Callable[..., Any],
        others: list[TensorType],
        feed: Feed,
    ) -> Op:
        bits = tensors[f"{name}_weight"]
        columns, inner = bits.shape
        types = [make_type(dtype, "tokens", inner), make_type(DType.float32, columns, 2), *others]

        def call(x: TensorValue, *others: TensorValue) -> Any:
            weight = Weight(name, dtype, bits.shape, on)
            return multiply(x, weight, *others, variants)

        return Op([*types], call, feed, bits=bits)

    def up(rows: int) -> list[Array]:
        x, scales = factor(rows, d, norm_scale(d))
        return [x, tensors["up_columns"], tensors["up_divisors"], scales]

    def down(rows: int) -> list[Array]:
        x, _ = factor(rows, 4 * d, INNER_SCALE)
        return [x, tensors["down_columns"], made.stored(rows, d)]

    stream = make_type(DType.bfloat16, "tokens", d)
    scales = make_type(DType.float32, "tokens" if in_int8 else 0)
    norm = partial(layer_norm_8bit, dtype=dtype)
    return {
        "norm": Op([stream], norm, lambda rows: [made.stored(rows, d)]),
        "up": product("up", multiply_8bit, [make_type(DType.float32, 4 * d), scales], up),
        "down": product("down", multiply_8bit_into_stream, [stream], down),
    }
