"""ModelRunner: binds weights to the compiled step graph and runs batches on the device.

Steps run in the order launched, on one thread beside the caller's; states are in a StatePool.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from max.driver import CPU, Buffer, Device
from max.dtype import DType
from max.engine import InferenceSession, Model

from engine.config import EngineConfig
from engine.device.gpu import open_gpu
from engine.device.graph_cache import load_or_compile
from engine.device.libc import keep_freed_memory, let_timers_be_late
from engine.device.linear import pack_linear, round_bfloat16
from engine.device.model import EDIT_INPUTS, MATRICES, SAMPLING_INPUTS, SCALARS, SCORING_INPUTS
from engine.device.processor import compile_for_level
from engine.device.state_pool import StatePool, count_slots, spare_slots
from engine.device.telemetry import turn_off_telemetry
from engine.steps.batch import (
    I64,
    NO_EDITS,
    NO_SCORES,
    Batch,
    Edits,
    Scores,
    SlotStates,
    StepResult,
    padded,
)
from engine.weights.weights import Weights, named_tensors

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step under way."""

    _future: Future[StepResult]

    def wait(self) -> StepResult:
        """Block until the step is done; raises what the device raised."""
        return self._future.result()


class ModelRunner:
    """The `Runner` that serves: MAX on a CPU or a GPU."""

    def __init__(self, weights: Weights, config: EngineConfig) -> None:
        keep_freed_memory()
        self.device = open_device(config.device)
        if config.num_slots:  # refuse too many slots before anything is compiled
            count_slots(config, weights.config, self.device)
        self.dtype = DType[config.compute_dtype]
        self._session = InferenceSession(devices=[self.device])
        self._compiled = load_or_compile(
            self._session,
            weights.config,
            self.dtype,
            self.device,
            config.cache_dir.expanduser(),
            Path(config.graphs_dir).expanduser() if config.graphs_dir else None,
        )
        self.load_weights(weights)
        self.num_slots = count_slots(config, weights.config, self.device)
        num_slots = self.num_slots + config.prefix_slots
        self._pool = StatePool(weights.config, num_slots + spare_slots(self.device), self.device)
        self._spare_slot = num_slots
        self._no_edits = self._upload_edits(NO_EDITS)
        self._thread = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="step", initializer=let_timers_be_late
        )

    def launch(self, batch: Batch) -> LaunchedStep:
        return LaunchedStep(self._thread.submit(self._run, batch))

    def read_slots(self, slots: I64) -> SlotStates:
        return self._thread.submit(self._pool.read, slots).result()

    def write_slots(self, slots: I64, states: SlotStates) -> None:
        self._thread.submit(self._pool.write, slots, states).result()

    def load_weights(self, weights: Weights) -> None:
        """Use these weights, of the compiled shape, from the next step on; compiles nothing. States
        of the old ones stay in the pool, which `Engine.load_weights` takes care of."""
        started = time.monotonic()
        registry = host_weights(weights, self.dtype, self.device)
        self._model: Model = self._session.init(self._compiled, weights_registry=registry)
        self.device.synchronize()  # it may still read what is freed next
        log.info("weights %s bound in %.2f s", weights.fingerprint, time.monotonic() - started)

    def close(self) -> None:
        """Let the step under way finish, then stop the thread."""
        self._thread.shutdown()

    def _run(self, batch: Batch) -> StepResult:
        if not self.device.is_host:  # a product of one row is summed in another order there
            batch = padded(batch, self._spare_slot)
        inputs = (
            batch.token_ids,
            batch.read_slots,
            batch.write_slots,
            batch.positions,
            batch.row_offsets,
            *(getattr(batch, name) for name in (*SAMPLING_INPUTS, *SCORING_INPUTS)),
        )
        tokens, logprobs, *scores = self._model.execute(
            self._pool.states,
            self._pool.last_token,
            *(_upload(array, self.device) for array in inputs),
            *(self._no_edits if batch.edits is NO_EDITS else self._upload_edits(batch.edits)),
        )
        found = Scores(*(one.to_numpy() for one in scores)) if len(batch.score_rows) else NO_SCORES
        return StepResult(tokens.to_numpy(), logprobs.to_numpy(), found)

    def _upload_edits(self, edits: Edits) -> list[Buffer]:
        return [_upload(getattr(edits, name), self.device) for name in EDIT_INPUTS]


def open_device(kind: str) -> Device:
    """Return the CPU or the first GPU. Raises ConfigError where there is none that could serve."""
    turn_off_telemetry()
    if kind == "cpu":
        compile_for_level()
        return CPU()
    return open_gpu()


def host_weights(weights: Weights, dtype: DType, device: Device) -> dict[str, Buffer]:
    """Return every weight by name, in the layout and dtype that the graph for this device declares;
    on the host, from where MAX copies them when it initialises a graph."""
    return {
        name: _host_weight(name, value, dtype, device) for name, value in named_tensors(weights)
    }


def _host_weight(name: str, value: Array, dtype: DType, device: Device) -> Buffer:
    kind = name.rsplit(".", maxsplit=1)[-1]
    if kind in SCALARS:
        return _buffer(value)
    if device.is_host and kind in MATRICES:
        value = pack_linear(value, dtype)
    elif dtype == DType.bfloat16:
        value = round_bfloat16(value)
    return _buffer(value).view(dtype, value.shape)  # numpy has no bfloat16, only its bits


def _upload(array: Array, device: Device) -> Buffer:
    buffer = _buffer(array)
    return buffer if device.is_host else buffer.to(device)


def _buffer(array: Array) -> Buffer:
    return Buffer.from_numpy(np.ascontiguousarray(array))
