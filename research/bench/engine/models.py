"""The common part of engine benchmarks: models, repetitions and times, and the peaks of a run.

Knows no measurement: it is given one, and runs it for every model between two measurements of the
GEMM and memory peaks, so that every figure can be compared with the machine's limits in the same
run.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from research.bench.frame import Record, Settings, random_shape
from research.bench.peaks.gemm import GemmPeak
from research.bench.peaks.memory import measure_memory
from research.bench.peaks.rates import memory_peak, peaks
from srm.engine.config import DEMO_MODEL, Dtype, EngineConfig, ProductSetting
from srm.engine.device.libc import keep_freed_memory
from srm.engine.device.products import VariantName
from srm.engine.weights.random_model import write_random_model


class BenchConfig(Settings, frozen=True, forbid_unknown_fields=True):
    """Settings of every benchmark of models."""

    demo_model: Path = DEMO_MODEL
    """Checkpoint to measure; left out where the folder is missing."""
    random_widths: tuple[int, ...] = (512, 1024)
    """Values of d_model of further models, which have random weights."""
    device: Literal["cpu", "gpu"] = "cpu"
    """Device to measure: the processor, or the first GPU."""
    dtypes: tuple[Dtype, ...] = ("float32", "bfloat16")
    """Dtypes of matrices and activations; each is measured. A GPU has bfloat16 and float8."""
    product: ProductSetting = "auto"
    """Matrix product of a GPU, same as the engine's setting of this name."""
    variants: tuple[VariantName, ...] = ()
    """Kernels that are measured instead of today's, all in one graph; a processor has `rejection`
    alone."""
    repetitions: int = 5
    """Measurements of each figure; the median is reported, the record has all."""
    seconds: float = 1.0
    """Least time of one repetition, in seconds."""
    cache_dir: Path = EngineConfig().cache_dir
    """Folder where compiled graphs are kept between runs."""

    def __post_init__(self) -> None:
        if not self.dtypes:
            raise ValueError("dtypes must name at least one")
        device, absent = self.device, {"cpu": "float8", "gpu": "float32"}[self.device]
        if absent in self.dtypes:
            raise ValueError(f"dtypes must not have {absent} where device is {device}")
        if device == "cpu" and {*self.variants} - {"rejection"}:
            raise ValueError("variants must be rejection or none where device is cpu")
        super().__post_init__()


class StepsConfig(BenchConfig, frozen=True, forbid_unknown_fields=True):
    """Settings of benchmarks of single steps, which are of a GPU and of random models alone."""

    device: Literal["cpu", "gpu"] = "gpu"
    """Device to measure: the processor, or the first GPU."""
    dtypes: tuple[Dtype, ...] = ("bfloat16",)
    """Dtypes of matrices and activations; each is measured."""
    random_widths: tuple[int, ...] = (1024, 512)
    """Values of d_model of the models."""
    rows: tuple[int, ...] = (65_536,)
    """Rows of a step."""
    repetitions: int = 3
    """Steps, or measurements of each figure."""
    seconds: float = 0.5
    """Least time of one repetition, in seconds."""


def measure_models(config: BenchConfig, measure: Callable[[Path], dict[str, Any]]) -> Record:
    """Return `measure` of each model, and the peaks before and after."""
    keep_freed_memory()  # as an engine process does
    gemm = GemmPeak(config.device, config.cache_dir, config.dtypes)
    record: Record = _peaks_now(gemm, config, "before") | {"models": measure_each(config, measure)}
    record |= _peaks_now(gemm, config, "after")
    record["peak_gflops"] = peaks(record["gemm_before"] + record["gemm_after"])
    record["peak_gb_per_s"] = memory_peak(record["memory_before"] + record["memory_after"])
    return record


def measure_each(config: BenchConfig, measure: Callable[[Path], dict[str, Any]]) -> list[Record]:
    """Return `measure` of each model."""
    models = []
    with tempfile.TemporaryDirectory() as folder:
        paths = {"demo": config.demo_model} if config.demo_model.exists() else {}
        for width in config.random_widths:
            path = paths[f"random d {width}"] = Path(folder) / f"d{width}"
            write_random_model(path, random_shape(width))
        for name, path in paths.items():
            models.append({"name": name} | measure(path))
            gc.collect()  # a runner's memory, before the next one's
    return models


def _peaks_now(gemm: GemmPeak, config: BenchConfig, when: str) -> dict[str, Any]:
    return {
        f"gemm_{when}": gemm.measure(config.repetitions),
        f"memory_{when}": measure_memory(config.device, config.repetitions),
    }
