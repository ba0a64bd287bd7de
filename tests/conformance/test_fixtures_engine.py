"""The MAX engine, in float32, gives the logits of the published code, however it is fed."""

from __future__ import annotations

import numpy as np
import pytest

from engine.weights.checkpoint import load_checkpoint
from tests.engines.logits_model import LogitsModel, compile_logits
from tests.models.published import (
    NAMES,
    TOLERANCE,
    cases,
    convert_fixture,
    parametrized,
    relative_error,
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LogitsModel]:
    folders = {name: convert_fixture(name, tmp_path_factory.mktemp(name)) for name in NAMES}
    return compile_logits({name: load_checkpoint(folder) for name, folder in folders.items()})


@parametrized()
def test_one_batch_gives_the_published_logits(name: str, models: dict[str, LogitsModel]) -> None:
    model = models[name]
    for ids, positions, expected in cases(name):
        rows = [(text.astype(np.int32), slot, slot, 0) for slot, text in enumerate(ids)]
        found = model.feed(model.pool(), rows).reshape(*ids.shape, -1)[:, positions]
        assert np.isfinite(found).all()
        assert relative_error(found, expected) < TOLERANCE


@parametrized()
def test_random_chunks_give_the_published_logits(name: str, models: dict[str, LogitsModel]) -> None:
    model = models[name]
    for ids, positions, expected in cases(name):
        texts = list(ids.astype(np.int32))
        found = np.stack(model.feed_in_chunks(texts, np.random.default_rng(0)))[:, positions]
        assert np.isfinite(found).all()
        assert relative_error(found, expected) < TOLERANCE
