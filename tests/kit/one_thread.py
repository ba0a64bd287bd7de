"""A fixture for tests of small models in torch; folders' conftest.py import it."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


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
