"""`verify`: rules that give each sample a score, as a request writes them.

What they mean, and all that msgspec does not check, is in `server.generation.verification`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from srm.errors import UNDECODABLE, InvalidRequest, cut, did_you_mean, in_words
from srm.server.schema.json_parts import MAX_VALUE_BYTES, first_byte
from srm.server.schema.validation import not_json, show

MAX_PATTERN_LENGTH = 1_000
"""Most characters of a regular expression."""
MAX_POINTER_LENGTH = 1_000
MAX_RULES = 64
"""Most rules in a list."""
MAX_WEIGHT = 1e6
MAX_USED = 10**9
"""Largest number that an expression must use."""
MAX_STRING_LENGTH = 256
"""Most characters of a string that a sample's pattern must, or must not, match."""
_SHOWN = 160
"""Most characters of what is wrong, which may repeat a name."""

_Tolerance = Annotated[float, Meta(ge=0)]
_Used = Annotated[
    list[Annotated[int, Meta(ge=0, le=MAX_USED)]], Meta(min_length=1, max_length=MAX_RULES)
]
_Strings = Annotated[
    list[Annotated[str, Meta(max_length=MAX_STRING_LENGTH)]],
    Meta(max_length=MAX_RULES),
]
_Rules = Annotated[list["Rule"], Meta(min_length=1, max_length=MAX_RULES)]


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A check of a text, which gives 1 or 0, or other rules with any, all, not or sum."""

    match: Annotated[str, Meta(min_length=1, max_length=MAX_PATTERN_LENGTH)] | None = None
    """A regular expression in RE2's syntax: what is checked is its first group, or without one what
    it finds. Without it, the whole text."""
    pointer: Annotated[str, Meta(max_length=MAX_POINTER_LENGTH)] | None = None
    """A JSON Pointer (RFC 6901): what is checked is this part of it, which must be JSON."""
    equals: Annotated[Raw, Meta(extra_json_schema={})] | UnsetType = UNSET
    """A text, or with pointer any JSON."""
    number: Annotated[Raw, Meta(extra_json_schema={"type": ["number", "string"]})] | UnsetType = (
        UNSET
    )
    """A number that it must be. In texts, $, commas and spaces are left out."""
    tolerance: _Tolerance | None = None
    """It may be so far from number."""
    relative_tolerance: _Tolerance | None = None
    """It may be so many times the size of number from it, if that is further."""
    using: _Used | None = None
    """Whole numbers. What is checked must be an expression of them by + - * / and brackets that
    uses each once, and its value must be number."""
    accepts: _Strings | None = None
    """Strings. What is checked must be a regular expression in RE2's syntax that matches each from
    end to end. White space around it is left out."""
    rejects: _Strings | None = None
    """Strings of which it must match none from end to end, alone or beside accepts."""
    any: _Rules | None = None
    """The highest score of these."""
    all: _Rules | None = None
    """The lowest score of these."""
    not_: Rule | None = msgspec.field(default=None, name="not")
    """1 minus the score of this."""
    sum: _Rules | None = None
    """The sum of the scores of these, each times its weight."""
    weight: Annotated[float, Meta(ge=-MAX_WEIGHT, le=MAX_WEIGHT)] | None = None
    """Factor of the score, only of a rule in sum; 1 if it is absent."""


VERIFY_FORMS = (
    Annotated[Rule, Meta(description="a rule, or a list with one rule for each prompt")],
    Annotated[list[Rule], Meta(min_length=1)],
)
"""Types that `verify` may have on the wire."""


def rules_of(value: Raw, num_prompts: int) -> list[Rule]:
    """Return the rules of `verify`, one for all prompts or one for each. Raises InvalidRequest
    naming the place of what is wrong."""
    if len(value) > MAX_VALUE_BYTES:
        raise InvalidRequest(
            f"verify must be in at most {MAX_VALUE_BYTES} bytes; got {show(value)}", "verify"
        )
    rules: list[Rule]
    try:
        if first_byte(value) != b"[":
            return [msgspec.json.decode(value, type=Rule)]
        rules = msgspec.json.decode(value, type=list[Rule])
    except msgspec.ValidationError as error:
        fault, known = in_words(error, "verify"), Rule.__struct_encode_fields__
        place = fault.removesuffix(" is not a field")
        near = did_you_mean(place.rpartition(".")[2], known) or f"; it may have {', '.join(known)}"
        hint = near if place != fault else ""
        must = cut(fault.partition("; got ")[0], _SHOWN)
        raise InvalidRequest(f"{must}; got {show(value)}{hint}", "verify") from None
    except UNDECODABLE as error:
        raise not_json(value, error) from None
    if len(rules) != num_prompts:
        raise InvalidRequest(
            f"verify has {len(rules)} rules and the request {num_prompts} prompts: give one rule "
            "for each, or one that is in no list for all",
            "verify",
        )
    return rules
