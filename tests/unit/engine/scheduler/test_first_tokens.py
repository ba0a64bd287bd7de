"""What a step gives to prompts, to first tokens and to next ones, and whose turn it is."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest

from srm.engine.scheduler.scheduler import Scheduler
from srm.engine.state.sequence import PATIENCE
from srm.engine.steps.batch import Batch
from tests.kit.engines.making import complete, request_of, scheduled, scheduler_of, step, steps

MANY = {"num_slots": 200, "max_step_rows": 64, "max_step_tokens": 128, "max_waiting": 1_000}


def running_scheduler(count: int, **settings: Any) -> Scheduler:
    """A scheduler of which so many sequences have sampled once."""
    scheduler = scheduler_of(**{**MANY, **settings})
    scheduler.add(request_of("running", [5], n=count, max_tokens=60))
    while scheduler.table.is_new.any() or not scheduler.table.num_owned:
        step(scheduler)
    return scheduler


def rows_by_request(scheduler: Scheduler, batch: Batch) -> Counter[str]:
    first_ids = scheduler.table.first_id[batch.slots].tolist()
    return Counter(
        scheduler.registry.by_first_id[first_own_id].request.id for first_own_id in first_ids
    )


@pytest.mark.parametrize(
    ("share", "prompts"), [(0.01, 1), (0.25, 5), (0.5, 10), (0.99, 19), (1.0, 19)]
)
def test_prompts_have_their_share_of_a_short_step(share: float, prompts: int) -> None:
    scheduler = running_scheduler(40, prefill_step_tokens=20, max_prefill_share=share)
    for i in range(3):
        scheduler.add(request_of(f"prompt {i}", [7] * 60))
    batch = scheduled(scheduler)
    assert (batch.num_decode, batch.num_tokens) == (20 - prompts, 20)


@pytest.mark.parametrize(
    ("running", "settings", "prompt", "decoded", "tokens"),
    [
        pytest.param(3, (20, 0.25), 60, 3, 20, id="prompts have all that sequences leave"),
        pytest.param(40, (20, 0.9), 5, 16, 20, id="sequences have all that prompts leave"),
        pytest.param(100, (120, 0.2), 60, 64, 120, id="no step decodes more than its rows"),
    ],
)
def test_who_leaves_room_leaves_it_to_the_others(
    running: int, settings: tuple[int, float], prompt: int, decoded: int, tokens: int
) -> None:
    step, share = settings
    scheduler = running_scheduler(running, prefill_step_tokens=step, max_prefill_share=share)
    scheduler.add(request_of("prompt", [7] * prompt))
    batch = scheduled(scheduler)
    assert (batch.num_decode, batch.num_tokens) == (decoded, tokens)


def test_a_step_without_prompts_is_as_large_as_any() -> None:
    scheduler = running_scheduler(100, prefill_step_tokens=20)
    assert scheduled(scheduler).num_decode == 64


def test_first_tokens_come_before_next_ones_and_before_prompts() -> None:
    scheduler = running_scheduler(40, prefill_step_tokens=20, max_prefill_share=1.0)
    scheduler.add(request_of("short", [7, 8], n=16))
    scheduler.add(request_of("long", [9] * 60))
    complete(scheduler, scheduled(scheduler))
    batch = scheduled(scheduler)
    assert rows_by_request(scheduler, batch) == {"short": 16}
    assert batch.num_tokens == 20


def test_all_that_run_take_turns_while_prompts_are_fed() -> None:
    scheduler = running_scheduler(40, prefill_step_tokens=20, max_prefill_share=0.5)
    for i in range(20):
        scheduler.add(request_of(f"prompt {i}", [7] * 60, max_tokens=1))
    before = scheduler.table.position.copy()
    for _ in range(12):
        step(scheduler)
    first_id = scheduler.registry.by_id["running"].first_id
    served = (scheduler.table.position - before)[scheduler.table.first_id == first_id]
    assert served.min() >= 2 and served.max() - served.min() <= 1


def test_of_new_sequences_without_room_the_earliest_begin() -> None:
    scheduler = scheduler_of(num_slots=50, max_step_rows=6)
    for i in range(10):
        scheduler.add(request_of(f"{i}", [5], n=3, max_tokens=9))
    seen = [rows_by_request(scheduler, scheduled(scheduler)) for _ in range(5)]
    assert seen == [{f"{2 * i}": 3, f"{2 * i + 1}": 3} for i in range(5)]
    scheduler.table.is_new[:30] = True
    scheduler.table.sequence_id[:30] = np.arange(30)[::-1]  # the latest in the lowest slots
    assert sorted(scheduled(scheduler).slots.tolist()) == [24, 25, 26, 27, 28, 29]


def test_first_tokens_come_one_after_the_other_and_not_when_all_is_read() -> None:
    limits = {"prefill_step_tokens": 16, "max_prefill_share": 0.75, "prefix_cache": False}
    scheduler, fed, fed_until = scheduler_of(**MANY, **limits), 0, dict[str, int]()
    for i in range(100):
        scheduler.add(request_of(str(i), [7] * 5, max_tokens=50, emit="delta"))
    while len(fed_until) < 100:
        batch = scheduled(scheduler)
        fed += batch.num_tokens
        for output in complete(scheduler, batch):
            fed_until.setdefault(output.id, fed)
    assert list(fed_until) == [str(i) for i in range(100)]
    for place, tokens in enumerate(fed_until.values(), 1):
        # 4 tokens of a prompt are three quarters of what is fed; its first token comes a step
        # later, which is a large one where all prompts are read.
        assert tokens <= 4 * place / 0.75 + 16 + 64


def test_the_shortest_prompts_come_first_whatever_came_first() -> None:
    scheduler = scheduler_of(num_slots=1, prefix_slots=1)
    for name, length in (("long", 9), ("short", 3), ("middle", 6), ("short too", 3)):
        scheduler.add(request_of(name, [5] * length, max_tokens=1))
    ids = [output.id for output in steps(scheduler)]
    assert ids == ["short", "short too", "middle", "long"]


@pytest.mark.parametrize("priority", [0, -1])
def test_a_priority_beats_any_length(priority: int) -> None:
    scheduler = scheduler_of(num_slots=1)
    scheduler.add(request_of("long", [5] * 60, max_tokens=1))
    scheduler.add(request_of("short", [5, 6], max_tokens=1, priority=priority))
    ids = [output.id for output in steps(scheduler)]
    assert ids == (["short", "long"] if priority == 0 else ["long", "short"])


def test_a_long_prompt_lets_pass_so_much_and_no_more() -> None:
    scheduler = scheduler_of(num_slots=1)
    scheduler.add(request_of("long", [5] * 40, max_tokens=1))
    lines: list[str] = []
    for i in itertools.count():
        if "long" in lines:
            break
        scheduler.add(request_of(f"short {i}", [5], max_tokens=1))
        lines += [output.id for output in step(scheduler)]
    # One token each, after the 40 of the long one; of equal rank is the one that it starts before.
    assert len(lines) - 1 == PATIENCE * (40 - 1) - 40


def served(scheduler: Scheduler) -> Counter[str]:
    """Rows of the next step, which has too few of them, by request."""
    batch = scheduled(scheduler)
    assert batch.is_partial
    counts = rows_by_request(scheduler, batch)
    complete(scheduler, batch)
    return counts


def test_the_higher_priority_is_in_every_step() -> None:
    scheduler = scheduler_of(num_slots=20, max_step_rows=7)
    scheduler.add(request_of("low", [5], n=9, priority=-1, max_tokens=60))
    scheduler.add(request_of("high", [5], n=3, max_tokens=60))
    scheduler.add(request_of("highest", [5], n=2, priority=4, max_tokens=60))
    ids, rows = scheduler.table.sequence_id, Counter[int]()
    for turn in range(1, 30):
        before = scheduler.table.position.copy()
        assert served(scheduler) == {"highest": 2, "high": 3, "low": 2}
        rows.update(np.flatnonzero(scheduler.table.position > before).tolist())
        counts = [rows[slot] for slot in np.flatnonzero((ids >= 0) & (ids < 9)).tolist()]
        assert max(counts) - min(counts) <= 1, f"unfair after {turn} steps"


def test_the_lower_priority_waits_for_rows() -> None:
    scheduler = scheduler_of(num_slots=20, max_step_rows=4)
    scheduler.add(request_of("low", [5], n=3, priority=-1, max_tokens=60))
    scheduler.add(request_of("high", [5], n=6, max_tokens=3))
    assert [served(scheduler) for _ in range(5)] == [{"high": 4}] * 4 + [{"high": 2, "low": 2}]


def test_a_turn_ends_where_fewer_run_than_hold_slots() -> None:
    scheduler = scheduler_of(num_slots=9, max_step_rows=6, max_step_tokens=9)
    scheduler.add(request_of("high", [5], n=5, max_tokens=60))
    scheduler.add(request_of("runs", [5], n=2, priority=-1, max_tokens=60))
    for name in ("is fed", "too"):
        scheduler.add(request_of(name, [5] * 60, priority=-1, max_tokens=60))
    assert served(scheduler) == {"high": 5, "runs": 1}
