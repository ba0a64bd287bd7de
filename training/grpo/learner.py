"""Updates a model from rewarded rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from srm.engine.device.libc import give_back_freed_memory
from srm.training.grpo.objective import (
    Objective,
    RolloutRow,
    Rows,
    Sums,
    log_probabilities,
    loss,
    side_by_side,
)
from srm.training.loop import Run
from srm.training.model import LanguageModel
from srm.training.precision import autocast
from srm.training.settings import Precision


class Learner:
    """A training run, and the reference model that its policy is kept near."""

    def __init__(
        self,
        run: Run,
        reference: LanguageModel | None,
        rules: Objective,
        device: torch.device,
        precision: Precision,
        micro_batch_tokens: int,
    ) -> None:
        """`reference` is needed unless `rules.kl_weight` is 0; it is moved to the device. Parts of
        at most `micro_batch_tokens` tokens, padding included, are computed one by one."""
        self._run, self._rules = run, rules
        self._reference = None if reference is None else reference.to(device)
        self._device, self._precision = device, precision
        self._micro_batch_tokens = micro_batch_tokens

    def learn(self, rows: Sequence[RolloutRow]) -> Sums:
        """Make one update on the mean loss over all rows; rows of similar length are computed
        together.

        Without a reference, rows with advantage 0 count in the mean but are not computed. Raises
        ConfigError if the loss is not finite.
        """
        divisor, sums = self._rules.divisor(rows), Sums()
        if self._reference is None:
            rows = [row for row in rows if row.advantage] or rows[:1]
        parts = _parts(rows, self._micro_batch_tokens)

        def of_part(part: list[RolloutRow]) -> Tensor:
            some = side_by_side(part, self._device)
            losses, own = loss(
                some, self._run.logits(some.inputs), self._of_reference(some), self._rules
            )
            sums.add(own)
            return losses / divisor

        self._run.update(parts, of_part)
        give_back_freed_memory()  # no two parts have rows of one length
        return sums

    def _of_reference(self, rows: Rows) -> Tensor | None:
        """Return the reference's log-probabilities of the targets, or None without one."""
        if self._reference is None:
            return None
        with torch.no_grad():
            with autocast(self._precision, self._device):
                logits = self._reference(rows.inputs)
            return log_probabilities(logits.float(), rows.targets, self._rules.temperature)


def _parts(rows: Sequence[RolloutRow], tokens: int) -> list[list[RolloutRow]]:
    """Group rows of similar length into parts of at most `tokens` tokens, padding included."""
    parts: list[list[RolloutRow]] = [[]]
    for row in sorted(rows, key=lambda row: len(row.prompt) + len(row.completion)):
        length = len(row.prompt) + len(row.completion) - 1  # the longest of its part
        if parts[-1] and (len(parts[-1]) + 1) * length > tokens:
            parts.append([])
        parts[-1].append(row)
    return parts
