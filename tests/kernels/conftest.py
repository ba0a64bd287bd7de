"""The compiled ops, once per device for all tests of this folder."""

from __future__ import annotations

import pytest
from max.driver import CPU, Accelerator, accelerator_count

from tests.kernels.harness import Ops


@pytest.fixture(scope="session", params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def ops(request: pytest.FixtureRequest) -> Ops:
    if request.param == "cpu":
        return Ops(CPU())
    if accelerator_count() == 0:
        pytest.skip("no device")
    return Ops(Accelerator())
