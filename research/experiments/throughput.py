"""`research.experiments throughput`: what a whole update costs by width, in time and memory.

An update is that of `srm train`: forward and backward passes over random token ids, clipped
gradients, AdamW. The paper's tables S1 to S7 have the same by width: parameters, memory and
throughput of training. On a CPU each case has a process of its own. A case that runs out of memory
is a row that says so.
"""

from __future__ import annotations

import gc
import os
import resource
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import ClassVar, Literal

import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F

from research.experiments.harness.models import (
    HEADS,
    MULTIPLE,
    PASSES,
    REFERENCE,
    count_flops,
    make_variant,
    model_makers,
)
from research.experiments.harness.report import draw_lines, number, table
from research.experiments.harness.result_cache import Numbers
from research.experiments.harness.runner import (
    Report,
    Results,
    in_fresh_process,
    process_bytes,
    run_cases,
)
from research.experiments.harness.settings import ExperimentSettings
from srm.engine.config import ModelConfig
from srm.training import captured
from srm.training.huggingface.units_srm import CHUNK
from srm.training.loop import Run
from srm.training.model import SRM, LanguageModel
from srm.training.precision import choose_precision
from srm.training.processes import Processes, processes
from srm.training.schedule import Schedule
from srm.training.settings import Precision

WARM_UP = captured.WARM_UP + 2
"""Updates before those that are timed: kernels are loaded, moments made, one is captured."""
WINDOWS = 5
"""Parts that the seconds of a case are divided into, each of whole updates."""
PEAK = "matrix product"
"""Case of the product that others are compared with."""
PEAK_SIDE = {"cpu": 2_048, "gpu": 8_192}
"""Rows and columns of its square matrices, by device."""
OUT_OF_MEMORY = "out of memory"
PAPER_SIZES = (16, 512, 8_000)
"""Blocks, context and vocabulary of the paper's models."""
PAPER_MILLIONS = {
    REFERENCE: {128: 4.76, 256: 14.69, 512: 50.29, 1_024: 184.40, 2_048: 704.28},
    "SRM without projections": {128: 4.23, 256: 12.59, 512: 41.89, 1_024: 150.8, 2_048: 570.0},
    "Mamba 2": {128: 5.85, 256: 19.03, 512: 69.42, 1_024: 252.3, 2_048: 974.3},
}
"""Millions of parameters by width in the paper's tables S1, S3 and S6."""
PAPER_TOKENS = {512: 412_000, 1_024: 202_000, 2_048: 65_000}
"""Tokens a second of one of the paper's two H100 NVL, by width of the SRM, in updates of 128 rows:
12.58, 6.15 and 1.99 of its samples a second, taken as such updates of both."""
PAPER_ROWS = 128
Form = Literal[
    "eager",
    "compiled",
    "captured",
    "compiled captured",
    "triton",
    "triton captured",
    "compiled triton captured",
]


class _Published(SRM):
    """An SRM whose mixers have one matrix over all tokens."""

    def forward(self, ids: Tensor, chunk: int = 0) -> Tensor:
        return super().forward(ids, chunk or ids.shape[1])


def makers(layers: int, n: int, vocab_size: int) -> dict[str, Callable[[int], LanguageModel]]:
    """Return by kind the functions from a width to a new model."""
    sizes = layers, n, vocab_size
    made = model_makers(*sizes)
    return {
        REFERENCE: made.pop(REFERENCE),
        "Transformer": made.pop("Transformer"),
        **made,
        "SRM without projections": lambda d: make_variant("mixed decay no projections", d, *sizes),
        "SRM published form": lambda d: _Published(ModelConfig(d, layers, HEADS, n, vocab_size)),
        "SRM row": lambda d: make_variant("row", d, *sizes),
        "SRM column": lambda d: make_variant("column", d, *sizes),
    }


KINDS = tuple(makers(1, 1, 1))


