"""The MAX step graph is the torch model: logits, states and greedy tokens, however it is fed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from engine.batch import F32, I32
from engine.checkpoint import load_checkpoint
from engine.config import DEMO_MODEL, EngineConfig, ModelConfig
from engine.engine import Engine
from engine.messages import SamplingParams
from engine.random_model import random_tensors
from engine.runner import ModelRunner
from engine.weights import Weights, fold
from tests.logits_model import LogitsModel, compile_logits
from tests.numpy_runner import NumpyRunner
from training.checkpoint import load_model
from training.model import SRM

F64 = npt.NDArray[np.float64]

TOLERANCE = 1e-5
"""Of float32 logits and states, relative to the largest."""


def config(**fields: Any) -> ModelConfig:
    shape = {"d_model": 48, "num_layers": 2, "num_heads": 4, "n_ctx": 96, "vocab_size": 101}
    return ModelConfig(**{**shape, **fields})


def headless(**fields: Any) -> ModelConfig:
    return config(num_heads=1, use_projections=False, **fields)


CONFIGS = {
    "mixed": config(d_model=64, num_layers=3),
    "mixed_unprojected": config(num_heads=6, use_projections=False),
    "mixed_undecayed": config(num_heads=2, decay=False, decay_constant=3),
    "parallel": config(mixer="parallel"),
    "parallel_unprojected": config(mixer="parallel", use_projections=False, decay_constant=2),
    "column_heads": config(mixer="column_heads", num_heads=3, decay=False),
    "combined": config(mixer="combined", decay_constant=2),
    "combined_quirk": config(mixer="combined", decay_constant=2, combined_row_quirk=True),
    "row": headless(mixer="row", decay=False),
    "column": headless(mixer="column", decay=False),
    "kernel": headless(mixer="kernel", kernel_size=4, decay_constant=2),
    "kernel_undecayed": headless(mixer="kernel", kernel_size=7, decay=False, d_model=35),
    "diagonal": config(mixer="diagonal"),
    "diagonal_undecayed": config(mixer="diagonal", decay=False),
    "expanded": headless(mixer="expanded", decay=False),
    "expanded_heads": config(mixer="expanded", decay=False, num_heads=3),
    "expanded_unprojected": config(mixer="expanded", decay=False, use_projections=False),
    "tiny_alphas": config(),
}
LENGTHS = {
    **{
        f"mixed_{n}": config(n_ctx=n, decay_constant=max(1, n // 512))
        for n in (64, 511, 512, 850, 1023, 1024, 2048)
    },
    "parallel_2048": config(n_ctx=2048, decay_constant=4, mixer="parallel"),
    "combined_2048": config(n_ctx=2048, decay_constant=4, mixer="combined"),
    "kernel_2048": headless(n_ctx=2048, decay_constant=8, mixer="kernel", kernel_size=4),
    "diagonal_2048": config(n_ctx=2048, mixer="diagonal"),
}


@dataclass
class Forms:
    """One model in MAX, float32, and in torch, float64."""

    max: LogitsModel
    torch: SRM

    def expected(self, ids: I32) -> F64:
        """Logits [length, vocab] of torch's parallel form."""
        with torch.no_grad():
            logits: F64 = self.torch(torch.from_numpy(ids)[None].long())[0].numpy()
        return logits

    def random_ids(self, seed: int, *shape: int) -> I32:
        rng = np.random.default_rng(seed)
        return rng.integers(0, self.max.config.vocab_size, shape, dtype=np.int32)


def tensors(name: str, config: ModelConfig) -> dict[str, F32]:
    found, rng = random_tensors(config), np.random.default_rng(0)
    for key, value in found.items():
        if name in LENGTHS and key.endswith("decay_value"):  # clipped, slow ones, never forgetting
            value[...] = rng.choice(np.array([0.88, 0.999, 0.9995, 1.0], np.float32), value.shape)
        if name == "tiny_alphas" and "mixer_heads" in key and key.endswith("weight"):
            value[:, [0, 3, 20]], value[:, [1, 10]] = 0, 1e-8
    return found


@pytest.fixture(scope="module")
def all_forms() -> dict[str, Forms]:
    weights, references = {}, {}
    for name, shape in (CONFIGS | LENGTHS).items():
        found = tensors(name, shape)
        weights[name] = fold(shape, found, name)
        references[name] = SRM(shape)
        references[name].load_state_dict({k: torch.from_numpy(v) for k, v in found.items()})
    compiled = compile_logits(weights)
    return {name: Forms(compiled[name], references[name].double()) for name in compiled}


@pytest.fixture(scope="module", params=list(CONFIGS))
def forms(request: pytest.FixtureRequest, all_forms: dict[str, Forms]) -> Forms:
    return all_forms[request.param]


def _error(found: F32, expected: F64) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def test_one_pass_gives_torchs_logits_at_every_position(forms: Forms) -> None:
    ids = forms.random_ids(0, forms.max.config.n_ctx)
    found = forms.max.feed(forms.max.pool(), [(ids, 5, 5, 0)])
    assert _error(found, forms.expected(ids)) < TOLERANCE


@pytest.mark.parametrize("name", LENGTHS)
def test_every_length_gives_torchs_logits(name: str, all_forms: dict[str, Forms]) -> None:
    forms = all_forms[name]
    ids = forms.random_ids(1, forms.max.config.n_ctx)
    expected = forms.expected(ids)
    (in_chunks,) = forms.max.feed_in_chunks([ids], np.random.default_rng(1))
    for found in (in_chunks, forms.max.feed(forms.max.pool(), [(ids, 5, 5, 0)])):
        assert _error(found, expected) < TOLERANCE


