"""Samples with our engine, in this process. It alone needs MAX: the rest of training does not."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np
from torch import Tensor

from srm.engine.config import EngineConfig, ModelConfig
from srm.engine.device.runner import GPU_MEMORY, make_runner
from srm.engine.messages import Output, SamplingParams
from srm.engine.process.engine import Engine
from srm.engine.weights.weights import Weights, fold
from srm.errors import StepFailed
from srm.training.grpo.rollouts import Rollout, RolloutSampling


class EngineSampler:
    """Samples with our engine in this process; weights are passed in memory."""

    def __init__(self, engine: Engine, close: Callable[[], None]) -> None:
        """Take an engine that has no other work; `close` frees it."""
        self._engine, self._close = engine, close

    def sample(
        self, prompts: Sequence[Sequence[int]], sampling: RolloutSampling
    ) -> list[list[Rollout]]:
        """Prompt i is sampled with seed `sampling.seed + i`. Raises RequestError if one is refused,
        StepFailed if the engine fails."""
        version = self._engine.weights_version
        params = SamplingParams(logprobs=0, **msgspec.structs.asdict(sampling))
        completions = self._engine.generate(prompts, params)
        return [[_rollout(output, version) for output in outputs] for outputs in completions]

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        engine = self._engine
        engine.load_weights(folded(engine.model, tensors, engine.weights_version + 1))

    def close(self) -> None:
        self._close()


def engine_sampler(
    model: ModelConfig,
    tensors: Mapping[str, Tensor],
    config: EngineConfig,
    version: int,
    gpu_memory: float,
) -> EngineSampler:
    """Start an engine on these weights, which are number `version`.

    On a GPU it reserves the fraction `gpu_memory` of the free memory, unless the environment says
    otherwise; the rest is for training.
    """
    variable, _ = GPU_MEMORY
    if config.device == "gpu":
        os.environ.setdefault(variable, str(round(100 * gpu_memory)))
    weights = folded(model, tensors, version)
    runner = make_runner(weights, config)
    engine = Engine(model, runner, config, weights.fingerprint, weights_version=version)
    return EngineSampler(engine, runner.close)


def folded(model: ModelConfig, tensors: Mapping[str, Tensor], version: int) -> Weights:
    """Return copies of a model's tensors as the engine's weights, named by their version."""
    copies = {name: tensor.detach().float().numpy().copy() for name, tensor in tensors.items()}
    return fold(model, copies, f"version-{version}")


def _rollout(output: Output, version: int) -> Rollout:
    if output.finish_reason not in {"stop", "length"}:
        raise StepFailed(f"a rollout failed: {output.error}")
    return Rollout(
        token_ids=np.frombuffer(output.token_ids, "<i4"),
        logprobs=np.frombuffer(output.logprobs, "<f4"),
        is_ended=output.finish_reason == "stop",
        weights_version=version,
    )
