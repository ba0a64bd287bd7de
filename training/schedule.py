"""How long a run is and how fast its parameters learn, each group of them at its own rate."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import msgspec
from torch import nn

from srm.engine.weights.tensors import is_scalar
from srm.training.settings import Precision

LAMBDA = "decay_value"
"""End of the names of the parameters that are λ."""


class Schedule(msgspec.Struct, frozen=True):
    """Length and learning rates of a training run, and how each step is computed."""

    steps: int
    """Total updates; 0: as many as `minutes` has time for."""
    learning_rate: float
    warmup_steps: int
    weight_decay: float
    save_every: int
    clip_norm: float = 1.0
    decline: Literal["linear", "cosine", "wsd"] = "linear"
    decline_share: float = 0.2
    """Last share over which `wsd` falls, linearly; 0: the rate stays, as that of a run from whose
    saves shorter ones branch off."""
    evaluate_every: int = 0
    keep_best: bool = False
    """Whether the run's result is the weights of least evaluation loss instead of the last ones."""
    micro_batches: int = 1
    data_workers: int = 0
    """Processes that make batches ahead; 0: each is made between two updates."""
    decay_rate_scale: float = 0.02
    """Learning rate of λ over that of the model. AdamW moves a value by about its learning rate an
    update, and λ has a range of 0.1: at the model's own rate most λ fall to its lower end."""
    clip_decays: bool = True
    """Whether λ are put back into their range after an update. As published, False: one that has
    left it has no gradient, and stays out."""
    precision: Precision = "auto"
    checkpoint_activations: bool = False
    compile: bool = False
    capture: bool = False
    """Whether an update is one CUDA graph."""
    shard: bool = False
    keep_every: int = 0
    keep_bytes: int = 0
    minutes: float = 0.0
    """Time of training after which the run ends even if `steps` are left; 0: no limit."""
    tensorboard: bool = False
    """Whether losses, learning rates and tokens per second are also written for TensorBoard."""
    wandb: bool = False
    """Whether they are also sent to Weights & Biases."""

    def rate(self, step: float) -> float:
        """Return a step's learning rate: linear up over the warm-up, then down to zero as `decline`
        says."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        return self._declined((self.steps - step) / max(1, self.steps - self.warmup_steps))

    def rate_by_clock(self, step: int, spent: float) -> float:
        """Return a step's learning rate when `spent`, a share of `minutes`, has passed.

        With `steps`, the rate is that of the step that has the same share of them, if this is ahead
        of `step`. Without, it falls from the start, and rises over the warm-up or a tenth of the
        time, whichever is shorter.
        """
        spent = min(1.0, spent)
        if self.steps:
            return self.rate(max(step, spent * self.steps))
        rise = max((step + 1) / max(1, self.warmup_steps), 10 * spent)
        return min(1.0, rise) * self._declined(1 - spent)

    def _declined(self, left: float) -> float:
        if self.decline == "cosine":
            left = (1 - math.cos(math.pi * left)) / 2
        elif self.decline == "wsd":
            left = min(1.0, left / self.decline_share) if self.decline_share else 1.0
        return self.learning_rate * left


class ParameterGroup(NamedTuple):
    """Parameters with a learning rate and a weight decay of their own."""

    parameters: list[nn.Parameter]
    rate_scale: float
    weight_decay: float


def parameter_groups(model: nn.Module, schedule: Schedule) -> list[ParameterGroup]:
    """Return the groups that the optimizer updates alike: matrices and embeddings, which alone have
    weight decay; α, β, δ, norms and biases; λ, at its own rate."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    decays: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim > 1 and not is_scalar(name)
        group = decays if name.endswith(LAMBDA) else matrices if is_matrix else others
        group.append(parameter)
    groups = (
        ParameterGroup(matrices, 1.0, schedule.weight_decay),
        ParameterGroup(others, 1.0, 0.0),
        ParameterGroup(decays, schedule.decay_rate_scale, 0.0),
    )
    return [group for group in groups if group.parameters]


def count_factors(model: nn.Module) -> int:
    """Return the multiplications of a token's products with matrices; an embedding has none."""
    return sum(
        value.numel()
        for name, value in model.named_parameters()
        if value.ndim > 1 and not is_scalar(name) and not name.startswith("input_layer")
    )
