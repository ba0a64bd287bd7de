"""Samples with the trained model in torch, as training libraries do without an engine.

The other `Sampler`, to measure the engine against: one question after the other, its rollouts side
by side until the last one has ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from srm.training.grpo.rollouts import Rollout, RolloutSampling, cut_rollouts
from srm.training.model import SRM
from srm.training.precision import autocast
from srm.training.settings import Precision


class TorchSampler:
    """Samples from a copy of the model, one token at a time."""

    def __init__(
        self, model: SRM, device: torch.device, precision: Precision, weights_version: int
    ) -> None:
        """Take a model for its own; products are computed in `precision`."""
        self._model, self._device, self._precision = model.to(device), device, precision
        self._version = weights_version

    def sample(
        self, prompts: Sequence[Sequence[int]], sampling: RolloutSampling
    ) -> list[list[Rollout]]:
        """Prompt i is sampled with seed `sampling.seed + i`."""
        with torch.no_grad(), autocast(self._precision, self._device):
            return [
                self._complete(prompt, sampling, (sampling.seed + number) % 2**64)
                for number, prompt in enumerate(prompts)
            ]

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self._model.load_state_dict(tensors)
        self._version += 1

    def close(self) -> None:
        del self._model

    def _complete(
        self, prompt: Sequence[int], sampling: RolloutSampling, seed: int
    ) -> list[Rollout]:
        random = torch.Generator(self._device).manual_seed(seed)
        config, count = self._model.config, sampling.n
        state, logits = self._model.empty_state(1), torch.empty(0)
        for position, token in enumerate(prompt):
            fed = torch.tensor([token], device=self._device)
            logits, state = self._model.step(fed, state, position)
        logits, state = logits.expand(count, -1), state.expand(-1, -1, count, -1)
        ids: list[Tensor] = []
        logprobs: list[Tensor] = []
        ends = torch.tensor(config.end_ids, device=self._device)
        ended = torch.zeros(count, dtype=torch.bool, device=self._device)
        most = min(sampling.max_tokens, config.n_ctx - len(prompt) + 1)
        for position in range(len(prompt), len(prompt) + most):
            if ids:
                logits, state = self._model.step(ids[-1], state, position - 1)
            logp = torch.log_softmax(logits.float() / sampling.temperature, -1)
            tokens = _drawn(logp, sampling.top_p, random)
            ids.append(tokens)
            logprobs.append(logp.gather(1, tokens[:, None])[:, 0])
            ended |= torch.isin(tokens, ends)
            if ended.all():
                break
        made = torch.stack(ids, 1), torch.stack(logprobs, 1)
        return cut_rollouts(*made, config.end_ids, self._version)


def _drawn(logprobs: Tensor, top_p: float, random: torch.Generator) -> Tensor:
    """Draw a token for each row [rows, V] among the fewest likeliest tokens whose probabilities
    reach `top_p`."""
    ordered, tokens = logprobs.exp().sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    within_top_p = ordered.masked_fill(before >= top_p, 0.0)
    return tokens.gather(1, torch.multinomial(within_top_p, 1, generator=random))[:, 0]
