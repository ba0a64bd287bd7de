"""Training learns, resumes exactly, and leaves a folder that loads."""

from __future__ import annotations

from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tokenizers import Tokenizer

from engine.config import DEMO_MODEL
from engine.errors import CheckpointError, ConfigError
from engine.weights.checkpoint import load_checkpoint
from training import pretrain as pretraining
from training.checkpoint import load_model
from training.data import BEGIN_ID, END_ID, IGNORED, PACKED_EVERY, ProblemBatches, train_tokenizer
from training.loop import Schedule
from training.pretrain import CHAT_TEMPLATE, TrainConfig, pretrain
from training.tasks import problems

SIZES: dict[str, Any] = {"d_model": 16, "num_layers": 2, "num_heads": 2, "n_ctx": 64}
TINY = TrainConfig(batch_tokens=256, warmup_steps=2, max_vocab_size=400, threads=1, **SIZES)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    texts = (p.prompt + p.solution for p in islice(problems("train", 0), 500))
    return train_tokenizer(texts, 600)


@pytest.fixture(autouse=True)
def few_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer of a hundred thousand takes half a minute to train."""
    monkeypatch.setattr(pretraining, "TOKENIZER_PROBLEMS", 500)


def _run(folder: Path, steps: int, **changes: object) -> list[float]:
    return pretrain(msgspec.structs.replace(TINY, output=folder, steps=steps, **changes))


def test_tokenizer_begins_texts_and_gives_them_back(tokenizer: Tokenizer) -> None:
    text = "Question: Ava has 3 pears – naïve, 数, \x00 and all.\nAnswer: 3\n#### 3"
    ids = tokenizer.encode(text).ids
    assert ids[0] == BEGIN_ID
    assert tokenizer.decode(ids) == text


def test_targets_are_the_next_tokens_and_padding_is_ignored(tokenizer: Tokenizer) -> None:
    """And batches are a function of seed and index."""
    batches, same = (ProblemBatches(tokenizer, seed=1, tokens=512, n_ctx=128) for _ in range(2))
    assert not torch.equal(batches[1][0][:2, :20], batches[2][0][:2, :20])
    for index in (0, PACKED_EVERY - 1):
        for first, again in zip(batches[index], same[index], strict=True):
            assert torch.equal(first, again)
    for row, target in zip(*(part.tolist() for part in batches[0]), strict=True):
        length = target.index(IGNORED) if IGNORED in target else len(target)
        assert row[1:length] == target[: length - 1]
        assert row[0] == BEGIN_ID
        assert all(t == IGNORED for t in target[length:])
        assert length == len(target) or target[length - 1] == END_ID
    inputs, targets = batches[PACKED_EVERY - 1]  # whole contexts
    assert inputs.shape == (4, 128)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert (inputs == END_ID).sum() > 4


def test_training_learns_and_leaves_a_model_the_engine_loads(tmp_path: Path) -> None:
    losses = _run(tmp_path, steps=60, learning_rate=1e-2)
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    weights, model = load_checkpoint(tmp_path), load_model(tmp_path)
    assert weights.config == model.config
    assert torch.equal(torch.from_numpy(weights.embedding), model.input_layer.weight)
    with pytest.raises(CheckpointError, match="cannot read"):
        load_model(tmp_path / "other")
    with pytest.raises(ConfigError, match="another model"):
        _run(tmp_path, steps=61, d_model=32)
    assert (DEMO_MODEL / "chat_template.jinja").read_text() == CHAT_TEMPLATE


def test_a_resumed_run_equals_one_that_never_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = _run(tmp_path / "whole", steps=12)
    reached = Schedule.rate

    def stop_at_eight(schedule: Schedule, step: int) -> float:
        if step == 8:
            raise KeyboardInterrupt
        return reached(schedule, step)

    with monkeypatch.context() as patch:
        patch.setattr(Schedule, "rate", stop_at_eight)
        with pytest.raises(KeyboardInterrupt):
            _run(tmp_path / "halves", steps=12, save_every=4)
    assert _run(tmp_path / "halves", steps=12, save_every=4) == whole
    halves = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "halves")]
    assert halves[0] == halves[1]


def test_learning_rate_warms_up_and_decays_to_zero() -> None:
    schedule = Schedule(
        steps=100, learning_rate=1.0, warmup_steps=10, weight_decay=0.0, save_every=1
    )
    rates = [schedule.rate(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == pytest.approx(1.0)
    assert rates[-1] == pytest.approx(1 / 90)
    assert all(a > b for a, b in pairwise(rates[10:]))
