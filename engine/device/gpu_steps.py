"""Steps on a GPU, enqueued without waiting: a step's inputs go up and it is launched while the one
before it still runs, and its results are read when they are there.

All is enqueued on the device's one queue, in order: a copy of all inputs from pinned memory of the
host, the graph, whose inputs are views of that copy, copies of the results into pinned memory, and
an event. Pinned memory is what the device reads and writes by itself while the host goes on.

A step that only decodes is padded to one of few sizes. The device records the launches of the first
step of each size and later replays them, which is one call of the driver instead of a call for each
launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
from max.driver import Buffer, Device, DeviceEvent, Usage
from max.dtype import DType
from max.engine import Model

from srm.engine.device.model import BATCH_INPUTS, EDIT_INPUTS
from srm.engine.device.state_pool import StatePool
from srm.engine.steps.batch import (
    NO_EDITS,
    NO_SCORES,
    Batch,
    Edits,
    Scores,
    StepResult,
    padded,
    unpadded,
)

Array = npt.NDArray[Any]

ALIGNMENT = 256
"""Bytes between which inputs begin: what memory of their own would be aligned to."""
LEAST_BYTES = 2**20
CAPTURED_ROWS = (*(part << shift for shift in range(6, 12) for part in (4, 5, 6, 7)), 2**14)
"""Decode rows of the steps that are captured: a step is padded by a quarter at most, and one of
more rows keeps the device busy longer than the host takes to launch it."""
NEW_SHARE = 16
"""A captured step has room for new sequences in all of its rows, or in one of so many."""


def batch_inputs(batch: Batch) -> list[Array]:
    """The step graph's inputs after those of the pool, in their order, without `edit_inputs`."""
    return [
        getattr(batch, name).view(np.int32).reshape(-1, *dims[1:])
        for name, dims in BATCH_INPUTS.items()
    ]


def edit_inputs(edits: Edits) -> list[Array]:
    """The step graph's last inputs, in their order."""
    return [getattr(edits, name) for name in EDIT_INPUTS]


