"""The lines of a run's log, and what the values in them mean."""

from __future__ import annotations

import msgspec


class Sample(msgspec.Struct, frozen=True, omit_defaults=True):
    """A text that the model wrote."""

    prompt: str
    text: str
    reward: float | None = None


class LogLine(msgspec.Struct, omit_defaults=True):
    """What became known after `step` updates."""

    step: int
    values: dict[str, float | None] = {}
    """By name; None for what is no finite number."""
    sample: Sample | None = None


MEANINGS = {
    "loss": "nats per target, before the update; evaluation: of what is not trained on",
    "learning rate": "of the model; λ has its own share of it",
    "gradient norm": "of all gradients together, before they are scaled down to clip_norm",
    "λ": "least and largest decay of a head when the run was saved",
    "α": "least and largest weight of a position in a mixer when the run was saved",
    "tokens per second": "trained on, padding included",
    "FLOP per second": "six for each token and each weight of a matrix, eight with a reference",
    "share of peak": "of the FLOP per second that a product of matrices, measured once when this "
    "process began, reached in the precision of the run",
    "entropy": "mean of -log p of the sampled tokens, in nats: how undecided the policy is",
    "length": "mean tokens of a rollout",
    "mixed": "share of the questions that have both good and bad rollouts",
    "ended": "share of the rollouts that ended with a token, not at the length limit",
    "reward": "mean of all rollouts",
    "kl": "estimated KL divergence from the reference in nats per token",
    "gap": "mean difference between the log-probabilities of trainer and sampler",
    "pass@1": "of the questions for evaluation",
}
