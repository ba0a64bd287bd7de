"""A second Runner, in float64 numpy: the meaning of a batch, small enough to be checked by eye.

It computes when waited for, not when launched, as late as a device could: a host that changes a
launched batch, or counts on a step having run, fails here. It also holds the host to the promises
in `engine/steps/batch.py`.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from mmap import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from srm.engine.config import EngineConfig, ModelConfig
from srm.engine.messages import MAX_LOGPROBS
from srm.engine.state.tables import TABLE_ENTRIES
from srm.engine.steps.batch import (
    F32,
    FROM_DEVICE,
    I32,
    I64,
    NEW_ROW,
    PREFILL_ROW,
    SAMPLED,
    SAMPLING,
    Batch,
    Edits,
    Records,
    Scores,
    SlotStates,
    Span,
    StepResult,
)
from srm.engine.weights.random_model import random_tensors
from srm.engine.weights.weights import LayerWeights, MixerUnit, Weights, fold
from tests.kernels import oracle

F64 = npt.NDArray[np.float64]
Kept = Callable[[F64], F64]

TINY = ModelConfig(d_model=16, num_layers=2, num_heads=2, n_ctx=64, vocab_size=32)
SMALL = ModelConfig(d_model=32, num_layers=2, num_heads=4, n_ctx=64, vocab_size=97)
"""Of the same shape as the published fixtures: tests of either share one compiled graph."""


def tiny_weights(seed: int = 0, config: ModelConfig = TINY) -> Weights:
    """Random weights whose tokens depend on the whole context."""
    return fold(config, random_tensors(config, seed), fingerprint=f"tiny-{seed}")


class NumpyRunner:
    """Runs batches on a pool of `num_slots` slots and `prefix_slots` more."""

    arithmetic = "cpu float32"

    def __init__(
        self, weights: Weights, num_slots: int, prefix_slots: int = EngineConfig().prefix_slots
    ) -> None:
        config = weights.config
        # Rubbish, as on a device: only a host that starts at position 0 never sees it.
        pool_slots = num_slots + prefix_slots
        self._states = np.full((pool_slots, config.state_width), np.nan)
        self._last_token = np.full(pool_slots, -9, np.int32)
        # How slots sample, as it was last sent. Rubbish: a host that does not send it is found out.
        self._sampling = np.full((pool_slots, SAMPLING.itemsize // 4), -9, np.int32)
        # A map of its own takes memory where it is written alone, whatever malloc was told before.
        self._tables = np.frombuffer(mmap(-1, 2 * TABLE_ENTRIES), np.uint16)
        self.num_slots = num_slots
        self._weights = weights
        self._launched: deque[NumpyLaunched] = deque()

    def launch(self, batch: Batch) -> NumpyLaunched:
        check_batch(batch, self._weights.config, len(self._states))
        launched = NumpyLaunched(self, batch)
        self._launched.append(launched)
        return launched

    def read_slots(self, slots: I64) -> SlotStates:
        self._run_all()
        return SlotStates(self._states[slots], self._last_token[slots])

    def write_slots(self, slots: I64, states: SlotStates) -> None:
        self._run_all()
        self._states[slots], self._last_token[slots] = states.states, states.last_tokens

    def copy_slots(self, read: I64, write: I64) -> None:
        self._run_all()
        self._states[write], self._last_token[write] = self._states[read], self._last_token[read]

    def bind_weights(self, weights: Weights) -> Weights:
        assert weights.config == self._weights.config
        return weights

    def use_weights(self, bound: Weights) -> None:
        assert not self._launched, "a step of the weights before is under way"
        self._weights = bound

    def close(self) -> None:
        self._run_all()

    def _run_all(self) -> None:
        if self._launched:
            self.run_until(self._launched[-1])

    def run_until(self, launched: NumpyLaunched) -> None:
        while launched.result is None:
            step = self._launched.popleft()
            step.result = self.run_batch(step.batch)

    def run_batch(self, batch: Batch) -> StepResult:
        # All reads come before all writes: no row may depend on another one of its batch.
        before, last_token = self._states.copy(), self._last_token.copy()
        rows, self._sampling = expanded(batch, self._sampling)
        sampling = self._sampling.view(SAMPLING)[batch.slots, 0]
        num_logits = batch.num_decode + batch.num_scored_prefill
        logits = np.zeros((num_logits, self._weights.config.vocab_size))
        for row in range(batch.num_rows):
            read, write = rows.read_slots[row], rows.write_slots[row]
            start, position = rows.row_offsets[row], int(rows.positions[row])
            state = before[read] if position else np.zeros_like(before[read])
            for offset in range(rows.row_offsets[row + 1] - start):
                token = int(rows.token_ids[start + offset])
                if token == FROM_DEVICE:
                    token = int(last_token[read])
                output, state = _fed_before(self._weights, token, position + offset, state)
                state = state.astype(np.float32).astype(np.float64)  # as a device keeps it
                if start + offset < len(logits):
                    logits[start + offset] = output
            self._states[write] = state
        for place, row in enumerate(batch.edits.rows):
            is_new = rows.token_ids[row] != FROM_DEVICE
            last = -1 if is_new else int(last_token[rows.read_slots[row]])
            logits[row] = oracle.edit(
                logits[row],
                last,
                batch.edits.spans[place],
                batch.edits.penalties[place],
                batch.edits.tokens,
                batch.edits.biases,
                batch.edits.masks,
            )
        for start, entries in batch.tables:
            self._tables[start : start + len(entries)] = entries
        for row in range(batch.num_decode if batch.has_tables else 0):
            slot, position = int(batch.slots[row]), int(batch.positions[row])
            logits[row], state = oracle.constrain(
                logits[row], sampling[row], int(last_token[slot]), position, self._tables
            )
            self._sampling.view(SAMPLING)[slot, 0]["state"] = state
        sampled = [
            sample(logits[row], sampling[row], int(batch.positions[row]))
            for row in range(batch.num_decode)
        ]
        tokens = np.array([token for token, _ in sampled], np.int32)
        self._last_token[batch.slots] = tokens
        logprobs = np.array([logprob for _, logprob in sampled], np.float32)
        return StepResult(tokens, logprobs, score(logits, batch, sampling, tokens))


class NumpyLaunched:
    """A step that runs when someone waits for it, or for a later one."""

    def __init__(self, runner: NumpyRunner, batch: Batch) -> None:
        self.batch = batch
        self.result: StepResult | None = None
        self._runner = runner

    def wait(self) -> StepResult:
        self._runner.run_until(self)
        assert self.result is not None
        return self.result


_FED: dict[tuple[int, int, int, bytes], tuple[Weights, F64, F64]] = {}
"""By identity of the weights, which the value keeps, and all else that `feed` depends on."""


def _fed_before(weights: Weights, token: int, position: int, state: F64) -> tuple[F64, F64]:
    """`feed`, remembered: tests run the same sequences in many ways."""
    key = id(weights), token, position, state.tobytes()
    if key not in _FED:
        if len(_FED) == 10_000:
            _FED.clear()
        _FED[key] = weights, *feed(weights, token, position, state)
    return _FED[key][1:]


def as_it_is(values: F64) -> F64:
    return values


def feed(
    weights: Weights,
    token: int,
    position: int,
    state: F64,
    rounding: Kept = as_it_is,
    mixers: Sequence[Callable[[F64], F64]] = (),
) -> tuple[F64, F64]:
    """One token through the model: logits f64[V] and the new state f64[state_width].

    `rounding` is what a step in a narrower dtype does to the activations that it keeps. With
    `mixers` those are the layers' channel mixers, norms included.
    """
    if not 0 <= token < weights.config.vocab_size:  # the sequence's last sample was not finite
        return np.full(weights.config.vocab_size, np.nan), np.full_like(state, np.nan)
    x = weights.embedding[token].astype(np.float64)
    left, new_states = list(state.reshape(-1, weights.config.d_model)), []
    for index, layer in enumerate(weights.layers):
        x = rounding(x + (mixers[index](x) if mixers else _mix_channels(layer, x, rounding)))
        mixed = rounding(_norm(x, layer.token_norm_weight, layer.token_norm_bias))
        if layer.proj_in_weight is not None and layer.proj_in_bias is not None:
            mixed = rounding(mixed @ layer.proj_in_weight + layer.proj_in_bias)
        mixed, states = _mix(weights.config, layer, mixed, position, left, rounding)
        left = left[len(layer.units) :]
        new_states += states
        if layer.proj_out_weight is not None and layer.proj_out_bias is not None:
            mixed = rounding(mixed) @ layer.proj_out_weight + layer.proj_out_bias
        x = rounding(x + mixed)
    return x @ weights.head, np.concatenate(new_states)


def _mix_channels(layer: LayerWeights, x: F64, rounding: Kept) -> F64:
    normed = rounding(_norm(x, layer.channel_norm_weight, layer.channel_norm_bias))
    y: F64 = rounding(silu(normed @ layer.up_weight + layer.up_bias)) @ layer.down_weight
    return y + layer.down_bias


def in_float64(part: Any, rounding: Kept = as_it_is) -> Any:
    """Weights, or a part of them, whose arrays `feed` need not widen at every token.

    Those of units are float32 in every model; what others are kept as, `rounding` says.
    """
    if isinstance(part, np.ndarray):
        return rounding(part.astype(np.float64))
    if isinstance(part, tuple):
        return tuple(in_float64(item, rounding) for item in part)
    if not isinstance(part, Weights | LayerWeights | MixerUnit):
        return part
    rounding = as_it_is if isinstance(part, MixerUnit) else rounding
    names = (field.name for field in dataclasses.fields(part))
    wide = {name: in_float64(getattr(part, name), rounding) for name in names}
    return dataclasses.replace(part, **wide)


def _mix(
    config: ModelConfig,
    layer: LayerWeights,
    x: F64,
    position: int,
    states: list[F64],
    rounding: Kept,
) -> tuple[F64, list[F64]]:
    """The layer's units, joined as the mixer joins them: output f64[d] and a new state each."""
    first, *others = layer.units
    y, s = _run_unit(first, x, position, states[0], rounding)
    if not others:
        return y, [s]
    source = x if config.mixer == "combined" else rounding(silu(y))
    z, t = _run_unit(others[0], source, position, states[1], rounding)
    return (rounding(y) + z if config.mixer == "combined" else z), [s, t]


