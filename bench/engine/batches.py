"""Handmade batches: steps to be timed that no scheduler would make, or not alone.

Row i uses slot i. They keep the promises of `engine.steps.batch`, except for `unsampled_rows`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from engine.scheduler.assembly import NOTHING
from engine.steps.batch import I32, SAMPLED, Batch


def prefill_rows(token_ids: I32, position: int = 0) -> Batch:
    """Return prompts i32[rows, length], or parts of prompts from `position` on; no output head."""
    rows, length = token_ids.shape
    offsets = np.arange(rows + 1, dtype=np.int32) * np.int32(length)
    return _batch(token_ids.ravel(), offsets, position, num_decode=0)


def decode_rows(token_ids: I32, position: int, top_p: float = 1.0) -> Batch:
    """Return one token i32[rows] of every sequence; the next one is sampled at temperature 1."""
    rows = len(token_ids)
    batch = _batch(token_ids, np.arange(rows + 1, dtype=np.int32), position, num_decode=rows)
    return replace(batch, top_p=np.full(rows, top_p, np.float32))


def unsampled_rows(token_ids: I32) -> Batch:
    """Return sequences i32[rows] of one token that pass the output head but are not sampled.

    The engine would score a token that passes the head and is not sampled.
    """
    return replace(prefill_rows(token_ids[:, None]), targets=np.zeros(len(token_ids), np.int32))


def _batch(token_ids: I32, row_offsets: I32, position: int, num_decode: int) -> Batch:
    slots = np.arange(len(row_offsets) - 1, dtype=np.int32)
    return Batch(
        sequence_ids=np.arange(num_decode, dtype=np.int64),
        read_slots=slots,
        write_slots=slots,
        positions=np.full(len(slots), position, np.int32),
        row_offsets=row_offsets,
        token_ids=token_ids,
        ends=np.zeros(num_decode, np.bool_),
        temperature=np.ones(num_decode, np.float32),
        top_k=np.zeros(num_decode, np.int32),
        top_p=np.ones(num_decode, np.float32),
        min_p=np.zeros(num_decode, np.float32),
        seeds=np.arange(num_decode, dtype=np.uint64),
        scored_ids=np.empty(0, np.int64),
        targets=np.full(num_decode, SAMPLED, np.int32),
        score_rows=NOTHING,
        num_top=NOTHING,
    )
