"""Constraints as tables over a tokenizer's tokens, which a device follows without the host.

    constraint -> pieces -> automaton over bytes -> the smallest one -> columns of tokens -> classes

A token's column says where it leads from each state. It is made byte by byte, and equal columns are
kept once, so no table of states times tokens is ever made. Whether a constraint has a table depends
on it and on the tokenizer alone.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from srm.engine.constraints.byte_automaton import NotCompiled, Piece, Work, any_text, determinize
from srm.engine.constraints.byte_table import DEAD, FAR, START, ByteDfa, count_steps, smallest
from srm.engine.constraints.regex_pieces import regex
from srm.engine.constraints.schema_pieces import schema_piece

logger = logging.getLogger(__name__)
U16 = npt.NDArray[np.uint16]
I32 = npt.NDArray[np.int32]
Bool = npt.NDArray[np.bool_]
UNREACHABLE = 65_535
"""A distance: no tokens lead to the end of a text."""
MAX_BYTES = 8_000_000
"""Most bytes of a table's `next_state`."""
MAX_STATES = 65_534
MAX_CLASSES = 8_192
"""Most classes of tokens: as `mojo_kernels/srm/logits/constraints.mojo` has room for."""
_MAX_CELLS = 16_000_000
"""Most entries of all columns, those of beginnings of tokens included."""
_REGEX = re.compile(r"start: /((?:[^/\\\n]|\\[^\n])+)/")
_TEXT = r'"(?:[^"\\\n]|\\[^\n])*"'
_CHOICES = re.compile(rf"start: CHOICE\nCHOICE: ({_TEXT}(?: \| {_TEXT})*)")
_ESCAPES = 'nrbtf\\"'


@dataclass(frozen=True, eq=False)
class TokenAutomaton:
    """Which tokens may follow where, and where they lead."""

    next_state: U16
    """[states, classes]. The last state is the end: the text has ended."""
    class_of: U16
    """[vocab_size]"""
    distance: U16
    """[states]: the fewest tokens to the end of the text, the one that ends it counted."""

    @property
    def nbytes(self) -> int:
        return self.next_state.nbytes + self.class_of.nbytes + self.distance.nbytes

    def to_bytes(self) -> bytes:
        """Return it as `of_bytes` reads it."""
        shape = np.array(self.next_state.shape, np.uint16)
        parts = (shape, self.class_of, self.distance, self.next_state.ravel())
        return np.concatenate(parts).tobytes()

    @classmethod
    def of_bytes(cls, data: bytes, vocab_size: int) -> TokenAutomaton:
        """Read what `to_bytes` made of one for so many tokens."""
        values = np.frombuffer(data, np.uint16)
        states, classes = values[:2].tolist()
        bounds = np.cumsum([2, vocab_size, states])
        _, class_of, distance, next_state = np.split(values, bounds)
        return cls(next_state.reshape(states, classes), class_of, distance)

    def walk(self, token_ids: I32, state: int = START) -> int:
        """Return the state after these tokens; DEAD if one of them is not allowed."""
        for token in token_ids.tolist():
            state = int(self.next_state[state, self.class_of[token]])
        return state

    def allowed(self, state: int, left: int) -> Bool:
        """Return which tokens may be sampled where `left` may be, this one included: [vocab_size].
        Those after which the text cannot end in time may not."""
        after = self.next_state[state]
        by_class = (after != DEAD) & (self.distance[after] < left)
        allowed: Bool = by_class[self.class_of]
        return allowed


def compile_automaton(
    constraint: str,
    tokens: Sequence[bytes],
    vocab_size: int,
    ends: int | Sequence[int],
    work: Work | None = None,
) -> TokenAutomaton | None:
    """Make the table of a constraint that llguidance has taken; None if it has none. `tokens` are
    their bytes by id, empty where one has no text; `ends` are those that end a text.

    A bug is logged, and so is MemoryError or RecursionError; there is no table then. Masks allow
    the same tokens, so only the end at `max_tokens` differs: better than no completion.
    """
    try:
        return make_automaton(constraint, tokens, vocab_size, ends, work)
    except NotCompiled:
        return None
    except Exception:
        logger.exception("a constraint is masked on the host: its table could not be made")
        return None


