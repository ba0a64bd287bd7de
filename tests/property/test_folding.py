"""Any model, folded and fed token by token, is the torch model's parallel form."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from srm.engine.config import ModelConfig
from srm.engine.weights.random_model import random_tensors
from srm.engine.weights.weights import fold
from srm.training.model import SRM
from tests.kit.engines.numpy_runner import feed
from tests.kit.models.variants import configs


@settings(max_examples=100)
@given(config=configs(), seed=st.integers(0, 2**32 - 1))
def test_every_variant_in_units_is_its_parallel_form(config: ModelConfig, seed: int) -> None:
    tensors = random_tensors(config, seed)
    ids = np.random.default_rng(seed).integers(0, config.vocab_size, config.n_ctx)
    model = SRM(config)
    model.load_state_dict({name: torch.from_numpy(value) for name, value in tensors.items()})
    with torch.no_grad():
        expected = model.double()(torch.from_numpy(ids)[None])[0].numpy()

    weights, state = fold(config, tensors, "fingerprint"), np.zeros(config.state_width)
    result = np.empty_like(expected)
    for position, token in enumerate(ids):
        result[position], state = feed(weights, int(token), position, state)
    # What is left is float32 in the folded weights: δ - α, and α / c of the combined quirk.
    assert np.abs(result - expected).max() < 1e-6 * np.abs(expected).max()
