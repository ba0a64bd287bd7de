"""Grammars: what a sequence may sample where that is constrained, and how far each one is in its.

llguidance compiles a constraint for a tokenizer and keeps the state of each text. Which tokens may
follow depends on the constraint and the tokens so far alone. So a sequence that was parked, forked
or restored needs nothing of its own kept: its matcher is made again of its tokens. A constraint
that is regular and small enough has a table too, which allows the same tokens.
"""

from __future__ import annotations

import ctypes
import json
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache, partial
from itertools import islice
from operator import attrgetter
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakSet

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import consume_token_par, fill_next_token_bitmask_par

from srm.cores import available_cores
from srm.engine.config import ModelConfig
from srm.engine.constraints.automaton import TokenAutomaton, compile_automaton
from srm.engine.constraints.closing import (
    BITS,
    UNKNOWN,
    Closing,
    Looks,
    Openings,
    Reach,
    make_closing,
)
from srm.engine.constraints.trial import LIMITS, tokenizer_of
from srm.errors import InvalidRequest, Overloaded, SRMError
from srm.memory import resident_bytes
from srm.tokenizer_file import parse_tokenizer, read_file

I32 = npt.NDArray[np.int32]
MakeTable = Callable[[str, list[bytes], int, list[int]], TokenAutomaton | None]
"""As `compile_automaton`."""
MAX_BYTES = 512 * 1024 * 1024
"""Most bytes of all grammars, kept for later requests or in use, with their tables and what they
have learnt of the texts that follow them."""
MAX_LEARNT = 32 * 1024 * 1024
"""Bytes that a grammar learns before it is compiled anew."""
RENEWED_AFTER = 10_000
"""Masks after which a grammar that fails is compiled anew: one that fails sooner is not."""
MAX_MATCHERS = 100_000
"""Most sequences whose matchers are kept between steps: one of 80 tokens takes about 14 KB."""


