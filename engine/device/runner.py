"""ModelRunner: binds weights to the compiled step graph and runs batches on the device.

One thread beside the caller's runs steps in the order launched, or on a GPU enqueues them
(`engine.device.gpu_steps`); states are in a StatePool.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from max.driver import CPU, Buffer, Device
from max.dtype import DType
from max.engine import InferenceSession, Model

from srm.engine.config import EngineConfig
from srm.engine.device.gpu import open_gpu
from srm.engine.device.gpu_steps import EnqueuedStep, GpuSteps, batch_inputs, edit_inputs
from srm.engine.device.graph_cache import RELEASED_GRAPHS, GraphCache
from srm.engine.device.libc import keep_freed_memory, let_timers_be_late
from srm.engine.device.linear import fold_norm, graph_dtype, pack_linear, round_bfloat16
from srm.engine.device.model import MATRICES, NORMED, SCALARS
from srm.engine.device.processor import compile_for_level, warn_of_emulation
from srm.engine.device.products import (
    FLOAT8,
    NO_VARIANTS,
    Product,
    Variants,
    choose_product,
    choose_variants,
    folds_norms,
)
from srm.engine.device.slot_copies import SlotCopies
from srm.engine.device.state_pool import StatePool, free_memory
from srm.engine.device.telemetry import turn_off_telemetry
from srm.engine.state.slot_counts import count_slots
from srm.engine.steps.batch import (
    I64,
    NO_EDITS,
    NO_SCORES,
    Batch,
    Runner,
    Scores,
    SlotStates,
    StepResult,
)
from srm.engine.weights.float8 import float8_tensors
from srm.engine.weights.huge_pages import HugePages
from srm.engine.weights.weights import Weights, named_tensors
from srm.errors import ConfigError

log = logging.getLogger(__name__)

GPU_MEMORY = ("MODULAR_DEVICE_CONTEXT_MEMORY_MANAGER_SIZE_PERCENT", "97")
"""How much of a GPU's free memory MAX keeps for itself, which it reads when it opens the device. It
would take less, and what does not fit into that is allocated far more slowly."""

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step under way on a CPU."""

    _future: Future[StepResult]

    def wait(self) -> StepResult:
        """Block until the step is done; raises what the device raised."""
        return self._future.result()


@dataclass(frozen=True, slots=True)
class LaunchedGpuStep:
    """A step under way on a GPU, or about to be enqueued by the thread of steps."""

    _thread: ThreadPoolExecutor
    _future: Future[EnqueuedStep]

    def wait(self) -> StepResult:
        """Block until steps launched meanwhile are enqueued too, and this one is done."""
        return self._thread.submit(self._future.result().wait).result()


class ModelRunner:
    """The `Runner` that serves: MAX on a CPU or a GPU. Benchmarks name `variants` of kernels."""

    def __init__(
        self, weights: Weights, config: EngineConfig, variants: Iterable[str] = ()
    ) -> None:
        keep_freed_memory()
        max_logprobs = config.logprobs_limit(weights.config)
        self.device = open_device(config.device, *config.devices)
        if config.num_slots:  # refuse too many slots before anything is compiled
            count_slots(config, weights.config, free_memory(config, weights.config, self.device))
        warn_of_emulation(config.device, config.compute_dtype)
        self.dtype = graph_dtype(config.compute_dtype)
        shipped = Path(config.graphs_dir or RELEASED_GRAPHS).expanduser()
        folder = config.cache_dir.expanduser()
        product = choose_product(config.product, weights.config, self.dtype, self.device)
        self._product = product
        chosen = choose_variants(variants, product, weights.config, self.dtype)
        self._variants = chosen
        how = (config.device, config.compute_dtype, product, *sorted(chosen))
        self.arithmetic = " ".join(filter(None, how))
        self._session = InferenceSession(devices=[self.device])
        cache = GraphCache(self._session, self.device, folder, shipped)
        self._compiled = cache.step(weights.config, self.dtype, product, max_logprobs, chosen)
        copies = None
        if not self.device.is_host:
            width = weights.config.state_width
            copies = SlotCopies(self._session, cache.slots(), width, self.device)
        self.use_weights(self.bind_weights(weights))
        free = free_memory(config, weights.config, self.device)
        self.num_slots = count_slots(config, weights.config, free)
        num_slots = self.num_slots + config.prefix_slots
        num_pool_slots = num_slots + config.on_gpu
        self._pool = StatePool(weights.config, num_pool_slots, self.device, copies)
        on_gpu = not self.device.is_host
        self._gpu_steps = GpuSteps(self.device, self._pool, num_slots) if on_gpu else None
        self._no_edits = [_buffer(edit_own_input) for edit_own_input in edit_inputs(NO_EDITS)]
        self._thread = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="step",
            initializer=None if on_gpu else let_timers_be_late,
        )
        self._enqueued: Future[EnqueuedStep]  # the last step that the thread got
        self._copied = self._thread.submit(lambda: None)  # the last copy of slots

    def launch(self, batch: Batch) -> LaunchedStep | LaunchedGpuStep | EnqueuedStep:
        steps = self._gpu_steps
        if steps is None:
            return LaunchedStep(self._thread.submit(self._run, batch))
        if steps.is_captured(self._model, batch):
            wait((self._enqueued,))  # which stand before this one on the device, as do copies
            wait((self._copied,))
            return steps.enqueue(self._model, batch)
        self._enqueued = self._thread.submit(steps.enqueue, self._model, batch)
        return LaunchedGpuStep(self._thread, self._enqueued)

    def replay_steps(self, replays: bool) -> None:
        """Replay captured steps from the next one on, or launch all; a CPU has none to replay."""
        if self._gpu_steps is not None:
            self._gpu_steps.replays = replays

    def read_slots(self, slots: I64) -> SlotStates:
        return self._thread.submit(self._pool.read, slots).result()

    def write_slots(self, slots: I64, states: SlotStates) -> None:
        self._thread.submit(self._pool.write, slots, states).result()

    def copy_slots(self, read: I64, write: I64) -> None:
        self._copied.result()
        self._copied = self._thread.submit(lambda: self._pool.write(write, self._pool.read(read)))

    def bind_weights(self, weights: Weights) -> Model | dict[str, Buffer]:
        """Pack these weights, of the compiled shape, in memory beside those in use, and on a CPU
        bind them to the graph; compiles nothing.

        A GPU's are bound by `use_weights`: its memory is taken and copied to by the thread that no
        step runs beside.
        """
        started = time.monotonic()
        how = self.dtype, self.device, self._product, self._variants
        registry = host_weights(weights, *how)
        bound = self._init(registry) if self.device.is_host else registry
        log.info("weights %s bound in %.2f s", weights.fingerprint, time.monotonic() - started)
        return bound

    def use_weights(self, bound: Model | dict[str, Buffer]) -> None:
        """Use such weights from the next step on. States of the old ones stay in the pool, which
        `Engine.load_weights` takes care of."""
        self._model: Model = self._init(bound) if isinstance(bound, dict) else bound

    def _init(self, registry: dict[str, Buffer]) -> Model:
        model = self._session.init(self._compiled, weights_registry=registry)
        self.device.synchronize()  # it may still read what is freed next
        return model

    def close(self) -> None:
        """Let the steps under way finish, then stop the thread."""
        self._thread.shutdown()
        self.device.synchronize()

    def _run(self, batch: Batch) -> StepResult:
        has_edits = batch.edits is not NO_EDITS
        edits = (
            [_buffer(edit_own_input) for edit_own_input in edit_inputs(batch.edits)]
            if has_edits
            else self._no_edits
        )
        buffers = [*(_buffer(batch_own_input) for batch_own_input in batch_inputs(batch)), *edits]
        pool = self._pool.inputs(batch)
        tokens, logprobs, *scores = self._model.execute(*pool, *buffers)
        scored = (
            Scores(*(score.to_numpy() for score in scores)) if len(batch.score_rows) else NO_SCORES
        )
        return StepResult(tokens.to_numpy(), logprobs.to_numpy(), scored)


