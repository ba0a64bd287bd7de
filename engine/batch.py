"""One step's inputs and outputs, as arrays. R rows, T tokens, D decode rows.

Rows 0 … D - 1 decode: one token each, and each samples. Rows D … R - 1 prefill: they only move
state. Row i reads `read_slots[i]`, writes `write_slots[i]` and feeds its tokens at `positions[i]`
and on; a row at position 0 ignores what its read slot holds. No slot that a row writes is read or
written by another row of the same batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
F32 = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]

FROM_DEVICE = -1
"""A token id that stands for "the last token sampled in read_slots[row]"."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What the device is to do in one step."""

    sequence_ids: I64  # i64[D] who each decode row belongs to: a slot may change owner meanwhile
    read_slots: I32  # i32[R]
    write_slots: I32  # i32[R]
    positions: I32  # i32[R] context position of the row's first token
    row_offsets: I32  # i32[R + 1] tokens of row i: token_ids[row_offsets[i] : row_offsets[i + 1]]
    token_ids: I32  # i32[T]
    ends: Bool  # bool[D] this is the sequence's last allowed token
    temperature: F32  # f32[D] 0 is greedy
    top_k: I32  # i32[D] 0 is off
    top_p: F32  # f32[D] 1 is off
    min_p: F32  # f32[D] 0 is off
    seeds: U64  # u64[D] of the sequence's random stream; the draw is a function of (seed, position)

    @property
    def num_decode(self) -> int:
        return len(self.ends)

    @property
    def num_rows(self) -> int:
        return len(self.read_slots)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the device sampled, in the order of the decode rows."""

    token_ids: I32  # i32[D] -1 where the logits were not finite
    logprobs: F32  # f32[D] of the sampled token, after temperature, before truncation


class Launched(Protocol):
    """A step under way on the device."""

    def wait(self) -> StepResult: ...


class Runner(Protocol):
    """Runs batches. `engine.runner.ModelRunner` (MAX) and `tests/numpy_runner.py` are the two."""

    def launch(self, batch: Batch) -> Launched:
        """Enqueue a step and return at once; steps run in the order launched."""
        ...
