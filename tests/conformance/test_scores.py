"""Scores of the MAX engine are torch's log softmax, however prompts are cut and crowded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch

from srm.engine.config import EngineConfig
from srm.engine.device.runner import ModelRunner
from srm.engine.messages import MAX_LOGPROBS, NAMED, PROMPT, Output, SamplingParams
from srm.engine.process.engine import Engine
from srm.engine.weights.checkpoint import load_checkpoint
from srm.engine.weights.random_model import random_tensors, write_random_model
from srm.engine.weights.tensors import is_scalar
from srm.engine.weights.weights import fold
from srm.errors import ConfigError
from srm.training.checkpoint import load_model
from srm.training.model import SRM
from tests.kit.engines.numpy_runner import SMALL
from tests.kit.models.demo import afresh, engine_on_max
from tests.kit.models.forms import TOLERANCE

F64 = npt.NDArray[np.float64]

SAMPLED = 8
PARAMS = SamplingParams(
    max_tokens=SAMPLED,
    temperature=0.0,
    ignore_eos=True,
    logprobs=MAX_LOGPROBS,
    prompt_logprobs=MAX_LOGPROBS,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_random_model(path, SMALL)
    return path


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with engine_on_max(load_checkpoint(folder), num_slots=64) as one:
        yield one


def generate(
    engine: Engine, prompts: list[list[int]], params: SamplingParams, max_step_tokens: int
) -> list[list[Output]]:
    sizes = {"num_slots": 64, "max_step_rows": 16, "max_step_tokens": max_step_tokens}
    return afresh(engine, **sizes).generate(prompts, params)


def joined(outputs: list[Output], name: str, dtype: str = "<i4") -> npt.NDArray[Any]:
    """What they say one after the other."""
    return np.frombuffer(b"".join(getattr(output, name) for output in outputs), dtype)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    lengths = [2, 3, SMALL.n_ctx - SAMPLED + 1, *rng.integers(4, 50, 12).tolist()]
    return [rng.integers(0, SMALL.vocab_size, length).tolist() for length in lengths]


def log_softmax(model: SRM, tokens: list[int]) -> tuple[F64, float]:
    """Of torch's parallel form in float64, [len(tokens), V], and the largest logit."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens]))[0]
    return logits.log_softmax(-1).numpy(), float(logits.abs().max())


def test_scores_are_torchs(engine: Engine, folder: Path, prompts: list[list[int]]) -> None:
    model = load_model(folder).double()
    for prompt, outputs in zip(prompts, generate(engine, prompts, PARAMS, 128), strict=True):
        assert [output.index for output in outputs] == [PROMPT, 0]
        tokens = joined(outputs, "token_ids")
        assert tokens[: len(prompt) - 1].tolist() == prompt[1:]
        assert len(tokens) == len(prompt) - 1 + SAMPLED
        expected, largest = log_softmax(model, [*prompt, *tokens[len(prompt) - 1 : -1].tolist()])
        result = joined(outputs, "logprobs", "<f4")
        rows = np.arange(len(tokens))
        np.testing.assert_allclose(result, expected[rows, tokens], atol=TOLERANCE * largest)
        top_ids = joined(outputs, "top_ids").reshape(len(tokens), -1)
        top_logprobs = joined(outputs, "top_logprobs", "<f4").reshape(top_ids.shape)
        best = -np.sort(-expected, axis=1)[:, :MAX_LOGPROBS]
        np.testing.assert_allclose(top_logprobs, best, atol=TOLERANCE * largest)
        at_ids = np.take_along_axis(expected, top_ids.astype(np.int64), axis=1)
        np.testing.assert_allclose(at_ids, best, atol=2 * TOLERANCE * largest)
        ranks = joined(outputs, "ranks")
        in_top = ranks <= MAX_LOGPROBS
        assert in_top[len(prompt) - 1 :].all()  # sampled greedily
        # The very same number wherever a token appears.
        np.testing.assert_array_equal(top_ids[in_top, ranks[in_top] - 1], tokens[in_top])
        np.testing.assert_array_equal(top_logprobs[in_top, ranks[in_top] - 1], result[in_top])


