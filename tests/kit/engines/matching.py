"""A matcher of bytes: whether a constraint takes a text, whatever tokens it is made of."""

from __future__ import annotations

from functools import cache
from random import Random

from llguidance import LLMatcher, LLTokenizer

from srm.engine.constraints.trial import LIMITS, tokenizer_of

BYTES = [*(bytes([byte]) for byte in range(256)), b""]
"""A vocabulary of all bytes, and the end of text."""


@cache
def byte_tokenizer() -> LLTokenizer:
    return tokenizer_of(BYTES, len(BYTES) - 1)


def accepts(constraint: str, text: str) -> bool:
    """Whether the text is one that the constraint allows, whole."""
    matcher = LLMatcher(byte_tokenizer(), constraint, log_level=0, limits=LIMITS)
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    return bool(
        matcher.validate_tokens(data) == len(data)
        and matcher.consume_tokens(data)
        and matcher.is_accepting()
    )


def draw_text(constraint: str, random: Random, longest: int) -> str | None:
    """A text that the constraint allows, with a liking for ends; None if none is so short."""
    eos = len(BYTES) - 1
    matcher = LLMatcher(byte_tokenizer(), constraint, log_level=0, limits=LIMITS)
    data = bytearray()
    while len(data) < longest and not matcher.is_error():
        mask = matcher.compute_bitmask()
        allowed = [token for token in range(eos) if mask[token // 8] >> token % 8 & 1]
        if matcher.is_accepting() and (not allowed or random.random() < 0.3):
            return data.decode()
        ends = [byte for byte in b'"}],' if byte in allowed]
        if not allowed:
            return None
        data.append(random.choice(ends if ends and random.random() < 0.4 else allowed))
        assert matcher.consume_token(data[-1])
    return None
