"""Which weights made which tokens, as spans of a choice's tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

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


def join_spans(spans: Sequence[VersionSpan]) -> list[VersionSpan]:
    """Join neighbouring spans of the same version."""
    joined: list[VersionSpan] = []
    for span in spans:
        if joined and joined[-1].version == span.version:
            joined[-1] = VersionSpan(span.version, joined[-1].start, span.end)
        else:
            joined.append(span)
    return joined