def test_ragged_batches_in_shuffled_slots_give_torchs_logits(forms: Forms) -> None:
    texts = list(forms.random_ids(1, 8, forms.max.config.n_ctx))
    found = forms.max.feed_in_chunks(texts, np.random.default_rng(1))
    for text, logits in zip(texts, found, strict=True):
        assert _error(logits, forms.expected(text)) < TOLERANCE


def test_forks_of_one_prefix_give_torchs_logits(forms: Forms) -> None:
    prefix, tails = forms.random_ids(2, 20), forms.random_ids(3, 6, 9)
    pool = forms.max.pool()
    forms.max.feed(pool, [(prefix, 3, 3, 0)])
    first = forms.max.feed(pool, [(tail[:1], 3, 10 + i, 20) for i, tail in enumerate(tails)])
    rest = forms.max.feed(
        pool, [(tail[1:], 10 + i, 10 + i, 21) for i, tail in enumerate(tails)]
    ).reshape(6, 8, -1)
    for i, tail in enumerate(tails):
        expected = forms.expected(np.concatenate([prefix, tail]))[20:]
        assert _error(np.concatenate([first[i : i + 1], rest[i]]), expected) < TOLERANCE


def test_states_are_torchs_states(forms: Forms) -> None:
    ids = forms.random_ids(3, forms.max.config.n_ctx)
    pool, state = forms.max.pool(), forms.torch.empty_state(1)
    for position, token in enumerate(ids):
        forms.max.feed(pool, [(ids[position : position + 1], 7, 7, position)])
        with torch.no_grad():
            _, state = forms.torch.step(torch.tensor([int(token)]), state, position)
        found = pool[0].to_numpy()[7].reshape(state.shape)
        assert _error(found, state.numpy()) < TOLERANCE


def test_any_chunking_and_company_give_the_same_bits(forms: Forms) -> None:
    ids, other = forms.random_ids(4, 2, 64)
    whole, parts = forms.max.pool(), forms.max.pool()
    expected = forms.max.feed(whole, [(ids, 2, 2, 0)])
    found = []
    for start, stop in ((0, 1), (1, 14), (14, 15), (15, 64)):
        rows = [(other[start:stop], 9, 9, start), (ids[start:stop], 4, 4, start)]
        found.append(forms.max.feed(parts, rows)[stop - start :])
    assert np.array_equal(np.concatenate(found), expected)
    assert np.array_equal(parts[0].to_numpy()[4], whole[0].to_numpy()[2])


@pytest.mark.parametrize("name", ["combined", "kernel"])
def test_the_engine_serves_more_than_one_unit_and_taps(name: str, tmp_path: Path) -> None:
    """Greedy tokens are those of the same weights in numpy, in float64."""
    weights = fold(CONFIGS[name], tensors(name, CONFIGS[name]), name)
    settings = EngineConfig(num_slots=6, max_step_rows=4, max_step_tokens=16, cache_dir=tmp_path)
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    rng = np.random.default_rng(6)
    prompts = [rng.integers(0, 101, n).tolist() for n in (1, 5, 40, 17, 30, 2, 9, 76)]
    runner = ModelRunner(weights, settings)
    found = Engine(weights.config, runner, settings).generate(prompts, params)
    runner.close()
    in_numpy = NumpyRunner(weights, settings.pool_slots)
    expected = Engine(weights.config, in_numpy, settings).generate(prompts, params)
    for outputs, others in zip(found, expected, strict=True):
        assert [output.token_ids for output in outputs] == [other.token_ids for other in others]


@pytest.fixture(scope="module")
def demo() -> Iterator[tuple[Weights, Engine, SRM]]:
    if not (DEMO_MODEL / "model.safetensors").exists():
        pytest.fail(f"{DEMO_MODEL} is missing")
    weights, config = load_checkpoint(DEMO_MODEL), EngineConfig(num_slots=1024)
    runner = ModelRunner(weights, config)
    yield weights, Engine(weights.config, runner, config), load_model(Path(DEMO_MODEL))
    runner.close()


def test_engine_greedy_tokens_are_torchs_for_500_prompts(
    demo: tuple[Weights, Engine, SRM],
) -> None:
    weights, engine, model = demo
    config, rng, count, new = weights.config, np.random.default_rng(5), 500, 24
    lengths = rng.integers(1, 40, count)
    prompts = [rng.integers(2, config.vocab_size, n).tolist() for n in lengths]
    params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
    outputs = engine.generate(prompts, params)
    state = model.empty_state(count)
    ids = torch.zeros(count, dtype=torch.long)
    found = np.stack([np.frombuffer(output[0].token_ids, "<i4") for output in outputs])
    expected = np.zeros((count, new), np.int64)
    close = np.ones(count, bool)  # until torch's own two best logits are too near to tell apart
    for position in range(int(lengths.max()) + new - 1):
        for i, prompt in enumerate(prompts):
            index = position - len(prompt)
            if index < 0:
                ids[i] = prompt[position]
            elif index < new:
                ids[i] = int(found[i, index])
        with torch.no_grad():
            logits, state = model.step(ids, state, position)
        best = logits.topk(2)
        for i, prompt in enumerate(prompts):
            index = position - len(prompt) + 1
            if 0 <= index < new:
                expected[i, index] = best.indices[i, 0]
                gap = float(best.values[i, 0] - best.values[i, 1])
                if gap < TOLERANCE * float(logits[i].abs().max()):
                    expected[i, index] = found[i, index]
                    close[i] &= found[i, index] in best.indices[i]
    assert np.array_equal(found, expected)
    assert close.all()
