"""Our products on an H100 or H200 against float64."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from research.bench.engine.ops import PRODUCTS, Ops, Variant
from research.bench.frame import random_shape
from research.bench.gpu.turns import TurnsConfig
from srm.engine.config import Dtype
from srm.engine.device.linear import graph_dtype
from srm.engine.device.runner import open_device
from tests.kernels.product_checks import check_float8, check_product, looked_at

pytestmark = pytest.mark.gpu

OPS: dict[Dtype, list[str]] = {
    "bfloat16": ["up", "down", "proj_in", "proj_out", "head"],
    "float8": ["norm", "up", "down"],
}
MOST_WRONG = 16
"""Wrong elements that are shown."""


@cache
def ops_of(width: int, dtype: Dtype, folder: Path, way: str = "") -> Ops:
    names = frozenset(filter(None, way.split("+")))
    variant = Variant(random_shape(width), graph_dtype(dtype), "own", bound=True, variants=names)
    only = PRODUCTS if way and dtype == "bfloat16" else ()
    return Ops(variant, open_device("gpu"), folder, only)


@pytest.mark.parametrize("rows", [0, 1, 2, 8, 64, 129, 1000, 4096, 65_536])
@pytest.mark.parametrize(("dtype", "name"), [(key, name) for key in OPS for name in OPS[key]])
@pytest.mark.parametrize("width", [1024, 512])
def test_a_product_is_within_rounding_of_float64(
    width: int, dtype: Dtype, name: str, rows: int, kept_graphs: Path
) -> None:
    check(ops_of(width, dtype, kept_graphs), dtype, name, rows)


@pytest.mark.parametrize("rows", [129, 65_536])
@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("way", TurnsConfig().compared)
@pytest.mark.parametrize("width", [1024, 512])
def test_a_variant_is_within_rounding_of_float64(
    width: int, way: str, name: str, rows: int, kept_graphs: Path
) -> None:
    check(ops_of(width, "bfloat16", kept_graphs, way), "bfloat16", name, rows)


@pytest.mark.parametrize("rows", [0, 1, 129, 4096, 65_536])
@pytest.mark.parametrize("name", OPS["float8"])
@pytest.mark.parametrize("width", [1024, 512])
def test_int8_is_within_rounding_of_float64(
    width: int, name: str, rows: int, kept_graphs: Path
) -> None:
    check(ops_of(width, "float8", kept_graphs, "int8"), "float8", name, rows)


def check(ops: Ops, dtype: Dtype, name: str, rows: int) -> None:
    before, outputs, _ = ops.run(name, rows)
    if dtype == "float8":
        result, expected, allowed = check_float8(name, ops.weights.get(name), before, outputs)
    else:
        result, expected, allowed = check_product(name, ops.weights[name], before, outputs)
    assert result.shape == expected.shape
    wrong = np.flatnonzero(~(np.abs(result - expected) <= allowed).ravel())  # NaN is not
    columns, of = outputs[0].shape[-1], looked_at(rows)
    places = [
        (*divmod(int(place), columns), *(a.flat[place] for a in (result, expected)))
        for place in wrong[:MOST_WRONG]
    ]
    assert not len(wrong), f"{len(wrong)} of {result.size} (row of {of}, column, is, not): {places}"
