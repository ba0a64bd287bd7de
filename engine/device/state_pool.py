"""The device's memory of every sequence: one row per slot, `[slot][layer][unit][channel]`."""

from __future__ import annotations

import numpy as np
from max.driver import Buffer, Device
from max.dtype import DType

from srm.engine.config import EngineConfig, ModelConfig
from srm.engine.device.slot_copies import SlotCopies
from srm.engine.state.slot_counts import GIB, slot_bytes
from srm.engine.state.tables import TABLE_ENTRIES
from srm.engine.steps.batch import I64, SAMPLING, Batch, SlotStates
from srm.errors import ConfigError


class StatePool:
    """Device arrays with an entry for each slot: `states` f32[state_width], `last_token` i32 and
    `sampling`, a record of SAMPLING as i32[9], which a sequence's first row in the slot sets. Each
    array is contiguous. Behind them lie the tables that sequences share."""

    def __init__(
        self,
        config: ModelConfig,
        num_slots: int,
        device: Device,
        copies: SlotCopies | None = None,
    ) -> None:
        """`copies` is what copies slots of this width on this device; a CPU needs none."""
        assert device.is_host or copies is not None
        shape = (num_slots, config.state_width)
        num_bytes = num_slots * slot_bytes(config)
        try:
            self.states = _zeros(shape, np.float32, DType.float32, device)
            self.last_token = _zeros((num_slots,), np.int32, DType.int32, device)
            record = (num_slots, SAMPLING.itemsize // 4)
            self.sampling = _zeros(record, np.int32, DType.int32, device)
        except (MemoryError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"num_slots + prefix_slots = {num_slots} needs {num_bytes / GIB:.1f} GiB of "
                f"memory on {device}, which is not free: {error}"
            ) from None
        self._tables = _zeros((TABLE_ENTRIES,), np.uint16, DType.uint16, device)
        self._device = device
        self._copies = copies

    def inputs(self, batch: Batch) -> tuple[Buffer, ...]:
        """The first inputs of a step's graph; the batch's tables are there from now on."""
        if batch.tables:
            self._device.synchronize()  # steps before may read what was there
        for start, entries in batch.tables:
            copied = Buffer.from_numpy(entries).to(self._device)
            self._tables[start : start + len(entries)].inplace_copy_from(copied)
            self._device.synchronize()  # a graph need not wait for copies begun before it
        tables = self._tables if batch.has_tables else self._tables[:1]
        return self.states, self.last_token, self.sampling, tables

    def read(self, slots: I64) -> SlotStates:
        """Copy these slots' states and last tokens to the host."""
        if self._copies is not None:
            return self._copies.read(self.states, self.last_token, slots)
        return SlotStates(self.states.to_numpy()[slots], self.last_token.to_numpy()[slots])

    def write(self, slots: I64, states: SlotStates) -> None:
        """Copy these states and last tokens from the host into these slots."""
        if self._copies is not None:
            self._copies.write(self.states, self.last_token, slots, states)
            return
        self.states.to_numpy()[slots] = states.states
        self.last_token.to_numpy()[slots] = states.last_tokens


def free_memory(config: EngineConfig, model: ModelConfig, device: Device) -> int | None:
    """Return the bytes that are free on a GPU besides tables and the workspaces of two steps, since
    one is enqueued while the other runs; None for a CPU."""
    if device.is_host:
        return None
    free = int(device.stats["free_memory"]) - 2 * gpu_workspace_bytes(config, model)
    return free - 2 * TABLE_ENTRIES


def gpu_workspace_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """Bytes that the largest step takes on a GPU besides weights and slots, at most.

    MAX plans one piece of memory for a step. Were no two of its parts in one place, a token would
    have five activations of d_model values, an inner one of four times as many and, where it passes
    the output head, a logit for each entry of the vocabulary; all of two bytes. A token that is
    scored has `max_logprobs` alternatives of eight bytes.
    """
    _, tokens = config.step_limits(model)
    activations = 2 * (5 * model.d_model + 4 * model.d_model + model.vocab_size)
    return tokens * (activations + 8 * config.logprobs_limit(model))


def _zeros(
    shape: tuple[int, ...], dtype: type[np.generic], device_dtype: DType, device: Device
) -> Buffer:
    if device.is_host:  # untouched pages of a numpy array take no memory yet
        return Buffer.from_numpy(np.zeros(shape, dtype))
    return Buffer.zeros(shape, device_dtype, device)
