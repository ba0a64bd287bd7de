"""The compiled ops, once per device for all tests of this folder."""

from __future__ import annotations

import pytest
from max.driver import CPU, Accelerator, accelerator_count

from engine.config import EngineConfig
from engine.settings import load
from tests.kernels.harness import Ops


@pytest.fixture(scope="session", params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def ops(request: pytest.FixtureRequest) -> Ops:
    folder = load(EngineConfig, [], prog="tests").cache_dir.expanduser()
    if request.param == "cpu":
        return Ops(CPU(), folder)
    if accelerator_count() == 0:
        pytest.skip("no device")
    return Ops(Accelerator(), folder)
