"""The step graphs of both benchmark widths as a GPU will run them, seen without one."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.kernels.lowered import LAYERS, Launch, Lowered, lower

GRAPHS = ("own:512", "own:1024", "max:512", "max:1024")
BIAS, SILU, RESIDUAL = (
    f"Epilogue(matmul, View(static.broadcast_to, {fused}), operandIndices=[0])"
    " transpose_b has_epilogue_fusion"
    for fused in ("add", "Elementwise(add, silu)", "Elementwise(add, add)")
)
NORM, MIX = "reduce.layer_norm", "srm_mix"
LAYER = {
    "own": [
        *("srm_normed_sm90 silu", "srm_stream_sm90"),
        *("srm_normed_sm90", MIX, "srm_stream_sm90"),
    ],
    "max": [NORM, SILU, RESIDUAL, NORM, BIAS, MIX, RESIDUAL],
}
"""What is launched for a layer, and what is fused with it."""
HEAD = {"own": ["srm_linear_sm90"], "max": ["slice", "matmul transpose_b"]}


@pytest.fixture(scope="module")
def graphs() -> dict[str, Lowered]:
    return lower(*GRAPHS)


def described(launch: Launch) -> str:
    """Its name, and its parameters that are true."""
    true = [name for name, value in launch.settings.items() if value == "True"]
    return " ".join([launch.name, *true])


@pytest.mark.parametrize("name", GRAPHS)
def test_a_layer_launches_these_kernels(graphs: dict[str, Lowered], name: str) -> None:
    """Activation and residual are part of their products, which take weights as they are kept."""
    launches = graphs[name].execute.launches
    product = name.partition(":")[0]
    assert [described(one) for one in launches if one.device == "gpu"] == [
        "srm_expand",
        "srm_embed_stream" if product == "own" else "srm_embed",
        *LAYER[product] * LAYERS,
        *(*HEAD[product], "srm_edit", "srm_sample", "srm_score"),
    ]
    on_host = [one.name for one in launches if one.device != "gpu"]
    assert on_host == ([] if product == "own" else ["concat"])  # the bounds of the head's rows


@pytest.mark.parametrize("name", GRAPHS)
def test_a_step_allocates_once_and_waits_for_nothing(graphs: dict[str, Lowered], name: str) -> None:
    memory = Counter(graphs[name].execute.memory)
    del memory["cpu buffer_alloc"]  # of the head's rows
    assert memory == {"gpu buffer_alloc": 1}


@pytest.mark.parametrize("name", GRAPHS)
def test_weights_are_uploaded_once_as_they_are_declared(
    graphs: dict[str, Lowered], name: str
) -> None:
    """Nothing is computed from them, then or later: none is transposed, none copied in a step."""
    graph = graphs[name]
    of_layer = 12 if name.startswith("own") else 16  # norms and biases are in `columns`
    assert graph.bound == graph.declared and len(graph.declared) == 2 + of_layer * LAYERS
    assert not graph.init.launches
    assert Counter(graph.init.memory) == dict.fromkeys(
        ("gpu buffer_alloc", "gpu buffer_host_to_device", "gpu sync"), len(graph.declared)
    )