class ThroughputFlags(ExperimentSettings, frozen=True):
    """Flags of `python -m research.experiments throughput`."""

    LEAST_SEEDS: ClassVar[int] = 1
    device: Literal["cpu", "gpu"] = "cpu"
    """Device that trains."""
    precision: Precision = "auto"
    """Precision of the matrix products, as in `srm train pretrain`."""
    kinds: tuple[str, ...] = KINDS
    """Models to measure, in this order. SRM is the form that is trained with, of mixed heads with
    decay and projections; the others of it differ in what they are named by."""
    forms: tuple[Form, ...] = ("eager",)
    """How updates of each are made: with `compile`, `capture`, both or neither; `triton`, with
    token mixing by the Triton kernels of `training/huggingface/units_triton.py`."""
    widths: tuple[int, ...] = (128, 256, 512, 1_024, 2_048)
    """Widths to measure each at."""
    rows: int = PAPER_ROWS
    """Sequences of an update."""
    micro_batches: int = 1
    """Parts into which an update is split, to save memory."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (wrong := set(self.kinds) - set(KINDS)) or not self.kinds:
            raise ValueError(f"kinds must be some of {', '.join(KINDS)}, got {sorted(wrong)}")
        if not self.forms or (self.device == "cpu" and set(self.forms) - {"eager", "compiled"}):
            raise ValueError(f"forms must be eager or compiled on a CPU, got {self.forms}")
        if any("triton" in form for form in self.forms) and self.kinds != ("SRM",):
            raise ValueError(f"kinds must be SRM where forms have triton, got {self.kinds}")
        if any(width < 1 or width % MULTIPLE for width in self.widths) or not self.widths:
            raise ValueError(f"widths must be multiples of {MULTIPLE}, got {self.widths}")
        if not 1 <= self.micro_batches <= self.rows or self.rows % self.micro_batches:
            raise ValueError(
                f"micro_batches must be a divisor of rows = {self.rows}, got {self.micro_batches}"
            )


class Settings(ThroughputFlags, frozen=True):
    """Settings of `python -m research.experiments throughput`; sizes are the paper's."""

    seeds: tuple[int, ...] = (0,)
    threads: int = 0
    num_layers: int = 16
    n_ctx: int = 512
    vocab_size: int = 8_000
    seconds: float = 1.5
    """Least seconds that the updates of a case are timed for."""

    def make(self, kind: str, width: int) -> LanguageModel:
        """Make a model of a kind."""
        return makers(self.num_layers, self.n_ctx, self.vocab_size)[kind](width)


def measure(config: Settings, kind: str, form: Form, width: int, seed: int) -> Numbers:
    """Time whole updates; return their rate, and the most memory that they took.

    On a CPU memory is what the process gained; so each call needs a fresh process there. An error
    of torch, as where memory runs out, or that there is no Triton, is returned as `failed`.
    """
    torch.set_num_threads(config.threads or os.cpu_count() or 1)
    torch.manual_seed(seed)
    counted = count(config, kind, width)
    if config.device == "cpu":
        _limit_memory()
    else:
        gc.collect()  # an earlier case
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        with processes(config.device) as own:
            return counted | _timed(config, kind, form, width, own)
    except (RuntimeError, MemoryError, ImportError) as error:
        traceback.print_exc()
        return counted | {"failed": _reason(error)}


def count(config: Settings, kind: str, width: int) -> Numbers:
    """Count a model's parameters; none is made."""
    with torch.device("meta"):
        model = config.make(kind, width)
    return {"parameters": sum(parameter.numel() for parameter in model.parameters())}


