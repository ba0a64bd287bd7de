"""What the runner of PyTorch does of its own: captured steps, weights in place, and refusals."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

from srm.engine.config import EngineConfig
from srm.engine.device.runner import make_runner
from srm.engine.messages import SamplingParams
from srm.engine.process.engine import Engine
from srm.engine.pytorch.logits import Ways, draw_uniforms, sample, truncates
from srm.engine.pytorch.model import TorchModel
from srm.engine.pytorch.runner import BUCKETS, Replay, TorchRunner
from srm.engine.steps.batch import SAMPLING, SlotStates
from srm.errors import ConfigError
from tests.kernels import oracle
from tests.kit.engines.numpy_runner import TINY, tiny_weights
from tests.kit.engines.torch_runner import torch_runner

SLOTS, PREFIXES = 600, 4
PROMPTS = [[at % 30, 3, 5] for at in range(300)]
PARAMS = SamplingParams(max_tokens=6, temperature=1.0, seed=3, ignore_eos=True)
CONFIG = EngineConfig(
    device="torch:cpu",
    num_slots=SLOTS,
    prefix_slots=PREFIXES,
    max_step_rows=400,
    max_step_tokens=900,
)


def capture(step: Replay) -> Replay:
    """As a GPU does: a replay reads and writes the tensors of the step that was captured."""
    results = step()

    def replay() -> tuple[torch.Tensor, torch.Tensor]:
        for result, new in zip(results, step(), strict=True):
            result.copy_(new)
        return results

    return replay


@pytest.fixture
def captured() -> Iterator[TorchRunner]:
    with closing(torch_runner(tiny_weights(), SLOTS - 1, PREFIXES + 1)) as runner:
        runner._spare -= 1  # a slot that the engine does not know, as a GPU's pool has one
        runner.num_slots = SLOTS - 2
        runner.capture = capture
        yield runner


def generate(runner: TorchRunner, params: SamplingParams = PARAMS, count: int = 300) -> list[Any]:
    engine = Engine(TINY, runner, CONFIG)
    return [outputs[0].token_ids for outputs in engine.generate(PROMPTS[:count], params)]


@pytest.mark.parametrize(
    "fields", [{}, {"top_p": 0.8}, {"temperature": 0.0}], ids=["plain", "top_p", "greedy"]
)
def test_replayed_steps_sample_what_launched_ones_do(
    captured: TorchRunner, fields: dict[str, Any]
) -> None:
    params = SamplingParams(**{"max_tokens": 6, "seed": 3, "ignore_eos": True, **fields})
    for count in (300, 7):
        with closing(torch_runner(tiny_weights(), SLOTS, PREFIXES)) as plain:
            expected = generate(plain, params, count)
        assert generate(captured, params, count) == expected
    sizes = {bucket for bucket, _ in captured._graphs}
    assert sizes == {256, 512}


def test_captured_steps_see_new_weights(captured: TorchRunner) -> None:
    before, other = generate(captured), tiny_weights(1)
    graphs = dict(captured._graphs)
    captured.use_weights(captured.bind_weights(other))
    with closing(torch_runner(other, SLOTS, PREFIXES)) as plain:
        expected = generate(plain)
    assert generate(captured) == expected != before
    assert captured._graphs == graphs != {}


def test_states_are_read_as_they_were_written() -> None:
    with closing(torch_runner(tiny_weights(), 8, PREFIXES)) as runner:
        rng = np.random.default_rng(1)
        states = rng.standard_normal((3, TINY.state_width)).astype(np.float32)
        slots = np.array([5, 0, 7])
        runner.write_slots(slots, SlotStates(states, np.array([4, -1, 9], np.int32)))
        result = runner.read_slots(slots[::-1].copy())
    np.testing.assert_array_equal(result.states, states[::-1])
    assert result.last_tokens.tolist() == [9, -1, 4] and result.last_tokens.dtype == np.int32


def test_a_step_that_fails_is_raised_to_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(torch_runner(tiny_weights(), SLOTS, PREFIXES)) as runner:
        monkeypatch.setattr(TorchModel, "step", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            generate(runner)
        monkeypatch.undo()
        assert len(generate(runner)) == len(PROMPTS)


def test_uniforms_are_philoxs() -> None:
    rng = np.random.default_rng(2)
    seeds = rng.integers(0, 2**64, 50, dtype=np.uint64)
    positions = rng.integers(0, 2**31, 50)
    halves = np.stack([seeds & np.uint64(0xFFFFFFFF), seeds >> np.uint64(32)], 1).astype(np.int64)
    result = draw_uniforms(torch.from_numpy(halves), torch.from_numpy(positions))
    expected = [
        oracle.uniform(int(seed), int(at)) for seed, at in zip(seeds, positions, strict=True)
    ]
    assert result.tolist() == expected


@pytest.mark.parametrize("vocab", [1, 97, 1_000])
@pytest.mark.parametrize("fields", [(0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.6, 0.0), (9, 0.7, 0.05)])
def test_tokens_are_drawn_as_in_float64(vocab: int, fields: tuple[int, float, float]) -> None:
    """Many logits are equal, some rows are not finite, and one has a single token left."""
    count, rng = 300, np.random.default_rng(vocab)
    logits = np.round(3 * rng.standard_normal((count, vocab)), 1).astype(np.float32)
    logits[1], logits[2], logits[3, 1:] = np.nan, -np.inf, -np.inf
    top_k, top_p, min_p = fields
    ways = Ways(
        torch.full((count,), 0.8),
        torch.full((count,), top_k),
        torch.full((count,), top_p),
        torch.full((count,), min_p),
        torch.from_numpy(np.stack([np.arange(count), np.arange(count)], 1)),
    )
    positions = torch.arange(count)
    temperature, *least = map(float, np.array([0.8, top_p, min_p], np.float32))
    tokens, logprobs = sample(torch.from_numpy(logits), ways, positions, fields != (0, 1.0, 0.0))
    for row in range(count):
        drawn = oracle.uniform(row + (row << 32), row)
        row_logits = logits[row].astype(np.float64)
        expected = oracle.sample(row_logits, temperature, top_k, least[0], least[1], drawn)
        assert int(tokens[row]) == expected[0]
        assert float(logprobs[row]) == pytest.approx(expected[1], abs=1e-5)
    assert tokens[:3].tolist()[1:] == [-1, -1] and tokens[3] == 0


def test_greedy_rows_need_no_order() -> None:
    records = np.zeros(2, SAMPLING)
    records["top_p"] = 1
    records[0]["top_k"] = 5  # whose temperature is 0
    assert not truncates(records)
    records[0]["temperature"] = 1
    assert truncates(records)


@pytest.mark.skipif(torch.cuda.is_available(), reason="PyTorch has a GPU here")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"device = torch:cuda: PyTorch .* sees 0 GPUs"):
        make_runner(tiny_weights(), EngineConfig(device="torch:cuda"))


def test_without_pytorch_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "srm.engine.pytorch.runner")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match="needs PyTorch, which is not installed"):
        make_runner(tiny_weights(), EngineConfig(device="torch:cpu"))


def test_buckets_reach_the_rows_of_a_step() -> None:
    assert BUCKETS[0] == 256 and BUCKETS[-1] == 16_384
