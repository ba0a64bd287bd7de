"""What GRPO learns from: which rollouts, how much of each token, and in which direction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from srm.training.data import IGNORED
from srm.training.grpo.config import LossMean
from srm.training.grpo.learner import Learner
from srm.training.grpo.objective import (
    Correction,
    Objective,
    RolloutRow,
    log_probabilities,
    loss,
    side_by_side,
)
from srm.training.grpo.resampling import GOOD, Resampling, advantages, chosen
from srm.training.loop import Run
from srm.training.model import SRM
from srm.training.processes import Processes
from srm.training.schedule import Schedule
from tests.kit.engines.numpy_runner import TINY

CPU = torch.device("cpu")
REWARDS = st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), min_size=24, max_size=24)


@given(rewards=REWARDS, size=st.integers(2, 12), pool=st.booleans(), in_order=st.booleans())
def test_half_of_a_group_is_good_where_there_are_so_many(
    rewards: list[float], size: int, pool: bool, in_order: bool
) -> None:
    table = np.array(rewards).reshape(2, 12)
    rules = Resampling(size, pool, in_order)
    groups = chosen(table, rules, np.random.default_rng(3))
    pools = [np.arange(24)] if pool else [np.arange(12), np.arange(12, 24)]
    assert len(groups) == len(pools)
    for group, own in zip(groups, pools, strict=True):
        assert len(set(group.tolist())) == size
        assert set(group.tolist()) <= set(own.tolist())
        good = int((table.ravel()[own] >= GOOD).sum())
        retained = int((table.ravel()[group] >= GOOD).sum())
        assert retained == max(min(good, size // 2), size - (len(own) - good))


def test_in_order_the_first_ones_of_all_questions_are_kept_as_published() -> None:
    table = np.array([[0.0, 1, 1, 0, 1], [1.0, 0, 0, 1, 0]])
    (group,) = chosen(table, Resampling(6, pool=True, in_order=True), np.random.default_rng(0))
    assert group.tolist() == [1, 2, 4, 0, 3, 6]


def test_at_random_every_rollout_has_its_chance_and_a_seed_repeats_it() -> None:
    table = np.array([[1.0] * 6 + [0.0] * 6])
    drawn = [chosen(table, Resampling(4), np.random.default_rng(seed))[0] for seed in range(200)]
    counts = np.bincount(np.concatenate(drawn), minlength=12)
    assert counts.sum() == 800
    assert counts.min() > 30  # 67 expected, of 200; the seeds are fixed
    again = chosen(table, Resampling(4), np.random.default_rng(7))[0]
    assert again.tolist() == drawn[7].tolist()


def test_without_resampling_a_question_is_a_group() -> None:
    groups = chosen(np.zeros((2, 3)), Resampling(0), np.random.default_rng(0))
    assert [group.tolist() for group in groups] == [[0, 1, 2], [3, 4, 5]]


def test_advantages_are_rewards_over_their_unbiased_deviation() -> None:
    """Or are left undivided."""
    rewards = np.array([1.0, 0.0, 0.0, 1.0])
    expected = 0.5 / (math.sqrt(4 * 0.25 / 3) + 1e-4)
    wanted = [expected, -expected, -expected, expected]
    assert advantages(rewards).tolist() == pytest.approx(wanted, rel=1e-12)
    assert advantages(rewards, scale=False).tolist() == [0.5, -0.5, -0.5, 0.5]
    for reward in (0.0, 1.0, 0.1):  # of a group that is all alike nothing is learned
        assert advantages(np.full(7, reward)).tolist() == [0.0] * 7
        assert advantages(np.full(3, reward), scale=False).tolist() == [0.0] * 3


VOCAB = 11
PROMPTS = [[0, 5, 3], [0, 2, 9, 4, 4], [0]]
COMPLETIONS = [[7, 1], [6, 6, 2, 1], [3, 8, 10]]
ADVANTAGES = [1.5, -0.75, 0.5]


def _logits(seed: int) -> NDArray[np.float64]:
    return np.random.default_rng(seed).normal(0, 2, (3, 8, VOCAB))


def _lp(logits: NDArray[np.float64], temperature: float) -> list[list[float]]:
    """Of each completion's tokens, one by one: token i of a row from what follows token i - 1."""
    results = []
    for row, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        own = []
        for offset, token in enumerate(completion):
            scaled = [float(x) / temperature for x in logits[row, len(prompt) + offset - 1]]
            top = max(scaled)
            own.append(scaled[token] - top - math.log(sum(math.exp(x - top) for x in scaled)))
        results.append(own)
    return results