def make_automaton(
    constraint: str,
    tokens: Sequence[bytes],
    vocab_size: int,
    ends: int | Sequence[int],
    work: Work | None = None,
) -> TokenAutomaton:
    """As `compile_automaton`, but raises NotCompiled, which says why."""
    work = work or Work()
    table = smallest(determinize(_read(constraint, work), work), work)
    if len(table.next_state) > MAX_STATES:
        raise NotCompiled(f"it has more than {MAX_STATES} states")
    columns, class_of = _columns(table, tokens, vocab_size, work)
    end = len(table.next_state)
    class_of[np.atleast_1d(ends)] = len(columns)
    columns.append(np.where(table.accepting, end, DEAD).astype(np.uint16))
    used, classes = np.unique(class_of, return_inverse=True)
    if len(used) > MAX_CLASSES:
        raise NotCompiled(f"its table has {len(used)} classes of tokens, more than {MAX_CLASSES}")
    if (num_bytes := 2 * (end + 1) * len(used)) > MAX_BYTES:
        raise NotCompiled(f"its table has {num_bytes} bytes, more than {MAX_BYTES}")
    next_state = np.zeros((end + 1, len(used)), np.uint16)
    next_state[:end] = np.stack([columns[number] for number in used.tolist()], axis=1)
    steps = count_steps(next_state, np.arange(end + 1) == end)
    if steps[START] == FAR:
        raise NotCompiled("no tokens spell a text that meets it")
    distance = np.where(steps == FAR, UNREACHABLE, steps).astype(np.uint16)
    return TokenAutomaton(next_state, classes.astype(np.uint16), distance)


def _columns(
    table: ByteDfa, tokens: Sequence[bytes], vocab_size: int, work: Work
) -> tuple[list[U16], npt.NDArray[np.int64]]:
    """Return different columns, [states] each, and which one is each token's."""
    by_class = np.ascontiguousarray(table.next_state.T.astype(np.uint16))
    num_states = len(table.next_state)
    byte_classes = table.class_of.tolist()
    rejected = np.zeros(num_states, np.uint16)
    columns: list[U16] = [rejected, np.arange(num_states, dtype=np.uint16)]
    numbers = {column.tobytes(): number for number, column in enumerate(columns)}
    after: dict[tuple[int, int], int] = {}
    class_of = np.zeros(vocab_size, np.int64)
    for token, text in enumerate(tokens):
        if token % 32 == 0:
            work.spend(16)
        number = 1 if text else 0
        for byte in text:
            if number == 0:
                break
            key = (number, byte_classes[byte])
            if key not in after:
                work.spend(4 + num_states // 256)
                column = by_class[key[1]][columns[number]]
                after[key] = numbers.setdefault(column.tobytes(), len(columns))
                if after[key] == len(columns):
                    columns.append(column)
                    if len(columns) * num_states > _MAX_CELLS:
                        raise NotCompiled("it has too many different columns of tokens")
            number = after[key]
        class_of[token] = number
    return columns, class_of


def _read(constraint: str, work: Work) -> Piece:
    """Return the piece of a constraint, which is as `constraint` makes them. Raises NotCompiled."""
    match _loads(constraint):
        case {"grammars": [{"json_schema": {"x-guidance": dict(options)} as schema}]}:
            return _read_schema(schema, options, work)
        case {"grammars": [{"lark_grammar": str(grammar)}]}:
            if pattern := _REGEX.fullmatch(grammar):
                return regex(pattern[1], work)
            if choices := _CHOICES.fullmatch(grammar):
                texts = re.findall(_TEXT, choices[1])
                return any_text([_loads(text).encode() for text in texts])
    raise NotCompiled("it is a grammar")


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise NotCompiled("it is a grammar") from None


def _read_schema(schema: dict[str, Any], options: dict[str, Any], work: Work) -> Piece:
    match options:
        case {
            "whitespace_flexible": False,
            "item_separator": str(comma),
            "key_separator": str(colon),
            "json_allowed_escapes": escapes,
        } if escapes == _ESCAPES and len(options) == 4:
            others = {name: value for name, value in schema.items() if name != "x-guidance"}
            return schema_piece(others, comma, colon, work)
    raise NotCompiled("it has options that are not known here")
