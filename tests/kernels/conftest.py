"""The compiled ops, once per device for all tests of this folder."""

from __future__ import annotations

from functools import cache

import pytest
from max.driver import CPU, Accelerator, accelerator_count

from tests.kernels.harness import Ops
from tests.kit.kept import cache_folder


@cache
def _ops_on(device: str) -> Ops:
    return Ops(CPU() if device == "cpu" else Accelerator(), cache_folder())


@pytest.fixture(scope="session", params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def ops(request: pytest.FixtureRequest) -> Ops:
    if request.param == "gpu" and accelerator_count() == 0:
        pytest.skip("no device")
    return _ops_on(request.param)


@pytest.fixture(scope="session")
def cpu_ops() -> Ops:
    """For arrays that are too large to be copied to a device, and for what a GPU has not."""
    return _ops_on("cpu")
