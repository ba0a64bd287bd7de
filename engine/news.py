"""News: what some completions have new, as arrays. Knows nothing of where it comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.batch import F32, I32, I64

U8 = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class News:
    """What some completions have new, each at most once, in ascending order."""

    indices: I64  # i64[completions] which of those asked for together
    offsets: I64  # i64[completions + 1] tokens of entry i: token_ids[offsets[i] : offsets[i + 1]]
    token_ids: I32  # i32[tokens]
    logprobs: F32  # f32[tokens], or none where nobody asked
    reasons: U8  # u8[completions] index into REASONS; not 0 at a completion's end


def merge(parts: Sequence[News]) -> News:
    """One News that says what several say, which came in this order."""
    if len(parts) == 1:
        return parts[0]
    indices = np.concatenate([part.indices for part in parts])
    order = np.argsort(indices, kind="stable")
    counts = np.concatenate([np.diff(part.offsets) for part in parts])[order]
    starts = np.cumsum([0, *(len(part.token_ids) for part in parts)])
    begins = np.concatenate(
        [part.offsets[:-1] + start for part, start in zip(parts, starts, strict=False)]
    )[order]
    ends = np.cumsum(counts)
    places = np.repeat(begins - ends + counts, counts) + np.arange(ends[-1] if len(ends) else 0)
    logprobs = np.concatenate([part.logprobs for part in parts])
    token_ids = np.concatenate([part.token_ids for part in parts])
    found, firsts = np.unique(indices[order], return_index=True)
    lasts = np.append(firsts[1:], len(order))  # of each completion's entries
    reasons = np.concatenate([part.reasons for part in parts])[order]
    return News(
        indices=found,
        offsets=np.concatenate([[0], ends[lasts - 1]]).astype(np.int64),
        token_ids=token_ids[places],
        logprobs=logprobs[places] if len(logprobs) else logprobs,
        reasons=reasons[lasts - 1],
    )
