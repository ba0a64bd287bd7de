"""The devices that the real engine is held to the same on, and how torch shares processors."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from max.driver import accelerator_count


@pytest.fixture(scope="module", params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "gpu" and accelerator_count() == 0:
        pytest.skip("no device")
    return str(request.param)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Sharing matrices this small out to threads takes longer than multiplying them."""
    torch = sys.modules.get("torch")  # which a GPU machine may not have
    if torch is None:
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
