"""Tokens: new tokens of some completions, in the one form that they have from step to reply.

The scheduler makes a table of each step, a message carries it, the client's table keeps it until it
is read, and a reply is rendered from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from srm.engine.messages import REASONS, Output
from srm.engine.steps.batch import F32, I32, I64, Bool

U8 = npt.NDArray[np.uint8]
NO_LOGPROBS: F32 = np.empty(0, np.float32)
NO_VERSIONS: I32 = np.empty(0, np.int32)
NO_TOP_IDS: I32 = np.empty((0, 0), np.int32)
NO_TOP_LOGPROBS: F32 = np.empty((0, 0), np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """A row for each completion that has new tokens or has ended; no completion has two."""

    owners: I64  # i64[rows] stream number of the completion; once read, its index in the request
    offsets: I64  # i64[rows + 1] tokens of row i: token_ids[offsets[i] : offsets[i + 1]]
    token_ids: I32  # i32[tokens] -1 where the reason is "error", which is no token
    reasons: U8  # u8[rows] index into REASONS; not 0 at a completion's end
    logprobs: F32 = field(default_factory=lambda: NO_LOGPROBS)
    """f32[tokens], valid where they were asked for; or none where nobody asked."""
    top_ids: I32 = field(default_factory=lambda: NO_TOP_IDS)
    """i32[first tokens, k]: those with alternatives are the first; -1 beyond what one asked for."""
    top_logprobs: F32 = field(default_factory=lambda: NO_TOP_LOGPROBS)  # f32[first tokens, k]
    versions: I32 = field(default_factory=NO_VERSIONS.view)
    """i32[tokens] version of the weights that made each, where a reader asks; never in a message"""

    def __len__(self) -> int:
        return len(self.owners)

    def rows(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield each row's owner, the begin and end of its tokens, and its reason."""
        ends = self.offsets.tolist()
        return zip(self.owners.tolist(), ends, ends[1:], self.reasons.tolist(), strict=False)

    def select(self, rows: Bool) -> Tokens:
        """Return the rows that are True."""
        counts = np.diff(self.offsets)
        if len(self.token_ids) == len(rows) and counts.all():  # one each, as in a step
            tokens, offsets = rows, self.offsets[: np.count_nonzero(rows) + 1]
        else:
            tokens, offsets = np.repeat(rows, counts), _offsets(counts[rows])
        firsts = tokens[: len(self.top_ids)]
        return Tokens(
            *(self.owners[rows], offsets, self.token_ids[tokens], self.reasons[rows]),
            self.logprobs[tokens] if len(self.logprobs) else self.logprobs,
            *(self.top_ids[firsts], self.top_logprobs[firsts]),
            self.versions[tokens] if len(self.versions) else self.versions,
        )

    def with_owners(self, owners: I64) -> Tokens:
        """Return the same tokens under other numbers."""
        return replace(self, owners=owners)

    def slices(self, size: int) -> Iterator[Tokens]:
        """Yield the same in parts of at most `size` rows, at least one."""
        for begin in range(0, max(len(self.owners), 1), size):
            rows, offsets = slice(begin, begin + size), self.offsets[begin : begin + size + 1]
            tokens = slice(offsets[0], offsets[-1])
            yield Tokens(
                *(self.owners[rows], offsets - offsets[0], self.token_ids[tokens]),
                *(self.reasons[rows], self.logprobs[tokens]),
                *(self.top_ids[tokens], self.top_logprobs[tokens]),
                self.versions[tokens],
            )

    def to_wire(self) -> list[bytes]:
        """Return a step's rows, one token each, as the bytes that a message carries."""
        assert len(self.token_ids) == len(self.owners)
        arrays = (self.owners, self.token_ids, self.reasons, self.logprobs)
        top = (self.top_ids, self.top_logprobs)
        width = self.top_ids.shape[1].to_bytes(4, "little")
        return [
            *(array.tobytes() for array in arrays),
            width,
            *(column.tobytes() for column in top),
        ]


def step_tokens(
    owners: I64,
    token_ids: I32,
    reasons: U8,
    logprobs: F32 = NO_LOGPROBS,
    top_ids: I32 = NO_TOP_IDS,
    top_logprobs: F32 = NO_TOP_LOGPROBS,
) -> Tokens:
    """Return rows of one token each."""
    offsets = np.arange(len(owners) + 1)
    return Tokens(owners, offsets, token_ids, reasons, logprobs, top_ids, top_logprobs)


def from_wire(wire: Sequence[bytes]) -> Tokens:
    """Return what `to_wire` made bytes of. Raises ValueError if that was not it."""
    owners, token_ids, reasons, logprobs, width, top_ids, top_logprobs = wire
    shape = -1, int.from_bytes(width, "little") or 1
    numbers = np.frombuffer(owners, "<i8")
    return Tokens(
        *(numbers, np.arange(len(numbers) + 1), np.frombuffer(token_ids, "<i4")),
        *(np.frombuffer(reasons, np.uint8), np.frombuffer(logprobs, "<f4")),
        *(
            np.frombuffer(top_ids, "<i4").reshape(shape),
            np.frombuffer(top_logprobs, "<f4").reshape(shape),
        ),
    )


NO_TOKENS = step_tokens(np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.uint8))


