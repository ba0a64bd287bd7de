"""Channel mixers with 8-bit factors, emulated on a CPU, and how far each is from float64 alone.

float8 is computed as the engine does, and int8 as its kernels do and in ways that they do not. Its
normalised rows have a scale each, and its weights one for each output. An inner row's scale would
be known only once it is complete, so scales are fixed by column instead, from rows seen before, or
from noise in the kernels. A Hadamard transform of each 16 neighbours, which weights undo, spreads
what is large over all 16.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from srm.engine.config import ModelConfig
from srm.engine.weights.float8 import (
    INNER,
    LARGEST_INT8,
    TURNED,
    float8_channel_mixer,
    from_e4m3,
    int8_channel_mixer,
    norm_scale,
    turned,
)
from srm.engine.weights.random_model import random_tensors
from srm.engine.weights.weights import LayerWeights, fold

DEPTH = 32
"""Products of float8 that a tensor core adds at a time."""
FLOAT32_BITS = 24
WIDTH, SEEN, TRIED = 512, 4096, 256
"""d_model of random mixers, rows that fix their scales, and rows of which errors are told."""


class Int8(NamedTuple):
    """How factors become int8."""

    is_fixed: bool = False  # scales of h, which is what is between the products: by column
    turned: str = ""  # which have Hadamard transforms: "h", "hx"


class Mixer(Protocol):
    """A channel mixer, but for the residual."""

    is_fixed: bool
    """Whether scales are fixed by rows that are run before."""

    def run(self, x: Tensor) -> Tensor:
        """Map x [..., d] to what is added to it."""

    def fix(self) -> None:
        """Fix the scales by what was run so far."""


Source = tuple[LayerWeights, Tensor, Tensor]
"""A layer, the rows that fix scales, and those that are tried; of the residual stream."""


class Float8Mixer:
    """A channel mixer as `srm_norm_8bit`, `srm_up_8bit` and `srm_down_8bit` compute it, but for the
    residual. Its scales follow from the weights."""

    is_fixed = False

    def __init__(self, layer: LayerWeights, sum_bits: int = FLOAT32_BITS) -> None:
        self._sum_bits = sum_bits
        self._tensors = {
            name: torch.from_numpy(from_e4m3(value) if value.dtype == np.uint8 else value)
            for name, value in float8_channel_mixer(layer).items()
        }

    def run(self, x: Tensor) -> Tensor:
        width = x.shape[-1]
        normed = to_e4m3(F.layer_norm(x, [width], eps=1e-5) * norm_scale(width))
        inner = to_e4m3(F.silu(self._product("up", normed)) / self._tensors["up_divisors"])
        return self._product("down", _in_inner_order(inner))

    def fix(self) -> None:
        """Do nothing."""

    def _product(self, name: str, x: Tensor) -> Tensor:
        scale, bias = self._tensors[f"{name}_columns"].T
        y: Tensor = self._sums(x, self._tensors[f"{name}_weight"]) * scale + bias
        return y

    def _sums(self, x: Tensor, weight: Tensor) -> Tensor:
        if self._sum_bits == FLOAT32_BITS:
            return F.linear(x, weight)
        sums = torch.zeros(*x.shape[:-1], len(weight))
        cut = -1 << (FLOAT32_BITS - self._sum_bits)
        for k in range(0, x.shape[-1], DEPTH):
            sums += F.linear(x[..., k : k + DEPTH], weight[:, k : k + DEPTH])
            sums.view(torch.int32).bitwise_and_(cut)
        return sums


class KernelInt8Mixer:
    """The same of those kernels in int8."""

    is_fixed = False

    def __init__(self, layer: LayerWeights) -> None:
        self._tensors = {
            name: torch.from_numpy(value.astype(np.float32))
            for name, value in int8_channel_mixer(layer).items()
        }
        self._tensors["up_columns"] *= 2

    def run(self, x: Tensor) -> Tensor:
        normed = round_rows(_turned(F.layer_norm(x, x.shape[-1:], eps=1e-5)))
        inner = _turned(_in_inner_order(F.silu(self._product("up", normed))))
        codes = inner * _in_inner_order(self._tensors["up_divisors"])
        return self._product("down", codes.round().clamp(-LARGEST_INT8, LARGEST_INT8))

    def fix(self) -> None:
        """Do nothing."""

    def _product(self, name: str, x: Tensor) -> Tensor:
        scale, bias = self._tensors[f"{name}_columns"].T
        y: Tensor = F.linear(x, self._tensors[f"{name}_weight"]) * scale + bias
        return y


class Int8Mixer:
    """A channel mixer of int8 factors. What fixed scales are for is not rounded before `fix`."""

    def __init__(self, layer: LayerWeights, way: Int8) -> None:
        up, self._bias, down, self._down_bias = folded(layer, torch.float32)
        self._turned, self.is_fixed = way.turned, way.is_fixed
        self._up, turned = round_rows(self._turn("x", up)), self._turn("h", down)
        self._down = turned if way.is_fixed else round_rows(turned)
        self._largest, self._scale = torch.zeros(len(up)), torch.zeros(0)

    def run(self, x: Tensor) -> Tensor:
        normed = round_rows(self._turn("x", F.layer_norm(x, x.shape[-1:], eps=1e-5)))
        inner = self._turn("h", F.silu(F.linear(normed, self._up, self._bias)))
        if not self.is_fixed:
            inner = round_rows(inner)
        elif len(self._scale):
            inner = (inner / self._scale).round().clamp(-LARGEST_INT8, LARGEST_INT8)
        else:
            self._largest = self._largest.maximum(inner.abs().flatten(0, -2).amax(0))
        return F.linear(inner, self._down, self._down_bias)

    def fix(self) -> None:
        """Make the largest values so far the largest of int8; weights multiply with the scales."""
        self._scale = self._largest.clamp(min=1e-30) / LARGEST_INT8
        self._down = round_rows(self._down * self._scale)

    def _turn(self, name: str, x: Tensor) -> Tensor:
        return _turned(x) / math.sqrt(TURNED) if name in self._turned else x


def _turned(x: Tensor) -> Tensor:
    hadamard = torch.from_numpy(turned(np.eye(TURNED, dtype=np.float32)))
    parts: Tensor = (x.reshape(*x.shape[:-1], -1, TURNED) @ hadamard).flatten(-2)
    return parts


def _in_inner_order(x: Tensor) -> Tensor:
    return x.view(*x.shape[:-1], -1, len(INNER))[..., INNER].flatten(-2)


def to_e4m3(x: Tensor) -> Tensor:
    """Round to e4m3; what exceeds 448 becomes NaN, and nothing does."""
    return x.to(torch.float8_e4m3fn).float()


def round_rows(x: Tensor) -> Tensor:
    """Round to int8 times a scale of each row."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / LARGEST_INT8
    return (x / scale).round() * scale