def _weight(ratio: float, advantage: float, rules: Objective) -> float:
    match rules.correction:
        case "none":
            return 1.0
        case "truncate":
            return min(ratio, rules.most_weight)
        case "clip":
            clipped = min(max(ratio, 1 - rules.clip_low), 1 + rules.clip_high)
            gained = min(ratio * advantage, clipped * advantage)
            if advantage < 0:
                gained = max(gained, rules.most_weight * advantage)
            return gained / advantage


def _by_hand(
    policy: NDArray[np.float64], old: list[list[float]], rules: Objective, weigh: Any = None
) -> float:
    """Minus the objective; `weigh` takes the place of the weights."""
    lps, refs = _lp(policy, rules.temperature), _lp(_logits(2), rules.temperature)
    total = 0.0
    for row, advantage in enumerate(ADVANTAGES):
        gained = []
        for i, (lp, ref) in enumerate(zip(lps[row], refs[row], strict=True)):
            weight = _weight(math.exp(lp - old[row][i]), advantage, rules)
            weight = weigh(row, i, lp) if weigh else weight
            k3 = math.exp(ref - lp) - (ref - lp) - 1
            gained.append(weight * advantage - rules.kl_weight * k3)
        tokens = {"completion": len(gained), "batch": 9 / 3, "max_tokens": rules.max_tokens}
        total -= sum(gained) / tokens[rules.loss_mean] / 3
    return total


def _rules(correction: str, loss_mean: LossMean = "completion") -> Objective:
    limits = {"clip_low": 0.2, "clip_high": 0.28, "most_weight": 2.0}
    return Objective(
        temperature=0.7, kl_weight=0.04, correction=cast(Correction, correction), **limits,
        loss_mean=loss_mean, max_tokens=7,
    )  # fmt: skip


def _rows(old: Sequence[Sequence[float]]) -> list[RolloutRow]:
    return [
        RolloutRow(prompt, np.array(completion, np.int32), np.array(own, np.float32), advantage)
        for prompt, completion, own, advantage in zip(
            PROMPTS, COMPLETIONS, old, ADVANTAGES, strict=True
        )
    ]


@pytest.mark.parametrize(
    ("correction", "loss_mean"),
    [
        *(("none", "completion"), ("truncate", "completion"), ("clip", "completion")),
        *(("none", "batch"), ("clip", "batch"), ("none", "max_tokens"), ("clip", "max_tokens")),
    ],
)
def test_loss_and_gradient_are_those_computed_by_hand(correction: str, loss_mean: LossMean) -> None:
    rules, policy = _rules(correction, loss_mean), _logits(1)
    lps = _lp(policy, rules.temperature)
    # ratios below and above both limits, and between them
    steps = iter([0.0, 0.5, -0.5, 1.5, -1.5, 0.1, -0.1, 0.9, -0.3])
    old = [[lp - next(steps) for lp in own] for own in lps]
    rows = side_by_side(_rows(old), CPU)
    assert rows.inputs.shape == (3, 8)
    assert (rows.targets != IGNORED).sum(1).tolist() == [2, 4, 3]
    logits = torch.tensor(policy, requires_grad=True)
    reference = log_probabilities(torch.tensor(_logits(2)), rows.targets, rules.temperature)
    total, sums = loss(rows, logits, reference, rules)
    total = total / rules.divisor(_rows(old))
    total.backward()  # type: ignore[no-untyped-call]
    assert float(total.detach()) == pytest.approx(_by_hand(policy, old, rules), rel=1e-6)
    assert sums.tokens == 9
    assert sums.gap == pytest.approx(0.0 + 0.5 + 0.5 + 1.5 + 1.5 + 0.1 + 0.1 + 0.9 + 0.3, rel=1e-5)
    assert sums.limited == {"none": 0, "truncate": 2, "clip": 5}[correction]

    constants = [
        [_weight(math.exp(lp - o), a, rules) for lp, o in zip(*pair, strict=True)]
        for *pair, a in zip(lps, old, ADVANTAGES, strict=True)
    ]

    def with_constant_weights(row: int, i: int, lp: float) -> float:
        """w times a 1 whose gradient is that of lp."""
        return constants[row][i] * math.exp(lp - lps[row][i])

    weigh = None if correction == "clip" else with_constant_weights
    assert logits.grad is not None
    for place in [(0, 2, 7), (0, 3, 4), (1, 4, 6), (1, 6, 2), (1, 7, 1), (2, 0, 3), (2, 2, 10)]:
        ends = []
        for sign in (1, -1):
            moved = policy.copy()
            moved[place] += sign * 1e-5
            ends.append(_by_hand(moved, old, rules, weigh))
        slope = (ends[0] - ends[1]) / 2e-5
        assert float(logits.grad[place]) == pytest.approx(slope, rel=1e-4, abs=1e-7), place
    for silent in [(0, 0), (0, 1), (0, 4), (1, 3), (2, 3)]:  # prompts and padding
        assert not logits.grad[silent].any()