def test_alternatives_reach_the_whole_vocabulary(
    engine: Engine, folder: Path, prompts: list[list[int]]
) -> None:
    """Each token once, in order, and what fewer are asked for is the same to the last bit."""
    size, prompts = SMALL.vocab_size, prompts[:5]
    params = msgspec.structs.replace(PARAMS, logprobs=size, prompt_logprobs=size)
    weights = load_checkpoint(folder)
    with engine_on_max(weights, num_slots=64, max_logprobs=-1) as wide:
        result = wide.generate(prompts, params)
    few = generate(engine, prompts, PARAMS, 128)
    model = load_model(folder).double()
    for prompt, outputs, fewer in zip(prompts, result, few, strict=True):
        tokens = joined(outputs, "token_ids")
        expected, largest = log_softmax(model, [*prompt, *tokens[len(prompt) - 1 : -1].tolist()])
        top_ids = joined(outputs, "top_ids").reshape(-1, size)
        top_logprobs = joined(outputs, "top_logprobs", "<f4").reshape(-1, size)
        np.testing.assert_array_equal(np.sort(top_ids), np.tile(np.arange(size), (len(tokens), 1)))
        assert (np.diff(top_logprobs) <= 0).all()
        at_ids = np.take_along_axis(expected, top_ids.astype(np.int64), axis=1)
        np.testing.assert_allclose(top_logprobs, at_ids, atol=TOLERANCE * largest)
        for name, dtype in (("top_ids", "<i4"), ("top_logprobs", "<f4")):
            wide_rows = joined(outputs, name, dtype).reshape(-1, size)[:, :MAX_LOGPROBS]
            assert wide_rows.tobytes() == joined(fewer, name, dtype).tobytes()
    # Those of named tokens, in the order of the names, are the same to the last bit.
    names = [tuple(np.random.default_rng(at).permutation(size)[:count].tolist()) for at, count in
             enumerate((MAX_LOGPROBS, 1, 3))]  # fmt: skip
    for ids in names:
        named = msgspec.structs.replace(
            PARAMS,
            **dict.fromkeys(NAMED, len(ids)),
            **dict.fromkeys(NAMED.values(), ids),
        )
        for outputs, whole in zip(generate(engine, prompts, named, 19), result, strict=True):
            for name in ("token_ids", "logprobs", "ranks"):
                assert joined(outputs, name).tobytes() == joined(whole, name).tobytes()
            top_ids, top_logprobs = (
                joined(whole, name, dtype).reshape(-1, size)
                for name, dtype in (("top_ids", "<i4"), ("top_logprobs", "<f4"))
            )
            places = np.argsort(top_ids)[:, list(ids)]
            assert joined(outputs, "top_ids").tolist() == list(ids) * len(top_ids)
            expected = np.take_along_axis(top_logprobs, places, axis=1)
            assert joined(outputs, "top_logprobs", "<f4").tobytes() == expected.tobytes()
    with pytest.raises(ConfigError, match="at most 97 where the vocabulary has 97 tokens, got 98"):
        ModelRunner(weights, EngineConfig(max_logprobs=size + 1))