def folded(layer: LayerWeights, dtype: torch.dtype) -> list[Tensor]:
    """Return up [4d, d] with the norm's gain and shift, its bias, down [d, 4d] and its bias."""
    up = (layer.channel_norm_weight[:, None].astype(np.float64) * layer.up_weight).T
    bias = layer.channel_norm_bias @ layer.up_weight + layer.up_bias
    values = up, bias, layer.down_weight.T, layer.down_bias
    return [torch.tensor(value, dtype=dtype) for value in values]


def measure_mixers(
    sources: dict[str, list[Source]], cases: dict[str, Callable[[LayerWeights], Mixer]]
) -> list[dict[str, Any]]:
    """Return the errors of channel mixers alone: rms, in units of the exact outputs' over all rows
    and layers of a source."""
    results = []
    for name, layers in (
        sources | {"Gaussian": [_drawn(0, 0)], "outliers": [_drawn(0.8, 0.5)]}
    ).items():
        result: dict[str, Any] = {"name": name, "errors": {}}
        for case, make in cases.items():
            off, all_ = 0.0, 0.0
            for layer, seen, tried in layers:
                mixer, exact = make(layer), _exact(layer, tried)
                if mixer.is_fixed:
                    mixer.run(seen)
                    mixer.fix()
                off += float((mixer.run(tried).double() - exact).square().sum())
                all_ += float(exact.square().sum())
            result["errors"][case] = float(f"{math.sqrt(off / all_):.4g}")
        results.append(result)
    return results


def _exact(layer: LayerWeights, x: Tensor) -> Tensor:
    up, bias, down, down_bias = folded(layer, torch.float64)
    normed = F.layer_norm(x.double(), x.shape[-1:], eps=1e-5)
    return F.linear(F.silu(F.linear(normed, up, bias)), down, down_bias)


def _drawn(of_x: float, of_h: float) -> Source:
    """Random weights and rows. Channels of x and h differ in size by factors exp(of_x * normal) and
    exp(of_h * normal), those of h in `down`."""
    shape = ModelConfig(d_model=WIDTH, num_layers=1, num_heads=2, n_ctx=1, vocab_size=2)
    (layer,) = fold(shape, random_tensors(shape), "random").layers
    rng = np.random.default_rng(1)
    sizes = (np.exp(by * rng.standard_normal(n)) for by, n in ((of_x, WIDTH), (of_h, 4 * WIDTH)))
    of_channel, of_inner = (item.astype(np.float32) for item in sizes)
    layer = replace(layer, down_weight=layer.down_weight * of_inner[:, None])
    x = torch.from_numpy(rng.standard_normal((SEEN + TRIED, WIDTH), np.float32) * of_channel)
    return layer, x[:SEEN], x[SEEN:]
