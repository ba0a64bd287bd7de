"""Grammars: what a sequence may sample where that is constrained, and how far each one is in its.

llguidance compiles a constraint for a tokenizer and keeps the state of each text. Which tokens may
follow depends on the constraint and the tokens so far alone. So a sequence that was parked, forked
or restored needs nothing of its own kept: its matcher is made again of its tokens. A constraint
that is regular and small enough has a table too, which allows the same tokens.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import consume_token_par, fill_next_token_bitmask_par

from srm.engine.config import ModelConfig
from srm.engine.constraints.automaton import TokenAutomaton, compile_automaton
from srm.engine.constraints.trial import LIMITS, tokenizer_of
from srm.engine.cores import available_cores
from srm.engine.errors import InvalidRequest, SRMError
from srm.engine.tokenizer_file import parse_tokenizer, read_file

I32 = npt.NDArray[np.int32]
MakeTable = Callable[[str, list[bytes], int, int], TokenAutomaton | None]
"""As `compile_automaton`."""
MAX_KEPT = 64
"""Most compiled grammars that are kept for later requests."""
MAX_KEPT_BYTES = 64 * 1024 * 1024
"""Most bytes of their tables."""

RENEWED_AFTER = 10_000
"""Masks after which a grammar that fails is compiled anew: one that fails sooner is not."""
MAX_MATCHERS = 100_000
"""Most sequences whose matchers are kept between steps: one of 80 tokens takes about 14 KB."""


class Grammar:
    """A constraint, compiled."""

    def __init__(self, make: Callable[[], LLMatcher], vocab_size: int) -> None:
        """`make` compiles it. Raises as that."""
        self.automaton: TokenAutomaton | None = None
        """Its table, if it has one."""
        self._make = make
        self._matcher = make()
        self._renewed_at = 0
        self.num_words = -(-vocab_size // 32)
        """Words of a mask."""
        self.first_mask: I32 = make_masks([self.start()], self.num_words)[0]
        """Mask of a text that has no token yet: i32[words]."""

    def renew(self, num_masks: int) -> None:
        """Compile it anew, if that was long ago by the number of masks made ever. All matchers
        share what it has learnt of texts, which may reach one of LIMITS by their number."""
        if num_masks - self._renewed_at >= RENEWED_AFTER:
            self._matcher, self._renewed_at = self._make(), num_masks

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
        self._kept: OrderedDict[str, Grammar] = OrderedDict()

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

        grammar = Grammar(make, vocab_size)
        grammar.automaton = make_table(
            constraint, self.tokens, vocab_size, self._model.eos_token_id
        )
        return grammar

    def keep(self, constraint: str, grammar: Grammar) -> None:
        """Keep it for `compile`; those that were not used for longest make room."""
        self._kept[constraint] = grammar
        tables = [own.automaton for own in self._kept.values()]
        num_bytes = sum(table.nbytes for table in tables if table)
        while len(self._kept) > MAX_KEPT or num_bytes > MAX_KEPT_BYTES:
            _, dropped = self._kept.popitem(last=False)
            num_bytes -= dropped.automaton.nbytes if dropped.automaton else 0

    def _read_tokenizer(self) -> LLTokenizer:
        if self._tokenizer is None:
            if self._path is None or self._data is None:
                raise InvalidRequest(
                    "constraint must be empty: this model has no tokenizer", "constraint"
                )
            try:
                self._tokenizer = LLTokenizer(
                    parse_tokenizer(self._data, self._path).to_str(),
                    n_vocab=self._model.vocab_size,
                    eos_token=self._model.eos_token_id,
                )
            except (SRMError, ValueError) as error:
                raise InvalidRequest(f"constraint cannot be used: {error}", "constraint") from None
            self.tokens = spell_tokens(self._tokenizer)
            if self.tokens[self._model.eos_token_id]:  # else it would be allowed within a string
                self._tokenizer = tokenizer_of(self.tokens, self._model.eos_token_id)
        return self._tokenizer


class Matchers:
    """Where sequences stand in their grammars, by slot."""

    def __init__(self) -> None:
        self._of: dict[int, LLMatcher] = {}
        self.num_masks = 0
        """Masks made, ever."""
        self.seconds = 0.0
        """Seconds that took, ever."""

    def forget(self, slots: Iterable[int]) -> None:
        """Drop what is known of these slots' sequences."""
        for slot in slots:
            self._of.pop(slot, None)

    def next_masks(
        self, slots: list[int], tokens: list[int], find: Callable[[int], tuple[Grammar, bytes]]
    ) -> I32:
        """Return the masks, i32[slots, words], after all tokens of some sequences, at least one.

        `tokens` are the last ones, before which a slot's mask was made if it is known here. `find`
        returns the grammar and all tokens, int32, of one that is not.
        """
        started = time.perf_counter()
        known = [self._of.get(slot) for slot in slots]
        behind = [(matcher, token) for matcher, token in zip(known, tokens, strict=True) if matcher]
        if behind:
            consume_token_par(_executor(), behind)
        for slot in [slot for slot, matcher in zip(slots, known, strict=True) if matcher is None]:
            grammar, token_ids = find(slot)
            self._of[slot] = grammar.start(token_ids)
        num_words = find(slots[0])[0].num_words
        masks = make_masks([self._of[slot] for slot in slots], num_words)
        for place in np.flatnonzero(~masks.any(axis=1)).tolist():
            masks[place] = self._try_again(slots[place], find)
        for slot in list(islice(self._of, max(0, len(self._of) - MAX_MATCHERS))):
            del self._of[slot]  # to be made again of its tokens
        self.num_masks += len(masks)
        self.seconds += time.perf_counter() - started
        return masks

    def _try_again(self, slot: int, find: Callable[[int], tuple[Grammar, bytes]]) -> I32:
        """Return the mask of a slot whose matcher failed: by a new one, if that may help."""
        grammar, token_ids = find(slot)
        grammar.renew(self.num_masks)
        self._of[slot] = grammar.start(token_ids)
        mask: I32 = make_masks([self._of[slot]], grammar.num_words)[0]
        return mask


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
