"""Which weights made which tokens, as spans of a choice's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt
from msgspec import UNSET, UnsetType

from srm.server.schema.completion_response import VersionSpan


def spans_of(versions: npt.NDArray[np.int32], start: int) -> list[VersionSpan]:
    """Return the spans of tokens made by these versions, the first of which has the number `start`
    in its choice."""
    begins = np.flatnonzero(np.diff(versions, prepend=-1)).tolist()
    ends = [*begins[1:], len(versions)]
    return [
        VersionSpan(int(versions[begin]), start + begin, start + end)
        for begin, end in zip(begins, ends, strict=False)
    ]


def join_spans(
    parts: Sequence[list[VersionSpan] | UnsetType],
) -> list[VersionSpan] | UnsetType:
    """Join the spans of a choice's parts, and neighbouring ones of the same version; UNSET if no
    part has any."""
    if parts[0] is UNSET:
        return UNSET
    joined: list[VersionSpan] = []
    for span in chain.from_iterable(part or () for part in parts):
        if joined and joined[-1].version == span.version:
            joined[-1] = VersionSpan(span.version, joined[-1].start, span.end)
        else:
            joined.append(span)
    return joined
