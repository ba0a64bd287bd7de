"""One step's inputs and outputs, as arrays. R rows, T tokens, D decode rows.

Rows 0 … D - 1 decode: one token each, and each samples. Rows D … R - 1 prefill: they only move
state. A row reads a slot, writes a slot and feeds its tokens from a position on; at position 0 it
ignores what the slot that it reads holds. No slot that a row writes is read or written by another
row of the same batch.

A decode row writes the slot that it reads and feeds the token sampled there last, in the way that
the device has on record for the slot. So of most rows the host says slot and position alone; of the
first one that a sequence has in a slot it says all, and the device keeps the record from then on.

The first H >= D tokens go through the output head: those of the decode rows, and those of the
prefill rows whose prompts are scored, which come first among the prefill rows. Q of these tokens
are scored: how likely is the token that follows, and which are the likeliest instead, or how likely
are some that the request names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from srm.engine.messages import MAX_LOGPROBS

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U16 = npt.NDArray[np.uint16]
U64 = npt.NDArray[np.uint64]
F32 = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]

FROM_DEVICE = -1  # a token id that stands for "the last token sampled in the slot that is read"
SAMPLED = -1  # a target that stands for "the token that this decode row samples"

SAMPLING = np.dtype(
    [
        ("temperature", "<f4"),  # 0 is greedy
        ("top_k", "<i4"),  # 0 is off
        ("top_p", "<f4"),  # 1 is off
        ("min_p", "<f4"),  # 0 is off
        ("seed", "<u8"),  # of its random stream; the draw is a function of (seed, position)
        # What a table of `Tables` lets it sample.
        ("table", "<i4"),  # where its table begins; 0: anything
        ("last_position", "<i4"),  # where it samples its last token
        ("state", "<i4"),  # of the automaton; ~state in a sequence's first row in its slot
    ]
)
"""How a sequence samples: the record that the device keeps of its slot."""
NEW_ROW = np.dtype([("row", "<i4"), ("read_slot", "<i4"), ("token", "<i4"), ("sampling", SAMPLING)])
"""A decode row that is the first of its sequence in its slot."""
PREFILL_ROW = np.dtype([(name, "<i4") for name in ("read_slot", "write_slot", "position", "end")])
"""`end` is where its tokens end among those of the batch, and those of the next row begin."""
Records = npt.NDArray[np.void]  # of one of these dtypes


class Span(IntEnum):
    """The lists of tokens that an edited row has, in the order of its spans."""

    BIASED = 0  # each once; the bias of token i is biases[i]
    ALLOWED = 1  # if any, all others are banned
    BANNED = 2
    PAIRS = 3  # (before, token), …: a token that is banned right after another
    PROMPT = 4  # tokens that the repetition penalty also counts
    SAMPLED = 5  # so far, but for the last one: the device has it
    MASK = 6  # of `masks` instead: a bit for each token, all others being banned; empty: none


@dataclass(frozen=True, slots=True, eq=False)
class Edits:
    """Edits to the logits of E decode rows before they are sampled.

    The order is that of `mojo_kernels/srm/logits/edits.mojo`. Rows of one request share lists.
    """

    rows: I32  # i32[E] ascending
    spans: I32  # i32[E, 2 * len(Span)] start and stop of each list in `tokens`, or `masks`
    penalties: F32  # f32[E, 3] repetition (1 is off), frequency and presence (0 is off)
    tokens: I32  # i32[N] those of biased spans come first
    biases: F32  # f32[B] of tokens[:B]
    masks: I32  # i32[M] bit t % 32 of word t // 32 says whether token t is allowed


NO_EDITS = Edits(
    rows=np.empty(0, np.int32),
    spans=np.empty((0, 2 * len(Span)), np.int32),
    penalties=np.empty((0, 3), np.float32),
    tokens=np.empty(0, np.int32),
    biases=np.empty(0, np.float32),
    masks=np.empty(0, np.int32),
)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One step's work for the device."""

    sequence_ids: I64  # i64[D] who each decode row belongs to: a slot may change owner meanwhile
    slots: I32  # i32[D] slot of each decode row
    positions: I32  # i32[D] context position of the token that it feeds
    ends: Bool  # bool[D] this is the sequence's last allowed token
    new: Records  # NEW_ROW[N] of decode rows, ascending
    # The first element of the next two, and of `targets`, stands for the decode rows. The end of
    # their tokens is D.
    prefill: Records  # PREFILL_ROW[1 + R - D]
    token_ids: I32  # i32[1 + T - D] FROM_DEVICE, then the tokens of prefill rows
    scored_ids: I64  # i64[C] first sequence id of each prompt scored, by prefill rows D … D + C - 1
    targets: I32  # i32[1 + H - D] what follows each token: SAMPLED, then the prompts' tokens
    score_rows: I32  # i32[Q] tokens to be scored, ascending: some decode rows, then D … H - 1
    num_top: I32  # i32[Q] likeliest tokens wanted, 0 … k, the setting max_logprobs; or ~i: those
    # that are listed at named[i]
    named: I32  # i32[*] lists of tokens, each behind its length, at most k
    edits: Edits = NO_EDITS
    has_tables: bool = False  # some sequences have tables, though maybe none of these
    tables: Sequence[tuple[int, U16]] = ()  # where each begins; to be put there before the step
    # Facts that the device does not need. The step may end after the next one is scheduled.
    # i64[S]: the decode rows that are a sequence's first.
    starting: I64 = field(default_factory=lambda: np.empty(0, np.int64))
    is_partial: bool = False  # other sequences run too, whose turn it is not

    @property
    def num_decode(self) -> int:
        return len(self.slots)

    @property
    def num_rows(self) -> int:
        return len(self.slots) + len(self.prefill) - 1

    @property
    def num_tokens(self) -> int:
        return len(self.slots) + len(self.token_ids) - 1

    @property
    def num_scored_decode(self) -> int:
        """Decode rows that are scored; their scores come first."""
        return len(self.score_rows) - self.num_scored_prefill

    @property
    def num_scored_prefill(self) -> int:
        """Prompt tokens whose next token is scored."""
        return len(self.targets) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """How likely tokens are, and which are the likeliest; equally likely ones by id."""

    logprobs: F32  # f32[Q] of the target; NaN where the logits were not finite
    ranks: I32  # i32[Q] of the target, 1 being the likeliest; 0 where not finite
    top_ids: I32  # i32[Q, k] the likeliest, or those named; -1 beyond them
    top_logprobs: F32  # f32[Q, k] theirs

    def as_bytes(self, start: int, stop: int, num_top: int) -> dict[str, bytes]:
        """Return the scores of rows start … stop - 1, as the fields of an Output."""
        return {
            "logprobs": self.logprobs[start:stop].tobytes(),
            "ranks": self.ranks[start:stop].tobytes(),
            "top_ids": self.top_ids[start:stop, :num_top].tobytes(),
            "top_logprobs": self.top_logprobs[start:stop, :num_top].tobytes(),
        }


