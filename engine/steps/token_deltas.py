"""New tokens of some completions, as arrays: which completion, which tokens, why it ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from engine.messages import REASONS, FinishReason, Output
from engine.steps.batch import F32, I32, I64

U8 = npt.NDArray[np.uint8]
NO_TOP_IDS: I32 = np.empty((0, 0), np.int32)
NO_TOP_LOGPROBS: F32 = np.empty((0, 0), np.float32)


class CompletionTokens(NamedTuple):
    """New tokens of one completion; the fields are those of an Output."""

    token_ids: bytes
    logprobs: bytes
    top_ids: bytes
    top_logprobs: bytes
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True, eq=False)
class TokenDeltas:
    """New tokens of some completions, each at most once, in ascending order."""

    indices: I64  # i64[completions] which of those asked for together
    offsets: I64  # i64[completions + 1] tokens of entry i: token_ids[offsets[i] : offsets[i + 1]]
    token_ids: I32  # i32[tokens]
    logprobs: F32  # f32[tokens], or none where nobody asked
    reasons: U8  # u8[completions] index into REASONS; not 0 at a completion's end
    top_ids: I32 = field(default_factory=lambda: NO_TOP_IDS)  # i32[tokens, k], or none
    top_logprobs: F32 = field(default_factory=lambda: NO_TOP_LOGPROBS)  # f32[tokens, k], or none

    def tokens_of(self, entry: int) -> bytes:
        """One completion's tokens, int32 little-endian."""
        return self.token_ids[self.offsets[entry] : self.offsets[entry + 1]].tobytes()

    def entries(self) -> Iterator[tuple[int, CompletionTokens]]:
        """Yield each completion's index and new tokens."""
        token_ids, logprobs = self.token_ids.tobytes(), self.logprobs.tobytes()
        top_ids, top_logprobs = self.top_ids.tobytes(), self.top_logprobs.tobytes()
        k = self.top_ids.shape[1]
        ends = (4 * self.offsets).tolist()
        reasons = map(REASONS.__getitem__, self.reasons.tolist())
        for index, begin, end, reason in zip(
            self.indices.tolist(), ends, ends[1:], reasons, strict=False
        ):
            own, top = slice(begin, end), slice(k * begin, k * end)
            yield (
                index,
                CompletionTokens(
                    token_ids[own], logprobs[own], top_ids[top], top_logprobs[top], reason
                ),
            )


NO_NEWS = TokenDeltas(
    indices=np.empty(0, np.int64),
    offsets=np.zeros(1, np.int64),
    token_ids=np.empty(0, np.int32),
    logprobs=np.empty(0, np.float32),
    reasons=np.empty(0, np.uint8),
)


def of_outputs(outputs: Sequence[tuple[int, Output]]) -> TokenDeltas:
    """Make arrays of Outputs in the order in which they came, each with its completion's index."""
    indices = [index for index, _ in outputs]
    parts = [output for _, output in outputs]
    ends = accumulate((len(part.token_ids) // 4 for part in parts), initial=0)
    token_ids = np.frombuffer(b"".join([part.token_ids for part in parts]), "<i4")
    shape = len(token_ids), -1 if len(token_ids) else 0
    top_ids = np.frombuffer(b"".join([part.top_ids for part in parts]), "<i4")
    top_logprobs = np.frombuffer(b"".join([part.top_logprobs for part in parts]), "<f4")
    found = TokenDeltas(
        indices=np.array(indices, np.int64),
        offsets=np.array([*ends], np.int64),
        token_ids=token_ids,
        logprobs=np.frombuffer(b"".join([part.logprobs for part in parts]), "<f4"),
        reasons=np.array([REASONS.index(part.finish_reason) for part in parts], np.uint8),
        top_ids=top_ids.reshape(shape),
        top_logprobs=top_logprobs.reshape(shape),
    )
    is_ordered = all(index < following for index, following in pairwise(indices))
    return found if is_ordered else _in_order([found])


def merge(parts: Sequence[TokenDeltas]) -> TokenDeltas:
    """Merge several, which came in this order, into one."""
    parts = [part for part in parts if len(part.indices)] or parts[:1]
    return parts[0] if len(parts) == 1 else _in_order(parts)


def _in_order(parts: Sequence[TokenDeltas]) -> TokenDeltas:
    """Sort entries by completion, and join those of one in the order in which they came."""
    indices = np.concatenate([part.indices for part in parts])
    order = np.argsort(indices, kind="stable")
    counts = np.concatenate([np.diff(part.offsets) for part in parts])[order]
    starts = np.cumsum([0, *(len(part.token_ids) for part in parts)])
    begins = np.concatenate(
        [part.offsets[:-1] + start for part, start in zip(parts, starts, strict=False)]
    )[order]
    ends = np.cumsum(counts)
    places = np.repeat(begins - ends + counts, counts) + np.arange(ends[-1])
    token_ids = np.concatenate([part.token_ids for part in parts])
    found, firsts = np.unique(indices[order], return_index=True)
    lasts = np.append(firsts[1:], len(order))  # of each completion's entries
    reasons = np.concatenate([part.reasons for part in parts])[order]

    def sorted_by_token(arrays: list[Any]) -> Any:
        values = np.concatenate([array for array in arrays if len(array)] or arrays[:1])
        # Others may have begun to ask meanwhile: then not all parts have them.
        return values[places] if len(values) == len(places) else values[:0]

    return TokenDeltas(
        indices=found,
        offsets=np.concatenate([[0], ends[lasts - 1]]).astype(np.int64),
        token_ids=token_ids[places],
        logprobs=sorted_by_token([part.logprobs for part in parts]),
        reasons=reasons[lasts - 1],
        top_ids=sorted_by_token([part.top_ids for part in parts]),
        top_logprobs=sorted_by_token([part.top_logprobs for part in parts]),
    )


def slices(news: TokenDeltas, size: int) -> Iterator[TokenDeltas]:
    """Yield the same in parts of at most `size` completions."""
    if 0 < len(news.indices) <= size:
        yield news
        return
    for begin in range(0, len(news.indices), size):
        end = min(begin + size, len(news.indices))
        tokens = slice(news.offsets[begin], news.offsets[end])
        yield TokenDeltas(
            indices=news.indices[begin:end],
            offsets=news.offsets[begin : end + 1] - news.offsets[begin],
            token_ids=news.token_ids[tokens],
            logprobs=news.logprobs[tokens],
            reasons=news.reasons[begin:end],
            top_ids=news.top_ids[tokens],
            top_logprobs=news.top_logprobs[tokens],
        )
