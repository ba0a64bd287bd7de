"""Tries a constraint before an engine gets it: whether it compiles and can be followed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import cache
from random import Random
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from srm.engine.constraints.pattern import FORMATS, LONG_FORMATS

LIMITS = LLParserLimits(verbose_errors=False)
"""How large a grammar and its states may become: the library's own limits."""
NOTHING = "no value can meet the schema"
"""How a fault begins that is the schema's own, whatever of it is enforced."""
_UNMET = "no text of the model's tokens can meet it, or to follow it takes too much"
_SHOWS_PLACE = re.compile(r"\s*(?:\^*$|[0-9]+ \| |<non-verbose/>)")
_REGEX_FAULT = re.compile(
    r"at 1\(8\): (invalid regex .*) \(in regex\): (?:regex parse error:; .*; error: )?"
)
"""Matches llguidance's message of an invalid regex, whose place is one in our own grammar."""
_EMPTY = re.compile(r"Regex is empty: .*")
_UNDECIDED = re.compile(r"Unable to determine if regex is empty.*")
_TOO_MANY_DIGITS = re.compile(r"Value for 'multipleOf' has too many digits.*")
_LIMITS_OF_FORMATS = [FORMATS[name] for name in (*LONG_FORMATS, "email")]
"""Patterns that allow less than their formats do."""
_NOT_DISJOINT = re.compile(r"patternProperty regexes .* are not disjoint")
_OVERLAP = "two patterns of patternProperties match the same name; they must exclude each other"
_WALKED = 64
"""Tokens of the walk that shows whether a constraint can be followed."""


class _Vocabulary:
    """What llguidance asks of a tokenizer. Nothing is ever encoded: it is given token ids."""

    bos_token_id = None
    unk_token_id = None

    def __init__(self, tokens: list[bytes], end_id: int) -> None:
        self.tokens = tokens
        self.eos_token_id = end_id
        self.special_token_ids = [token for token, data in enumerate(tokens) if not data]

    def __call__(self, text: str | bytes) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        ids = {spelling: token for token, spelling in enumerate(self.tokens) if len(spelling) == 1}
        return [ids[data[i : i + 1]] for i in range(len(data)) if data[i : i + 1] in ids]


def tokenizer_of(tokens: list[bytes], ends: int | Sequence[int]) -> LLTokenizer:
    """Make the tokenizer of these tokens, by id. Those without bytes are special, and so are those
    that end a text, whatever their bytes."""
    end_ids: list[int] = np.atleast_1d(ends).tolist()
    tokens = [b"" if token in end_ids else data for token, data in enumerate(tokens)]
    wrapped = TokenizerWrapper(_Vocabulary(tokens, end_ids[0]))
    return LLTokenizer(wrapped, n_vocab=len(tokens), eos_token=end_ids)


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
        going_on = allowed[~np.isin(allowed, tokenizer.eos_tokens)]
        if not len(going_on):
            if matcher.is_accepting():
                return ""
            return _UNMET
        matcher.consume_token(int(going_on[random.randrange(len(going_on))]))
    return _plain(matcher.get_error()) if matcher.is_error() else ""


def all_matches(pattern: str, texts: Iterable[str]) -> list[str] | None:
    """Return those of the texts that a pattern of JSON Schema matches, as llguidance reads it; None
    if it matches other texts too."""
    matching = matches(pattern, texts)
    matcher = _matcher(_with_pattern(pattern, matching))
    named = "".join(f"{_quote(text)}:0," for text in matching)
    matcher.consume_tokens(list(f'{{{named}"'.encode()))
    has_others = any(matcher.compute_bitmask()) and not matcher.is_error()
    return None if has_others else matching


def matches(pattern: str, texts: Iterable[str]) -> list[str]:
    """Return those of the texts that a pattern of JSON Schema matches, as llguidance reads it."""
    matcher = _matcher(_with_pattern(pattern, ()))
    spelled = {text: list(f"{{{_quote(text)}:0}}".encode()) for text in texts}
    return [text for text, data in spelled.items() if matcher.validate_tokens(data) == len(data)]


def _with_pattern(pattern: str, names: Iterable[str]) -> dict[str, Any]:
    """Return the schema of objects with these names and further ones that the pattern matches."""
    return {
        "type": "object",
        "properties": {name: {"const": 0} for name in names},
        "patternProperties": {pattern: {"const": 0}},
        "additionalProperties": False,
    }


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def is_possible(schema: dict[str, Any]) -> bool:
    """Whether llguidance finds a value that the schema allows."""
    return not _matcher(schema).is_error()


def _matcher(schema: dict[str, Any]) -> LLMatcher:
    """Return a matcher of single bytes."""
    options = {"whitespace_flexible": False}
    constraint = json.dumps({"grammars": [{"json_schema": {**schema, "x-guidance": options}}]})
    return LLMatcher(_bytes_tokenizer(), constraint, log_level=0, limits=LIMITS)


@cache
def _bytes_tokenizer() -> LLTokenizer:
    return tokenizer_of([*(bytes([byte]) for byte in range(256)), b""], 256)


def _plain(error: str) -> str:
    """Return what llguidance says, without its state and the lines that show a place."""
    lines = [line.strip() for line in error.splitlines() if not _SHOWS_PLACE.match(line)]
    fault = _REGEX_FAULT.sub(r"\1: ", "; ".join(lines))
    fault = _EMPTY.sub("no text meets its pattern, format and lengths together", fault)
    if "Regex is empty" in error and any(f"/{own}/" in error for own in _LIMITS_OF_FORMATS):
        return "no text that is made for its format meets its pattern and lengths: leave out format"
    fault = _UNDECIDED.sub(
        "to find out whether a text meets its pattern, format and lengths takes too much", fault
    )
    fault = _TOO_MANY_DIGITS.sub("multipleOf has too many digits", fault)
    fault = _NOT_DISJOINT.sub(_OVERLAP, fault)
    fault = fault.replace("Unsatisfiable schema", NOTHING)
    return _UNMET if error.startswith("NoExtension") else fault[:500]
