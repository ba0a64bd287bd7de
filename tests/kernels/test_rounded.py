"""`srm_mix` on narrow tensors rounds where `bench.model.rounded` says that it does."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from max.driver import CPU, Buffer
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import BufferType, DeviceRef, Graph, TensorType

from bench.model.rounded import Unit, rounded
from engine.device import kernels
from engine.device.linear import kernel_libraries
from engine.steps.batch import F32
from engine.weights.weights import MixerUnit

F16 = npt.NDArray[np.float16]
LENGTH, HEADS, WIDTH = 400, 2, 48


def mixed(unit: MixerUnit, x: F16, state: F16) -> F16:
    """One row of LENGTH tokens from position 1 on, through the op; the state is changed."""
    on, i32 = DeviceRef.CPU(), DType.int32
    per_head = TensorType(DType.float32, [HEADS, LENGTH + 1], on)
    types = [
        BufferType(DType.float16, [1, WIDTH], on),
        TensorType(i32, [], on),
        TensorType(DType.float16, [LENGTH, WIDTH], on),
        *(TensorType(i32, [1], on) for _ in range(3)),
        TensorType(i32, [2], on),
        *(per_head, per_head, per_head),
        TensorType(DType.float32, [2, HEADS], on),
    ]
    with Graph("mix_float16", input_types=types, custom_extensions=kernel_libraries()) as graph:
        buffer, *tensors = graph.inputs
        graph.output(kernels.mix(buffer.buffer, *(value.tensor for value in tensors)))
    model = InferenceSession(devices=[CPU()]).load(graph)
    where = [np.array(value, np.int32) for value in ([0], [0], [1], [0, LENGTH])]
    scalars = [unit.alpha_in, unit.alpha_out, unit.beta, unit.decay]
    inputs = [state, np.array(0, np.int32), x, *where, *scalars]
    (y,) = model.execute(*(Buffer.from_numpy(array) for array in inputs))
    found: F16 = y.to_numpy()
    return found


@pytest.mark.slow
def test_the_op_in_float16_is_the_emulated_one() -> None:
    rng = np.random.default_rng(0)
    alpha_out, beta = rng.standard_normal((2, HEADS, LENGTH + 1)).astype(np.float32)
    decay = np.array([[0.999, 1.0], [1e-8, 0.0]], np.float32)
    unit = MixerUnit(np.ones_like(beta), alpha_out, beta, decay)
    x = rng.standard_normal((LENGTH, WIDTH)).astype(np.float16) + np.float16(1)
    state = rng.standard_normal((1, WIDTH)).astype(np.float16)

    def emulated(dtype: torch.dtype) -> tuple[F32, F32]:
        before = torch.from_numpy(state.astype(np.float32))
        tokens = torch.from_numpy(x.astype(np.float32))[:, None]
        y = Unit(unit, WIDTH).run(tokens, before, 1, dtype)[:, 0]
        return rounded(y, torch.float16).numpy(), before.numpy()

    y_narrow, narrow = emulated(torch.float16)
    y_wide, wide = emulated(torch.float32)
    y = mixed(unit, x, state)
    # The op fuses multiply-adds, so now and then a value is rounded to the other side.
    assert (state == narrow).mean() > 0.95 and (state == wide).mean() < 0.1
    assert (y == y_narrow).mean() > 0.95 and (y == y_wide).mean() < 0.8
    assert np.abs(state - narrow).max() <= 0.5, "two ulps of a sum of 400 ones"
