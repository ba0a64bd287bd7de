"""Which product a GPU takes, and how its weights are laid out."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
import pytest
from max.driver import CPU, Device
from max.dtype import DType

from srm.engine.config import ModelConfig, read_model_config
from srm.engine.device.linear import fold_norm, round_bfloat16, widen_bfloat16
from srm.engine.device.model import MATRICES, build_step_graph, graph_shape
from srm.engine.device.products import (
    FLOAT8,
    Product,
    choose_product,
    choose_variants,
    folds_norms,
)
from srm.engine.device.runner import host_weights
from srm.engine.weights.random_model import random_tensors
from srm.engine.weights.weights import fold, named_tensors
from srm.errors import ConfigError
from tests.kernels import oracle
from tests.kit.engines.numpy_runner import TINY, tiny_weights
from tests.kit.serving import ROOT

WIDE = ModelConfig(d_model=512, num_layers=2, num_heads=4, n_ctx=16, vocab_size=1024)
BF16 = DType.bfloat16


class Gpu(NamedTuple):
    """A GPU as far as it is asked."""

    architecture_name: str = "sm_90a"
    is_host: bool = False


H100 = Gpu()


def choose(
    wanted: Any, gpu: Gpu | Device = H100, dtype: DType = BF16, **changes: Any
) -> str | None:
    model = msgspec.structs.replace(WIDE, **changes)
    return choose_product(wanted, model, dtype, cast(Device, gpu))


def test_ours_is_taken_where_it_can_be() -> None:
    assert choose("auto") == choose("auto", Gpu("sm_90")) == choose("own") == "own"
    for other in (
        {"gpu": Gpu("sm_80")},
        {"gpu": Gpu("sm_100a")},
        {"dtype": DType.float32},
        {"d_model": 192},
    ):
        assert choose("auto", **other) == "plain", other
    assert choose("own", d_model=384) == choose("own", vocab_size=1000) == "own"
    assert choose("auto", d_model=384) == choose("auto", vocab_size=1000) == "plain"
    assert choose("plain") == choose("plain", Gpu("sm_80")) == "plain"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"gpu": Gpu("sm_80")}, r"sm_90\), the GPU is sm_80"),
        ({"dtype": DType.float32}, "dtype is float32"),
        ({"d_model": 192}, "multiples of 128 as d_model, the model has 192"),
    ],
)
def test_one_that_cannot_be_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=f"product = own: .*{why}"):
        choose("own", **changes)


@pytest.mark.parametrize("name", ["countdown", "demo"])
def test_bundled_models_can_use_tensor_cores(name: str) -> None:
    model, _ = read_model_config(ROOT / "models" / name)
    assert choose_product("own", model, BF16, cast(Device, H100)) == "own"


def test_float8_has_ours_on_an_h100_or_is_refused() -> None:
    assert choose("auto", dtype=FLOAT8) == choose("own", dtype=FLOAT8) == "own"
    for wanted, gpu, changes, why in (
        ("auto", Gpu("sm_80"), {}, r"dtype = float8: it is for .*, the GPU is sm_80; use dtype = "),
        ("own", Gpu("sm_100a"), {}, "dtype = float8: it is for an H100 or H200"),
        ("auto", H100, {"d_model": 768}, "dtype = float8: it wants multiples of 512 as d_model"),
        ("auto", H100, {"vocab_size": 1000}, "no GPU has run it with a vocabulary of 1000"),
        ("plain", H100, {}, "product = plain: dtype = float8 has product = own or auto alone"),
        ("auto", CPU(), {}, "dtype = float8: an H100 .* use float32 or bfloat16 on a CPU"),
    ):
        with pytest.raises(ConfigError, match=why):
            choose(wanted, gpu, FLOAT8, **changes)
    assert choose("own", dtype=FLOAT8, vocab_size=1000) == "own"
    assert graph_shape(WIDE, FLOAT8, "own") != graph_shape(WIDE, BF16, "own")


def test_a_cpu_has_none_to_choose() -> None:
    assert choose_product("auto", WIDE, BF16, CPU()) is None
    with pytest.raises(ConfigError, match="product = plain: it is of a GPU"):
        choose_product("plain", WIDE, BF16, CPU())


def test_graphs_of_two_products_are_two() -> None:
    shapes = {graph_shape(WIDE, BF16, product) for product in (None, "own", "plain")}
    assert len(shapes) == 3


def test_unknown_variants_are_refused() -> None:
    with pytest.raises(ConfigError, match="variants = tan, wide: known are "):
        choose_variants(["wide", "tan"], "own", WIDE, BF16)


def test_variants_need_folded_norms() -> None:
    assert choose_variants(["tanh"], "own", WIDE, FLOAT8) == {"tanh"}
    assert choose_variants([], None, WIDE, DType.float32) == frozenset()
    for product, model in (
        ("plain", WIDE),
        ("own", msgspec.structs.replace(WIDE, use_projections=False)),
    ):
        with pytest.raises(ConfigError, match="variants = tanh: they need product = own"):
            choose_variants(["tanh"], cast(Product, product), model, BF16)
    assert choose_variants(["rejection"], None, WIDE, DType.float32) == {"rejection"}


def test_a_graph_samples_by_rejection_where_asked() -> None:
    for names, rejects in ([], "false"), (["rejection"], "true"):
        variants = choose_variants(names, None, TINY, DType.float32)
        graph = build_step_graph(TINY, DType.float32, CPU(), variants=variants)
        assert f"rejects = {rejects}" in str(graph)


def test_mixers_that_no_product_can_do_are_refused() -> None:
    for mixer in ("mixed", "parallel", "column_heads"):
        model = msgspec.structs.replace(WIDE, mixer=mixer, decay=False)
        assert choose_variants(["mixed"], "own", model, BF16) == {"mixed"}
    for changes in ({"mixer": "combined"}, {"mixer": "diagonal"}, {"num_heads": 16}):
        model = msgspec.structs.replace(WIDE, **changes, decay=False)
        assert choose_variants(["tanh"], "own", model, BF16)
        with pytest.raises(ConfigError, match=r"variants = mixed: it is of .* multiple of 64"):
            choose_variants(["mixed"], "own", model, BF16)


def test_int8_is_of_float8() -> None:
    assert choose_variants(["int8"], "own", WIDE, FLOAT8) == {"int8"}
    with pytest.raises(
        ConfigError, match=r"variants = int8: it is of dtype = float8, this is bfloat16"
    ):
        choose_variants(["int8"], "own", WIDE, BF16)


def test_graphs_of_variants_differ() -> None:
    shapes = {
        graph_shape(WIDE, BF16, "own", variants=frozenset(names)) for names in ("", "a", "ab")
    }
    assert len(shapes) == 3


def test_a_gpus_matrices_are_out_by_in() -> None:
    weights = tiny_weights()
    bound = host_weights(weights, BF16, cast(Device, Gpu()))
    matrices = 0
    for name, value in named_tensors(weights):
        if name.rsplit(".", maxsplit=1)[-1] in MATRICES:
            result = bound[name].view(DType.uint16, value.T.shape).to_numpy()
            np.testing.assert_array_equal(result, round_bfloat16(value.T))
            matrices += 1
    assert matrices == 4 * TINY.num_layers + 1


def test_a_folded_norm_gives_the_same_product() -> None:
    """But for weights, which are rounded once, together with the gain."""
    rng = np.random.default_rng(0)
    shapes = (512, 96), (96,), (512,), (512,)
    weight, bias, gain, shift = (rng.standard_normal(shape, np.float32) for shape in shapes)
    folded, columns = fold_norm(weight, bias, gain, shift)
    np.testing.assert_array_equal(folded, widen_bfloat16(round_bfloat16(weight * gain[:, None])))
    x = rng.normal(5, 1, (40, 512))
    scale = 1 / np.sqrt(x.var(1, keepdims=True) + 1e-5)
    wide = columns.astype(np.float64)
    y = (x @ folded - x.mean(1, keepdims=True) * wide[:, 0]) * scale + wide[:, 1]
    normed = oracle.layer_norm(x)
    np.testing.assert_allclose(y, normed @ folded + (bias + shift @ weight), atol=1e-3)
    exact = (normed * gain + shift) @ weight.astype(np.float64) + bias
    unfolded = widen_bfloat16(round_bfloat16(weight)).astype(np.float64)
    others = (normed * gain + shift) @ unfolded + bias  # of a norm that is not folded
    assert np.abs(y - exact).std() < 1.1 * np.abs(others - exact).std()


@pytest.mark.parametrize("projected", [False, True])
def test_weights_of_a_folded_norm_are_those_of_its_product(projected: bool) -> None:
    changes = {"d_model": 256, "num_heads": 2, "use_projections": projected}
    model = msgspec.structs.replace(TINY, **changes)
    assert folds_norms("own", model, BF16) == projected and not folds_norms("plain", model, BF16)
    weights = fold(model, random_tensors(model, 0), "")
    plain, folded = (
        host_weights(weights, BF16, cast(Device, Gpu()), product) for product in ("plain", "own")
    )
    gone, new = plain.keys() - folded.keys(), folded.keys() - plain.keys()
    kinds = {name.rsplit(".", maxsplit=1)[-1] for name in new}
    assert kinds == ({"up_columns", "proj_in_columns"} if projected else set())
    assert len(gone) == 3 * len(new) == 3 * 2 * model.num_layers * projected
    for name in new:
        columns = folded[name].to_numpy()
        matrix = folded[name.replace("_columns", "_weight")]
        bits = matrix.view(DType.uint16, matrix.shape).to_numpy()
        sums = widen_bfloat16(bits).astype(np.float64).sum(1)
        np.testing.assert_allclose(columns[:, 0], sums, rtol=1e-6, atol=1e-6)
