"""The compiled ops, once per device for all tests of this folder."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest
from max.driver import CPU, Accelerator, accelerator_count

from srm.engine.config import EngineConfig
from tests.kernels.harness import Ops


@cache
def _ops_on(device: str) -> Ops:
    folder = Path(os.environ.get("SRM_CACHE_DIR", EngineConfig().cache_dir)).expanduser()
    return Ops(CPU() if device == "cpu" else Accelerator(), folder)


@pytest.fixture(scope="session", params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def ops(request: pytest.FixtureRequest) -> Ops:
    if request.param == "gpu" and accelerator_count() == 0:
        pytest.skip("no device")
    return _ops_on(request.param)


@pytest.fixture(scope="session")
def cpu_ops() -> Ops:
    """For arrays that are too large to be copied to a device, and for what a GPU has not."""
    return _ops_on("cpu")
