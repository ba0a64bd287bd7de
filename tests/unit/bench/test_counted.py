"""What a step is counted to take, from launches and code that are given."""

from __future__ import annotations

import pytest

from research.bench.gpu.counted import Code, CountedConfig, count_step
from tests.kit.ptx.lowered import LAYERS, Launch

CONFIG = CountedConfig(tflops=100.0, processors=64, ghz=1.0, issued=4.0, gap_us=1.0)
TB_PER_S = 2.0
WIDTH = 512
CODE = Code(
    epilogues={
        **{"up": 512, "down": 0, "proj_in": 0},
        **{"head, temperature 1": 512, "head, top-p 0.9": 0},
    },
    special={
        **dict.fromkeys(("up", "down", "proj_in", "head, top-p 0.9"), 0),
        **{"head, temperature 1": 32},
    },
    mix=(0.0, 20.0),
    samplers={"sample, temperature 1": (2560.0, 0.0), "sample, top-p 0.9": (25600.0, 0.0)},
)


def product(name: str, outer: int, inner: int, silu: bool = False) -> Launch:
    settings = {"N": str(outer), "K": str(inner), "silu": str(silu)}
    return Launch("gpu", f"srm_{name}_sm90", settings)


def plain(name: str) -> Launch:
    return Launch("gpu", name, {})


LAYER = [
    product("normed", 4 * WIDTH, WIDTH, silu=True),
    product("stream", WIDTH, 4 * WIDTH),
    plain("srm_mix"),
]
STEP = [
    *(plain("srm_embed_stream"), *LAYER * LAYERS, product("head", 8192, WIDTH)),
    *(plain(f"srm_{name}") for name in ("edit", "sample", "score")),
]


def test_a_step_takes_what_its_kernels_take() -> None:
    rows = 64 * 128
    case = count_step(WIDTH, rows, STEP, CODE, CONFIG, TB_PER_S)
    entries = {kernel["name"]: kernel for kernel in case["kernels"]}
    assert (case["launches"], case["launches_a_layer"]) == (8 * 3 + 5, 3)
    assert case["gaps_ns"] == pytest.approx(29 * 1000 / rows)
    # 8 rounds of 64 tiles, each as long again by an eighth: 1,024 clocks beside 8,192.
    up_ns = 2 * 4 * WIDTH**2 / 100e3 * 9 / 8
    assert (
        entries["up"]["ns"] == pytest.approx(8 * up_ns) and entries["up"]["bound"] == "processors"
    )
    # Two rounds.
    assert entries["down"]["ns"] == pytest.approx(8 * 2 * 4 * WIDTH**2 / 100e3)
    assert entries["mix"]["ns"] == pytest.approx(8 * 20 * WIDTH / 2e3)
    assert entries["mix"]["bound"] == "memory" and entries["edit"]["ns"] == 0
    assert entries["sample, temperature 1"]["ns"] == pytest.approx(2560 / (64 * 4))
    head_ns = 2 * 8192 * WIDTH / 100e3
    assert entries["head, temperature 1"]["ns"] == pytest.approx(head_ns * 9 / 8)
    assert entries["head, top-p 0.9"]["ns"] == pytest.approx(head_ns)
    ns = case["gaps_ns"] + sum(
        kernel["ns"] for kernel in case["kernels"] if not kernel["name"].endswith("temperature 1")
    )
    assert case["tokens_per_s"]["top-p 0.9"] == pytest.approx(1e9 / ns)


def test_rounds_that_are_not_full_cost_as_much_as_those_that_are() -> None:
    # 40 tiles of the down product on 64 processors; small ones would be 80.
    assert down_ns(20 * 128) == pytest.approx(64 / 40 * 8 * 2 * 4 * WIDTH**2 / 100e3)


def test_small_tiles_fill_processors_that_whole_ones_leave_idle() -> None:
    """Their last instructions take as long as those of whole ones, on half of the products."""
    full = 8 * 2 * 4 * WIDTH**2 / 100e3
    assert down_ns(16 * 128) == pytest.approx(full)  # 32 whole tiles, or 64 small ones
    slow = CODE._replace(epilogues=CODE.epilogues | {"down": 2048})
    assert down_ns(16 * 128, slow) == pytest.approx(full * (1 + 4096 / 16384))
    assert down_ns(32 * 128, slow) == pytest.approx(full * (1 + 4096 / 32768))


def test_special_functions_take_longer_than_what_else_a_thread_does() -> None:
    """128 of them take 2,048 clocks, 512 instructions 1,024; half as many where a tile is small."""
    full = 8 * 2 * 4 * WIDTH**2 / 100e3
    special, epilogues = CODE.special | {"down": 128}, CODE.epilogues | {"down": 512}
    slow = CODE._replace(epilogues=epilogues, special=special)
    assert down_ns(32 * 128, slow) == pytest.approx(full * (1 + 2048 / 32768))
    assert down_ns(16 * 128, slow) == pytest.approx(full * (1 + 1024 / 16384))


def down_ns(rows: int, code: Code = CODE) -> float:
    case = count_step(WIDTH, rows, STEP, code, CONFIG, TB_PER_S)
    (down,) = (kernel for kernel in case["kernels"] if kernel["name"] == "down")
    ns: float = down["ns"]
    return ns


def test_an_unknown_kernel_is_not_counted_as_nothing() -> None:
    with pytest.raises(KeyError, match="srm_new"):
        count_step(WIDTH, 128, [plain("srm_new"), *STEP[1:]], CODE, CONFIG, TB_PER_S)