def from_outputs(outputs: Sequence[tuple[int, Output]]) -> Tokens:
    """Return the tokens of Outputs, which came in this order, each with its completion's index."""
    parts = [output for _, output in outputs]
    token_ids = np.frombuffer(b"".join([part.token_ids for part in parts]), "<i4")
    shape = len(token_ids), -1 if len(token_ids) else 0
    tokens = Tokens(
        owners=np.array([index for index, _ in outputs], np.int64),
        offsets=_offsets(np.array([len(part.token_ids) // 4 for part in parts], np.int64)),
        token_ids=token_ids,
        reasons=np.array([REASONS.index(part.finish_reason) for part in parts], np.uint8),
        logprobs=np.frombuffer(b"".join([part.logprobs for part in parts]), "<f4"),
        top_ids=np.frombuffer(b"".join([part.top_ids for part in parts]), "<i4").reshape(shape),
        top_logprobs=np.frombuffer(b"".join([part.top_logprobs for part in parts]), "<f4").reshape(
            shape
        ),
        versions=np.frombuffer(b"".join([part.versions for part in parts]), "<i4"),
    )
    is_ordered = all(index < following for (index, _), (following, _) in pairwise(outputs))
    return tokens if is_ordered else _join([tokens])


def join(parts: Sequence[Tokens]) -> Tokens:
    """Join tables, which came in this order, into one, with ascending owners unless all have the
    same in another order."""
    if len(parts) > 1:
        parts = [part for part in parts if len(part.owners)] or parts[:1]
    if len(parts) == 1:
        return parts[0]
    return _join_alike(parts) if _are_alike(parts) else _join(parts)


def join_steps(steps: Sequence[Tokens]) -> Tokens:
    """Join tables of steps, whose rows are of any requests. Where others have scores, tokens have
    some too that nobody asked for: 0, of the alternatives -1."""
    if len(steps) > 1 and any(len(step.logprobs) for step in steps):
        width = max(step.top_ids.shape[1] for step in steps)
        steps = [_with_scores(step, width) for step in steps]
    return join(steps)


def _with_scores(step: Tokens, width: int) -> Tokens:
    def filled(array: Any, fill: int, *shape: int) -> Any:
        result = np.full((len(step.token_ids), *shape), fill, array.dtype)
        result[tuple(map(slice, array.shape))] = array
        return result

    top = filled(step.top_ids, -1, width), filled(step.top_logprobs, 0, width)
    logprobs = filled(step.logprobs, 0)
    return replace(step, logprobs=logprobs, top_ids=top[0], top_logprobs=top[1])


def _are_alike(parts: Sequence[Tokens]) -> bool:
    """Return whether all have the same owners, and each one as many tokens of every owner."""
    owners, rows = parts[0].owners, len(parts[0].owners)
    if any(len(part.owners) != rows for part in parts):
        return False
    if rows <= 1:
        return rows == 1 and len({part.owners.item() for part in parts}) == 1
    return all(
        (part.owners == owners).all()
        and (np.diff(part.offsets) == len(part.token_ids) // rows).all()
        for part in parts
    )


def _join_alike(parts: Sequence[Tokens]) -> Tokens:
    rows, num_tokens = len(parts[0].owners), sum([len(part.token_ids) for part in parts])

    def joined(arrays: list[Any]) -> Any:
        arrays = [array for array in arrays if len(array)] or arrays[:1]
        if sum(map(len, arrays)) < num_tokens or not num_tokens:
            return arrays[0][:0]
        if rows > 1:
            shape = arrays[0].shape[1:]
            arrays = [array.reshape(rows, len(array) // rows, *shape) for array in arrays]
            return np.concatenate(arrays, axis=1).reshape(num_tokens, *shape)
        return np.concatenate(arrays)

    return Tokens(
        owners=parts[0].owners,
        offsets=np.arange(rows + 1) * (num_tokens // rows),
        token_ids=joined([part.token_ids for part in parts]),
        reasons=parts[-1].reasons,
        logprobs=joined([part.logprobs for part in parts]),
        top_ids=joined([part.top_ids for part in parts]),
        top_logprobs=joined([part.top_logprobs for part in parts]),
        versions=joined([part.versions for part in parts]),
    )


def _join(parts: Sequence[Tokens]) -> Tokens:
    owners = np.concatenate([part.owners for part in parts])
    is_small = int(owners.max(initial=0)) < 2**16  # small numbers are sorted faster
    order = np.argsort(owners.astype(np.uint16) if is_small else owners, kind="stable")
    counts = np.concatenate([np.diff(part.offsets) for part in parts])
    begins = (np.cumsum(counts) - counts)[order]
    counts = counts[order]
    ends = np.cumsum(counts)
    # The place of each token among those of the parts.
    places = np.repeat(begins - ends + counts, counts)
    places += np.arange(len(places))
    owners = owners[order]
    firsts = np.flatnonzero(np.diff(owners, prepend=-1))
    lasts = np.append(firsts[1:], len(order)) - 1  # the last part's row of each completion

    def ordered(arrays: list[Any]) -> Any:
        values = np.concatenate([array for array in arrays if len(array)] or arrays[:1])
        # Others may have begun to ask meanwhile: then not all parts have them.
        return values[places] if len(values) == len(places) else values[:0]

    return Tokens(
        owners=owners[firsts],
        offsets=np.append(0, ends[lasts]),
        token_ids=ordered([part.token_ids for part in parts]),
        reasons=np.concatenate([part.reasons for part in parts])[order][lasts],
        logprobs=ordered([part.logprobs for part in parts]),
        top_ids=ordered([part.top_ids for part in parts]),
        top_logprobs=ordered([part.top_logprobs for part in parts]),
        versions=ordered([part.versions for part in parts]),
    )


def _offsets(counts: I64) -> I64:
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets
