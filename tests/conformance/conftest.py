"""The devices that the real engine is held to the same on."""

from __future__ import annotations

import pytest
from max.driver import accelerator_count

from tests.kit.one_thread import one_thread  # noqa: F401 - a fixture of all below

GPU = pytest.param("gpu", marks=pytest.mark.gpu)


@pytest.fixture(scope="module", params=["cpu", "torch:cpu", GPU])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "gpu" and accelerator_count() == 0:
        pytest.skip("no device")
    return str(request.param)
