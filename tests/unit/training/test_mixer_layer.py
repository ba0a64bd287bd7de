"""The token mixer as a layer of other models."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from srm.engine.config import ModelConfig
from srm.torch import MixerCache, MixerLayer
from srm.training.huggingface.mixers_srm import TokenMixer
from srm.training.huggingface.units_srm import Places
from tests.kit.serving import ROOT

WIDTH, LENGTH = 24, 13
VARIANTS: list[dict[str, Any]] = [
    {},
    {"mixer": "parallel", "decay": False},
    {"mixer": "combined"},
    {"mixer": "expanded", "decay": False, "use_projections": False},
    {"mixer": "kernel", "num_heads": 1, "kernel_size": 2, "use_projections": False},
]


def _layer(**settings: Any) -> MixerLayer:
    torch.manual_seed(0)
    return MixerLayer(WIDTH, n_ctx=32, **settings).double()


def _x(rows: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randn(rows, length, WIDTH, dtype=torch.float64)


@pytest.mark.parametrize("variant", VARIANTS)
def test_parallel_chunks_and_steps_agree(variant: dict[str, Any]) -> None:
    layer, x = _layer(chunk_size=4, **variant), _x()
    config = ModelConfig(
        **{"num_heads": 4, **variant}, d_model=WIDTH, num_layers=1, n_ctx=32, vocab_size=2
    )
    published = TokenMixer(config).double()
    published.load_state_dict(layer.state_dict())
    expected, _ = published(x, Places(slice(LENGTH), chunk=LENGTH))
    torch.testing.assert_close(layer(x)[0], expected)
    cache = MixerCache()
    parts = [layer(part, None, cache, True)[0] for part in torch.split(x, [5, 1, 1, 6], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(side: str) -> None:
    layer, x = _layer(), _x()
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    hidden = slice(0, 4) if side == "left" else slice(9, LENGTH)
    mask[1, hidden] = 0
    alone = x[1:, 4:] if side == "left" else x[1:, :9]
    cache, reference = MixerCache(), MixerCache()
    x[1, hidden] = math.nan
    y, _, _ = layer(x, mask, cache, True)
    expected, _, _ = layer(alone, None, reference, True)
    assert not y[1, hidden].any()
    torch.testing.assert_close(y[1:][mask[1:] == 1], expected[0])
    following, longer = _x(2, 1), torch.cat([mask, mask[:, :1] * 0 + 1], 1)
    torch.testing.assert_close(
        layer(following, longer, cache, True)[0][1:], layer(following[1:], None, reference, True)[0]
    )


def test_packed_sequences_do_not_meet() -> None:
    layer, x = _layer(chunk_size=4), _x(1)
    y, _, _ = layer(x, cu_seqlens=torch.tensor([0, 3, 3, LENGTH], dtype=torch.int32))
    expected = [layer(x[:, :3])[0], layer(x[:, 3:])[0]]
    torch.testing.assert_close(y, torch.cat(expected, 1))


def test_a_cache_holds_states_by_row() -> None:
    layer, x, cache = _layer(), _x(), MixerCache()
    layer(x, None, cache, True)
    states, counts = cache[0]["recurrent_state"]
    assert states.shape == (2, 1, WIDTH)
    assert counts.tolist() == [LENGTH, LENGTH]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_layer_of_any_dtype_and_place_goes_on_from_its_state(dtype: torch.dtype) -> None:
    """Layer 0 may be one of attention, whose cache is another."""
    layer, x, cache = _layer(layer_idx=1).to(dtype), _x().to(dtype), MixerCache()
    expected, _, _ = layer(x)
    parts = [layer(part, None, cache, True)[0] for part in torch.split(x, [12, 1], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=0, atol=0.02)
    assert (len(cache), cache[0]) == (2, {})


@pytest.mark.parametrize("wrong", [{"mixer": "foo"}, {"num_heads": 5}, {"depth": 3}, {"n_ctx": 0}])
def test_what_is_no_mixer_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong)) if "mixer" not in wrong else "foo"):
        MixerLayer(WIDTH, **wrong)


def test_gradients_reach_every_parameter() -> None:
    layer = _layer()
    layer(_x())[0].square().sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"output_attentions": True}, "output_attentions"),
        ({"use_cache": True}, "past_key_values"),
        ({"attention_mask": torch.ones(2, LENGTH, LENGTH)}, "attention_mask must be"),
        ({"cu_seqlens": torch.tensor([0, LENGTH])}, "one row"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _layer()(_x(), **arguments)


def test_no_sequence_is_longer_than_its_positions() -> None:
    layer, cache = _layer(), MixerCache()
    with pytest.raises(ValueError, match="n_ctx = 32"):
        layer(_x(2, 33))
    layer(_x(2, 32), None, cache, True)
    with pytest.raises(ValueError, match="got 33"):
        layer(_x(2, 1), None, cache, True)
    with pytest.raises(ValueError, match="cache has 2 rows"):
        layer(_x(1, 1), None, cache, True)
    with pytest.raises(ValueError, match="must have a token"):
        layer(_x(2, 0))
    for ends in ([0, 5], [1, LENGTH], [0, 9, 5, LENGTH], [], [0.0, LENGTH]):
        with pytest.raises(ValueError, match="cu_seqlens must"):
            layer(_x(1), cu_seqlens=torch.tensor(ends))


def test_the_example_in_the_pages_runs() -> None:
    page = (ROOT / "docs" / "training.md").read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    exec(example, {})