def test_zero_and_tiny_alphas_are_exact(
    engine: Engine, folder: Path, prompts: list[list[int]]
) -> None:
    """The published recurrence divides by them: 0 gives NaN, 1e-8 costs it all its digits."""
    tensors, rng = random_tensors(SMALL), np.random.default_rng(2)
    for name, values in tensors.items():
        if is_scalar(name) and name.endswith(".weight"):
            tiny = rng.choice(np.array([0, 1e-8, -1e-8, 1e-30], np.float32), values.shape)
            values[...] = np.where(rng.random(values.shape) < 0.5, tiny, values)
        elif is_scalar(name) and name.endswith(".bias"):  # what it would subtract, and then divide
            values[...] = rng.standard_normal(values.shape)
    model = SRM(SMALL)
    model.load_state_dict({name: torch.from_numpy(value) for name, value in tensors.items()})
    model.double()
    prompts = prompts[:6]
    engine.load_weights(fold(SMALL, tensors, "tiny alphas"))
    result = generate(engine, prompts, PARAMS, 50)
    engine.load_weights(load_checkpoint(folder))
    for prompt, outputs in zip(prompts, result, strict=True):
        message, logprobs = (
            joined(outputs, "token_ids").tolist(),
            joined(outputs, "logprobs", "<f4"),
        )
        state, tolerance = model.empty_state(1), 0.0
        expected = np.zeros(len(message))
        for position, token in enumerate([prompt[0], *message[:-1]]):
            with torch.no_grad():
                logits, state = model.step(torch.tensor([token]), state, position)
            expected[position] = logits[0].log_softmax(-1)[message[position]]
            tolerance = max(tolerance, TOLERANCE * float(logits.abs().max()))
        assert np.isfinite(logprobs).all()
        np.testing.assert_allclose(logprobs, expected, atol=tolerance, rtol=0)


def test_any_chunking_and_company_give_the_same_bits(
    engine: Engine, prompts: list[list[int]]
) -> None:
    together = generate(engine, prompts, PARAMS, 128)
    assert generate(engine, prompts, PARAMS, 19) == together
    for i, prompt in enumerate(prompts[:5]):
        (alone,) = generate(engine, [prompt], PARAMS, 128)
        assert [msgspec.structs.replace(waiting, id=str(i)) for waiting in alone] == together[i]


def test_a_scored_part_has_the_bits_of_the_whole(engine: Engine, prompts: list[list[int]]) -> None:
    """Also from a state that an earlier request left."""
    long = [prompt for prompt in prompts if len(prompt) > 30]
    whole = generate(engine, long, PARAMS, 128)
    for start in (20, -5):
        params = msgspec.structs.replace(PARAMS, prompt_logprobs_start=start)
        again = afresh(engine, num_slots=64, max_step_rows=16, max_step_tokens=50)
        again.generate([prompt[:15] for prompt in long], SamplingParams(max_tokens=1))
        for parts, all_scores in zip(again.generate(long, params), whole, strict=True):
            assert {part.cached_tokens for part in parts} == {14}
            for part, scores in zip(parts, all_scores, strict=True):
                for name in ("token_ids", "logprobs", "ranks", "top_ids", "top_logprobs"):
                    assert getattr(part, name) and getattr(scores, name).endswith(
                        getattr(part, name)
                    )


def test_scoring_changes_no_sample(engine: Engine, prompts: list[list[int]]) -> None:
    for temperature in (0.0, 0.8):
        scored = msgspec.structs.replace(
            PARAMS, temperature=temperature, seed=3, logprobs=5, prompt_logprobs=0
        )
        silent = msgspec.structs.replace(scored, logprobs=None, prompt_logprobs=None)
        quiet, loud = generate(engine, prompts, silent, 128), generate(engine, prompts, scored, 19)
        assert [a[-1].token_ids for a in quiet] == [b[-1].token_ids for b in loud]


def test_scoring_a_sample_gives_what_sampling_it_gave(
    engine: Engine, prompts: list[list[int]]
) -> None:
    """Bit for bit, though one was fed token by token and the other in chunks."""
    short = [prompt for prompt in prompts if len(prompt) + SAMPLED <= SMALL.n_ctx]
    samples = [outputs[-1] for outputs in generate(engine, short, PARAMS, 128)]
    texts = [
        prompt + np.frombuffer(sample.token_ids, "<i4").tolist()
        for prompt, sample in zip(short, samples, strict=True)
    ]
    scoring = SamplingParams(max_tokens=0, prompt_logprobs=MAX_LOGPROBS)
    for sample, (scores, end) in zip(samples, generate(engine, texts, scoring, 50), strict=True):
        assert (end.finish_reason, end.token_ids) == ("length", b"")
        for name in ("token_ids", "logprobs", "ranks", "top_ids", "top_logprobs"):
            assert getattr(scores, name).endswith(getattr(sample, name))
