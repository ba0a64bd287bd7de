"""A budget's samples start together where none of them can be in vain."""

from __future__ import annotations

from typing import NamedTuple

from srm.server.generation.early_stop import AHEAD, EarlyStop, SharedBudget


class Sample(NamedTuple):
    num_tokens: int = 20
    matched: bool = False


def test_a_spent_budget_holds_no_first_sample_back() -> None:
    prompts = 3 * AHEAD
    early_stops = [EarlyStop[Sample](20, 1) for _ in range(prompts)]
    budget = SharedBudget(early_stops, 1)
    assert budget.start_more() == dict.fromkeys(range(prompts), 1)
    for prompt in range(prompts):
        paid = budget.spend(prompt, early_stops[prompt].add_sample(0, False, Sample()))
        assert len(paid) == 1 and budget.start_more() == {}
    assert budget.is_spent and {stop.end for stop in early_stops} == {1}
