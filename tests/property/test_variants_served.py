"""Any model of any variant, scheduled in any way, samples and scores as both forms of torch do.

The engine's units, its scheduler and its batches on the runners of numpy and of PyTorch;
`test_feeding` has MAX.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from srm.engine.config import EngineConfig, ModelConfig
from srm.engine.messages import Output, SamplingParams
from srm.engine.process.engine import Engine
from srm.engine.weights.random_model import random_tensors
from srm.engine.weights.weights import fold
from srm.training.model import SRM
from tests.kit.engines import strategies
from tests.kit.engines.torch_runner import RUNNERS
from tests.kit.models.variants import configs

TOLERANCE = 1e-5
"""Of log-probabilities rounded to float32, relative to the largest logit."""


@dataclass(frozen=True)
class Case:
    """A model, and prompts to score and to continue greedily."""

    config: ModelConfig
    seed: int
    prompts: list[list[int]]
    params: SamplingParams


@st.composite
def cases(draw: st.DrawFn) -> Case:
    config = draw(configs(max_n_ctx=14))
    token = st.integers(0, config.vocab_size - 1)
    prompt = st.lists(token, min_size=1, max_size=config.n_ctx)
    params = SamplingParams(
        max_tokens=draw(st.integers(1, 6)),
        temperature=0.0,
        ignore_eos=True,
        logprobs=draw(st.integers(0, 3)),
        prompt_logprobs=draw(st.integers(0, 3)),
    )
    prompts = draw(st.lists(prompt, min_size=1, max_size=6))
    return Case(config, draw(st.integers(0, 2**32 - 1)), prompts, params)


schedules = strategies.configs()


def serve(case: Case, schedule: EngineConfig, runner: str) -> list[list[Output]]:
    weights = fold(case.config, random_tensors(case.config, case.seed), "")
    with closing(RUNNERS[runner](weights, schedule.num_slots, schedule.prefix_slots)) as running:
        return Engine(case.config, running, schedule).generate(case.prompts, case.params)


def read_tokens(outputs: list[Output]) -> tuple[list[int], list[float]]:
    """The tokens after the first of the prompt, and their log-probabilities."""
    tokens = np.frombuffer(b"".join(output.token_ids for output in outputs), "<i4")
    logprobs = np.frombuffer(b"".join(output.logprobs for output in outputs), "<f4")
    return tokens.tolist(), logprobs.tolist()


def both_forms(model: SRM, ids: torch.Tensor) -> list[torch.Tensor]:
    """Logits [length, V], parallel and recurrent."""
    state, results = model.empty_state(1), []
    for position in range(len(ids)):
        logits, state = model.step(ids[position : position + 1], state, position)
        results.append(logits[0])
    return [model(ids[None])[0], torch.stack(results)]


@pytest.mark.parametrize("runner", RUNNERS)
@settings(max_examples=40)
@given(case=cases(), schedule=schedules)
def test_tokens_and_scores_are_those_of_both_forms(
    runner: str, case: Case, schedule: EngineConfig
) -> None:
    model = SRM(case.config)
    tensors = random_tensors(case.config, case.seed)
    model.load_state_dict({name: torch.from_numpy(value) for name, value in tensors.items()})
    model.double()
    for prompt, outputs in zip(case.prompts, serve(case, schedule, runner), strict=True):
        tokens, logprobs = read_tokens(outputs)
        assert tokens[: len(prompt) - 1] == prompt[1:]
        room = case.config.n_ctx - len(prompt) + 1
        assert len(tokens) == len(prompt) - 1 + min(case.params.max_tokens, room)
        ids = torch.tensor([prompt[0], *tokens[:-1]])
        with torch.no_grad():
            for logits in both_forms(model, ids):
                largest = float(logits.abs().max())
                expected = logits.log_softmax(-1)
                at_tokens = expected[range(len(tokens)), tokens]
                assert np.abs(at_tokens.numpy() - logprobs).max() < TOLERANCE * max(1, largest)
                sampled = slice(len(prompt) - 1, None)
                short = expected.max(-1).values[sampled] - at_tokens[sampled]
                assert short.max() < TOLERANCE * max(1, largest), "it is not the likeliest token"
