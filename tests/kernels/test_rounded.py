"""`srm_mix` on narrow tensors rounds where `bench.model.rounded` says that it does."""

from __future__ import annotations

import numpy as np
import torch

from bench.model.rounded import Unit, rounded
from engine.steps.batch import F32
from engine.weights.weights import MixerUnit
from tests.kernels.harness import Ops
from tests.kernels.test_mixer import ints


def test_the_op_in_float16_is_the_emulated_one(cpu_ops: Ops) -> None:
    """One row of 400 tokens from position 1 on."""
    rng, length, heads, width = np.random.default_rng(0), 400, 2, 48
    alpha_out, beta = rng.standard_normal((2, heads, length + 1)).astype(np.float32)
    decay = np.array([[0.999, 1.0], [1e-8, 0.0]], np.float32)
    unit = MixerUnit(np.ones_like(beta), alpha_out, beta, decay)
    x = rng.standard_normal((length, width)).astype(np.float16) + np.float16(1)
    state = rng.standard_normal((1, width)).astype(np.float16)

    def emulated(dtype: torch.dtype) -> tuple[F32, F32]:
        before, tokens = (torch.from_numpy(one.astype(np.float32)) for one in (state, x[:, None]))
        y = Unit(unit, width).run(tokens, before, 1, dtype)[:, 0]
        return rounded(y, torch.float16).numpy(), before.numpy()

    y_narrow, narrow = emulated(torch.float16)
    y_wide, wide = emulated(torch.float32)
    where = ints(0), ints(0), ints(1), ints(0, length)
    scalars = unit.alpha_in, alpha_out, beta, decay
    (y,) = cpu_ops.run("mix_float16", state, np.array(0, np.int32), x, *where, *scalars)
    # The op fuses multiply-adds, so now and then a value is rounded to the other side.
    assert (state == narrow).mean() > 0.95 and (state == wide).mean() < 0.1
    assert (y == y_narrow).mean() > 0.95 and (y == y_wide).mean() < 0.8
    assert np.abs(state - narrow).max() <= 0.5, "two ulps of a sum of 400 ones"
