"""Tries a constraint before an engine gets it: whether it compiles and can be followed."""

from __future__ import annotations

import re
from random import Random

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

LIMITS = LLParserLimits(verbose_errors=False)
"""How large a grammar and its states may become: the library's own limits."""
_UNMET = "no text of the model's tokens can meet it, or to follow it takes too much"
_SHOWS_PLACE = re.compile(r"\s*(?:\^*$|[0-9]+ \| |<non-verbose/>)")
_REGEX_FAULT = re.compile(
    r"at 1\(8\): (invalid regex .*) \(in regex\): (?:regex parse error:; .*; error: )?"
)
"""Matches llguidance's message of an invalid regex, whose place is one in our own grammar."""
_WALKED = 64
"""Tokens of the walk that shows whether a constraint can be followed."""


class _Vocabulary:
    """What llguidance asks of a tokenizer. Nothing is ever encoded: it is given token ids."""

    bos_token_id = None
    unk_token_id = None

    def __init__(self, tokens: list[bytes], eos_token_id: int) -> None:
        self.tokens = tokens
        self.eos_token_id = eos_token_id
        self.special_token_ids = [token for token, data in enumerate(tokens) if not data]

    def __call__(self, text: str | bytes) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        ids = {spelling: token for token, spelling in enumerate(self.tokens) if len(spelling) == 1}
        return [ids[data[i : i + 1]] for i in range(len(data)) if data[i : i + 1] in ids]


def tokenizer_of(tokens: list[bytes], eos_token_id: int) -> LLTokenizer:
    """Make the tokenizer of these tokens, by id. Those without bytes are special, and so is the one
    that ends a text, whatever its bytes."""
    tokens = [*tokens[:eos_token_id], b"", *tokens[eos_token_id + 1 :]]
    wrapped = TokenizerWrapper(_Vocabulary(tokens, eos_token_id))
    return LLTokenizer(wrapped, n_vocab=len(tokens), eos_token=eos_token_id)


def why_not(constraint: str, tokenizer: LLTokenizer) -> str:
    """Return why no completion can meet the constraint, or why it takes too much; empty: neither.

    A short walk of allowed tokens shows what llguidance finds out only on its way."""
    matcher = LLMatcher(tokenizer, constraint, log_level=0, limits=LIMITS)
    random = Random(constraint)
    for _ in range(_WALKED):
        if matcher.is_error():
            return _plain(matcher.get_error())
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        going_on = allowed[allowed != tokenizer.eos_token]
        if not len(going_on):
            if matcher.is_accepting():
                return ""
            return _UNMET
        matcher.consume_token(int(going_on[random.randrange(len(going_on))]))
    return _plain(matcher.get_error()) if matcher.is_error() else ""


def _plain(error: str) -> str:
    """Return what llguidance says, without its state and the lines that show a place."""
    lines = [line.strip() for line in error.splitlines() if not _SHOWS_PLACE.match(line)]
    fault = _REGEX_FAULT.sub(r"\1: ", "; ".join(lines))
    return _UNMET if error.startswith("NoExtension") else fault[:500]
