"""The edits that batches carry for what requests want of tokens."""

from __future__ import annotations

import numpy as np

from srm.engine.scheduler.scheduler import Scheduler
from srm.engine.steps.batch import NO_EDITS, Edits, Span
from tests.kit.engines.making import complete, request_of, scheduled, scheduler_of
from tests.kit.engines.numpy_runner import TINY


def step(scheduler: Scheduler, sampled: int) -> Edits:
    """The edits of a step in which every row samples the same token."""
    batch = scheduled(scheduler)
    complete(scheduler, batch, sampled)
    return batch.edits


def listed(edits: Edits, place: int) -> dict[Span, list[int]]:
    """The lists of an edited row that are not empty; banned tokens ascend."""
    bounds = edits.spans[place].reshape(-1, 2).tolist()
    lists = {Span(i): edits.tokens[start:stop].tolist() for i, (start, stop) in enumerate(bounds)}
    lists[Span.BANNED].sort()
    return {span: ids for span, ids in lists.items() if ids}


def test_a_step_without_edits_carries_none() -> None:
    scheduler = scheduler_of()
    scheduler.add(request_of("a", [5], min_tokens=1, max_tokens=3))
    scheduler.add(request_of("b", [6], max_tokens=9))
    assert step(scheduler, 7).rows.tolist() == [0]
    for _ in range(3):  # "a" has its tokens, then is gone
        assert step(scheduler, 7) is NO_EDITS
    assert not scheduler.table.edits and not scheduler.table.is_edited.any()


def test_rows_of_a_request_share_what_is_the_same() -> None:
    scheduler = scheduler_of()
    wants = {
        "logit_bias": {3: 1.5, 4: -2.0},
        "allowed_token_ids": tuple(range(3, 30)),
        "bad_words": ((5,), (6, 7)),
        "stop_token_ids": (11,),
        "min_tokens": 2,
        "frequency_penalty": 0.5,
    }
    scheduler.add(request_of("a", [5], n=3, **wants))
    scheduler.add(request_of("b", [5], logit_bias={9: 3.0}))
    early, second, late = (step(scheduler, 7) for _ in range(3))
    lists: dict[Span, list[int]] = {
        Span.BIASED: [3, 4],
        Span.ALLOWED: list(range(3, 30)),
        Span.BANNED: sorted([5, *TINY.end_ids, 11]),
        Span.PAIRS: [6, 7],
    }
    for edits in (early, second, late):
        assert edits.rows.tolist() == [0, 1, 2, 3]
        assert edits.biases.tolist() == [1.5, -2.0, 3.0]
        assert edits.penalties.tolist() == [[1, 0.5, 0]] * 3 + [[1, 0, 0]]
        assert listed(edits, 3) == {Span.BIASED: [9]}
        assert (np.diff(edits.spans[:3, :10], axis=0) == 0).all()
    for place in range(3):
        assert listed(early, place) == lists
        assert listed(late, place) == lists | {Span.BANNED: [5], Span.SAMPLED: [7]}
    assert len(early.tokens) == sum(map(len, [*lists.values(), [9]]))
