"""Copies of slots between a GPU's pool and the host: a kernel packs many, one copy moves them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from max.driver import Buffer, Device, Usage
from max.dtype import DType
from max.engine import CompiledModel, InferenceSession

from srm.engine.device.model import GATHER_SLOTS, SCATTER_SLOTS
from srm.engine.steps.batch import F32, I32, I64, SlotStates

STAGED_BYTES = 2**26
"""Bytes that are copied at once: enough for a bus, little beside a pool."""


class SlotCopies:
    """Reads and writes slots of a pool of `width` values a slot.

    Keeps a buffer on the device and one of the same size on the host, page-locked, so that the
    device copies at the bus's speed: of `staged_bytes` each, or of one slot if that is larger.
    A graph need not wait for copies begun before it, nor they for it: each step here does.
    """

    def __init__(
        self,
        session: InferenceSession,
        compiled: CompiledModel,
        width: int,
        device: Device,
        staged_bytes: int = STAGED_BYTES,
    ) -> None:
        models = session.init_all(compiled)
        self._gather, self._scatter = models[GATHER_SLOTS], models[SCATTER_SLOTS]
        self._width, self._device = width, device
        self._at_once = max(1, staged_bytes // (4 * (width + 1)))
        shape = (self._at_once * (width + 1),)
        self._packed = Buffer(DType.float32, shape, device)
        self._staged = Buffer(DType.float32, shape, device, usage=Usage.STAGING)

    def read(self, states: Buffer, last_token: Buffer, slots: I64) -> SlotStates:
        """Copy these slots' states and last tokens to the host."""
        copied = SlotStates(
            np.empty((len(slots), self._width), np.float32), np.empty(len(slots), np.int32)
        )
        for part, chosen, packed, staged in self._parts(slots):
            self._gather.execute(states, last_token, packed, chosen)
            self._device.synchronize()
            staged.inplace_copy_from(packed)
            self._device.synchronize()
            copied.states[part], copied.last_tokens[part] = self._unpacked(staged)
        return copied

    def write(self, states: Buffer, last_token: Buffer, slots: I64, given: SlotStates) -> None:
        """Copy these states and last tokens from the host into these slots."""
        for part, chosen, packed, staged in self._parts(slots):
            rows, tokens = self._unpacked(staged)
            rows[:], tokens[:] = given.states[part], given.last_tokens[part]
            packed.inplace_copy_from(staged)
            self._device.synchronize()
            self._scatter.execute(states, last_token, packed, chosen)
            self._device.synchronize()

    def _parts(self, slots: I64) -> Iterator[tuple[slice, Buffer, Buffer, Buffer]]:
        """Yield as many as fit at once: where in the list, their slots, the device's and the host's
        buffer for them."""
        for begin in range(0, len(slots), self._at_once):
            part = slice(begin, min(begin + self._at_once, len(slots)))
            chosen = Buffer.from_numpy(slots[part].astype(np.int32)).to(self._device)
            size = (part.stop - begin) * (self._width + 1)
            yield part, chosen, self._packed[:size], self._staged[:size]

    def _unpacked(self, staged: Buffer) -> tuple[F32, I32]:
        """The host's states [N, width] and last tokens [N], to be read or written."""
        values = staged.to_numpy()
        count = len(values) // (self._width + 1)
        states, tokens = np.split(values, [count * self._width])
        return states.reshape(count, self._width), tokens.view(np.int32)
