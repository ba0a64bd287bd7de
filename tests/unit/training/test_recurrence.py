"""The PyTorch recurrence that the engine is measured against is the same model."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
import torch

from srm.engine.config import ModelConfig
from srm.engine.weights.random_model import random_tensors
from srm.engine.weights.weights import fold
from srm.training.model import SRM
from srm.training.recurrence import Recurrence
from tests.kit.engines.numpy_runner import TINY

LENGTH = 12


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


HEADLESS = {"num_heads": 1, "use_projections": False}
CONFIGS = [
    msgspec.structs.replace(TINY, mixer=mixer, decay=decay, **more)
    for mixer, decay, more in (
        ("mixed", True, {}),
        ("parallel", True, {}),
        ("column_heads", False, {}),
        ("row", False, HEADLESS),
    )
]


def recurrence(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Recurrence:
    return Recurrence(fold(config, random_tensors(config), "random"), dtype)


def logits(model: Recurrence, ids: torch.Tensor) -> torch.Tensor:
    """ids [batch, LENGTH] token by token: [batch, LENGTH, vocab]."""
    state, positions = model.empty_state(len(ids)), torch.arange(LENGTH)[:, None]
    steps = [model.logits(ids[:, i], state, positions[i]) for i in range(LENGTH)]
    return torch.stack(steps, dim=1).float()


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.mixer)
def test_it_gives_the_logits_of_the_parallel_form(config: ModelConfig) -> None:
    published = SRM(config)
    tensors = random_tensors(config)
    published.load_state_dict({name: torch.from_numpy(value) for name, value in tensors.items()})
    ids = torch.randint(config.vocab_size, (3, LENGTH), generator=torch.Generator().manual_seed(0))
    expected = published(ids)
    result = logits(recurrence(config), ids)
    assert (result - expected).abs().max() < 1e-5 * expected.abs().max()
    rounded = logits(recurrence(config, torch.bfloat16), ids)
    assert (rounded - expected).abs().max() < 5e-2 * expected.abs().max()
    assert not torch.equal(rounded, result)


def test_it_samples_from_its_softmax() -> None:
    model, batch = recurrence(TINY), 20_000
    torch.manual_seed(0)
    ids, at = torch.full((batch,), 7), torch.zeros(1, dtype=torch.int64)
    drawn = model(ids, model.empty_state(batch), at)
    expected = model.logits(ids[:1], model.empty_state(1), at)[0].softmax(-1)
    frequency = drawn.bincount(minlength=32) / batch
    assert ((frequency - expected).abs() < 5 * (expected / batch).sqrt() + 1e-4).all()
