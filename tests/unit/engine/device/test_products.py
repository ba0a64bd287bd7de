"""Which product a GPU takes, and how its weights are laid out."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
import pytest
from max.driver import CPU, Device
from max.dtype import DType

from engine.config import ModelConfig
from engine.device.linear import round_bfloat16
from engine.device.model import MATRICES, graph_shape
from engine.device.products import choose_product
from engine.device.runner import host_weights
from engine.errors import ConfigError
from engine.weights.weights import named_tensors
from tests.engines.numpy_runner import TINY, tiny_weights

WIDE = ModelConfig(d_model=512, num_layers=2, num_heads=4, n_ctx=16, vocab_size=1024)
BF16 = DType.bfloat16


class Gpu(NamedTuple):
    """A GPU as far as it is asked."""

    architecture_name: str = "sm_90a"
    is_host: bool = False


H100 = Gpu()


def choose(wanted: Any, gpu: Gpu = H100, dtype: DType = BF16, **changes: Any) -> str | None:
    model = msgspec.structs.replace(WIDE, **changes)
    return choose_product(wanted, model, dtype, cast(Device, gpu))


def test_ours_is_taken_where_it_can_be() -> None:
    assert choose("auto") == choose("auto", Gpu("sm_90")) == choose("own") == "own"
    for other in (
        {"gpu": Gpu("sm_80")},
        {"gpu": Gpu("sm_100a")},
        {"dtype": DType.float32},
        {"d_model": 384},
        {"vocab_size": 1000},
    ):
        assert choose("auto", **other) == "max", other
    assert (choose("linalg"), choose("max"), choose("max", Gpu("sm_80"))) == (
        "linalg",
        "max",
        "max",
    )


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"gpu": Gpu("sm_80")}, r"sm_90\), the GPU is sm_80"),
        ({"dtype": DType.float32}, "dtype is float32"),
        ({"vocab_size": 1000}, "a matrix of 512 x 1000"),
    ],
)
def test_one_that_cannot_be_is_refused(changes: dict[str, Any], why: str) -> None:
    for wanted in ("own", "linalg"):
        with pytest.raises(ConfigError, match=f"product = {wanted}: .*{why}"):
            choose(wanted, **changes)
    assert choose("own", vocab_size=1280) == "own"
    with pytest.raises(ConfigError, match="multiples of 64 inputs and 512 outputs"):
        choose("linalg", vocab_size=1280)


def test_a_cpu_has_none_to_choose() -> None:
    assert choose_product("auto", WIDE, BF16, CPU()) is None
    with pytest.raises(ConfigError, match="product = max: it is of a GPU"):
        choose_product("max", WIDE, BF16, CPU())


def test_graphs_of_two_products_are_two() -> None:
    shapes = {graph_shape(WIDE, BF16, product) for product in (None, "own", "linalg", "max")}
    assert len(shapes) == 4


def test_a_gpus_matrices_are_out_by_in() -> None:
    weights = tiny_weights()
    bound = host_weights(weights, BF16, cast(Device, Gpu()))
    matrices = 0
    for name, value in named_tensors(weights):
        if name.rsplit(".", maxsplit=1)[-1] in MATRICES:
            found = bound[name].view(DType.uint16, value.T.shape).to_numpy()
            np.testing.assert_array_equal(found, round_bfloat16(value.T))
            matrices += 1
    assert matrices == 4 * TINY.num_layers + 1