NO_SCORES = Scores(
    logprobs=np.empty(0, np.float32),
    ranks=np.empty(0, np.int32),
    top_ids=np.empty((0, MAX_LOGPROBS), np.int32),
    top_logprobs=np.empty((0, MAX_LOGPROBS), np.float32),
)


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """Tokens sampled, in the order of the decode rows, and the scores of `score_rows`."""

    token_ids: I32  # i32[D] -1 where the logits were not finite
    logprobs: F32  # f32[D] of the sampled token, after temperature, before truncation
    scores: Scores = NO_SCORES


NOTHING_EDITED = Edits(
    rows=np.zeros(1, np.int32),
    spans=np.zeros((1, 2 * len(Span)), np.int32),
    penalties=np.array([[1, 0, 0]], np.float32),
    tokens=np.zeros(1, np.int32),
    biases=np.zeros(1, np.float32),
    masks=np.zeros(1, np.int32),
)
"""An edit of row 0 that changes no logit."""


GREEDY = (0, 0, 1, 0, 0, 0, 0, 0)
"""A record of SAMPLING."""
NO_NEW_ROW = np.array([(-1, 0, 0, GREEDY)], NEW_ROW)
"""Says nothing of any row."""


def padded(batch: Batch, spare_slot: int, rows: int = 0, new: int = 0) -> Batch:
    """The same step as a GPU wants it: no array is empty, and two tokens at least are fed and pass
    the output head, because there a product of one row is summed in another order. With `rows`, a
    step that only decodes gets so many decode rows and room for `new` new ones.

    What is added changes nothing: rows at position 0 of `spare_slot`, which nobody has, a target
    that nobody asks for, a scored row, an edit without effect. It lies behind what is there, but
    for the decode row that a step without any gets. `unpadded` takes it out of the result.
    """
    zero = np.zeros(1, np.int32)
    if rows:
        more = rows - batch.num_decode
        batch = replace(
            batch,
            slots=np.append(batch.slots, np.full(more, spare_slot, np.int32)),
            positions=np.append(batch.positions, np.zeros(more, np.int32)),
            new=np.append(batch.new, np.repeat(NO_NEW_ROW, new - len(batch.new))),
            prefill=np.array([(0, 0, 0, rows)], PREFILL_ROW),
        )
    if not batch.num_decode:
        prefill = batch.prefill.copy()
        prefill["end"] += 1
        batch = replace(
            batch,
            slots=zero + np.int32(spare_slot),
            positions=zero,
            new=np.array([(0, spare_slot, 0, GREEDY)], NEW_ROW),
            prefill=prefill,
            score_rows=batch.score_rows + np.int32(1),
        )
    if batch.num_tokens == 1:
        spare = np.array([(spare_slot, spare_slot, 0, 2)], PREFILL_ROW)
        batch = replace(
            batch,
            prefill=np.append(batch.prefill, spare),
            token_ids=np.append(batch.token_ids, zero),
        )
    if batch.num_decode + batch.num_scored_prefill == 1:
        batch = replace(batch, targets=np.append(batch.targets, zero))
    if not len(batch.new):
        batch = replace(batch, new=NO_NEW_ROW)
    if not len(batch.score_rows):
        batch = replace(batch, score_rows=zero, num_top=zero)
    if not len(batch.named):
        batch = replace(batch, named=zero)
    own = {field.name: getattr(batch.edits, field.name) for field in fields(Edits)}
    missing = {name: getattr(NOTHING_EDITED, name) for name, array in own.items() if not len(array)}
    return replace(batch, edits=replace(batch.edits, **missing))


