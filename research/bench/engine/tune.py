"""`srm tune`: which matrix product is the fastest for a model on this machine's GPU.

Every product is held against float64 and timed at the model's shapes, by `research.bench.gpu.ops`
in a
process of its own: one that fails, hangs or leaves the GPU unusable costs no other. What was found
is written beside the compiled graphs, where the engine's `product = auto` reads it.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec
from max.driver import accelerator_count
from max.dtype import DType

from research.bench.frame import check_sizes, table
from research.bench.gpu.task import Task, read_lines
from srm.engine.config import DEMO_MODEL, EngineConfig, ModelConfig
from srm.engine.device.graph_cache import ProductChoice, choice_path
from srm.engine.device.products import Product
from srm.engine.device.runner import open_device
from srm.engine.weights.checkpoint import read_model
from srm.errors import ConfigError, SRMError
from srm.settings import load

LIMIT_S = 1800
"""Most seconds that one product may take, compilation included."""


class TuneConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm tune`."""

    model: Path = DEMO_MODEL
    """Checkpoint whose shapes are measured."""
    cache_dir: Path = EngineConfig().cache_dir
    """Folder of compiled graphs and of the result: the engine's setting of this name."""
    rows: tuple[int, ...] = (64, 1024, 4096, 16_384)
    """Rows of a step to measure; all count equally."""
    repetitions: int = 5
    """Measurements of each op; the median counts."""
    seconds: float = 0.1
    """Least time of one repetition, in seconds."""

    def __post_init__(self) -> None:
        for name in ("rows", "repetitions", "seconds"):
            value = getattr(self, name)
            check_sizes(name, value if isinstance(value, tuple) else (value,))


def main(argv: list[str]) -> int:
    """Measure, print what was found and write it for the engine."""
    config = load(TuneConfig, argv, prog="srm tune")
    if accelerator_count() == 0:
        _say_why_none()
    model, cache_dir = read_model(config.model).config, config.cache_dir.expanduser()
    rates: dict[Product, list[dict[str, Any]] | str] = {
        product: measure(product, model, config, cache_dir) for product in get_args(Product)
    }
    choice = choose(model, config.rows, rates)
    sys.stdout.write("\n".join([*shown(choice), ""]))
    path = choice_path(model, DType.bfloat16, open_device("gpu"), cache_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_bytes(msgspec.json.encode(choice))
    partial.replace(path)
    sys.stdout.write(f"product = auto takes {choice.product} from now on: {path}\n")
    return 0


def _say_why_none() -> None:
    """Raises ConfigError, which does not say that a processor may be taken instead."""
    try:
        open_device("gpu")
    except ConfigError as error:
        why = re.sub("(, else|, or|;) use device = cpu$", "", error.message)
        raise ConfigError(
            f"products of a GPU are measured, on the machine with it: {why}"
        ) from None


def ops_of(model: ModelConfig) -> dict[str, int]:
    """Return what a step does in which products differ, and how often. "norm" is not there where
    it is folded."""
    layer = {"norm": 2, "up": 1, "down": 1}
    layer |= {"proj_in": 1, "proj_out": 1} if model.use_projections else {}
    return {name: model.num_layers * count for name, count in layer.items()} | {"head": 1}


def measure(
    product: Product, model: ModelConfig, config: TuneConfig, cache_dir: Path
) -> list[dict[str, Any]] | str:
    """Return what `research.bench.gpu.ops` wrote of a product, or why it came to no end."""
    with tempfile.TemporaryDirectory() as folder:
        task = Task(
            part=product,
            lines=f"{folder}/lines.jsonl",
            device="gpu",
            cache_dir=str(cache_dir),
            product=product,
            shape=model,
            rows=config.rows,
            op_rows=config.rows,
            ops=tuple(ops_of(model)),
            repetitions=config.repetitions,
            seconds=config.seconds,
        )
        command = [
            sys.executable,
            "-m",
            "research.bench.gpu.ops",
            msgspec.json.encode(task).decode(),
        ]
        try:
            done = subprocess.run(
                command, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return f"it did not end within {LIMIT_S} s"
        if done.returncode:
            output = done.stderr.strip().splitlines() or [f"exit {done.returncode}"]
            return output[-1]
        return [line for line in read_lines(Path(task.lines)) if not line.get("begun")]


def choose(
    model: ModelConfig,
    rows: Sequence[int],
    rates: Mapping[Product, Sequence[dict[str, Any]] | str],
) -> ProductChoice:
    """Return the product with the least geometric mean of times, of those that are right. Raises
    SRMError if none is."""
    seconds: dict[Product, dict[int, float]] = {}
    left_out: dict[Product, str] = {}
    for product, lines in rates.items():
        wrong = lines if isinstance(lines, str) else next(_wrong(lines), "")
        if wrong or isinstance(lines, str):
            left_out[product] = wrong
            continue
        counts = ops_of(model)
        seconds[product] = dict.fromkeys(rows, 0.0)
        for line in lines:
            seconds[product][line["rows"]] += counts[line["op"]] * line["seconds"]
    if not seconds:
        why = "; ".join(f"{product}: {reason}" for product, reason in left_out.items())
        raise SRMError(f"no product is right on this GPU: {why}")
    fastest = min(seconds, key=lambda product: math.prod(seconds[product].values()))
    return ProductChoice(fastest, seconds, left_out)


def _wrong(lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    for line in lines:
        if not line["ok"]:
            times = f"{line['error']:.3g} times"
            yield f"{line['op']} of {line['rows']} rows is off {times} as far as it may"


def shown(choice: ProductChoice) -> list[str]:
    """Render what was found."""
    rows = next(iter(choice.seconds.values()))
    lines = {
        product: [*(f"{seconds * 1e3:.3f} ms" for seconds in by_rows.values()), ""]
        for product, by_rows in choice.seconds.items()
    } | {product: [*([""] * len(rows)), why] for product, why in choice.left_out.items()}
    heads = " | ".join(["product", *(f"{count:,} rows" for count in rows), "left out"])
    return table(heads, (" | ".join([product, *cells]) for product, cells in lines.items()))
