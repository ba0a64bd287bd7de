"""`srm bench counted`: what a step on a GPU takes by count, from its compiled code and its shapes.

Nothing here is measured. What a step launches comes from the graph as MAX lowers it, instructions
and bytes from the kernels' own code, run by the interpreter of the tests:

- A product takes what its operations take at the rate that the device reaches, divided by two
  shares. One is that of the tensor cores' time in a tile: CLOCKS_A_TERM clocks for each term of its
  sums, beside what the instructions of a thread after its last product take, none of which is
  counted as hidden: CLOCKS_AN_INSTRUCTION each, or CLOCKS_A_SPECIAL each of those for the
  special-function unit if that is longer. The other is that of the rounds of tiles that are full.
  A term and a special function of a small tile, of half the rows, take half the clocks, an
  instruction as many.
- Anything takes at least what its bytes take, as if no activation stayed in the cache, and where it
  is no product its instructions, `issued` of them a clock of a processor.
- At temperature 1 the head leaves slices, and rows are drawn from them; with top-p neither is so.
- From one kernel's end to the next one's start there is a gap.

Edits and scores are launched and do nothing; host and uploads are under the step before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

from research.bench.engine.counts import count_op
from research.bench.frame import Record, Settings, run
from research.bench.gpu.counted_table import markdown
from srm.engine.config import ModelConfig
from tests.kernels.gpu.test_gpu_batches import decode_counts
from tests.kernels.gpu.test_gpu_rows import row_counts
from tests.kernels.gpu.test_products import COLUMNS, SLOTS, check, compile_kernels
from tests.kernels.gpu.test_products import run as run_product
from tests.kernels.test_sampler import Settings as Sampling
from tests.kit.ptx.lowered import LAYERS, Launch, lower
from tests.kit.ptx.ptx import compiled

TILE = (128, 256)
"""Rows and columns of a product's tile."""
PAIR = 2
"""Tiles, one below the other, that two processors compute together."""
SMALL_ROWS, FOUR, GROUP = 64, 4, 16
"""Rows of a small tile; those that four processors compute together. They have the same rows and
are taken if all of them find, in groups of so many processors, four at once."""
CLOCKS_A_TERM, CLOCKS_AN_INSTRUCTION, CLOCKS_A_SPECIAL = 16, 2, 16
"""Of a tile, whose epilogue is 256 threads': a processor issues four warps a clock, and its
unit for special functions serves 16 threads (CUDA's programming guide, compute capability 9.0)."""
TB_PER_S = {"H100": 3.0, "H200": 4.3}
"""Memory bandwidth that a copy by torch reaches."""
SLICE_BYTES = 8
"""Bytes of a slice, which the head writes for each row of a tile."""
DECODED = 4
"""Rows of `decode_counts`."""
PRODUCTS = {
    "up": "normed_up",
    "proj_in": "normed_proj_in",
    "down": "measured_down",
    "proj_out": "measured_down",
    "head": "slices",
}
"""Matrix products, and the epilogue of each, as tests/kit/ptx/product_kernels.mojo names it."""
BY_SAMPLER = {"head", "sample"}
"""Kernels whose cost depends on how rows are sampled: the head writes slices only for rows that are
drawn from them."""
NAMES = {
    **{f"srm_{name}": name for name in ("expand", "mix", "edit", "sample", "score")},
    "srm_embed_stream": "embed",
    "srm_head_sm90": "head",
}
IDLE = {"edit", "score"}
SAMPLERS = {"temperature 1": Sampling(), "top-p 0.9": Sampling(top_p=0.9)}


