"""The device's memory of every sequence: one row per slot, `[slot][layer][unit][channel]`.

Knows no sequences and no owners: what a slot means is the scheduler's business.
"""

from __future__ import annotations

import numpy as np
from max.driver import Buffer, Device
from max.dtype import DType

from engine.config import ModelConfig
from engine.errors import ConfigError


class StatePool:
    """`states` f32[num_slots, state_width] and `last_token` i32[num_slots], contiguous."""

    def __init__(self, config: ModelConfig, num_slots: int, device: Device) -> None:
        shape = (num_slots, config.state_width)
        num_bytes = 4 * num_slots * (config.state_width + 1)
        try:
            self.states = _zeros(shape, np.float32, DType.float32, device)
            self.last_token = _zeros((num_slots,), np.int32, DType.int32, device)
        except (MemoryError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"num_slots + prefix_slots = {num_slots} needs {num_bytes / 2**30:.1f} GiB of "
                f"memory on {device}, which is not free: {error}"
            ) from None


def _zeros(
    shape: tuple[int, ...], dtype: type[np.generic], device_dtype: DType, device: Device
) -> Buffer:
    if device.is_host:  # untouched pages of a numpy array take no memory yet
        return Buffer.from_numpy(np.zeros(shape, dtype))
    return Buffer.zeros(shape, device_dtype, device)
