"""The training loop: AdamW, warm-up, linear decay, gradient clipping, checkpoint and resume.

Knows no tasks and no file formats: it takes a model, batches by index and a folder.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.nn import functional as F

from engine.errors import ConfigError
from engine.weights.tensors import DECAY_RANGE
from training.checkpoint import whole
from training.data import IGNORED
from training.model import SRM


class TrainingBatches(Protocol):
    """Yields inputs and targets, int64 [rows, length], of step `index`."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]: ...


class Schedule(msgspec.Struct, frozen=True):
    """Length and learning rates of a training run."""

    steps: int
    learning_rate: float
    warmup_steps: int
    weight_decay: float
    save_every: int
    clip_norm: float = 1.0

    def rate(self, step: int) -> float:
        """Return a step's learning rate: linear up over the warm-up, then linear down to zero."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        left = (self.steps - step) / max(1, self.steps - self.warmup_steps)
        return self.learning_rate * left


def train(model: SRM, batches: TrainingBatches, schedule: Schedule, folder: Path) -> list[float]:
    """Train `model` in place, in bfloat16 autocast; return the loss of every step.

    The run's state is saved to `folder/run.pt` every `save_every` steps; if that exists, training
    resumes from it. Raises ConfigError if it is a run of another model.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=schedule.learning_rate, weight_decay=schedule.weight_decay
    )
    losses: list[float] = []
    saved = folder / "run.pt"
    if saved.exists():
        run = torch.load(saved, weights_only=True)
        if run["config"] != msgspec.to_builtins(model.config):
            raise ConfigError(f"{saved} is a run of another model: remove it or change --output")
        model.load_state_dict(run["model"])
        optimizer.load_state_dict(run["optimizer"])
        losses = run["losses"]
    progress = Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  {task.fields[rate]:,.0f} tok/s"),
        TimeRemainingColumn(),
    )
    with progress:
        bar = progress.add_task(
            "", total=schedule.steps, completed=len(losses), loss=float("nan"), rate=0.0
        )
        for step in range(len(losses), schedule.steps):
            started = time.monotonic()
            for group in optimizer.param_groups:
                group["lr"] = schedule.rate(step)
            inputs, targets = batches[step]
            losses.append(_update(model, optimizer, inputs, targets, schedule.clip_norm))
            rate = inputs.numel() / (time.monotonic() - started)
            progress.update(bar, advance=1, loss=losses[-1], rate=rate)
            if (step + 1) % schedule.save_every == 0 or step + 1 == schedule.steps:
                if not progress.console.is_terminal:  # a log shows no bar
                    done = f"step {step + 1} of {schedule.steps}"
                    progress.print(f"{done}: loss {losses[-1]:.3f}, {rate:,.0f} tok/s")
                run = {"config": msgspec.to_builtins(model.config), "model": model.state_dict()}
                run |= {"optimizer": optimizer.state_dict(), "losses": losses}
                with whole(saved) as partial:
                    torch.save(run, partial)
    return losses


def _update(
    model: SRM, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor, clip_norm: float
) -> float:
    with torch.autocast(inputs.device.type, torch.bfloat16):
        logits = model(inputs)
    loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    optimizer.step()
    with torch.no_grad():  # the clip of `decay` has no gradient outside its range: never leave it
        for name, parameter in model.named_parameters():
            if name.endswith("decay_value"):
                parameter.clamp_(*DECAY_RANGE)
    return loss.item()
