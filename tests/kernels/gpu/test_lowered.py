"""The step graphs of both benchmark widths as a GPU will run them, seen without one."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.kit.ptx.lowered import LAYERS, Launch, Lowered, lower

GRAPHS = (
    *("own:512", "own:1024", "plain:512", "plain:1024", "float8:512", "float8:1024"),
    *("mixed:512", "mixed:1024", "pdl:512", "int8:512", "int8:1024"),
    *("own:countdown", "own:demo"),
)
NORM, MIX, PLAIN = "reduce.layer_norm", "srm_mix", "srm_linear_plain"
LAYER = {
    "own": [
        *("srm_normed_sm90 silu", "srm_stream_sm90"),
        *("srm_normed_sm90", MIX, "srm_stream_sm90"),
    ],
    "mixed": [
        *("srm_normed_sm90 silu", "srm_stream_sm90", "srm_mixed_sm90", "srm_stream_sm90"),
    ],
    "plain": [
        *(NORM, f"{PLAIN} has_bias silu", f"{PLAIN} has_bias has_residual"),
        *(NORM, f"{PLAIN} has_bias", MIX, f"{PLAIN} has_bias has_residual"),
    ],
    "float8": [
        *("srm_norm_8bit", "srm_up_8bit", "srm_down_8bit"),
        *("srm_normed_sm90", MIX, "srm_stream_sm90"),
    ],
}
LAYER["pdl"], LAYER["int8"] = LAYER["own"], LAYER["float8"]
"""What is launched for a layer, and what is fused with it."""
OWN_HEAD = [
    *("srm_head_sm90", "srm_edit has_slices", "srm_constrain has_slices", "srm_sample has_slices")
]
HEAD = {
    "own": OWN_HEAD,
    "mixed": OWN_HEAD,
    "pdl": OWN_HEAD,
    "float8": OWN_HEAD,
    "int8": OWN_HEAD,
    "plain": [PLAIN, "srm_edit", "srm_constrain", "srm_sample"],
}
STREAM = "srm_embed_stream"
EMBED = dict.fromkeys(("own", "mixed", "pdl"), STREAM)
EMBED |= dict.fromkeys(("float8", "int8", "plain"), "srm_embed")
WEIGHTS = {"own": 12, "mixed": 12, "pdl": 12, "float8": 13, "int8": 13, "plain": 16}
"""Of a layer: norms and biases that are folded are in `columns`, and float8 has divisors."""


@pytest.fixture(scope="module")
def graphs() -> dict[str, Lowered]:
    return lower(*GRAPHS)


def described(launch: Launch) -> str:
    """Its name, and its parameters that are true, but for "pdl"."""
    true = [name for name, value in launch.settings.items() if value == "True" and name != "pdl"]
    return " ".join([launch.name, *true])


def starts_early(launch: Launch) -> bool:
    return launch.settings.get("pdl") == "True" or launch.settings.get("variants") == "pdl"


@pytest.mark.parametrize("name", GRAPHS)
def test_a_layer_launches_these_kernels(graphs: dict[str, Lowered], name: str) -> None:
    """Activation and residual are part of their products, which take weights as they are kept."""
    launches = graphs[name].execute.launches
    kind = name.partition(":")[0]
    assert [described(launch) for launch in launches if launch.device == "gpu"] == [
        "srm_expand",
        EMBED[kind],
        *LAYER[kind] * LAYERS,
        *(*HEAD[kind], "srm_score"),
    ]
    assert all(launch.device == "gpu" for launch in launches)


def test_variant_pdl_starts_all_but_two_ops_early(graphs: dict[str, Lowered]) -> None:
    """The first is behind an upload, and no step that is replayed has constraints."""
    ordinary = [item.name for item in graphs["pdl:512"].execute.launches if not starts_early(item)]
    assert ordinary == ["srm_expand", "srm_constrain"]
    assert not any(starts_early(launch) for launch in graphs["own:512"].execute.launches)


def test_a_vocabulary_is_padded_where_logits_are_read(graphs: dict[str, Lowered]) -> None:
    """That of countdown has 1,014 tokens."""
    for name, padding in ("own:countdown", "10"), ("own:demo", "0"), ("plain:512", "0"):
        (*_, edit, constrain, sample, score) = graphs[name].execute.launches
        read = {launch.settings["padding"] for launch in (edit, constrain, sample, score)}
        assert read == {padding}
        head = graphs[name].execute.launches[-5].settings
        assert head.get("padding", "0") == padding


@pytest.mark.parametrize("name", GRAPHS)
def test_a_step_allocates_once_and_waits_for_nothing(graphs: dict[str, Lowered], name: str) -> None:
    memory = Counter(graphs[name].execute.memory)
    assert memory == {"gpu buffer_alloc": 1}


@pytest.mark.parametrize("name", GRAPHS)
def test_weights_are_uploaded_once_as_they_are_declared(
    graphs: dict[str, Lowered], name: str
) -> None:
    """Nothing is computed from them, then or later: none is transposed, none copied in a step."""
    graph = graphs[name]
    of_layer = WEIGHTS[name.partition(":")[0]]
    assert graph.bound == graph.declared and len(graph.declared) == 2 + of_layer * LAYERS
    assert not graph.init.launches
    assert Counter(graph.init.memory) == dict.fromkeys(
        ("gpu buffer_alloc", "gpu buffer_host_to_device", "gpu sync"), len(graph.declared)
    )
