"""New tokens of some completions, as arrays: which completion, which tokens, why it ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.steps.batch import F32, I32, I64

U8 = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class TokenDeltas:
    """New tokens of some completions, each at most once, in ascending order."""

    indices: I64  # i64[completions] which of those asked for together
    offsets: I64  # i64[completions + 1] tokens of entry i: token_ids[offsets[i] : offsets[i + 1]]
    token_ids: I32  # i32[tokens]
    logprobs: F32  # f32[tokens], or none where nobody asked
    reasons: U8  # u8[completions] index into REASONS; not 0 at a completion's end

    def tokens_of(self, entry: int) -> bytes:
        """One completion's tokens, int32 little-endian."""
        return self.token_ids[self.offsets[entry] : self.offsets[entry + 1]].tobytes()

    def logprobs_of(self, entry: int) -> bytes:
        """One completion's log-probabilities, float32 little-endian; none where nobody asked."""
        return self.logprobs[self.offsets[entry] : self.offsets[entry + 1]].tobytes()


def merge(parts: Sequence[TokenDeltas]) -> TokenDeltas:
    """Merge several, which came in this order, into one."""
    parts = [part for part in parts if len(part.indices)] or parts[:1]
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
    places = np.repeat(begins - ends + counts, counts) + np.arange(ends[-1])
    logprobs = np.concatenate([part.logprobs for part in parts])
    token_ids = np.concatenate([part.token_ids for part in parts])
    found, firsts = np.unique(indices[order], return_index=True)
    lasts = np.append(firsts[1:], len(order))  # of each completion's entries
    reasons = np.concatenate([part.reasons for part in parts])[order]
    return TokenDeltas(
        indices=found,
        offsets=np.concatenate([[0], ends[lasts - 1]]).astype(np.int64),
        token_ids=token_ids[places],
        # Others may have begun to ask meanwhile: then not all parts have them.
        logprobs=logprobs[places] if len(logprobs) == len(places) else logprobs[:0],
        reasons=reasons[lasts - 1],
    )


def slices(news: TokenDeltas, size: int) -> Iterator[TokenDeltas]:
    """Yield the same in parts of at most `size` completions."""
    for begin in range(0, len(news.indices), size):
        end = min(begin + size, len(news.indices))
        tokens = slice(news.offsets[begin], news.offsets[end])
        yield TokenDeltas(
            indices=news.indices[begin:end],
            offsets=news.offsets[begin : end + 1] - news.offsets[begin],
            token_ids=news.token_ids[tokens],
            logprobs=news.logprobs[tokens],
            reasons=news.reasons[begin:end],
        )
