"""A constraint's table and llguidance's masks side by side."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from srm.engine.constraints.automaton import TokenAutomaton, compile_automaton
from srm.engine.constraints.byte_table import DEAD, START
from srm.engine.constraints.closing import Openings, make_closing
from srm.engine.constraints.grammars import Grammar, spell_tokens, unforced
from srm.engine.constraints.trial import LIMITS
from srm.tokenizer_file import read_tokenizer
from tests.kit.engines.matching import BYTES, byte_tokenizer

DEMO = Path(__file__).resolve().parents[3] / "models" / "demo" / "tokenizer.json"
ALL = 2**31
"""More tokens than any text has."""


class Vocabulary:
    """A tokenizer as both ways see it."""

    def __init__(self, tokenizer: LLTokenizer, tokens: list[bytes], eos: int) -> None:
        self.tokenizer = tokenizer
        self.tokens = tokens
        self.eos = eos

    def table(self, constraint: str) -> TokenAutomaton | None:
        return compile_automaton(constraint, self.tokens, len(self.tokens), self.eos)

    def matcher(self, constraint: str) -> LLMatcher:
        return LLMatcher(self.tokenizer, unforced(constraint), log_level=0, limits=LIMITS)

    def grammar(self, constraint: str) -> Grammar:
        """A grammar that has no table, and the ends of its texts."""
        grammar = Grammar(partial(self.matcher, constraint), len(self.tokens))
        openings = Openings(self.tokens, grammar.num_words)
        grammar.closing = make_closing(constraint, self.tokenizer, openings, grammar.start)
        return grammar

    def mask(self, matcher: LLMatcher) -> npt.NDArray[np.bool_]:
        """Which tokens the matcher allows next."""
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(bits, bitorder="little")[: len(self.tokens)].astype(bool)

    def text(self, token_ids: list[int]) -> bytes:
        return b"".join(self.tokens[token] for token in token_ids)


@cache
def of_bytes() -> Vocabulary:
    return Vocabulary(byte_tokenizer(), BYTES, len(BYTES) - 1)


@cache
def of_demo() -> Vocabulary:
    tokenizer = LLTokenizer(read_tokenizer(DEMO).to_str(), n_vocab=2_048, eos_token=1)
    return Vocabulary(tokenizer, spell_tokens(tokenizer), 1)


def walk_both(
    vocabulary: Vocabulary, constraint: str, table: TokenAutomaton, random: Random, most: int
) -> bytes | None:
    """Go on with tokens that are allowed, both ways: at each step they are the same ones. Return
    the text if it is whole; None if it is not after so many tokens."""
    matcher = vocabulary.matcher(constraint)
    sampled: list[int] = []
    state = START
    for _ in range(most):
        wanted, allowed = vocabulary.mask(matcher), table.allowed(state, ALL)
        if matcher.is_error():  # a limit of the library's
            return None
        differing = np.flatnonzero(wanted != allowed)
        shown = [(vocabulary.tokens[token], bool(wanted[token])) for token in differing[:5]]
        assert not shown, f"{constraint} after {vocabulary.text(sampled)!r}: {shown}"
        token = _choose(vocabulary, np.flatnonzero(allowed), random)
        if token == vocabulary.eos:
            return vocabulary.text(sampled)
        sampled.append(token)
        state = table.walk(np.array([token], np.int32), state)
        assert state != DEAD and matcher.consume_token(token)
    return None


def _choose(vocabulary: Vocabulary, allowed: npt.NDArray[np.int64], random: Random) -> int:
    """Any one of them, with a liking for ends."""
    ends = [token for token in allowed if vocabulary.tokens[token] in (b'"', b"}", b"]", b"")]
    return int(random.choice(ends if ends and random.random() < 0.4 else allowed.tolist()))


def cover(vocabulary: Vocabulary, constraint: str, table: TokenAutomaton) -> int:
    """Go to each state by a shortest way, and one token of each class further: the allowed tokens
    are the same ones there. Return how many places that are."""
    representatives = np.unique(table.class_of, return_index=True)[1].tolist()
    places = 0
    waiting = [(START, vocabulary.matcher(constraint), b"")]
    known = {DEAD, len(table.next_state) - 1}
    for state, matcher, text in waiting:  # which grows meanwhile
        places += 1
        wanted, allowed = vocabulary.mask(matcher), table.allowed(state, ALL)
        assert not matcher.is_error(), matcher.get_error()
        differing = np.flatnonzero(wanted != allowed)
        shown = [(vocabulary.tokens[token], bool(wanted[token])) for token in differing[:5]]
        assert not shown, f"{constraint} after {text!r}: {shown}"
        if state in known:
            continue
        known.add(state)
        for token in representatives:
            after = int(table.next_state[state, table.class_of[token]])
            if after != DEAD and token != vocabulary.eos:
                following = matcher.deep_copy()
                assert following.consume_token(token)
                waiting.append((after, following, text + vocabulary.tokens[token]))
    return places