def test_the_clipped_objective_of_own_rollouts_has_the_bits_of_the_plain_one() -> None:
    """As at the first update of a batch, where no probability has moved."""
    targets = side_by_side(_rows([[0.0] * len(own) for own in COMPLETIONS]), CPU).targets
    policy = torch.tensor(_logits(1), dtype=torch.float32)
    lp = log_probabilities(policy, targets, 0.7)
    old = [own[target != IGNORED].tolist() for own, target in zip(lp, targets, strict=True)]
    results = []
    for correction in ("none", "clip"):
        logits = policy.clone().requires_grad_()
        total, sums = loss(side_by_side(_rows(old), CPU), logits, None, _rules(correction))
        total.backward()  # type: ignore[no-untyped-call]
        assert sums.limited == 0
        results.append((total.detach(), logits.grad))
    (plain, of_plain), (clipped, of_clipped) = results
    assert of_plain is not None and of_clipped is not None and of_plain.any()
    assert torch.equal(plain, clipped) and torch.equal(of_plain, of_clipped)


@pytest.mark.parametrize("kl_weight", [0.0, 0.04])
def test_rows_that_teach_nothing_count_in_the_mean(tmp_path: Path, kl_weight: float) -> None:
    """And parts of an update are the same update; there may be rows of no advantage alone."""
    results = []
    runs = (("one", 1_000, 1), ("parts", 9, 1), ("each", 1, 1), ("none", 8, 0))
    for name, tokens, factor in runs:
        torch.manual_seed(0)
        own = Processes(0, 1, CPU)
        model, reference = SRM(TINY), SRM(TINY)
        schedule = Schedule(
            steps=2, learning_rate=1e-2, warmup_steps=1, weight_decay=0.0, save_every=1,
            precision="float32",
        )  # fmt: skip
        (tmp_path / name).mkdir()
        run = Run(model, schedule, tmp_path / name, own, {})
        before = {key: value.clone() for key, value in run.weights().items()}
        rules = msgspec.structs.replace(_rules("none"), kl_weight=kl_weight)
        learner = Learner(run, reference if kl_weight else None, rules, CPU, "float32", tokens)
        completion, logprobs = np.array([4, 5], np.int32), np.zeros(2, np.float32)
        rows = [
            RolloutRow([1, 2, 3], completion, logprobs, factor * advantage)
            for advantage in (1.0, 0.0, 0.0, -2.0)
        ]
        sums = learner.learn(rows)
        assert sums.tokens == (8 if kl_weight else 4 if factor else 2)
        results.append(run.losses.steps[0])
        moved = any(not torch.equal(before[key], value) for key, value in run.weights().items())
        assert moved == bool(factor or kl_weight)
        if not kl_weight:
            assert run.losses.steps[0] == pytest.approx(factor * 1.0 / 4)
    assert results[:3] == pytest.approx([results[0]] * 3, rel=1e-6)
