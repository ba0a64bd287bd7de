"""TorchRunner: runs batches in PyTorch, on a GPU of any make or a processor.

It promises the distribution of samples. Its tokens are not those of MAX, nor are they the same in
any batch: PyTorch's products are summed in an order that depends on their number of rows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from srm.engine.config import EngineConfig, ModelConfig
from srm.engine.pytorch.logits import (
    Ways,
    constrain,
    edit,
    sample,
    score,
    truncates,
    ways_of,
)
from srm.engine.pytorch.model import Rows, TorchModel, host_tensors, put
from srm.engine.state.slot_counts import count_slots
from srm.engine.state.tables import TABLE_ENTRIES
from srm.engine.steps.batch import I64, NO_SCORES, SAMPLING, Batch, Scores, SlotStates, StepResult
from srm.engine.weights.weights import Weights
from srm.errors import ConfigError

log = logging.getLogger(__name__)

BUCKETS = tuple(2**exponent for exponent in range(8, 15))
"""Rows of the steps that are captured; one that only decodes is padded to the next of them."""

Replay = Callable[[], tuple[Tensor, Tensor]]
Capture = Callable[[Replay], Replay]


class Inputs(NamedTuple):
    """The inputs of a step that only decodes; each has one entry a row."""

    reads: Tensor  # i64 slot
    writes: Tensor  # i64 slot
    positions: Tensor  # i64
    token_ids: Tensor  # i64 -1: the token sampled last in the slot that is read
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor

    @property
    def ways(self) -> Ways:
        return Ways(*self[4:])


@dataclass(frozen=True, slots=True)
class TorchStep:
    """A step under way: its results are copied to the host behind it."""

    _future: Future[tuple[StepResult, torch.cuda.Event | None]]

    def wait(self) -> StepResult:
        """Block until the step is done; raises what the device raised."""
        result, done = self._future.result()
        if done is not None:
            done.synchronize()
        return result


class TorchRunner:
    """The `Runner` for `device = torch:cuda` and `torch:cpu`. One thread launches the steps."""

    def __init__(self, weights: Weights, config: EngineConfig) -> None:
        """Raises ConfigError if PyTorch has no such device, or it has too little memory."""
        self.device, self._on_gpu = open_device(config), config.on_gpu
        config.logprobs_limit(weights.config)  # is refused; any number below it costs the same
        self.arithmetic = f"{config.device} {config.compute_dtype}"
        self._dtype = getattr(torch, config.compute_dtype)
        with torch.inference_mode():
            self._model = TorchModel(weights, self._dtype, self.device)
        free = free_memory(config, weights.config, self.device) if self._on_gpu else None
        self.num_slots = count_slots(config, weights.config, free)
        self._spare = self.num_slots + config.prefix_slots
        width, slots = weights.config.state_width, self._spare + config.on_gpu
        self._states = self._zeros((slots, width), np.float32)
        self._last_token = self._zeros((slots,), np.int64)
        self._automata = self._zeros((slots,), np.int64)
        self._tables = self._zeros((TABLE_ENTRIES,), np.int16)
        self._sampling = np.zeros(slots, SAMPLING)  # as last said; `_automata` has the states
        self._graphs: dict[tuple[int, bool], tuple[Inputs, Replay]] = {}
        self.capture: Capture | None = capture_on_gpu if self._on_gpu else None
        self._put = partial(put, device=self.device)
        self._thread = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="step", initializer=partial(select_gpu, self.device)
        )
        self._copied = self._thread.submit(lambda: None)  # the last copy of slots

    def launch(self, batch: Batch) -> TorchStep:
        return TorchStep(self._thread.submit(self._run, batch))

    def read_slots(self, slots: I64) -> SlotStates:
        return self._thread.submit(self._read, slots).result()

    def write_slots(self, slots: I64, states: SlotStates) -> None:
        self._thread.submit(self._write, slots, states).result()

    def copy_slots(self, read: I64, write: I64) -> None:
        self._copied.result()
        self._copied = self._thread.submit(lambda: self._write(write, self._read(read)))

    def bind_weights(self, weights: Weights) -> dict[str, Tensor]:
        """Make tensors of them on the host, beside those in use."""
        started = time.monotonic()
        tensors = host_tensors(weights, self._dtype)
        log.info("weights %s bound in %.2f s", weights.fingerprint, time.monotonic() - started)
        return tensors

    def use_weights(self, bound: dict[str, Tensor]) -> None:
        """Copy them over those in use. States of the old ones stay in the pool."""
        with torch.inference_mode():
            self._model.use(bound)

    def close(self) -> None:
        """Let the steps under way finish, then stop the thread."""
        self._thread.shutdown()

    @torch.inference_mode()
    def _read(self, slots: I64) -> SlotStates:
        places = self._put(slots)
        last_tokens = self._last_token[places].int().cpu().numpy()
        return SlotStates(self._states[places].cpu().numpy(), last_tokens)

    @torch.inference_mode()
    def _write(self, slots: I64, states: SlotStates) -> None:
        places = self._put(slots)
        self._states[places] = self._put(np.asarray(states.states, np.float32))
        self._last_token[places] = self._put(states.last_tokens.astype(np.int64))

    @torch.inference_mode()
    def _run(self, batch: Batch) -> tuple[StepResult, torch.cuda.Event | None]:
        inputs = self._inputs(batch)
        for start, entries in batch.tables:
            self._tables[start : start + len(entries)] = self._put(entries.view(np.int16))
        is_plain = not (
            len(batch.token_ids) > 1
            or len(batch.edits.rows)
            or len(batch.score_rows)
            or batch.has_tables
        )
        has_parts = truncates(self._sampling[batch.slots])
        if self.capture is not None and is_plain and batch.num_decode <= BUCKETS[-1]:
            tokens, logprobs = self._replay(self.capture, inputs, has_parts)
            scores: list[Tensor] = []
        else:
            on_device = Inputs(*(tensor.to(self.device) for tensor in inputs))
            tokens, logprobs, scores = self._step(batch, on_device, has_parts)
        results = [result.to("cpu", non_blocking=self._on_gpu) for result in
                   (tokens, logprobs, *scores)]  # fmt: skip
        done = None
        if self._on_gpu:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        of_rows = [result.numpy() for result in results]
        own_scores = Scores(*of_rows[2:]) if scores else NO_SCORES
        return StepResult(of_rows[0], of_rows[1], own_scores), done

    def _inputs(self, batch: Batch) -> Inputs:
        """Return the rows that decode, on the host, and keep how new ones sample."""
        new, slots = batch.new, batch.slots.astype(np.int64)
        reads, token_ids = slots.copy(), np.full(len(slots), -1, np.int64)
        reads[new["row"]], token_ids[new["row"]] = new["read_slot"], new["token"]
        of_new = slots[new["row"]]
        self._sampling[of_new] = new["sampling"]
        constrained = new["sampling"]["table"] > 0
        if constrained.any():
            states = new["sampling"]["state"][constrained].astype(np.int64)
            self._automata[self._put(of_new[constrained])] = self._put(states)
        rows = map(torch.from_numpy, (reads, slots, batch.positions.astype(np.int64), token_ids))
        return Inputs._make([*rows, *ways_of(self._sampling[batch.slots])])

    def _decode(self, inputs: Inputs, has_parts: bool) -> tuple[Tensor, Tensor]:
        """A step of rows that only decode, which is what a GPU captures."""
        known = self._last_token.index_select(0, inputs.reads)
        token_ids = torch.where(inputs.token_ids < 0, known, inputs.token_ids)
        rows = Rows(token_ids, inputs.positions, inputs.reads, inputs.writes)
        rows = replace(rows, num_logits=len(token_ids))
        logits = self._model.step(rows, self._states)
        tokens, logprobs = sample(logits, inputs.ways, inputs.positions, has_parts)
        self._last_token.index_copy_(0, inputs.writes, tokens.long())
        return tokens, logprobs

    def _step(
        self, batch: Batch, inputs: Inputs, has_parts: bool
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Any step: tokens, log-probabilities and the fields of `Scores`, if there are any."""
        decode, prefill = batch.num_decode, batch.prefill[1:]
        last = self._last_token.index_select(0, inputs.reads)
        token_ids = torch.where(inputs.token_ids < 0, last, inputs.token_ids)
        rows = Rows(token_ids, inputs.positions, inputs.reads, inputs.writes)
        if len(prefill):
            starts = np.concatenate([batch.positions, prefill["position"]]).astype(np.int64)
            ends = np.concatenate([np.arange(1, decode + 1), prefill["end"]])
            lengths = np.diff(ends, prepend=0)
            offsets = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
            rows = Rows(
                torch.cat([token_ids, self._put(batch.token_ids[1:]).long()]),
                self._put(np.repeat(starts, lengths) + offsets),
                torch.cat([inputs.reads, self._put(prefill["read_slot"]).long()]),
                torch.cat([inputs.writes, self._put(prefill["write_slot"]).long()]),
                firsts=self._put(ends - lengths),
                lasts=self._put(ends - 1),
                offsets=self._put(offsets),
                longest=int(lengths.max()),
            )
        rows = replace(rows, num_logits=decode + batch.num_scored_prefill)
        logits = self._model.step(rows, self._states)
        if len(edited := batch.edits.rows):
            places = self._put(edited.astype(np.int64))
            edit(logits, batch.edits, torch.where(inputs.token_ids < 0, last, -1)[places])
        of_decode = logits[:decode]
        if batch.has_tables:
            automata = self._automata[inputs.writes]
            before = self._last_token[inputs.writes]
            records = self._sampling[batch.slots]
            constrain(of_decode, records, automata, before, inputs.positions, self._tables)
            self._automata[inputs.writes] = automata
        tokens, logprobs = sample(of_decode, inputs.ways, inputs.positions, has_parts)
        self._last_token.index_copy_(0, inputs.writes, tokens.long())
        if not len(batch.score_rows):
            return tokens, logprobs, []
        return tokens, logprobs, [*score(logits, batch, inputs.temperature, tokens)]

    def _replay(self, capture: Capture, inputs: Inputs, has_parts: bool) -> tuple[Tensor, Tensor]:
        """Replay the captured step of the next bucket, whose further rows are the spare slot's."""
        count = len(inputs.reads)
        bucket = next(size for size in BUCKETS if size >= count)
        if (bucket, has_parts) not in self._graphs:
            fixed = Inputs._make(
                tensor.new_zeros((bucket, *tensor.shape[1:]), device=self.device)
                for tensor in inputs
            )
            fixed.reads.fill_(self._spare)
            fixed.writes.fill_(self._spare)
            replay = capture(partial(self._decode, fixed, has_parts))
            self._graphs[bucket, has_parts] = fixed, replay
        fixed, replay = self._graphs[bucket, has_parts]
        for to, tensor in zip(fixed, inputs, strict=True):
            to[:count].copy_(tensor.pin_memory() if self._on_gpu else tensor, non_blocking=True)
        fixed.reads[count:] = fixed.writes[count:] = self._spare
        fixed.positions[count:] = 0
        tokens, logprobs = replay()
        return tokens[:count].clone(), logprobs[:count].clone()

    def _zeros(self, shape: tuple[int, ...], dtype: type[np.generic]) -> Tensor:
        """On a host such memory takes no room until it is used."""
        zeros = torch.from_numpy(np.zeros(shape if not self._on_gpu else 0, dtype))
        if not self._on_gpu:
            return zeros
        try:
            return torch.zeros(shape, dtype=zeros.dtype, device=self.device)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"num_slots + prefix_slots = {self._spare} need more memory than is free on "
                f"{self.device}: {error}"
            ) from None