def padded_inputs(batch: Batch, spare_slot: int, rows: int = 0, new: int = 0) -> list[Array]:
    """All inputs of the step graph after those of the pool, as a GPU wants them; with `rows`, those
    of so many decode rows, `new` of which may be the first of their sequences."""
    full = padded(batch, spare_slot, rows, new)
    return [*batch_inputs(full), *edit_inputs(full.edits)]


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A recorded step, and the memory on the device that it reads and writes in each replay."""

    key: int
    packed: Buffer
    inputs: list[Buffer]
    outputs: Sequence[Buffer]


class GpuSteps:
    """Enqueues steps on one pool of states. To be called from one thread at a time.

    Buffers of a step are used again once its results were read, when every copy from and to them
    is done: two sets take turns where each step is read after the next one was enqueued.
    """

    def __init__(self, device: Device, pool: StatePool, spare_slot: int) -> None:
        self._device, self._pool, self._spare_slot = device, pool, spare_slot
        self.unused: list[StepBuffers] = []
        """Memory of steps that have ended, for those to come."""
        self.replays = False
        """Whether steps that may be replayed are: off until a GPU has shown that it is faster."""
        self._captured: dict[tuple[int, int], CapturedStep] = {}
        self._model: Model | None = None  # of the captured steps

    def enqueue(self, model: Model, batch: Batch) -> EnqueuedStep:
        """Enqueue all of a step, and return while it runs or waits for those before it."""
        if size := self._captured_size(batch):
            return self._enqueue_captured(model, batch, *size)
        buffers = self.unused.pop() if self.unused else StepBuffers(self._device)
        inputs = buffers.upload(padded_inputs(batch, self._spare_slot))
        outputs = model.execute(*self._pool.inputs(batch), *inputs)
        buffers.download(outputs if len(batch.score_rows) else outputs[:2])
        return EnqueuedStep(self, batch, buffers)

    def is_captured(self, model: Model, batch: Batch) -> bool:
        """Return whether `enqueue` replays this step, which takes few microseconds."""
        return model is self._model and self._captured_size(batch) in self._captured

    def _captured_size(self, batch: Batch) -> tuple[int, int] | None:
        """Return decode rows and new rows of the captured step that does this one, if one may."""
        count = batch.num_decode
        only_decodes = batch.num_rows == count and not len(batch.score_rows)
        is_plain = batch.edits is NO_EDITS and not batch.has_tables
        if not (
            self.replays and count and count <= CAPTURED_ROWS[-1] and only_decodes and is_plain
        ):
            return None
        rows = next(rows for rows in CAPTURED_ROWS if rows >= count)
        return rows, rows if len(batch.new) > rows // NEW_SHARE else rows // NEW_SHARE

    def _enqueue_captured(self, model: Model, batch: Batch, rows: int, new: int) -> EnqueuedStep:
        """Replay the captured step of this size; the first one runs before it is captured, so that
        the driver has loaded its kernels."""
        if model is not self._model:
            self._captured, self._model = {}, model
        buffers = self.unused.pop() if self.unused else StepBuffers(self._device)
        arrays = padded_inputs(batch, self._spare_slot, rows, new)
        begins, size = buffers.pack(arrays)
        captured, pool = self._captured.get((rows, new)), self._pool.inputs(batch)
        if captured:
            buffers.upload_packed(captured.packed, size)
            model.replay(captured.key, *pool, *captured.inputs)
            buffers.download(captured.outputs[:2])
            return EnqueuedStep(self, batch, buffers)
        packed = Buffer(DType.uint8, [size], self._device)
        inputs = _views(packed, arrays, begins)
        buffers.upload_packed(packed, size)
        buffers.download(model.execute(*pool, *inputs)[:2])
        key = len(self._captured)
        outputs = model.capture(key, *pool, *inputs)
        self._captured[rows, new] = CapturedStep(key, packed, inputs, outputs)
        return EnqueuedStep(self, batch, buffers)

    def reuse(self, buffers: StepBuffers) -> None:
        self.unused.append(buffers)


class EnqueuedStep:
    """A step that is enqueued, and the buffers that it has until it was read."""

    def __init__(self, steps: GpuSteps, batch: Batch, buffers: StepBuffers) -> None:
        self._steps, self._batch, self._buffers = steps, batch, buffers

    def wait(self) -> StepResult:
        """Wait until the step is done, once; raises what the device raised."""
        tokens, logprobs, *scores = self._buffers.read()
        self._steps.reuse(self._buffers)
        result = StepResult(tokens, logprobs, Scores(*scores) if scores else NO_SCORES)
        return unpadded(result, self._batch)


class StepBuffers:
    """Memory that one step's inputs and results pass through, as large as any step needed."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._results = _pinned(device, LEAST_BYTES)
        self._read: list[Buffer] = []
        self._outputs: Sequence[Buffer] = ()
        self._event: DeviceEvent | None = None
        self._make_room(LEAST_BYTES)

    def upload(self, arrays: Sequence[Array]) -> list[Buffer]:
        """Enqueue one copy of all arrays, none of them empty; return them on the device."""
        begins, size = self.pack(arrays)
        self.upload_packed(self._on_device, size)
        return _views(self._on_device, arrays, begins)

    def upload_packed(self, into: Buffer, size: int) -> None:
        """Enqueue a copy of the first `size` bytes that `pack` wrote into memory of the device."""
        into[:size].inplace_copy_from(self._inputs[:size])

    def pack(self, arrays: Sequence[Array]) -> tuple[list[int], int]:
        """Write all arrays into the pinned memory; return where each begins, and the end of all."""
        begins, size = _places([array.nbytes for array in arrays])
        if size > self._inputs.num_elements:
            self._make_room(size)
        for array, begin in zip(arrays, begins, strict=True):
            self._bytes[begin : begin + array.nbytes] = array.reshape(-1).view(np.uint8)
        return begins, size

    def download(self, outputs: Sequence[Buffer]) -> None:
        """Enqueue copies of a step's outputs to the host, which `read` waits for."""
        sizes = [output.num_elements * output.element_size for output in outputs]
        begins, size = _places(sizes)
        if size > self._results.num_elements:
            self._results = _pinned(self._device, 2 * size)
        self._read = [
            self._results[begin : begin + own].view(output.dtype, output.shape)
            for output, begin, own in zip(outputs, begins, sizes, strict=True)
        ]
        for target, output in zip(self._read, outputs, strict=True):
            target.inplace_copy_from(output)
        self._outputs = outputs  # not to be freed before they are copied
        self._event = self._device.default_queue.record_event()

    def read(self) -> list[Array]:
        """Wait for the copies that `download` enqueued; return arrays of their own."""
        assert self._event is not None
        self._event.synchronize()
        self._outputs = ()
        return [buffer.to_numpy().copy() for buffer in self._read]

    def _make_room(self, size: int) -> None:
        """Have room for inputs of so many bytes, and for twice as many so that it seldom grows."""
        self._inputs = _pinned(self._device, 2 * size)
        self._bytes = self._inputs.to_numpy()
        # Were this a copy, nothing that is written into it would reach the device.
        assert np.shares_memory(self._bytes, self._inputs.to_numpy())
        self._on_device = Buffer(DType.uint8, [2 * size], self._device)


def _pinned(device: Device, size: int) -> Buffer:
    """Memory of the host that the device copies from and to by itself. MAX does not track what uses
    it: the event of the step says when it may be written again."""
    return Buffer(DType.uint8, [size], device, usage=Usage.STAGING | Usage.UNTRACKED)


def _views(packed: Buffer, arrays: Sequence[Array], begins: Sequence[int]) -> list[Buffer]:
    """Return where each array lies in memory that they are packed in."""
    return [
        packed[begin : begin + array.nbytes].view(DType.from_numpy(array.dtype), array.shape)
        for array, begin in zip(arrays, begins, strict=True)
    ]


def _places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return the offset of each part if parts of these sizes lie one behind the other, and the end
    of all."""
    begins = [0, *accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]
    return begins[:-1], begins[-1]