def _timed(config: Settings, kind: str, form: Form, width: int, own: Processes) -> Numbers:
    before = process_bytes("VmRSS")
    with own.device, tempfile.TemporaryDirectory() as folder:
        schedule = Schedule(
            steps=2**31,  # more than are made, so that none is the last
            learning_rate=0.0,  # no time depends on what is learned
            warmup_steps=1,
            weight_decay=0.0,
            save_every=2**31,
            precision=config.precision,
            compile="compiled" in form,
            capture="captured" in form,
        )
        model = config.make(kind, width)
        run = Run(model, schedule, Path(folder), own, {})
        ids = torch.randint(config.vocab_size, (config.rows, config.n_ctx + 1))
        parts = [(some[:, :-1], some[:, 1:]) for some in ids.chunk(config.micro_batches)]

        def loss(part: tuple[Tensor, Tensor]) -> Tensor:
            logits = run.logits(part[0]).flatten(0, 1)
            return F.cross_entropy(logits, part[1].flatten()) / len(parts)

        update = partial(run.update, parts, loss)
        flops = config.rows * count_flops(model, config.n_ctx)
        if "triton" in form:
            assert isinstance(model, SRM)
            module = import_module(
                "srm.training.huggingface.units_triton"
            )  # only a GPU's torch has
            model.run_unit = module.run_unit
        started = time.monotonic()
        for _ in range(WARM_UP):
            update()
        warm_up_s = time.monotonic() - started
        steps, windows = 1, [_window(update, 1)]
        steps = max(1, round(config.seconds / WINDOWS / windows.pop()))
        while sum(windows) < config.seconds:
            windows.append(_window(update, steps))
    is_gpu = config.device == "gpu"
    return {
        "flops": flops,
        "precision": run.precision,
        "warm_up_s": warm_up_s,
        "updates_of_a_window": steps,
        "seconds": windows,
        "tokens_per_s": steps * config.rows * config.n_ctx / median(windows),
        "bytes": torch.cuda.max_memory_allocated() if is_gpu else process_bytes("VmHWM") - before,
    }


def _window(update: Callable[[], float], steps: int) -> float:
    """Return the seconds of some updates, until the device has made them."""
    started = time.monotonic()
    for _ in range(steps):
        update()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.monotonic() - started


def measure_peak(config: Settings, seed: int) -> Numbers:
    """Multiply large random matrices; return operations a second, the median of windows."""
    torch.set_num_threads(config.threads or os.cpu_count() or 1)
    torch.manual_seed(seed)
    side, windows = PEAK_SIDE[config.device], []
    with processes(config.device) as own:
        precision = choose_precision(config.precision, own.device.type)
        dtype = getattr(torch, precision)
        first, other = (torch.randn(side, side, device=own.device).to(dtype) for _ in range(2))
        for _ in range(1 + 2 * WINDOWS):
            started = time.monotonic()
            float((first @ other)[0, 0])  # waits for the device
            windows.append(time.monotonic() - started)
    return {"precision": precision, "flops_per_s": 2 * side**3 / median(windows[1:])}


def _limit_memory() -> None:
    """Let this process take no more than is free: else the system kills one of its own choice."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    (kib,) = (int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (process_bytes("VmData") + 1024 * kib, hard))


def _reason(error: Exception) -> str:
    """Say in a few words what stopped a case."""
    words = str(error)
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate memory" in words:
        return OUT_OF_MEMORY
    return f"{type(error).__name__}: {(words.splitlines() or [''])[0]:.80}"


def apart(config: Settings, kind: str, form: Form, width: int) -> Callable[[int], Numbers]:
    """Return the function that measures a case, on a CPU in a fresh process, which the system may
    kill."""
    measured = partial(measure, config, kind, form, width)
    if config.device == "gpu":  # whose memory is counted from nothing anew
        return measured
    in_process = in_fresh_process(measured)

    def whatever(seed: int) -> Numbers:
        try:
            return in_process(seed)
        except BrokenProcessPool:
            return count(config, kind, width) | {"failed": f"killed, as if {OUT_OF_MEMORY}"}

    return whatever


def run_all(config: Settings) -> Results:
    """Measure all cases, kind by kind."""
    cases: dict[str, Callable[[int], Numbers]] = {PEAK: partial(measure_peak, config)}
    for kind, form, width in product(config.kinds, config.forms, config.widths):
        cases[f"{_label(kind, form)} {width}"] = apart(config, kind, form, width)
    return run_cases(config, cases, {})


def _label(kind: str, form: Form) -> str:
    """Return the name of a kind's cases."""
    return kind if form == "eager" else f"{kind} {form}"


def _labels(config: Settings) -> list[str]:
    return [_label(*both) for both in product(config.kinds, config.forms)]