def make_runner(weights: Weights, config: EngineConfig) -> Runner:
    """Return the runner of `config.device`. Raises ConfigError if there is no such device, and
    where PyTorch is wanted and not installed."""
    if not config.device.startswith("torch:"):
        return ModelRunner(weights, config)
    try:
        module = import_module("srm.engine.pytorch.runner")  # which nobody else needs torch for
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"device = {config.device} needs PyTorch, which is not installed ({error}): "
            f"{sys.executable} -m pip install torch, in the build for this device"
        ) from None
    runner: Runner = module.TorchRunner(weights, config)
    return runner


def open_device(kind: str, *numbers: int) -> Device:
    """Return the CPU, the GPU of this number, or the first one. Raises ConfigError where there is
    none that could serve, and for several numbers."""
    turn_off_telemetry()
    if kind == "cpu":
        compile_for_level()
        return CPU()
    os.environ.setdefault(*GPU_MEMORY)
    if len(numbers) > 1:
        raise ConfigError(f"devices = {numbers}: only srm serve starts several engines")
    return open_gpu(*numbers)


def host_weights(
    weights: Weights,
    dtype: DType,
    device: Device,
    product: Product | None = None,
    variants: Variants = NO_VARIANTS,
) -> dict[str, Buffer]:
    """Return every weight by name, in the layout and dtype that the graph for this device, product
    and variants declares; on the host, from where MAX copies them when it initialises a graph."""
    in_float8 = dtype == FLOAT8
    in_int8 = "int8" in variants
    named = dict(float8_tensors(weights, in_int8) if in_float8 else named_tensors(weights))
    if folds_norms(product, weights.config, dtype):
        norms = [(name, norm) for name, norm in NORMED.items() if not in_float8 or name != "up"]
        for layer, (name, norm) in itertools.product(range(len(weights.layers)), norms):
            parts = f"{name}_weight", f"{name}_bias", f"{norm}_weight", f"{norm}_bias"
            folded, columns = fold_norm(*(named.pop(f"layers.{layer}.{part}") for part in parts))
            named |= {f"layers.{layer}.{name}_weight": folded}
            named |= {f"layers.{layer}.{name}_columns": columns}
    pages = HugePages()
    return {name: _host_weight(name, value, dtype, device, pages) for name, value in named.items()}


def _host_weight(name: str, value: Array, dtype: DType, device: Device, pages: HugePages) -> Buffer:
    kind = name.rsplit(".", maxsplit=1)[-1]
    if kind in SCALARS or kind.endswith(("_columns", "_divisors")) or value.dtype == np.int8:
        return _buffer(value)
    if value.dtype == np.uint8:  # laid out already
        return _buffer(value).view(FLOAT8, value.shape)
    if kind in MATRICES and not device.is_host:
        value = value.T
    if kind in MATRICES and device.is_host:
        value = pages.copy(pack_linear(value, dtype))  # which MAX reads where it is
    elif dtype != DType.float32:
        dtype, value = DType.bfloat16, round_bfloat16(value)
    return _buffer(value).view(dtype, value.shape)  # numpy has no bfloat16, only its bits


def _buffer(array: Array) -> Buffer:
    return Buffer.from_numpy(np.ascontiguousarray(array))