class CountedConfig(Settings, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm bench counted`. The defaults are an H100 that is hot."""

    cards: tuple[Literal["H100", "H200"], ...] = ("H100", "H200")
    """GPUs to count; they differ in their memory."""
    widths: tuple[int, ...] = (1024, 512)
    """Values of d_model; each model has 8 layers and a vocabulary of 8,192 tokens."""
    step_rows: tuple[int, ...] = (65_536, 4_096)
    """Rows in a step."""
    tflops: float = 650.0
    """Rate of matrix products in bfloat16, in TFLOP/s: cuBLAS's on an H100 held to 700 W."""
    processors: int = 132
    """Number of multiprocessors of a device."""
    ghz: float = 1.755
    """Clock rate of a multiprocessor, in GHz."""
    issued: float = 2.0
    """Assumed instructions of warps a clock and multiprocessor outside of products, of 4."""
    gap_us: float = 2.5
    """Assumed time between a kernel and the next, in microseconds."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(width % TILE[1] for width in self.widths):
            raise ValueError(f"widths must be multiples of {TILE[1]}, got {self.widths}")


class Code(NamedTuple):
    """Instructions and bytes that were counted in compiled code."""

    epilogues: dict[str, int]  # of each product: instructions of a thread, of a full tile
    special: dict[str, int]  # those of them that are for the special-function unit
    mix: tuple[float, float]  # of a channel of a row: instructions of warps, and bytes
    samplers: dict[str, tuple[float, float]]  # of a row: likewise
    """Keys of what is BY_SAMPLER are of `_kinds`."""


def main(argv: list[str]) -> int:
    """Count, write a record, print its tables."""
    return run(CountedConfig, argv, "counted", measure, markdown)


def measure(config: CountedConfig) -> Record:
    """Return what the code says, and a case for each card, width and number of rows."""
    code = read_code()
    graphs = lower(*(f"own:{width}" for width in config.widths))
    cases = [
        {"card": card}
        | count_step(
            width, rows, graphs[f"own:{width}"].execute.launches, code, config, TB_PER_S[card]
        )
        for card in config.cards
        for width in config.widths
        for rows in config.step_rows
    ]
    return {"code": code._asdict(), "cases": cases}


def read_code() -> Code:
    """Run the kernels whose instructions count."""
    depth, width = 256, 1024
    with TemporaryDirectory() as name:
        folder = Path(name)
        products = compile_kernels(folder)
        rows = compiled("row_kernels.mojo", folder)
        mixed = decode_counts(compiled("batch_kernels.mojo", folder), "mix", "bfloat16", width)
    epilogues, special = {}, {}
    for name, kind in PRODUCTS.items():
        for sampler in _samplers(name):
            slots = SLOTS if SAMPLERS.get(sampler) == Sampling() else SLOTS[:0]
            text = products[f"{kind} {COLUMNS} {depth}"]
            ran = run_product(text, kind, PAIR * TILE[0], depth, slots=slots)
            check(kind, ran)
            kind_of = _kind(name, sampler)
            epilogues[kind_of], special[kind_of] = ran.epilogue, ran.special
    return Code(
        epilogues=epilogues,
        special=special,
        mix=(mixed.warp_instructions / DECODED / width, sum(mixed.moved) / DECODED / width),
        samplers={
            _kind("sample", name): row_counts(rows, settings) for name, settings in SAMPLERS.items()
        },
    )


def _samplers(name: str) -> Iterable[str]:
    return SAMPLERS if name in BY_SAMPLER else [""]


def _kind(name: str, sampler: str) -> str:
    """Return the name of what a kernel does, for a way to sample if there is a difference."""
    return f"{name}, {sampler}" if sampler else name


def count_step(
    width: int,
    rows: int,
    launches: list[Launch],
    code: Code,
    config: CountedConfig,
    tb_per_s: float,
) -> dict[str, Any]:
    """Count a step of a model of that width, whose LAYERS layers launch what `launches` has."""
    model = ModelConfig(d_model=width, num_layers=8, num_heads=4, n_ctx=512, vocab_size=8192)
    names = [_name(launch) for launch in launches]
    first, head = names.index("embed") + 1, names.index("head")
    layer = names[first : first + (head - first) // LAYERS]
    step = [*names[:first], *layer * model.num_layers, *names[head:]]
    kernels: list[dict[str, Any]] = []
    for name, calls in Counter(step).items():
        launch = launches[names.index(name)]
        for sampler in _samplers(name):
            moved, busy_ns = _row(launch, sampler, model, rows, code, config)
            memory_ns = moved / tb_per_s / 1e3
            kernels.append(
                {
                    "name": _kind(name, sampler),
                    "sampler": sampler,
                    "launches": calls,
                    "bytes": calls * moved,
                    "ns": calls * max(busy_ns, memory_ns),
                    "bound": "memory" if memory_ns > busy_ns else "processors",
                }
            )
    gaps_ns = len(step) * config.gap_us * 1e3 / rows
    ns = {
        sampler: gaps_ns
        + sum(kernel["ns"] for kernel in kernels if kernel["sampler"] in {"", sampler})
        for sampler in SAMPLERS
    }
    return {
        "width": width,
        "rows": rows,
        "launches": len(step),
        "launches_a_layer": len(layer),
        "gaps_ns": gaps_ns,
        "kernels": kernels,
        "tokens_per_s": {sampler: 1e9 / taken for sampler, taken in ns.items()},
    }


def _name(launch: Launch) -> str:
    """Return the name of what is launched, as `research.bench.engine.counts` has it."""
    if launch.name == "srm_normed_sm90":
        return "up" if launch.settings["silu"] == "True" else "proj_in"
    if launch.name == "srm_stream_sm90":
        return "proj_out" if launch.settings["N"] == launch.settings["K"] else "down"
    return NAMES[launch.name]


def _row(
    launch: Launch,
    sampler: str,
    model: ModelConfig,
    rows: int,
    code: Code,
    config: CountedConfig,
) -> tuple[float, float]:
    """Return bytes that a kernel moves for a row, and nanoseconds that it has the processors."""
    name = _name(launch)
    issued_per_ns = config.processors * config.issued * config.ghz
    if name == "sample":
        instructions, moved = code.samplers[_kind(name, sampler)]
        return moved, instructions / issued_per_ns
    if name == "mix":
        instructions, moved = (model.d_model * value for value in code.mix)
        return moved, instructions / issued_per_ns
    if name in IDLE:
        return 0.0, 0.0
    flops, moved = count_op(name, model, "bfloat16", "gpu", rows)
    if name not in PRODUCTS:
        return moved / rows, 0.0
    inner, outer = int(launch.settings["K"]), int(launch.settings["N"])
    if name == "head" and SAMPLERS[sampler] == Sampling():
        moved += rows * outer // TILE[1] * SLICE_BYTES
    clusters = ceil(rows / TILE[0] / PAIR) * outer // TILE[1]
    fit = clusters <= config.processors // GROUP * (GROUP // FOUR)
    tile_rows = SMALL_ROWS if fit else TILE[0]
    clocks = CLOCKS_A_TERM * inner * tile_rows / TILE[0]
    kind = _kind(name, sampler)
    special = CLOCKS_A_SPECIAL * code.special[kind] * tile_rows / TILE[0]
    epilogue = max(CLOCKS_AN_INSTRUCTION * code.epilogues[kind], special)
    rounds = rows / tile_rows * outer / TILE[1] / config.processors
    shares = clocks / (clocks + epilogue) * rounds / ceil(rounds)
    return moved / rows, flops / rows / config.tflops / 1e3 / shares
