"""Triton's kernels for token mixing in training, on a GPU: as near to float64 as torch is."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from tests.kit.models.units import check_unit

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(128, 512, 4, 128), (3, 1000, 2, 72), (2, 65, 2, 16)])
def test_a_unit_is_as_exact_as_by_torch(
    dtype: torch.dtype, shape: tuple[int, int, int, int]
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no device")
    run_unit = import_module("srm.training.huggingface.units_triton").run_unit
    check_unit(dtype, run_unit, shape, "cuda")
