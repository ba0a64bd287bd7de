"""What a request may want of tokens, and the edits that batches carry for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.errors import InvalidRequest
from engine.scheduler.accept import accept
from engine.scheduler.scheduler import Scheduler
from engine.steps.batch import NO_EDITS, Batch, Edits, Span, StepResult
from tests.conftest import MakeEngine, MakeRequest
from tests.engines.numpy_runner import TINY, check_batch

EOS = TINY.eos_token_id
V = TINY.vocab_size
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((f"{kind}_penalty", bad) for kind in ("presence", "frequency") for bad in (2.1, -3, NAN)),
        *(("repetition_penalty", bad) for bad in (0.0, -1.0, 0.001, 101.0, NAN, INF)),
        *(("logit_bias", bad) for bad in ({V: 1.0}, {-1: 1.0}, {0: 100.5}, {0: NAN}, {0: -INF})),
        *(("allowed_token_ids", bad) for bad in ((V,), (0, -1))),
        *(("bad_words", bad) for bad in (((V,),), ((1, -1),), ((1,), ()))),
        ("min_tokens", -1),
        ("min_tokens", 17),
    ],
)
def test_a_parameter_out_of_range_is_named(
    make_request: MakeRequest, field: str, value: object
) -> None:
    with pytest.raises(InvalidRequest) as error:
        accept(make_request(**{field: value}), TINY, 0)
    assert error.value.param == field
    assert field in error.value.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((f"{kind}_penalty", good) for kind in ("presence", "frequency") for good in (2.0, -2.0)),
        *(("repetition_penalty", good) for good in (0.01, 100.0)),
        ("logit_bias", {0: 100.0, V - 1: -100.0}),
        ("allowed_token_ids", (V - 1,)),
        ("bad_words", tuple((token,) for token in range(1, V))),
        ("min_tokens", 16),
    ],
)
def test_the_ends_of_a_range_are_in_it(
    make_request: MakeRequest, field: str, value: object
) -> None:
    assert accept(make_request(**{field: value}), TINY, 0).edits is not None


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"bad_words": tuple((token,) for token in range(V))}, "bad_words"),
        ({"bad_words": tuple((3, token) for token in range(V))}, "bad_words"),
        ({"allowed_token_ids": (4, 4), "bad_words": ((4, 4),)}, "allowed_token_ids"),
        ({"allowed_token_ids": (EOS,), "min_tokens": 1}, "allowed_token_ids"),
        ({"allowed_token_ids": (EOS, 5), "min_tokens": 1, "stop_token_ids": (5,)}, "allowed_token"),
        ({"min_tokens": 1, "stop_token_ids": tuple(range(V))}, "min_tokens"),
        (
            {"min_tokens": 1, "bad_words": tuple((t,) for t in range(V) if t != EOS)},
            "bad_words and min_tokens",
        ),
    ],
)
def test_what_could_leave_no_token_is_refused(
    make_request: MakeRequest, params: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"^{named}.* must leave a token") as error:
        accept(make_request(**params), TINY, 0)
    assert error.value.param is not None and error.value.param in named + "_ids"


def test_a_request_that_wants_nothing_has_no_plan(make_request: MakeRequest) -> None:
    neutral = {
        "presence_penalty": -0.0,
        "frequency_penalty": 0,
        "repetition_penalty": 1,
        "logit_bias": {},
        "allowed_token_ids": (),
        "bad_words": (),
        "min_tokens": 0,
    }
    assert accept(make_request(**neutral), TINY, 0).edits is None


def make_scheduler() -> Scheduler:
    return Scheduler(TINY, EngineConfig(num_slots=8, max_step_rows=8, max_step_tokens=64))


def step(scheduler: Scheduler, sampled: int) -> Batch:
    """One step in which every row samples the same token."""
    batch = scheduler.schedule()
    assert batch is not None
    check_batch(batch, TINY, scheduler.table.num_slots + scheduler.prefixes.num_slots)
    tokens = np.full(batch.num_decode, sampled, np.int32)
    scheduler.complete(batch, StepResult(tokens, np.zeros(batch.num_decode, np.float32)))
    return batch


def listed(edits: Edits, place: int) -> dict[Span, list[int]]:
    """The lists of an edited row that are not empty."""
    bounds = edits.spans[place].reshape(-1, 2).tolist()
    lists = {Span(i): edits.tokens[start:stop].tolist() for i, (start, stop) in enumerate(bounds)}
    return {span: ids for span, ids in lists.items() if ids}


def test_a_step_without_edits_carries_none(make_request: MakeRequest) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [5], min_tokens=1, max_tokens=3))
    scheduler.add(make_request("b", [6], max_tokens=9))
    assert step(scheduler, 7).edits.rows.tolist() == [0]
    for _ in range(3):  # "a" has its tokens, then is gone
        assert step(scheduler, 7).edits is NO_EDITS
    assert not scheduler.table.edits and not scheduler.table.is_edited.any()


def test_the_last_token_is_left_to_the_device(make_request: MakeRequest) -> None:
    scheduler = make_scheduler()
    scheduler.add(
        make_request("a", [9, 5, 9], repetition_penalty=2, bad_words=((7, 8, 9),), max_tokens=9)
    )
    scheduler.schedule()  # prefill
    expected = [
        {Span.PROMPT: [5, 9]},
        {Span.PROMPT: [5, 9]},
        {Span.PROMPT: [5, 9], Span.SAMPLED: [7], Span.PAIRS: [8, 9]},
        {Span.PROMPT: [5, 9], Span.SAMPLED: [7, 6]},
        {Span.PROMPT: [5, 9], Span.SAMPLED: [7, 6, 7], Span.PAIRS: [8, 9]},
    ]
    for token, lists in zip([7, 6, 7, 6, 6], expected, strict=True):
        assert listed(step(scheduler, token).edits, 0) == lists


def test_rows_of_a_request_share_what_is_the_same(make_request: MakeRequest) -> None:
    scheduler = make_scheduler()
    wants = {
        "logit_bias": {3: 1.5, 4: -2.0},
        "allowed_token_ids": tuple(range(3, 30)),
        "bad_words": ((5,), (6, 7)),
        "stop_token_ids": (11,),
        "min_tokens": 2,
        "frequency_penalty": 0.5,
    }
    scheduler.add(make_request("a", [5], n=3, **wants))
    scheduler.add(make_request("b", [5], logit_bias={9: 3.0}))
    early, second, late = (step(scheduler, 7).edits for _ in range(3))
    lists: dict[Span, list[int]] = {
        Span.BIASED: [3, 4],
        Span.ALLOWED: list(range(3, 30)),
        Span.BANNED: [5, *sorted({EOS, 11})],
        Span.PAIRS: [6, 7],
    }
    for edits in (early, second, late):
        assert edits.rows.tolist() == [0, 1, 2, 3]
        assert edits.biases.tolist() == [1.5, -2.0, 3.0]
        assert edits.penalties.tolist() == [[1, 0.5, 0]] * 3 + [[1, 0, 0]]
        assert listed(edits, 3) == {Span.BIASED: [9]}
        assert (np.diff(edits.spans[:3, :10], axis=0) == 0).all()
    for place in range(3):
        found = listed(early, place)
        assert found | {Span.BANNED: sorted(found[Span.BANNED])} == lists | {
            Span.BANNED: sorted(lists[Span.BANNED])
        }
        assert listed(late, place) == lists | {Span.BANNED: [5], Span.SAMPLED: [7]}
    assert len(early.tokens) == sum(map(len, [*lists.values(), [9]]))


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_slot_that_is_given_back_edits_nothing_of_the_next(
    make_engine: MakeEngine, make_request: MakeRequest, overlaps: bool
) -> None:
    engine, fresh = make_engine(num_slots=1), make_engine(num_slots=1)
    engine.add(make_request("a", [5], n=2, allowed_token_ids=(4,), max_tokens=5))
    engine.step()
    engine.abort("a")
    for one in (engine, fresh):
        one.add(make_request("b", [5], max_tokens=9, temperature=0.0))
    found = []
    for one in (engine, fresh):
        outputs = []
        while one.has_work:
            outputs += one.step_overlapped() if overlaps else one.step()
        found.append(outputs)
    assert found[0] == found[1]
