"""The MAX step graph is the torch model: logits, states and greedy tokens, however it is fed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from srm.engine.config import DEMO_MODEL, EngineConfig
from srm.engine.messages import SamplingParams
from srm.engine.process.engine import Engine
from srm.training.checkpoint import load_model
from tests.kit.engines.numpy_runner import NumpyRunner
from tests.kit.models.demo import engine_on_max
from tests.kit.models.forms import (
    CONFIGS,
    LENGTHS,
    LONG,
    TOLERANCE,
    Forms,
    all_forms,
    error,
    folded,
    long_forms,
)


@pytest.fixture(scope="module", params=list(CONFIGS))
def forms(request: pytest.FixtureRequest) -> Forms:
    return all_forms()[request.param]


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in LONG]


@pytest.mark.parametrize("name", [*CONFIGS, *LENGTHS, *SLOW])
def test_one_pass_and_chunks_give_torchs_logits_at_every_position(name: str) -> None:
    forms = (long_forms() if name in LONG else all_forms())[name]
    ids = forms.random_ids(1, forms.max.config.n_ctx)
    expected = forms.expected(ids)
    (in_chunks,) = forms.max.feed_in_chunks([ids], np.random.default_rng(1))
    for result in (in_chunks, forms.max.run_batch(forms.max.pool(), [(ids, 5, 5, 0)])):
        assert error(result, expected) < TOLERANCE


def test_forks_of_one_prefix_give_torchs_logits(forms: Forms) -> None:
    prefix, tails = forms.random_ids(2, 20), forms.random_ids(3, 6, 9)
    pool = forms.max.pool()
    forms.max.run_batch(pool, [(prefix, 3, 3, 0)])
    first = forms.max.run_batch(pool, [(tail[:1], 3, 10 + i, 20) for i, tail in enumerate(tails)])
    rest = forms.max.run_batch(
        pool, [(tail[1:], 10 + i, 10 + i, 21) for i, tail in enumerate(tails)]
    ).reshape(6, 8, -1)
    for i, tail in enumerate(tails):
        expected = forms.expected(np.concatenate([prefix, tail]))[20:]
        assert error(np.concatenate([first[i : i + 1], rest[i]]), expected) < TOLERANCE


def test_states_are_torchs_states(forms: Forms) -> None:
    ids = forms.random_ids(3, forms.max.config.n_ctx)
    pool, state = forms.max.pool(), forms.torch.empty_state(1)
    for position, token in enumerate(ids):
        forms.max.run_batch(pool, [(ids[position : position + 1], 7, 7, position)])
        with torch.no_grad():
            _, state = forms.torch.step(torch.tensor([int(token)]), state, position)
        result = pool[0].to_numpy()[7].reshape(state.shape)
        assert error(result, state.numpy()) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", ["combined", "kernel"])
def test_the_engine_serves_more_than_one_unit_and_taps(name: str, tmp_path: Path) -> None:
    """Greedy tokens are those of the same weights in numpy, in float64."""
    weights = folded(CONFIGS)[name]
    settings: dict[str, Any] = {
        "num_slots": 6,
        "max_step_rows": 4,
        "max_step_tokens": 16,
        "cache_dir": tmp_path,
    }
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    rng = np.random.default_rng(6)
    prompts = [rng.integers(0, 97, n).tolist() for n in (1, 5, 40, 17, 30, 2, 9, 44)]
    with engine_on_max(weights, **settings) as engine:
        result = engine.generate(prompts, params)
    in_numpy, config = NumpyRunner(weights, 6), EngineConfig(**settings)
    expected = Engine(weights.config, in_numpy, config).generate(prompts, params)
    for outputs, others in zip(result, expected, strict=True):
        assert [output.token_ids for output in outputs] == [other.token_ids for other in others]


@pytest.mark.parametrize("device", ["cpu", "torch:cpu"])
def test_greedy_tokens_are_the_torch_models_for_150_prompts(device: str) -> None:
    """Where torch's own two best logits are too near to tell apart, either will do."""
    model, rng, count, new = load_model(DEMO_MODEL), np.random.default_rng(5), 150, 24
    lengths = rng.integers(1, 40, count)
    prompts = [rng.integers(2, model.config.vocab_size, n).tolist() for n in lengths]
    params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
    with engine_on_max(num_slots=1024, device=device) as engine:
        outputs = engine.generate(prompts, params)
    result = np.stack([np.frombuffer(output[0].token_ids, "<i4") for output in outputs])
    texts, state = np.zeros((count, lengths.max() + new), np.int64), model.empty_state(count)
    for text, prompt, tokens in zip(texts, prompts, result, strict=True):
        text[: len(prompt) + new] = [*prompt, *tokens]
    compared = 0
    for position in range(texts.shape[1] - 1):
        with torch.no_grad():
            logits, state = model.step(torch.from_numpy(texts[:, position]), state, position)
        best, near = logits.topk(2), TOLERANCE * logits.abs().amax(-1)
        is_close = best.values[:, 0] - best.values[:, 1] < near
        for i in np.flatnonzero((lengths <= position + 1) & (position + 1 < lengths + new)):
            likeliest = best.indices[i].tolist()
            assert texts[i, position + 1] in likeliest[: 2 if is_close[i] else 1]
            compared += 1
    assert compared == count * new
