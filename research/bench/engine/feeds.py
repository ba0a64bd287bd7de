"""Input arrays for the ops of `research.bench.engine.ops`, in the order of their inputs, as in a
step.

Rows use slots of their own and are in the middle of their context; prompts begin at position 0.
Lists of edits, likeliest tokens and taps are as long as `research.bench.engine.counts` says. Of
more rows than DISTINCT, which take long to draw, the later ones repeat the first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from research.bench.engine.counts import BIASED, CLASSES, KERNEL_SIZE, SAMPLED, STATES, TOP
from srm.engine.config import ModelConfig
from srm.engine.device.linear import round_bfloat16, widen_bfloat16
from srm.engine.device.products import SLICE, moment_columns
from srm.engine.steps.batch import F32, I32, NEW_ROW, SAMPLING, Span

Array = npt.NDArray[Any]
DISTINCT = 1021
"""A prime: a kernel that takes a row of another tile for its own is found out."""


class Feeds:
    """Makes the arrays of a model of this shape; numpy has no bfloat16, only its bits."""

    def __init__(
        self, model: ModelConfig, *, is_narrow: bool, narrow_logits: bool, padding: int = 0
    ) -> None:
        """`padding` columns of -inf follow those of tokens."""
        self._model, self._is_narrow, self._narrow_logits = model, is_narrow, narrow_logits
        self._padding = padding
        self._rng = np.random.default_rng(0)

    @staticmethod
    def drawn(*shape: int) -> F32:
        """Return normally distributed numbers, of a shape the same every time."""
        return np.random.default_rng(0).standard_normal(shape, np.float32)

    def values(self, *shape: int) -> F32:
        """Return normally distributed numbers."""
        few = self._rng.standard_normal((min(shape[0], DISTINCT), *shape[1:]), np.float32)
        return np.resize(few, shape)

    def stored(self, *shape: int) -> Array:
        """Return normal numbers in the dtype of weights and activations."""
        few = self.values(min(shape[0], DISTINCT), *shape[1:])
        return np.resize(self.narrowed(few), shape)

    def narrowed(self, values: F32) -> Array:
        """Convert numbers to the dtype of weights and activations."""
        return round_bfloat16(values) if self._is_narrow else values

    def weight(self, inner: int, columns: int) -> Array:
        """Return a bound weight [inner, columns] as its dtype keeps it, the same every time."""
        return self.narrowed(self.drawn(inner, columns) / np.float32(inner**0.5))

    def normed(self, rows: int, inner: int, columns: int) -> list[Array]:
        """Return the inputs of a product that a norm is folded into; its weight is bound."""
        sums = widen_bfloat16(self.weight(inner, columns)).sum(0, dtype=np.float64)
        few = self.stored(min(rows, DISTINCT), inner)
        size = moment_columns(inner)
        parts = widen_bfloat16(few).reshape(len(few), inner // size, size)
        moments = np.stack([parts.mean(-1), parts.var(-1) * size], -1)
        of_columns = np.stack([sums, self.drawn(columns)], 1).astype(np.float32)
        x, moments = (np.resize(array, (rows, *array.shape[1:])) for array in (few, moments))
        return [x, of_columns, moments]

    def embed(self, rows: int) -> list[Array]:
        table = self.stored(self._model.vocab_size, self._model.d_model)
        return [_zeros(rows), self._tokens(rows), _slots(rows), table]

    def norm(self, rows: int) -> list[Array]:
        width = self._model.d_model
        return [self.stored(rows, width), self.stored(width), self.stored(width)]

    def mix(self, rows: int, length: int = 1) -> list[Array]:
        """Return inputs of so many tokens: sequences of one, or prompts of `length`, maybe cut."""
        model = self._model
        offsets = np.append(np.arange(0, rows, length), rows).astype(np.int32)
        slots = _slots(len(offsets) - 1)
        middle = model.n_ctx // 2 if length == 1 else 0
        scalars = [self.values(model.num_heads, model.n_ctx) for _ in range(3)]
        decay = np.array([[0.99], [1e-9]], np.float32).repeat(model.num_heads, 1)
        return [
            self.values(len(slots), model.state_width),
            np.array(model.num_layers // 2, np.int32),
            self.stored(rows, model.d_model),
            *(slots, slots, np.full(len(slots), middle, np.int32), offsets),
            *scalars,
            decay,
        ]

    def taps(self, rows: int) -> list[Array]:
        model = self._model
        x = self.stored(rows, model.d_model)
        where = [self._middle(rows), _slots(rows + 1)]
        return [x, *where, self.values(KERNEL_SIZE, model.n_ctx), self.values(model.n_ctx), x]

    def edit(self, rows: int) -> list[Array]:
        """Return inputs with biases of some tokens, and penalties for those sampled."""
        spans = np.zeros((rows, len(Span), 2), np.int32)
        spans[:, Span.BIASED] = 0, BIASED
        begins = BIASED + SAMPLED * np.arange(rows)
        spans[:, Span.SAMPLED] = np.stack([begins, begins + SAMPLED], 1)
        biased = np.unique(np.linspace(0, self._model.vocab_size - 1, BIASED).astype(np.int32))
        biased = np.resize(biased, BIASED)  # a vocabulary of fewer has some twice
        penalties = np.tile(np.array([1.0, 0.5, 0.5], np.float32), (rows, 1))
        return [
            *(_zeros(rows), self._logits(rows), self._tokens(rows), _slots(rows), _slots(rows)),
            *(spans.reshape(rows, -1), penalties),
            np.concatenate([biased, self._tokens(SAMPLED * rows)]),
            self.values(BIASED),
            _zeros(1),
        ]

    def constrain(self, rows: int) -> list[Array]:
        """Return inputs of rows in the states of one table, each of which allows a few classes."""
        records, vocab = np.zeros(rows, SAMPLING), self._model.vocab_size
        records["table"], records["last_position"] = 8, self._model.n_ctx
        records["state"] = ~(1 + np.arange(rows) % (STATES - 1))
        after = self._rng.integers(STATES, size=(STATES, CLASSES))
        after[self._rng.random(after.shape) < 0.9] = 0
        distance = np.append(2**16 - 1, np.zeros(STATES - 1))
        head = np.array([*[0] * 8, CLASSES, STATES, *[0] * 6])
        class_of = self._rng.integers(CLASSES, size=-(-vocab // 8) * 8)
        table = np.concatenate([head, class_of, after.ravel(), distance]).astype(np.uint16)
        sampling = records.view(np.int32).reshape(rows, SAMPLING.itemsize // 4)
        where: list[Array] = [self._middle(rows), _slots(rows), table]
        return [_zeros(rows), sampling, self._logits(rows), *where]

    def head(self, rows: int) -> list[Array]:
        """Return inputs of the head that leaves slices; its weight is bound."""
        return [self.stored(rows, self._model.d_model), _sampling(rows), _slots(rows)]

    def expand(self, rows: int) -> list[Array]:
        """Return inputs of decode rows of which none is new."""
        sampling = np.zeros((rows, SAMPLING.itemsize // 4), np.int32)
        new = np.full((1, NEW_ROW.itemsize // 4), -1, np.int32)
        prefill = np.array([[0, 0, 0, rows]], np.int32)
        return [sampling, _slots(rows), self._middle(rows), new, prefill, _zeros(1)]

    def sample(self, rows: int, top_p: float = 1.0) -> list[Array]:
        """Return inputs of sampling at temperature 1."""
        where = [self._middle(rows), _slots(rows)]
        return [_zeros(rows), self._logits(rows), _sampling(rows, top_p), *where]

    def sample_slices(self, rows: int, top_p: float = 1.0) -> list[Array]:
        """Return the same with the slices of the logits, as the head leaves them."""
        inputs = self.sample(rows, top_p)
        parts = widen_bfloat16(inputs[1][:DISTINCT]).reshape(min(rows, DISTINCT), -1, SLICE)
        largest = parts.max(-1)
        sums = np.exp(parts - largest[..., None]).sum(-1)
        slices = np.stack([largest, sums], -1)
        return [*inputs, np.resize(slices, (rows, *slices.shape[1:]))]

    def score(self, rows: int) -> list[Array]:
        """Return inputs that score the sampled token of every row."""
        likeliest = np.full(rows, min(TOP, self._model.vocab_size), np.int32)
        sampled = [_sampling(rows), _slots(rows), self._tokens(rows), _zeros(1)]
        return [self._logits(rows), *sampled, _slots(rows), likeliest, _zeros(1)]

    def _middle(self, rows: int) -> I32:
        return np.full(rows, self._model.n_ctx // 2, np.int32)

    def _logits(self, rows: int) -> Array:
        few = 3 * self.values(min(rows, DISTINCT), self._model.vocab_size)
        few = np.pad(few, ((0, 0), (0, self._padding)), constant_values=-np.inf)
        shape = (rows, few.shape[1])
        return np.resize(round_bfloat16(few) if self._narrow_logits else few, shape)

    def _tokens(self, count: int) -> I32:
        return self._rng.integers(self._model.vocab_size, size=count, dtype=np.int32)


def _sampling(rows: int, top_p: float = 1.0) -> I32:
    """Records of temperature 1 and seeds 0, 1, …"""
    records = np.zeros(rows, SAMPLING)
    records["temperature"], records["top_p"], records["seed"] = 1, top_p, np.arange(rows)
    return records.view(np.int32).reshape(rows, SAMPLING.itemsize // 4)


def _slots(rows: int) -> I32:
    return np.arange(rows, dtype=np.int32)


def _zeros(rows: int) -> I32:
    return np.zeros(rows, np.int32)