def unpadded(result: StepResult, batch: Batch) -> StepResult:
    """Return the step's result from the result of the same step `padded`."""
    decode, scored = batch.num_decode, len(batch.score_rows)
    scores = (getattr(result.scores, field.name)[:scored] for field in fields(Scores))
    return StepResult(result.token_ids[:decode], result.logprobs[:decode], Scores(*scores))


@dataclass(frozen=True, slots=True, eq=False)
class SlotStates:
    """All that the device keeps of some sequences, and that they need to go on."""

    states: npt.NDArray[np.floating[Any]]  # f32[k, state_width], of the runner's own precision
    last_tokens: I32  # i32[k] what FROM_DEVICE stands for

    def __len__(self) -> int:
        return len(self.last_tokens)

    def only(self, places: slice | I64) -> SlotStates:
        """Select the sequences at these places; those of a slice share memory."""
        return SlotStates(self.states[places], self.last_tokens[places])

    @staticmethod
    def join(parts: Sequence[SlotStates]) -> SlotStates:
        """Join parts, in their order."""
        return SlotStates(
            np.concatenate([part.states for part in parts]),
            np.concatenate([part.last_tokens for part in parts]),
        )


class Launched(Protocol):
    """A step under way on the device."""

    def wait(self) -> StepResult: ...


class Runner(Protocol):
    """Runs batches: `engine.device.runner.ModelRunner`, `engine.pytorch.runner.TorchRunner` and
    `tests.kit.engines.numpy_runner`."""

    @property
    def num_slots(self) -> int:
        """Slots of its pool: batches read and write slots 0 … num_slots - 1."""
        ...

    @property
    def arithmetic(self) -> str:
        """All that decides how a sum is rounded: device, dtype and a GPU's matrix product."""
        ...

    def launch(self, batch: Batch) -> Launched:
        """Enqueue a step and return at once; steps run in the order launched."""
        ...

    def read_slots(self, slots: I64) -> SlotStates:
        """Return what the pool holds of these slots, once all steps launched have run."""
        ...

    def write_slots(self, slots: I64, states: SlotStates) -> None:
        """Put these states into these slots, after all steps launched and before the next one."""
        ...

    def copy_slots(self, read: I64, write: I64) -> None:
        """Copy the states of slots `read` into slots `write`, after all steps launched and before
        the next one, and return at once. What fails is raised by the next copy."""
        ...

    def bind_weights(self, weights: Any) -> Any:
        """Return these `Weights`, of the same configuration, as `use_weights` takes them. For any
        thread, while steps are under way."""
        ...

    def use_weights(self, bound: Any) -> None:
        """Use what `bind_weights` returned from the next step on. All steps launched have been
        waited for."""
        ...

    def close(self) -> None:
        """Let the steps under way finish, and stop."""
        ...