class Grammar:
    """A constraint, compiled."""

    def __init__(
        self,
        make: Callable[[], LLMatcher],
        vocab_size: int,
        beside: Callable[[Callable[[], object]], object] = lambda work: work(),
    ) -> None:
        """`make` compiles it. `beside` has work done whose time has no bound, by default at once.
        Raises as `make`."""
        self.automaton: TokenAutomaton | None = None
        """Its table, if it has one."""
        self._make, self._beside = make, beside
        before = resident_bytes()
        self._matcher = make()
        self.num_words = -(-vocab_size // 32)
        """Words of a mask."""
        self.first_mask: I32 = make_masks([self.start()], self.num_words)[0]
        """Mask of a text that has no token yet: i32[words]."""
        self._compiled = max(0, resident_bytes() - before)
        self.learnt = 0
        """Bytes by which the process grew while texts followed it."""
        self._renewed_at = 0
        self._is_asked = False
        self._fresh: LLMatcher | None = None
        self.closing: Closing | None = None
        """How texts that are JSON end before their last token where they are masked."""

    @property
    def nbytes(self) -> int:
        return self._compiled + self.learnt + (self.automaton.nbytes if self.automaton else 0)

    def ask_renewal(self) -> None:
        """Have it compiled anew beside the steps. All matchers share what it has learnt of texts,
        which takes memory and may reach one of LIMITS."""
        if not self._is_asked:
            self._is_asked = True
            self._beside(self._renew)

    def may_be_renewed(self, num_masks: int) -> bool:
        """Whether that may help, by the number of masks made ever: it was long ago."""
        return num_masks - self._renewed_at >= RENEWED_AFTER

    def take_renewed(self, num_masks: int) -> list[LLMatcher]:
        """Go on with what was compiled anew, if it is there; return what it was before, which
        goes with its matchers to `release`."""
        fresh, self._fresh = self._fresh, None
        if fresh is None:
            return []
        before, self._matcher = self._matcher, fresh
        self.learnt, self._renewed_at, self._is_asked = 0, num_masks, False
        return [before]

    def release(self, matchers: list[LLMatcher]) -> None:
        """Free what matchers held; the caller has no others of them."""
        self._beside(partial(_free, matchers))

    def _renew(self) -> None:
        self._fresh = self._make()

    def start(self, token_ids: bytes = b"") -> LLMatcher:
        """Return a matcher for a text of these tokens, int32."""
        matcher = self._matcher.deep_copy()
        if token_ids:
            matcher.consume_tokens(np.frombuffer(token_ids, "<i4").tolist())
        return matcher


class Grammars:
    """Compiles constraints for one model's tokenizer."""

    def __init__(self, model: ModelConfig, tokenizer: Path | None) -> None:
        """`tokenizer`: a `tokenizer.json`, which is read now, since it may be changed later, and
        made use of when a constraint is first compiled. Raises CheckpointError if it cannot be
        read."""
        self._model = model
        self._path = tokenizer
        self._data = read_file(tokenizer) if tokenizer and tokenizer.exists() else None
        self._tokenizer: LLTokenizer | None = None
        self.tokens: list[bytes] = []
        """The bytes of each token, once a constraint was compiled; those of a special one are
        empty."""
        self._openings: Openings | None = None
        self._kept: OrderedDict[str, Grammar] = OrderedDict()
        self._all = WeakSet[Grammar]()  # those in use too
        self._lock = Lock()
        self.beside: Callable[[Callable[[], object]], object] = lambda work: work()
        """Has work done that steps are not to wait for; by default at once."""
        self.shown_bytes = 0
        """`nbytes` as of the last `make_room`."""

    @property
    def nbytes(self) -> int:
        """Bytes of all that are kept or in use."""
        return sum(grammar.nbytes for grammar in self._all)

    def has(self, constraint: str) -> bool:
        """Whether `compile` has nothing to do for it."""
        return constraint in self._kept

    def compile(self, constraint: str) -> Grammar:
        """Return the grammar of a constraint, which is JSON as llguidance has it.

        Raises InvalidRequest, of the field `constraint`, if it cannot be compiled or the model has
        no tokenizer.
        """
        grammar = self._kept.get(constraint)
        if grammar is None:
            grammar = self.build(constraint)
            self.keep(constraint, grammar)
        self._kept.move_to_end(constraint)
        return grammar

    def build(self, constraint: str, make_table: MakeTable = compile_automaton) -> Grammar:
        """As `compile`, anew; for any thread. Raises what `make_table` does."""
        with self._lock:
            tokenizer = self._read_tokenizer()
        vocab_size = self._model.vocab_size
        written = unforced(constraint)

        def make() -> LLMatcher:
            matcher = LLMatcher(tokenizer, written, log_level=0, limits=LIMITS)
            if matcher.is_error():
                raise InvalidRequest(
                    f"constraint is not taken: {matcher.get_error()}", "constraint"
                )
            return matcher

        grammar = Grammar(make, vocab_size, self.beside)
        ends = [*self._model.end_ids]
        grammar.automaton = make_table(constraint, self.tokens, vocab_size, ends)
        if self._openings is None:
            self._openings = Openings(self.tokens, grammar.num_words)
        # A table too is left for masks where a request has min_tokens.
        grammar.closing = make_closing(constraint, tokenizer, self._openings, grammar.start)
        return grammar

    def keep(self, constraint: str, grammar: Grammar) -> None:
        """Keep it for `compile`; those that were not used for longest make room. Raises Overloaded
        if those in use leave too little for it."""
        self._kept[constraint] = grammar
        self._all.add(grammar)
        self.make_room()
        if (nbytes := self.nbytes) > MAX_BYTES and len(self._all) > 1:
            del self._kept[constraint]
            raise Overloaded(
                f"the constraints in use take {nbytes - grammar.nbytes} of {MAX_BYTES} bytes, and "
                f"this one takes {grammar.nbytes}",
                excess=1,
            )

    def make_room(self) -> Grammar | None:
        """Give up those not used for longest while all take too many bytes. If those in use do,
        return the one that has learnt most, which is to be renewed."""
        while len(self._kept) > 1 and self.nbytes > MAX_BYTES:
            self._kept.popitem(last=False)
            self.beside(partial(_free, []))
        self.shown_bytes = self.nbytes
        if self.shown_bytes <= MAX_BYTES:
            return None
        return max(self._all, key=attrgetter("learnt"))

    def _read_tokenizer(self) -> LLTokenizer:
        if self._tokenizer is None:
            if self._path is None or self._data is None:
                raise InvalidRequest(
                    "constraint must be empty: this model has no tokenizer", "constraint"
                )
            ends = self._model.end_ids
            try:
                parsed = parse_tokenizer(self._data, self._path)
                size = parsed.get_vocab_size()
                self._tokenizer = LLTokenizer(
                    parsed.to_str(),
                    n_vocab=self._model.vocab_size,
                    # It takes none of those that only the model has.
                    eos_token=[end for end in ends if end < size] or [0],
                )
            except (SRMError, ValueError) as error:
                raise InvalidRequest(f"constraint cannot be used: {error}", "constraint") from None
            self.tokens = spell_tokens(self._tokenizer)
            # An end token with bytes would be allowed within a string.
            if any(end >= size or self.tokens[end] for end in ends):
                self._tokenizer = tokenizer_of(self.tokens, ends)
        return self._tokenizer


class Matchers:
    """Where sequences stand in their grammars, by slot."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[LLMatcher, Grammar]] = {}
        self._renewing: set[Grammar] = set()
        self._reaches: dict[int, Reach] = {}
        self._ends: dict[int, tuple[int, ...]] = {}
        """Tokens with which the texts of some slots go on and end: the first is allowed now."""
        self._waiting: dict[int, None] = {}
        """Slots for whose ends no step had looks left since their last token, in turn."""
        self.num_masks = 0
        """Masks made, ever."""
        self.seconds = 0.0
        """Seconds that took, ever."""

    def forget(self, slots: Iterable[int]) -> None:
        """Drop what is known of these slots' sequences."""
        for slot in slots:
            self._of.pop(slot, None)
            self._reaches.pop(slot, None)
            self._ends.pop(slot, None)
            self._waiting.pop(slot, None)

    def next_masks(
        self, slots: list[int], tokens: list[int], find: Callable[[int], tuple[Grammar, bytes]]
    ) -> I32:
        """Return the masks, i32[slots, words], after all tokens of some sequences, at least one.

        `tokens` are the last ones, before which a slot's mask was made if it is known here. `find`
        returns the grammar and all tokens, int32, of one that is not.
        """
        started = time.perf_counter()
        at_end = np.array([*map(self._goes_on, slots, tokens)])
        masks = np.zeros((len(slots), find(slots[0])[0].num_words), np.int32)
        if at_end.any():
            rows = np.flatnonzero(at_end)
            allowed = np.array([self._ends[slots[row]][0] for row in rows.tolist()])
            masks[rows, allowed // 32] = BITS[allowed % 32]
        if not at_end.all():
            rest = np.flatnonzero(~at_end).tolist()
            own_slots, own_tokens = [slots[row] for row in rest], [tokens[row] for row in rest]
            masks[rest] = self._match(own_slots, own_tokens, find)
        self.num_masks += len(masks)
        self.seconds += time.perf_counter() - started
        return masks

    def _goes_on(self, slot: int, token: int) -> bool:
        """Whether a text goes on with its end behind this token; forgets an end that it left."""
        end = self._ends.pop(slot, ())
        if len(end) < 2 or end[0] != token:
            return False
        self._ends[slot] = end[1:]
        return True

    def _match(
        self, slots: list[int], tokens: list[int], find: Callable[[int], tuple[Grammar, bytes]]
    ) -> I32:
        """As `next_masks`, of those that do not go on with a known end."""
        held = resident_bytes()
        for grammar in list(self._renewing):
            self._take_renewed(grammar)
        known = [self._of.get(slot) for slot in slots]
        behind = [
            (own[0], token)
            for slot, own, token in zip(slots, known, tokens, strict=True)
            if own and slot not in self._waiting
        ]
        if behind:
            consume_token_par(_executor(), behind)
        self._make_missing(slots, find)
        num_words = self._of[slots[0]][1].num_words
        masks = make_masks([self._of[slot][0] for slot in slots], num_words)
        for place in np.flatnonzero(~masks.any(axis=1)).tolist():
            masks[place] = self._try_again(slots[place], find)
        self._make_missing(slots, find)  # of a grammar that was renewed
        if (grown := resident_bytes() - held) > 0:
            self._count_learnt({self._of[slot][1] for slot in slots}, grown)
        for slot in list(islice(self._of, max(0, len(self._of) - MAX_MATCHERS))):
            del self._of[slot]  # to be made again of its tokens
        return masks

    def _make_missing(self, slots: list[int], find: Callable[[int], tuple[Grammar, bytes]]) -> None:
        for slot in slots:
            if slot not in self._of:
                grammar, token_ids = find(slot)
                self._of[slot] = grammar.start(token_ids), grammar

    def _count_learnt(self, grammars: set[Grammar], num_bytes: int) -> None:
        for grammar in grammars:
            grammar.learnt += num_bytes // len(grammars)
            if grammar.learnt > MAX_LEARNT:
                self.renew(grammar)

    def renew(self, grammar: Grammar) -> None:
        """Have a grammar compiled anew, and go on with that once it is there."""
        self._renewing.add(grammar)
        grammar.ask_renewal()

    def _take_renewed(self, grammar: Grammar) -> None:
        """Go on with a grammar that was compiled anew, if it is: its matchers are made again."""
        if old := grammar.take_renewed(self.num_masks):
            self._renewing.discard(grammar)
            for slot in [slot for slot, own in self._of.items() if own[1] is grammar]:
                old.append(self._of.pop(slot)[0])
            grammar.release(old)

    def close(
        self,
        slots: list[int],
        lefts: list[int],
        lasts: list[int | None],
        masks: I32,
        grammars: Callable[[int], Grammar],
    ) -> list[int]:
        """Leave in masks only tokens after which JSON can end, in place; return the rows that wait.

        `lefts` are the tokens that each may sample, this one included; `lasts` those sampled last;
        None: there is none yet. The ends of all are sought by at most LOOKS looks. A row for which
        none are left samples nothing in this step, and is among the first in a later one.
        """
        looks, waiting = Looks(), list[int]()
        rows = [row for row, slot in enumerate(slots) if slot not in self._ends]
        if self._waiting:
            turns = {slot: turn for turn, slot in enumerate(self._waiting)}
            rows.sort(key=lambda row: turns.get(slots[row], len(turns)))
        closings = [grammars(slots[row]).closing for row in rows]
        if (any_closing := next(filter(None, closings), None)) is None:
            return []
        are_free = any_closing.openings.are_free(masks)
        for row, closing in zip(rows, closings, strict=True):
            slot, left, last = slots[row], lefts[row], lasts[row]
            self._waiting.pop(slot, None)
            known, own = self._reaches.pop(slot, UNKNOWN), self._of.get(slot)
            mask, is_free = masks[row], are_free[row]
            reach: Reach | None
            if closing is None:
                continue
            if last is None:
                reach = closing.begin(mask, is_free, left)
            elif own:
                reach = closing.restrict(mask, is_free, left, known, last, own[0], looks)
            else:
                continue
            if reach is None and closing not in looks.failed:
                self._waiting[slot], self._reaches[slot] = None, known
                waiting.append(row)
            elif reach and reach.is_forced:
                self._ends[slot] = reach.end
                self._of.pop(slot, None)
            else:
                self._reaches[slot] = reach or UNKNOWN
        return waiting

    def _try_again(self, slot: int, find: Callable[[int], tuple[Grammar, bytes]]) -> I32:
        """Return the mask of a slot whose matcher failed: by a new one, if that may help."""
        grammar, token_ids = find(slot)
        if grammar.may_be_renewed(self.num_masks):
            self.renew(grammar)
            self._take_renewed(grammar)
        self._of[slot] = grammar.start(token_ids), grammar
        mask: I32 = make_masks([self._of[slot][0]], grammar.num_words)[0]
        return mask


def _free(matchers: list[LLMatcher]) -> None:
    """Free what matchers hold, and give it back to the system: else what others learn next takes
    its place, and is not seen."""
    matchers.clear()
    with suppress(AttributeError):  # another libc
        ctypes.CDLL(None).malloc_trim(0)


def unforced(constraint: str) -> str:
    """Write a constraint so that llguidance allows all tokens that fit.

    Else it allows a single one where the text can only go on in one way: the one that the tokenizer
    would choose, which depends on the token before. A table knows states alone. Masks also take
    less time this way.
    """
    rest: list[Any] = []
    try:
        match json.loads(constraint):
            case {"grammars": [{"json_schema": schema, **others}]} if not others:
                grammar = f"start: %json {json.dumps(schema)}"
            case {"grammars": [{"lark_grammar": str(grammar), **others}, *rest]} if not others:
                pass
            case _:
                return constraint
    except ValueError:  # llguidance says what is wrong with it
        return constraint
    grammar = f'%llguidance {{"no_forcing": true}}\n{grammar}'
    return json.dumps({"grammars": [{"lark_grammar": grammar}, *rest]}, ensure_ascii=False)


def spell_tokens(tokenizer: LLTokenizer) -> list[bytes]:
    """Return the bytes of each token, by id; those of a special one are empty."""
    return [
        b"" if tokenizer.is_special_token(token) else tokenizer.decode_bytes([token])
        for token in range(tokenizer.vocab_size)
    ]


def make_masks(matchers: list[LLMatcher], num_words: int) -> I32:
    """Return which tokens each may be given next: i32[matchers, words]. Where nothing may follow,
    since a text reached one of LIMITS, no bit is set."""
    masks = np.zeros((len(matchers), num_words), np.int32)
    fill_next_token_bitmask_par(
        _executor(), list(zip(matchers, range(len(matchers)), strict=True)), masks
    )
    # A matcher that failed allows the end of the text alone; so may one that did not.
    for row in np.flatnonzero(np.count_nonzero(masks, axis=1) == 1).tolist():
        if matchers[row].is_error():
            masks[row] = 0
    return masks


@cache
def _executor() -> LLExecutor:
    return LLExecutor(num_threads=available_cores())