def capture_on_gpu(step: Replay) -> Replay:
    """Return what replays the step as one CUDA graph; it is run once before, which may load
    kernels."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()

    def replay() -> tuple[Tensor, Tensor]:
        graph.replay()
        return results

    return replay


def open_device(config: EngineConfig) -> str:
    """Return PyTorch's name of the device. Raises ConfigError if it is not there."""
    if len(config.devices) > 1:
        raise ConfigError(f"devices = {config.devices}: only srm serve starts several engines")
    if not config.on_gpu:
        return "cpu"
    number = config.devices[0] if config.devices else 0
    if number >= torch.cuda.device_count():
        raise ConfigError(
            f"device = {config.device}: PyTorch {torch.__version__} sees "
            f"{torch.cuda.device_count()} GPUs, and number {number} is asked for"
        )
    return f"cuda:{number}"


def select_gpu(device: str) -> None:
    """Have this thread run on that GPU, if it is one."""
    if device != "cpu":
        torch.cuda.set_device(device)


def free_memory(config: EngineConfig, model: ModelConfig, device: str) -> int:
    """Return the bytes that are free on a GPU besides the tables and what a step takes at most: a
    token's activations, some of them twice, and logits that are copied once."""
    free, _ = torch.cuda.mem_get_info(device)
    _, tokens = config.step_limits(model)
    of_token = 2 * (6 * model.d_model + 8 * model.d_model) + 16 * model.d_model
    return free - 2 * TABLE_ENTRIES - tokens * (of_token + 10 * model.vocab_size)
