"""A matcher of bytes: whether a constraint takes a text, whatever tokens it is made of."""

from __future__ import annotations

from functools import cache

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
