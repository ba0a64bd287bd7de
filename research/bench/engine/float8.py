"""The ops of a channel mixer in FLOAT8, on an sm_90 GPU alone: a norm and two products.

Weights are bound, as in a step, and are those of a random layer: scales and divisors are as a model
has them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from max.dtype import DType
from max.graph import DeviceRef, TensorType, TensorValue, Weight

from research.bench.engine.feeds import DISTINCT, Array, Feeds
from research.bench.engine.op import Feed, Op
from srm.engine.config import ModelConfig
from srm.engine.device.linear import layer_norm_float8
from srm.engine.device.products import (
    FLOAT8,
    NO_VARIANTS,
    Variants,
    multiply_float8,
    multiply_float8_into_stream,
)
from srm.engine.weights.float8 import float8_channel_mixer, norm_scale, round_e4m3
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
    tensors = float8_channel_mixer(layer)

    def make_type(dtype: DType, *shape: int | str) -> TensorType:
        return TensorType(dtype, shape, on)

    def factor(rows: int, inner: int, scale: int) -> Array:
        few = round_e4m3(scale * made.values(min(rows, DISTINCT), inner))
        return np.resize(few, (rows, inner))

    def product(
        name: str,
        multiply: Callable[..., Any],
        other: TensorType,
        feed: Feed,
    ) -> Op:
        bits = tensors[f"{name}_weight"]
        columns, inner = bits.shape
        types = [make_type(FLOAT8, "tokens", inner), make_type(DType.float32, columns, 2), other]

        def call(x: TensorValue, of_columns: TensorValue, last: TensorValue) -> Any:
            weight = Weight(name, FLOAT8, bits.shape, on)
            return multiply(x, weight, of_columns, last, variants)

        return Op([*types], call, feed, bits=bits)

    def up(rows: int) -> list[Array]:
        return [factor(rows, d, norm_scale(d)), tensors["up_columns"], tensors["up_divisors"]]

    def down(rows: int) -> list[Array]:
        x = factor(rows, 4 * d, INNER_SCALE)
        return [x, tensors["down_columns"], made.stored(rows, d)]

    stream = make_type(DType.bfloat16, "tokens", d)
    return {
        "norm": Op([stream], layer_norm_float8, lambda rows: [made.stored(rows, d)]),
        "up": product("up", multiply_float8, make_type(DType.float32, 4 * d), up),
        "down": product("down", multiply_float8_into_stream, stream, down),
    }
