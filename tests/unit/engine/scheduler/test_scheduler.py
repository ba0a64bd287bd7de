"""What the scheduler decides, batch by batch, on tokens that the test makes up."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from srm.engine.random_streams import sample_seeds
from srm.engine.steps.batch import FROM_DEVICE, Batch
from srm.errors import InvalidRequest, Overloaded
from tests.kit.engines.making import (
    complete,
    ints,
    request_of,
    rows,
    scheduled,
    scheduler_of,
    step,
    steps,
)


def test_a_prompt_is_prefilled_up_to_its_last_token() -> None:
    scheduler = scheduler_of()
    assert scheduler.schedule() is None
    scheduler.add(request_of(prompt=[5, 6, 7, 8], max_tokens=2))
    prefill = scheduled(scheduler)
    assert (prefill.num_decode, rows(prefill)) == (0, [[5, 6, 7]])
    assert prefill.prefill["position"].tolist() == [0, 0]
    assert complete(scheduler, prefill) == []
    first = scheduled(scheduler)
    assert (rows(first), first.positions.tolist(), first.ends.tolist()) == ([[8]], [3], [False])
    assert complete(scheduler, first) == []
    second = scheduled(scheduler)
    assert (rows(second), second.positions.tolist()) == ([[FROM_DEVICE]], [4])
    assert second.ends.tolist() == [True]
    (output,) = complete(scheduler, second, 11)
    assert (ints(output.token_ids), output.finish_reason) == ([9, 11], "length")
    assert scheduler.schedule() is None
    assert scheduler.num_requests == scheduler.num_waiting == 0


def test_who_left_the_queue_is_counted() -> None:
    scheduler = scheduler_of(num_slots=2)
    counts = [scheduler.num_left]
    for _ in range(2):
        scheduler.add(request_of(prompt=[5], n=3))
        counts.append(scheduler.num_left)
        scheduled(scheduler)
        counts.append(scheduler.num_left)
        scheduler.abort("a")
    assert [*counts, scheduler.num_left] == [0, 0, 2, 3, 5, 6]


def test_samples_fork_from_one_prefix_until_the_last_one_has() -> None:
    scheduler = scheduler_of(num_slots=3)
    scheduler.add(request_of(n=5, max_tokens=2))
    prefix = int(scheduled(scheduler).prefill["write_slot"][1])
    assert (scheduler.prefixes.num_pinned, scheduler.num_waiting) == (1, 5)
    forks = scheduled(scheduler)
    assert forks.new["read_slot"].tolist() == [prefix] * 3
    assert len({prefix, *forks.slots.tolist()}) == 4
    assert scheduler.num_waiting == 2
    complete(scheduler, forks)
    assert len(step(scheduler)) == 3
    last = scheduled(scheduler)
    assert last.new["read_slot"].tolist() == [prefix] * 2
    assert scheduler.prefixes.num_pinned == 0  # nobody is still to read it
    complete(scheduler, last)
    assert sorted(output.index for output in step(scheduler)) == [3, 4]
    assert scheduler.table.num_free == 3


def test_samples_stopped_before_a_row_let_go_of_the_prefix() -> None:
    scheduler = scheduler_of(num_slots=4, max_step_rows=2)
    scheduler.add(request_of(n=4, max_tokens=5))
    scheduled(scheduler)
    forks = scheduled(scheduler)
    assert (len(forks.slots), scheduler.prefixes.num_pinned) == (2, 1)
    slots = scheduler.registry.by_id["a"].slots[:4]
    left = np.flatnonzero(~np.isin(slots, forks.slots)).astype(np.int32)
    assert scheduler.stop("a", left) == 2
    assert scheduler.prefixes.num_pinned == 0


def test_long_prompts_are_fed_in_chunks_behind_the_decode_rows() -> None:
    scheduler = scheduler_of(max_step_rows=2, max_step_tokens=5)
    scheduler.add(request_of("decoding", [4], max_tokens=20))
    step(scheduler)
    scheduler.add(request_of("long", range(2, 13)))
    scheduler.add(request_of("next", range(20, 31)))
    chunks = []
    for _ in range(4):
        chunks.append(rows(batch := scheduled(scheduler)))
        complete(scheduler, batch)
    assert chunks == [
        [[FROM_DEVICE], [2, 3, 4, 5]],
        [[FROM_DEVICE], [6, 7, 8, 9]],
        [[FROM_DEVICE], [10, 11], [20, 21]],
        [[12], [22, 23, 24, 25]],  # the first token comes before others' next ones
    ]


def test_a_slot_is_not_taken_long_before_it_can_be_prefilled() -> None:
    scheduler = scheduler_of(max_step_rows=2, max_step_tokens=5)
    for name in "abcd":
        scheduler.add(request_of(name, [3] * 20))
    scheduled(scheduler)
    assert scheduler.table.num_owned == 1


def test_more_sequences_than_rows_are_served_in_turn() -> None:
    """Also where running slots lie far apart: none is missed or served twice."""
    scheduler = scheduler_of(num_slots=500, max_step_rows=7, max_waiting=500)
    for i in range(50):
        scheduler.add(request_of(f"long {i}", [5], max_tokens=60))
        scheduler.add(request_of(f"short {i}", [5], n=9, max_tokens=1))
    while scheduler.table.num_owned != 50:
        step(scheduler)
    served = Counter[int]()
    for turn in range(1, 100):
        batch = scheduled(scheduler)
        assert batch.num_decode == 7
        served.update(batch.sequence_ids.tolist())
        complete(scheduler, batch)
        least = min(served.values()) if len(served) == 50 else 0
        assert max(served.values()) - least <= 1, f"unfair after {turn} steps"
    assert len(served) == 50


def test_priority_comes_before_arrival_and_before_samples_of_requests_under_way() -> None:
    scheduler = scheduler_of(num_slots=1)
    for name, priority in (("a", 0), ("b", 0), ("c", 2), ("d", -1)):
        scheduler.add(request_of(name, [5], priority=priority, max_tokens=1))
    assert [step(scheduler)[0].id for _ in range(4)] == ["c", "a", "b", "d"]
    scheduler = scheduler_of(num_slots=2)
    scheduler.add(request_of("many", [5], n=10, max_tokens=1))
    step(scheduler)
    scheduler.add(request_of("urgent", [5], priority=1, max_tokens=1))
    assert {output.id for output in step(scheduler)} == {"many", "urgent"}
    scheduler.add(request_of("later", [5], max_tokens=1))
    assert {output.id for output in step(scheduler)} == {"many"}


@pytest.mark.parametrize("priority", [0, 9])
def test_a_blocked_prefix_does_not_hold_up_forks_behind_it(priority: int) -> None:
    scheduler = scheduler_of(num_slots=1, prefix_slots=1)
    scheduler.add(request_of("low", n=3, max_tokens=2))
    scheduled(scheduler)
    scheduler.add(request_of("other", [8, 9], n=3, max_tokens=2, priority=priority))
    order = ["low"] * 3 + ["other"] * 3  # who has a higher priority takes the state of the prompt
    assert [output.id for output in steps(scheduler)] == (order[::-1] if priority else order)


@pytest.mark.parametrize(
    ("token", "params", "reason"),
    [
        (1, {"ignore_eos": False}, "stop"),
        (1, {}, None),
        (4, {"stop_token_ids": (3, 4)}, "stop"),
        (-1, {}, "error"),
        (-1, {"max_tokens": 1}, "error"),
        (4, {"stop_token_ids": (4,), "max_tokens": 1}, "stop"),
        (9, {"max_tokens": 1}, "length"),
        (-1, {"stop_token_ids": tuple(range(32))}, "error"),
    ],
)
def test_why_a_sequence_ends(token: int, params: dict[str, Any], reason: str | None) -> None:
    scheduler = scheduler_of()
    scheduler.add(request_of(prompt=[5], **params))
    results = [
        (output.finish_reason, ints(output.token_ids), bool(output.error))
        for output in step(scheduler, token)
    ]
    is_error = reason == "error"
    assert results == ([(reason, [] if is_error else [token], is_error)] if reason else [])
    assert scheduler.table.num_free == (8 if reason else 7)


def test_what_the_queue_cannot_take_is_refused() -> None:
    scheduler = scheduler_of(num_slots=4, max_waiting=10)
    scheduler.add(request_of(prompt=[5], max_tokens=1))
    for name, n, param, message in (
        ("a", 1, "id", "in use"),
        ("b", 11, "n", "at most max_waiting = 10, got 11"),
    ):
        with pytest.raises(InvalidRequest, match=message) as error:  # for good
            scheduler.add(request_of(name, n=n))
        assert error.value.param == param
    step(scheduler)
    scheduler.add(request_of(prompt=[5], n=8, max_tokens=1))
    with pytest.raises(Overloaded, match="8 of at most 10") as full:
        scheduler.add(request_of("b", [5], n=3))  # for now
    assert full.value.retry_after_s >= 1
    step(scheduler)
    scheduler.add(request_of("b", [5], n=3))


def test_a_batch_line_that_fills_the_queue_leaves_it_to_people() -> None:
    scheduler = scheduler_of()
    scheduler.add(request_of("line", n=99, priority=-1000))
    with pytest.raises(Overloaded, match="99 of at most 100"):
        scheduler.add(request_of("other line", n=2, priority=-1000))
    scheduler.add(request_of("a person", n=98))
    with pytest.raises(Overloaded, match="98 of at most 100") as error:
        scheduler.add(request_of("another", n=4))
    assert error.value.excess == 2
    with pytest.raises(Overloaded, match="197 of at most 100"):
        scheduler.add(request_of("other line", n=2, priority=-1000))
    for name in ("line", "a person"):
        scheduler.abort(name)
    scheduler.add(request_of("other line", n=100, priority=-1000))


def test_only_the_first_row_of_a_sequence_says_how_it_samples() -> None:
    def next_batch() -> Batch:
        batch = scheduled(scheduler)
        complete(scheduler, batch)
        return batch

    scheduler = scheduler_of()
    scheduler.add(request_of("old", [4], max_tokens=20))
    next_batch()
    how: dict[str, Any] = {"temperature": 0.5, "top_k": 7, "top_p": 0.25, "min_p": 0.125}
    scheduler.add(request_of("new", [5, 6], n=2, seed=3, max_tokens=4, **how))
    prefix = int(next_batch().prefill["write_slot"][1])
    forks = next_batch()
    assert [new[:3] for new in forks.new.tolist()] == [(1, prefix, 6), (2, prefix, 6)]
    seeds = sample_seeds(3, forks.sequence_ids[1:] - 1).tolist()
    sampling = [own[:5] for own in forks.new["sampling"].tolist()]
    assert sampling == [(0.5, 7, 0.25, 0.125, seed) for seed in seeds]
    for _ in range(3):
        batch = next_batch()
        assert (batch.num_decode, len(batch.new)) == (3, 0)
    assert next_batch().num_decode == 1
