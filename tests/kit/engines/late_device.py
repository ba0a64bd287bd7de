"""A stub of a GPU as MAX's driver shows it, which does all that is enqueued as late as it can.

A copy or a step is done when someone waits for an event behind it, not before: memory of the host
that is written again too soon, or read too soon, gives other tokens. What a step computes is what
`tests.kit.engines.numpy_runner` does with the inputs that lie in the device's memory by then.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from max.driver import Device, Usage
from max.dtype import DType

from srm.engine.device.gpu_steps import GpuSteps
from srm.engine.device.model import BATCH_INPUTS, EDIT_INPUTS
from srm.engine.device.runner import LaunchedGpuStep
from srm.engine.device.state_pool import StatePool
from srm.engine.messages import MAX_LOGPROBS
from srm.engine.steps.batch import I64, NEW_ROW, PREFILL_ROW, Batch, Edits, SlotStates
from srm.engine.weights.weights import Weights
from tests.kit.engines.numpy_runner import NumpyRunner


class LateDevice:
    """Also its own default queue."""

    is_host = False

    def __init__(self) -> None:
        self.calls: list[str] = []  # what the host enqueued and waited for
        self._enqueued: deque[Callable[[], None]] = deque()
        self._begun = self._done = 0

    @property
    def default_queue(self) -> LateDevice:
        return self

    def enqueue(self, name: str, work: Callable[[], None]) -> None:
        self.calls.append(name)
        self._enqueued.append(work)
        self._begun += 1

    def record_event(self) -> LateEvent:
        return LateEvent(self, self._begun)

    def run_until(self, count: int) -> None:
        while self._done < count:
            self._enqueued.popleft()()
            self._done += 1

    def synchronize(self) -> None:
        self.run_until(self._begun)


class LateEvent:
    def __init__(self, device: LateDevice, after: int) -> None:
        self._device, self._after = device, after

    def synchronize(self) -> None:
        self._device.calls.append("read")
        self._device.run_until(self._after)


class LateBuffer:
    """Memory of a LateDevice, or of the host where it is for staging."""

    def __init__(
        self,
        dtype: DType,
        shape: Sequence[int],
        device: LateDevice,
        usage: Usage = Usage.DEFAULT,
        memory: npt.NDArray[Any] | None = None,
    ) -> None:
        kind = dtype.to_numpy()
        self.dtype, self.shape, self.device, self.usage = dtype, tuple(shape), device, usage
        # What was never written is rubbish.
        self.memory = np.full(shape, 77, kind) if memory is None else memory
        assert self.memory.size, "a buffer of no bytes"
        self.element_size, self.num_elements = self.memory.itemsize, math.prod(shape)

    def __getitem__(self, part: slice) -> LateBuffer:
        return self._same(self.dtype, self.memory[part])

    def view(self, dtype: DType, shape: Sequence[int]) -> LateBuffer:
        return self._same(dtype, self.memory.view(dtype.to_numpy()).reshape(shape))

    def _same(self, dtype: DType, memory: npt.NDArray[Any]) -> LateBuffer:
        return LateBuffer(dtype, memory.shape, self.device, self.usage, memory)

    def to_numpy(self) -> npt.NDArray[Any]:
        assert Usage.STAGING in self.usage, "the host cannot read a device's memory"
        return self.memory

    def inplace_copy_from(self, source: LateBuffer) -> None:
        """Enqueue the copy, which must be from or to pinned memory, of the same size and dtype."""
        assert (self.dtype, self.shape) == (source.dtype, source.shape)
        staged = Usage.STAGING in source.usage
        assert staged != (Usage.STAGING in self.usage)

        def copy() -> None:
            self.memory[...] = source.memory

        self.device.enqueue("upload" if staged else "download", copy)


class LateModel:
    """What MAX would make of the step graph: `run` gets the batch that the inputs say."""

    def __init__(self, device: LateDevice, run: Callable[[Batch], Any]) -> None:
        self._device, self.run = device, run
        self.inputs: dict[str, LateBuffer] = {}  # of the last step
        self._captured: dict[
            int, tuple[tuple[LateBuffer, ...], Callable[[], None], list[LateBuffer]]
        ] = {}

    def execute(self, launched: Batch, *inputs: LateBuffer) -> list[LateBuffer]:
        """`launched` stands for the pool, whose tables it says."""
        compute, outputs = self._prepare(launched, *inputs)
        self._device.enqueue("launch", compute)
        return outputs

    def capture(self, key: int, launched: Batch, *inputs: LateBuffer) -> list[LateBuffer]:
        """Record what `execute` would do with the buffers, whatever lies in them then."""
        assert key not in self._captured and not launched.has_tables
        compute, outputs = self._prepare(launched, *inputs)
        self._captured[key] = inputs, compute, outputs
        return outputs

    def replay(self, key: int, _: Batch, *inputs: LateBuffer) -> list[LateBuffer]:
        captured, compute, outputs = self._captured[key]
        assert all(own is given for own, given in zip(captured, inputs, strict=True))
        self._device.enqueue("replay", compute)
        return outputs

    def _prepare(
        self, launched: Batch, *inputs: LateBuffer
    ) -> tuple[Callable[[], None], list[LateBuffer]]:
        given = self.inputs = dict(zip([*BATCH_INPUTS, *EDIT_INPUTS], inputs, strict=True))
        decode, scored = given["slots"].shape[0], given["score_rows"].shape[0]
        top = scored, MAX_LOGPROBS
        f32, i32 = DType.float32, DType.int32
        kinds = ((i32, (decode,)), (f32, (decode,)), (f32, (scored,)), (i32, (scored,)))
        outputs = [
            LateBuffer(dtype, shape, self._device)
            for dtype, shape in (*kinds, (i32, top), (f32, top))
        ]

        def compute() -> None:
            arrays: dict[str, Any] = {name: item.memory.copy() for name, item in given.items()}
            edits = Edits(**{name: arrays.pop(name) for name in EDIT_INPUTS})
            for name, dtype in (("new", NEW_ROW), ("prefill", PREFILL_ROW)):
                arrays[name] = arrays[name].view(dtype)[:, 0]
            result = self.run(
                Batch(
                    sequence_ids=np.zeros(decode, np.int64),
                    ends=np.zeros(decode, np.bool_),
                    scored_ids=np.empty(0, np.int64),
                    edits=edits,
                    has_tables=launched.has_tables,
                    tables=launched.tables,
                    **arrays,
                )
            )
            scores = result.scores
            results = (scores.logprobs, scores.ranks, scores.top_ids, scores.top_logprobs)
            for target, array in zip(
                outputs, (result.token_ids, result.logprobs, *results), strict=True
            ):
                target.memory[...] = array

        return compute, outputs


class LateRunner(NumpyRunner):
    """The numpy runner behind `GpuSteps` on a LateDevice: `gpu_steps.Buffer` must be LateBuffer."""

    def __init__(self, weights: Weights, num_slots: int, prefix_slots: int) -> None:
        super().__init__(weights, num_slots, prefix_slots + 1)
        self.late = LateDevice()
        self.model = LateModel(self.late, self.run_batch)
        pool = cast(StatePool, type("Pool", (), {"inputs": lambda batch: (batch,)}))
        spare = num_slots + prefix_slots
        self.steps = GpuSteps(cast(Device, self.late), pool, spare)
        self._thread = ThreadPoolExecutor(max_workers=1)
        self.batches: list[Batch] = []

    def launch(self, batch: Batch) -> Any:
        self.batches.append(batch)
        future = self._thread.submit(self.steps.enqueue, cast(Any, self.model), batch)
        return LaunchedGpuStep(self._thread, future)

    def read_slots(self, slots: I64) -> SlotStates:
        read: Callable[[I64], SlotStates] = self._in_order(super().read_slots)
        return self._thread.submit(read, slots).result()

    def write_slots(self, slots: I64, states: SlotStates) -> None:
        self._thread.submit(self._in_order(super().write_slots), slots, states).result()

    def copy_slots(self, read: I64, write: I64) -> None:
        self._thread.submit(self._in_order(super().copy_slots), read, write).result()

    def _in_order(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def after_all(*arguments: Any) -> Any:
            self.late.synchronize()
            return call(*arguments)

        return after_all
