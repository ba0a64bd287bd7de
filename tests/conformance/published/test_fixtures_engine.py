"""The MAX engine, in float32, gives the logits of the published code, however it is fed."""

from __future__ import annotations

import numpy as np
import pytest

from srm.engine.weights.checkpoint import load_checkpoint
from tests.kit.engines.logits_model import LogitsModel
from tests.kit.models.forms import TOLERANCE, error, graphs
from tests.kit.models.published import NAMES, cases, convert_fixture, parametrized


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LogitsModel]:
    folders = {name: convert_fixture(name, tmp_path_factory.mktemp(name)) for name in NAMES}
    return graphs().bind({name: load_checkpoint(folder) for name, folder in folders.items()})


@parametrized()
def test_one_batch_and_random_chunks_give_the_published_logits(
    name: str, models: dict[str, LogitsModel]
) -> None:
    model = models[name]
    for ids, positions, expected in cases(name):
        texts = list(ids.astype(np.int32))
        rows = [(text, slot, slot, 0) for slot, text in enumerate(texts)]
        at_once = model.run_batch(model.pool(), rows).reshape(*ids.shape, -1)
        in_chunks = np.stack(model.feed_in_chunks(texts, np.random.default_rng(0)))
        for result in (at_once, in_chunks):
            assert error(result[:, positions], expected) < TOLERANCE
