"""The objective of GRPO over rows of prompt and completion.

    mean over rows of the mean over a completion's tokens of  w · A - β · k3

The mean over tokens may have another divisor than the completion's length (`loss_mean`).
A is the row's advantage, w the token's weight by `correction`, and
k3 = exp(ref - lp) - (ref - lp) - 1 an estimate, never below 0, of the KL divergence of the policy
from the reference. Log-probabilities are those after temperature, of the distribution that was
sampled from but for top_p: `ref` the reference's, `lp` the policy's, `old` those of the weights
that sampled, as the sampler says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from srm.engine.steps.batch import F32, I32
from srm.training.data import IGNORED
from srm.training.grpo.config import LossMean

Correction = Literal["none", "truncate", "clip"]


class Objective(msgspec.Struct, frozen=True):
    """Parameters of the objective."""

    temperature: float
    """Temperature that the rows were sampled with; logits are divided by it."""
    kl_weight: float
    """Weight of the KL term (β); 0: no reference is needed."""
    correction: Correction
    """`none`: w is 1, and its gradient that of lp: for rows that these weights have sampled.
    `truncate`: w is exp(lp - old) as a constant, at most `most_weight`, times the same.
    `clip`: w is exp(lp - old), clipped to 1 - `clip_low` … 1 + `clip_high` where that makes w · A
    less (PPO), and at most `most_weight` where A < 0."""
    clip_low: float
    clip_high: float
    most_weight: float
    loss_mean: LossMean
    """What divides the sum over a completion's tokens: `completion`, their number; `batch`, the
    mean number of the rows' tokens; `max_tokens`, the constant of that name."""
    max_tokens: int

    def divisor(self, rows: Sequence[RolloutRow]) -> int:
        """Return what the losses of these rows, which are all of an update, are divided by."""
        match self.loss_mean:
            case "completion":
                return len(rows)
            case "batch":
                return sum(len(row.completion) for row in rows)
            case "max_tokens":
                return len(rows) * self.max_tokens


@dataclass(frozen=True, slots=True, eq=False)
class RolloutRow:
    """One rollout to learn from."""

    prompt: Sequence[int]
    completion: I32  # i32[tokens], at least one
    old: F32  # f32[tokens], log-probabilities of the completion's tokens when sampled
    advantage: float


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows side by side, padded behind; B rows of T tokens, all on one device."""

    inputs: Tensor  # i64[B, T]
    targets: Tensor  # i64[B, T], the token after each; IGNORED but for those of completions
    old: Tensor  # f32[B, T] of the targets, 0 where they are ignored
    advantages: Tensor  # f32[B]


def side_by_side(rows: Sequence[RolloutRow], device: torch.device) -> Rows:
    """Return rows as tensors; the first token of each is at position 0."""
    inputs, targets, old = [], [], []
    for row in rows:
        ids = torch.tensor([*row.prompt, *row.completion.tolist()])
        before = len(row.prompt) - 1
        inputs.append(ids[:-1])
        targets.append(torch.cat([torch.full((before,), IGNORED), ids[before + 1 :]]))
        old.append(torch.cat([torch.zeros(before), torch.from_numpy(row.old.copy())]))
    return Rows(
        inputs=pad_sequence(inputs, batch_first=True).to(device),
        targets=pad_sequence(targets, batch_first=True, padding_value=IGNORED).to(device),
        old=pad_sequence(old, batch_first=True).to(device),
        advantages=torch.tensor([row.advantage for row in rows], dtype=torch.float32).to(device),
    )


def log_probabilities(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Return f32[B, T] of the targets, 0 where they are ignored; logits f32[B, T, V]."""
    flat = F.cross_entropy(
        logits.flatten(0, 1) / temperature,
        targets.flatten(),
        ignore_index=IGNORED,
        reduction="none",
    )
    return -flat.view(targets.shape)


class Sums(msgspec.Struct):
    """Sums over the tokens of rows."""

    tokens: int = 0
    kl: float = 0.0
    """Sum of k3 in nats; 0 without a reference."""
    gap: float = 0.0
    """Sum of abs(lp - old) in nats: how far the trainer's log-probabilities are from the
    sampler's."""
    inputs: int = 0
    """Number of positions that were computed, those of prompts and of padding among them."""
    limited: int = 0
    """Number of tokens whose weight `correction` truncated or clipped."""

    def add(self, other: Sums) -> None:
        """Add the sums over other rows."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


def loss(
    rows: Rows, logits: Tensor, reference: Tensor | None, rules: Objective
) -> tuple[Tensor, Sums]:
    """Return minus the objective, summed over rows, to be divided by `rules.divisor`; `reference`
    are log-probabilities f32[B, T]."""
    is_own = rows.targets != IGNORED
    lp = log_probabilities(logits, rows.targets, rules.temperature)
    gained, is_limited = _weighted(lp, rows, rules)
    k3 = torch.zeros_like(lp)
    if reference is not None:
        k3 = torch.exp(reference - lp) - (reference - lp) - 1
    each = (rules.kl_weight * k3 - gained) * is_own
    sums = Sums(
        tokens=int(is_own.sum()),
        kl=float((k3.detach() * is_own).sum()),
        inputs=rows.inputs.numel(),
        gap=float(((lp.detach() - rows.old).abs() * is_own).sum()),
        limited=int((is_limited & is_own).sum()),
    )
    of_rows = each.sum(1)
    if rules.loss_mean == "completion":
        of_rows = of_rows / is_own.sum(1)
    return of_rows.sum(), sums


def _weighted(lp: Tensor, rows: Rows, rules: Objective) -> tuple[Tensor, Tensor]:
    """Return w · A of each token, and whether w was truncated or clipped."""
    advantages = rows.advantages[:, None]
    ratio = torch.exp(lp - rows.old)
    match rules.correction:
        case "none":
            weight = torch.exp(lp - lp.detach())  # 1, with the gradient of lp
            is_limited = torch.zeros_like(ratio, dtype=torch.bool)
        case "truncate":
            constant = ratio.detach().clamp(max=rules.most_weight)
            weight = constant * torch.exp(lp - lp.detach())
            is_limited = ratio > rules.most_weight
        case "clip":
            low, high = 1 - rules.clip_low, 1 + rules.clip_high
            up, down = ratio.clamp(max=high), ratio.clamp(low, rules.most_weight)
            weight = torch.where(advantages < 0, down, up)
            is_limited = weight != ratio
    return weight * advantages, is_limited