def silu(x: F64) -> F64:
    y: F64 = x / (1 + np.exp(-x))
    return y


def _run_unit(
    unit: MixerUnit, x: F64, position: int, state: F64, rounding: Kept
) -> tuple[F64, F64]:
    def per_channel(scalars: F32) -> F64:
        return np.repeat(scalars.astype(np.float64), len(x) // len(scalars))

    s = per_channel(unit.alpha_in[:, position]) * x
    s += per_channel(unit.decay.astype(np.float64).sum(0)) * state
    y = per_channel(unit.alpha_out[:, position]) * s + per_channel(unit.beta[:, position])
    if unit.gamma is not None:
        y += per_channel(unit.gamma[:, position]) * x
    if unit.taps is not None and unit.taps_beta is not None:
        y = np.convolve(rounding(y), unit.taps[::-1, position])[: len(y)] + unit.taps_beta[position]
    return y, s


def _norm(x: F64, weight: npt.NDArray[np.float32], bias: npt.NDArray[np.float32]) -> F64:
    normed: F64 = (x - x.mean()) / np.sqrt(x.var() + 1e-5) * weight + bias
    return normed


def ints(records: Records) -> I32:
    """As a device sees them: i32[records, values]."""
    return records.view(np.int32).reshape(len(records), records.itemsize // 4)


def expanded(batch: Batch, sampling: I32 | None = None) -> tuple[oracle.Rows, I32]:
    """The rows of a batch, and how slots sample after it."""
    if sampling is None:
        sampling = np.zeros((batch.slots.max(initial=0) + 1, SAMPLING.itemsize // 4), np.int32)
    new, prefill = ints(batch.new), ints(batch.prefill)
    return oracle.expand(sampling, batch.slots, batch.positions, new, prefill, batch.token_ids)


def sample(logits: F64, sampling: np.void, position: int) -> tuple[int, float]:
    """The token drawn, or -1 if there can be none, and its log-probability."""
    temperature, top_k, top_p, min_p, seed, *_ = sampling.item()
    drawn = oracle.uniform(seed, position)
    return oracle.sample(logits, temperature, top_k, top_p, min_p, drawn)


def score(logits: F64, batch: Batch, sampling: Records, tokens: I32) -> Scores:
    """The scores of `batch.score_rows`, given how decode rows sample and what they sampled."""
    rows = batch.score_rows
    widths = [batch.named[~at] if at < 0 else at for at in batch.num_top]
    size = len(rows), max(MAX_LOGPROBS, *widths, 0)
    scores = Scores(
        logprobs=np.zeros(len(rows), np.float32),
        ranks=np.zeros(len(rows), np.int32),
        top_ids=np.full(size, -1, np.int32),
        top_logprobs=np.zeros(size, np.float32),
    )
    for i, row in enumerate(rows):
        is_decode = row < batch.num_decode
        temperature = float(sampling["temperature"][row]) if is_decode else 1.0
        target = int(tokens[row] if is_decode else batch.targets[1 + row - batch.num_decode])
        scores.logprobs[i], scores.ranks[i], likeliest = oracle.score(
            logits[row], temperature, target, int(batch.num_top[i]), batch.named.tolist()
        )
        for place, (token, logprob) in enumerate(likeliest):
            scores.top_ids[i, place], scores.top_logprobs[i, place] = token, logprob
    return scores


def check_batch(batch: Batch, config: ModelConfig, num_slots: int) -> None:
    """Assert what `engine/steps/batch.py` promises about a batch."""
    decode, new, prefill = batch.num_decode, batch.new, batch.prefill
    assert (new.dtype, prefill.dtype) == (NEW_ROW, PREFILL_ROW)
    assert batch.sequence_ids.dtype == np.int64 and len(batch.sequence_ids) == decode
    assert len(batch.positions) == len(batch.ends) == decode and batch.num_rows > 0
    assert (np.diff(new["row"]) > 0).all() and ((new["row"] >= 0) & (new["row"] < decode)).all()
    assert batch.token_ids[0] == FROM_DEVICE and prefill["end"][0] == decode
    assert batch.num_tokens == prefill["end"][-1] and (np.diff(prefill["end"]) > 0).all()
    assert all(item.dtype == np.int32 for item in (batch.slots, batch.positions, batch.token_ids))
    check_scoring(batch, config.vocab_size)
    check_edits(batch.edits, decode, config.vocab_size)
    rows, _ = expanded(batch)
    assert (rows.positions >= 0).all()
    assert (rows.positions + np.diff(rows.row_offsets) <= config.n_ctx).all()
    assert (rows.token_ids < config.vocab_size).all() and (rows.token_ids >= FROM_DEVICE).all()
    assert (batch.token_ids[1:] >= 0).all(), "a prefill row must say its tokens"
    slots = np.concatenate([rows.read_slots, rows.write_slots])
    assert slots.min() >= 0 and slots.max() < num_slots
    assert len(np.unique(rows.write_slots)) == batch.num_rows, "two rows write one slot"
    writer = {int(slot): row for row, slot in enumerate(rows.write_slots)}
    for row, slot in enumerate(rows.read_slots):
        assert writer.get(int(slot), row) == row, "a row reads a slot that another one writes"


def check_scoring(batch: Batch, vocab_size: int) -> None:
    """Assert what `engine/steps/batch.py` promises about what is scored."""
    decode, rows = batch.num_decode, batch.score_rows
    head = decode + batch.num_scored_prefill
    assert batch.scored_ids.dtype == np.int64
    assert all(array.dtype == np.int32 for array in (batch.targets, rows, batch.num_top))
    assert head == batch.prefill["end"][len(batch.scored_ids)], "no whole rows are scored"
    assert batch.targets[0] == SAMPLED
    assert (batch.targets[1:] >= 0).all() and (batch.targets[1:] < vocab_size).all()
    assert len(rows) == len(batch.num_top) and (np.diff(rows) > 0).all()
    assert rows[batch.num_scored_decode :].tolist() == list(range(decode, head))
    assert (batch.num_top[: batch.num_scored_decode] != 0).all()
    named = batch.named
    assert named.dtype == np.int32 and (batch.num_top <= max(vocab_size, MAX_LOGPROBS)).all()
    for begin in ~batch.num_top[batch.num_top < 0]:
        ids = named[begin + 1 : begin + 1 + named[begin]]
        assert len(np.unique(ids)) == len(ids) == named[begin] > 0
        assert (ids >= 0).all() and (ids < vocab_size).all()


def check_edits(edits: Edits, num_decode: int, vocab_size: int) -> None:
    """Assert what `engine/steps/batch.py` promises about edits."""
    count, rows = len(edits.rows), edits.rows
    assert edits.spans.shape == (count, 2 * len(Span)) and edits.penalties.shape == (count, 3)
    assert all(array.dtype == np.int32 for array in (rows, edits.spans, edits.tokens))
    assert edits.penalties.dtype == edits.biases.dtype == np.float32
    assert (np.diff(rows) > 0).all() and ((rows >= 0) & (rows < num_decode)).all()
    assert ((edits.tokens >= 0) & (edits.tokens < vocab_size)).all()
    starts, stops = edits.spans[:, :-2:2], edits.spans[:, 1:-2:2]
    assert ((starts >= 0) & (starts <= stops) & (stops <= len(edits.tokens))).all()
    assert not ((stops - starts)[:, Span.PAIRS] % 2).any()
    sizes = edits.spans[:, -1] - edits.spans[:, -2]
    assert edits.masks.dtype == np.int32 and np.isin(sizes, [0, -(-vocab_size // 32)]).all()
    assert ((edits.spans[:, -2] >= 0) & (edits.spans[:, -1] <= len(edits.masks))).all()
    for start, stop in edits.spans[:, :2].tolist():
        assert stop <= len(edits.biases) and len(set(edits.tokens[start:stop])) == stop - start
