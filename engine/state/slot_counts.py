"""How many slots there can be: what memory of the device and of the host holds."""

from __future__ import annotations

import logging

from srm.engine.config import EngineConfig, ModelConfig
from srm.engine.state.slots import SlotTable
from srm.engine.steps.batch import SAMPLING
from srm.errors import ConfigError
from srm.memory import available_memory

log = logging.getLogger(__name__)

CPU_SLOTS = 16_384
"""Most slots on a CPU where the number is not set: other programs use the computer too."""
MAX_SLOTS = 2**31 - 1  # a slot is an int32
GIB = 2**30


def slot_bytes(config: ModelConfig) -> int:
    """Bytes the device keeps of one sequence: its states, its last token and how it samples."""
    return 4 * (config.state_width + 1) + SAMPLING.itemsize


def count_slots(config: EngineConfig, model: ModelConfig, free_on_gpu: int | None = None) -> int:
    """Return `num_slots` if it fits, or, if it is 0, as many as `memory_fraction` of memory holds.

    A slot counts as if its sequence filled the context; `prefix_slots` come on top of them. On a
    GPU `free_on_gpu` bytes are free besides what steps take, and one slot is spare. Raises
    ConfigError if too many are wanted; beside a GPU, too little memory of the host for `num_slots`
    that are set is a warning: what an array takes it takes as it is used.
    """
    on_device, on_host = slot_bytes(model), SlotTable(1, model.n_ctx).nbytes
    for_prefixes = (config.prefix_slots + config.on_gpu) * on_device
    if free_on_gpu is None:
        needs = [("memory", on_device + on_host, available_memory() - for_prefixes)]
    else:
        needs = [
            ("device memory", on_device, free_on_gpu - for_prefixes),
            ("host memory", on_host, available_memory()),
        ]
    fitting = min(int(config.memory_fraction * free) // size for _, size, free in needs)
    most = MAX_SLOTS if config.on_gpu else CPU_SLOTS
    num_slots = config.num_slots or max(1, min(fitting, config.max_slots or most))
    largest = max(0, min(free // size for _, size, free in needs))
    for name, size, free in needs:
        if num_slots * size <= free:
            continue
        if name == "host memory" and config.num_slots:  # it may grow as it is used
            log.warning(
                "num_slots = %d: if every sequence fills its context, they take %.1f GiB of the "
                "host's memory, and %.1f GiB are free now",
                *(num_slots, num_slots * size / GIB, max(free, 0) / GIB),
            )
        else:
            raise ConfigError(
                f"num_slots = {num_slots} does not fit, at most {largest} do: "
                f"a slot takes {size:,} bytes of {name}, "
                f"and {max(free, 0) / GIB:.2f} GiB are free besides "
                f"prefix_slots = {config.prefix_slots}"
                + (" and two steps" if config.on_gpu else "")
            )
    log.info(
        "%d slots of %d bytes for states (%.2f GiB) and up to %d bytes of the host's (%.2f GiB)",
        *(num_slots, on_device, num_slots * on_device / GIB),
        *(on_host, num_slots * on_host / GIB),
    )
    return num_slots
