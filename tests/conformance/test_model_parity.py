"""The MAX step graph is the torch model: logits, states and greedy tokens, however it is fed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from max.driver import CPU, Buffer
from max.engine import InferenceSession, Model

from engine.batch import F32, I32
from engine.checkpoint import load_checkpoint
from engine.config import DEMO_MODEL, EngineConfig, ModelConfig
from engine.engine import Engine
from engine.messages import SamplingParams
from engine.model import build_logits_graph
from engine.random_model import write_random_model
from engine.runner import ModelRunner, device_weights
from engine.weights import Weights
from training.checkpoint import load_model
from training.model import SRM

F64 = npt.NDArray[np.float64]

TOLERANCE = 1e-5
"""Of float32 logits and states, relative to the largest."""

CONFIGS = {
    "projections": ModelConfig(d_model=64, num_layers=3, num_heads=4, n_ctx=96, vocab_size=101),
    "no projections": ModelConfig(
        d_model=48, num_layers=2, num_heads=6, n_ctx=96, vocab_size=101, use_projections=False
    ),
    "no decay": ModelConfig(
        d_model=32, num_layers=2, num_heads=2, n_ctx=96, vocab_size=50, decay=False
    ),
}
NUM_SLOTS = 24


@dataclass
class LogitsModel:
    """The step's blocks in MAX, giving logits, with a pool that starts as garbage."""

    config: ModelConfig
    model: Model
    torch_model: SRM

    def pool(self) -> tuple[Buffer, Buffer]:
        states = np.full((NUM_SLOTS, self.config.state_width), 1e3, np.float32)
        return Buffer.from_numpy(states), Buffer.from_numpy(np.zeros(NUM_SLOTS, np.int32))

    def feed(self, pool: tuple[Buffer, Buffer], rows: list[tuple[I32, int, int, int]]) -> F32:
        """rows of (token_ids, read slot, write slot, position) -> logits [tokens, vocab]."""
        tokens = np.concatenate([row[0] for row in rows]).astype(np.int32)
        read, write, positions = (np.array([row[i] for row in rows], np.int32) for i in (1, 2, 3))
        offsets = np.cumsum([0, *(len(row[0]) for row in rows)]).astype(np.int32)
        inputs = (Buffer.from_numpy(a) for a in (tokens, read, write, positions, offsets))
        logits: F32 = self.model.execute(*pool, *inputs)[0].to_numpy()
        return logits

    def expected(self, ids: I32) -> F64:
        """Logits [length, vocab] of torch's parallel form, in float64."""
        with torch.no_grad():
            logits: F64 = self.torch_model(torch.from_numpy(ids)[None].long())[0].numpy()
        return logits


@pytest.fixture(scope="module", params=list(CONFIGS))
def logits_model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> LogitsModel:
    config = CONFIGS[request.param]
    folder = tmp_path_factory.mktemp("model")
    write_random_model(folder, config)
    session, device = InferenceSession(devices=[CPU()]), CPU()
    compiled = session.compile(build_logits_graph(config, device))
    registry = device_weights(load_checkpoint(folder), device)
    model = session.init(compiled, weights_registry=registry)
    return LogitsModel(config, model, load_model(folder).double())


def _error(found: F32, expected: F64) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def test_one_pass_gives_torchs_logits_at_every_position(logits_model: LogitsModel) -> None:
    config = logits_model.config
    ids = np.random.default_rng(0).integers(0, config.vocab_size, config.n_ctx, dtype=np.int32)
    found = logits_model.feed(logits_model.pool(), [(ids, 5, 5, 0)])
    assert _error(found, logits_model.expected(ids)) < TOLERANCE


def test_ragged_batches_in_shuffled_slots_give_torchs_logits(logits_model: LogitsModel) -> None:
    """Eight sequences, fed in chunks of random lengths, in a new order each step."""
    config, rng = logits_model.config, np.random.default_rng(1)
    texts = [rng.integers(0, config.vocab_size, config.n_ctx, dtype=np.int32) for _ in range(8)]
    slots, fed = rng.permutation(NUM_SLOTS)[:8], [0] * 8
    found = [np.empty((0, config.vocab_size), np.float32) for _ in texts]
    pool = logits_model.pool()
    while min(fed) < config.n_ctx:
        rows, who = [], []
        for i in rng.permutation(8):
            count = min(int(rng.choice([0, 1, 1, 2, 7, 30])), config.n_ctx - fed[i])
            if count:
                slot = int(slots[i])
                rows.append((texts[i][fed[i] : fed[i] + count], slot, slot, fed[i]))
                who.append((i, count))
                fed[i] += count
        if not rows:
            continue
        parts = np.split(logits_model.feed(pool, rows), np.cumsum([count for _, count in who])[:-1])
        for (i, _), part in zip(who, parts, strict=True):
            found[i] = np.concatenate([found[i], part])
    for text, logits in zip(texts, found, strict=True):
        assert _error(logits, logits_model.expected(text)) < TOLERANCE


def test_forks_of_one_prefix_give_torchs_logits(logits_model: LogitsModel) -> None:
    config, rng = logits_model.config, np.random.default_rng(2)
    prefix = rng.integers(0, config.vocab_size, 20, dtype=np.int32)
    tails = [rng.integers(0, config.vocab_size, 9, dtype=np.int32) for _ in range(6)]
    pool = logits_model.pool()
    logits_model.feed(pool, [(prefix, 3, 3, 0)])
    first = logits_model.feed(pool, [(tail[:1], 3, 10 + i, 20) for i, tail in enumerate(tails)])
    rest = logits_model.feed(
        pool, [(tail[1:], 10 + i, 10 + i, 21) for i, tail in enumerate(tails)]
    ).reshape(6, 8, -1)
    for i, tail in enumerate(tails):
        expected = logits_model.expected(np.concatenate([prefix, tail]))[20:]
        assert _error(np.concatenate([first[i : i + 1], rest[i]]), expected) < TOLERANCE


def test_states_are_torchs_states(logits_model: LogitsModel) -> None:
    config = logits_model.config
    ids = np.random.default_rng(3).integers(0, config.vocab_size, config.n_ctx, dtype=np.int32)
    pool, torch_model = logits_model.pool(), logits_model.torch_model
    state = torch_model.empty_state(1)
    for position, token in enumerate(ids):
        logits_model.feed(pool, [(ids[position : position + 1], 7, 7, position)])
        with torch.no_grad():
            _, state = torch_model.step(torch.tensor([int(token)]), state, position)
        found = pool[0].to_numpy()[7].reshape(state.shape)
        assert _error(found, state.numpy()) < TOLERANCE


def test_any_chunking_and_company_give_the_same_bits(logits_model: LogitsModel) -> None:
    config, rng = logits_model.config, np.random.default_rng(4)
    ids, other = rng.integers(0, config.vocab_size, (2, 64), dtype=np.int32)
    whole, parts = logits_model.pool(), logits_model.pool()
    expected = logits_model.feed(whole, [(ids, 2, 2, 0)])
    found = []
    for start, stop in ((0, 1), (1, 14), (14, 15), (15, 64)):
        rows = [(other[start:stop], 9, 9, start), (ids[start:stop], 4, 4, start)]
        found.append(logits_model.feed(parts, rows)[stop - start :])
    assert np.array_equal(np.concatenate(found), expected)
    assert np.array_equal(parts[0].to_numpy()[4], whole[0].to_numpy()[2])


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
