"""In bfloat16 the MAX step is torch's arithmetic with the same values rounded, and invariant too.

The emulation computes in float64 and rounds to bfloat16 what the step keeps: weights, the residual
stream, and the output of every norm, product and mixer; states and logits it does not round. A sum
of the step that is float32 may fall on the other side of a tie, which moves one value by 2^-8, so
logits differ by as much as a few such values make; that is measured against what rounding does.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from max.dtype import DType

from engine.steps.batch import F32
from engine.weights.weights import LayerWeights, MixerUnit, Weights
from tests.engines.logits_model import LogitsModel
from tests.engines.numpy_runner import F64, feed
from tests.models.forms import CONFIGS, ROUNDED, all_forms, folded, graphs

MODELS = folded(ROUNDED)


@cache
def in_max() -> dict[str, LogitsModel]:
    return graphs().bind(MODELS, DType.bfloat16)


def rounded(values: F32 | F64 | torch.Tensor) -> torch.Tensor:
    """f64 that bfloat16 can hold."""
    return torch.as_tensor(values).float().bfloat16().double()


class Emulation:
    """One sequence through a model, token by token."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        shape = (-1, weights.config.d_model)
        self.state = torch.zeros(weights.config.state_width, dtype=torch.float64).reshape(shape)

    def feed(self, token: int, position: int) -> torch.Tensor:
        """Logits f64[V]."""
        x, states = rounded(self.weights.embedding[token]), list(self.state)
        for index, layer in enumerate(self.weights.layers):
            y = self._norm(x, layer.channel_norm_weight, layer.channel_norm_bias)
            up = y @ rounded(layer.up_weight) + rounded(layer.up_bias)
            down = rounded(up * torch.sigmoid(up)) @ rounded(layer.down_weight)
            x = rounded(down + rounded(layer.down_bias) + x)
            x = self._mix_tokens(layer, x, states, index * len(layer.units), position)
        self.state = torch.stack(states)
        return x @ rounded(self.weights.head)

    def _mix_tokens(
        self, layer: LayerWeights, x: torch.Tensor, states: list[torch.Tensor], at: int, p: int
    ) -> torch.Tensor:
        """x and what the units add; `at` is the place of the first one's state."""
        y = self._norm(x, layer.token_norm_weight, layer.token_norm_bias)
        if layer.proj_in_weight is not None and layer.proj_in_bias is not None:
            y = rounded(y @ rounded(layer.proj_in_weight) + rounded(layer.proj_in_bias))

        def unit(number: int, source: torch.Tensor) -> torch.Tensor:
            out, states[at + number] = _run(layer.units[number], source, states[at + number], p)
            return out

        match self.weights.config.mixer:
            case "combined":
                y = rounded(unit(1, y) + rounded(unit(0, y)))
            case "expanded":
                inner = unit(0, y)
                return rounded(unit(1, rounded(inner * torch.sigmoid(inner))) + x)
            case "kernel":
                taps, beta = layer.units[0].taps, layer.units[0].taps_beta
                assert taps is not None and beta is not None
                q = rounded(unit(0, y)).numpy()
                tapped = np.convolve(q, taps[::-1, p].astype(np.float64))[: len(q)] + beta[p]
                return rounded(torch.from_numpy(tapped) + x)
            case _:
                y = rounded(unit(0, y))
        assert layer.proj_out_weight is not None and layer.proj_out_bias is not None
        return rounded(y @ rounded(layer.proj_out_weight) + rounded(layer.proj_out_bias) + x)

    def _norm(self, x: torch.Tensor, weight: F32, bias: F32) -> torch.Tensor:
        centred = x - x.mean()
        scale = (centred.square().mean() + 1e-5).rsqrt()
        return rounded(centred * scale * rounded(weight) + rounded(bias))


def _run(
    unit: MixerUnit, x: torch.Tensor, s: torch.Tensor, position: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A unit's output, not rounded, and its new state."""

    def per_channel(scalars: F32) -> torch.Tensor:
        return torch.from_numpy(np.repeat(scalars.astype(np.float64), len(x) // len(scalars)))

    s = per_channel(unit.alpha_in[:, position]) * x + per_channel(unit.decay.sum(0)) * s
    y = per_channel(unit.alpha_out[:, position]) * s + per_channel(unit.beta[:, position])
    if unit.gamma is not None:
        y = y + per_channel(unit.gamma[:, position]) * x
    return y, s


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_same_roundings(name: str) -> None:
    weights, model = MODELS[name], in_max()[name]
    ids = np.random.default_rng(3).integers(0, 97, 40, dtype=np.int32)
    found = model.feed(model.pool(), [(ids, 5, 5, 0)])
    emulation, state = Emulation(weights), np.zeros(weights.config.state_width)
    emulated, exact = np.zeros(found.shape), np.zeros(found.shape)
    for position, token in enumerate(ids):
        emulated[position] = emulation.feed(int(token), position).numpy()
        exact[position], state = feed(weights, int(token), position, state)
    error, rounding = np.abs(found - emulated), np.abs(emulated - exact)
    assert rounding.mean() > 1e-4 * np.abs(exact).max()
    assert error.mean() < 0.3 * rounding.mean()
    assert error.max() < rounding.max()


@pytest.mark.parametrize("name", [*MODELS, *CONFIGS])
def test_any_chunking_and_company_give_the_same_bits(name: str) -> None:
    model = in_max()[name] if name in MODELS else all_forms()[name].max
    size, most = min(64, model.config.n_ctx), model.config.vocab_size
    ids, other = np.random.default_rng(4).integers(0, most, (2, size), dtype=np.int32)
    whole, parts = model.pool(), model.pool()
    expected = model.feed(whole, [(ids, 2, 2, 0)])
    found = []
    for start, stop in ((0, 1), (1, 14), (14, 15), (15, size)):
        rows = [(other[start:stop], 9, 9, start), (ids[start:stop], 4, 4, start)]
        found.append(model.feed(parts, rows)[stop - start :])
    assert np.array_equal(np.concatenate(found), expected)
    assert np.array_equal(parts[0].to_numpy()[4], whole[0].to_numpy()[2])