def page(config: Settings, results: Results) -> list[str]:
    """Return the record's text: tables by width of parameters, speed, memory and share of the
    peak."""
    peak = mean(result["flops_per_s"] for result in results[PEAK])
    heads = ["model", *(f"d {width:,}" for width in config.widths)]
    blocks = [
        f"Whole updates of {config.rows} sequences of {config.n_ctx} tokens on random ids, in "
        f"{config.micro_batches} parts, with "
        f"{config.num_layers} blocks and {config.vocab_size:,} ids: "
        "forward and backward passes, clipped gradients, AdamW, as `srm train` makes them.",
        "Parameters in millions:",
        table(heads, _size_rows(config, results)),
    ]

    def share(result: Numbers) -> float:
        a_token = result["flops"] / (config.rows * config.n_ctx)
        return float(100 * a_token * result["tokens_per_s"] / peak)

    figures: tuple[tuple[str, Callable[[Numbers], float], int], ...] = (
        ("Tokens a second, the median of windows", lambda result: result["tokens_per_s"], 0),
        ("Memory at its most, in MiB", lambda result: result["bytes"] / 2**20, 0),
        (
            f"Per cent of the {peak / 1e12:.3g} TFLOP/s of a product of square matrices of "
            f"{PEAK_SIDE[config.device]:,} rows",
            share,
            1,
        ),
    )
    for title, figure, digits in figures:
        rows = (
            [label, *(_cell(results[f"{label} {d}"], figure, digits) for d in config.widths)]
            for label in _labels(config)
        )
        blocks += [f"{title}:", table(heads, rows)]
    if config.rows == PAPER_ROWS and _has_paper_sizes(config):
        known = (f"d {d:,} {rate:,}" for d, rate in PAPER_TOKENS.items())
        blocks.append(f"The paper's SRM makes on one of its two H100 NVL: {', '.join(known)}.")
    memory = (
        "torch's allocator gave out on the GPU" if config.device == "gpu" else "the process gained"
    )
    return [
        *blocks,
        f"Operations are {PASSES} times those of the matrix products of a forward pass, as torch "
        "counts them: 6 a token for each weight of a matrix but the embedding's, and those of "
        "token mixing, triangular matrices as full ones; a matrix of SRM spans "
        f"{min(CHUNK, config.n_ctx)} tokens. Memory is what {memory}.",
    ]


def _size_rows(config: Settings, results: Results) -> list[list[str]]:
    """Return rows of parameters in millions, beside the paper's where it has the same sizes."""
    rows = []
    for kind in config.kinds:
        paper = PAPER_MILLIONS.get(kind, {})
        label = _label(kind, config.forms[0])
        sizes = [results[f"{label} {d}"][0]["parameters"] / 1e6 for d in config.widths]
        rows.append([kind, *(f"{size:.2f}" for size in sizes)])
        if paper and _has_paper_sizes(config):
            rows.append(["the paper's", *(number(paper.get(d), 2) for d in config.widths)])
    return rows


def _has_paper_sizes(config: Settings) -> bool:
    return (config.num_layers, config.n_ctx, config.vocab_size) == PAPER_SIZES


def _cell(results: list[Numbers], figure: Callable[[Numbers], float], digits: int) -> str:
    """Render the mean of a figure over seeds, or why there is none."""
    failed = [result["failed"] for result in results if "failed" in result]
    if failed:
        return str(failed[0]).replace("|", "/")
    return f"{mean(map(figure, results)):,.{digits}f}"


def draw(config: Settings, results: Results) -> Figure:
    """Plot tokens a second and memory by width, a line for each model."""
    figure, panels = plt.subplots(1, 2, figsize=(10, 4.5))
    for axes, member, unit, label in (
        (panels[0], "tokens_per_s", 1, "tokens a second"),
        (panels[1], "bytes", 2**20, "MiB at the most"),
    ):
        lines = {}
        for name in _labels(config):
            cases = {d: results[f"{name} {d}"] for d in config.widths}
            done = {d: of for d, of in cases.items() if not any("failed" in run for run in of)}
            values = [mean(run[member] for run in of) / unit for of in done.values()]
            lines[name] = [*done], values
        draw_lines(lines, axes, yscale="log", xlabel="width", ylabel=label)
        axes.set_xscale("log", base=2)
    return figure


def run(config: Settings) -> Report:
    """Measure all cases."""
    results = run_all(config)
    return results, page(config, results), draw(config, results)
