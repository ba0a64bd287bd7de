"""The runner of PyTorch on the processor, for tests of what every runner promises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from srm.engine.config import EngineConfig
from srm.engine.pytorch.runner import TorchRunner
from srm.engine.weights.weights import Weights
from tests.kit.engines.numpy_runner import NumpyRunner


def torch_runner(weights: Weights, num_slots: int, prefix_slots: int) -> TorchRunner:
    """Its slots as those of a `NumpyRunner`."""
    torch.set_num_threads(1)  # sharing matrices this small out takes longer than their products
    config = EngineConfig(device="torch:cpu", num_slots=num_slots, prefix_slots=prefix_slots)
    return TorchRunner(weights, config)


RUNNERS: dict[str, Callable[[Weights, int, int], Any]] = {
    "numpy": NumpyRunner,
    "torch": torch_runner,
}
"""The makers of runners that need no compiled graph."""
