"""Whatever a schema says, what its grammar allows is valid by another program's judgement."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, given, settings
from jsonschema import Draft202012Validator, FormatChecker
from llguidance import LLMatcher

from srm.engine.constraints.constraint import json_constraint
from srm.engine.constraints.trial import LIMITS
from srm.errors import InvalidRequest
from tests.kit.engines.matching import accepts, byte_tokenizer, draw_text
from tests.tools.fuzz_schemas import BROKEN, fates

LONGEST = 400
NAMES = st.sampled_from(["a", "b", "ab", "é", "n\n", 'q"'])
NUMBERS = st.one_of(st.integers(-20, 20), st.sampled_from([0.5, -1.25, 3.0]))
VALUES = st.one_of(NUMBERS, st.none(), st.booleans(), NAMES, st.lists(NAMES, max_size=2))
PATTERNS = st.sampled_from(["^a", "b$", "^[^a]{1,3}$", r"\d", r"^\S+$", r"^\w-\w", "a|b", "^.?$"])
SIZES = st.integers(0, 3)
FORMATS = st.sampled_from(["date", "ipv4", "uuid", "email"])
TYPES = st.sampled_from("null boolean integer number string array object".split())


def optional(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


LEAVES = st.one_of(
    st.just({"type": "object", "maxProperties": 2}),
    st.builds(lambda value: {"const": value}, VALUES),
    st.builds(lambda values: {"enum": values}, st.lists(VALUES, min_size=1, max_size=3)),
    st.builds(lambda name: {"type": "string", "format": name}, FORMATS),
    optional(type=TYPES, minimum=NUMBERS, exclusiveMaximum=NUMBERS, multipleOf=SIZES.map(float)),
    optional(type=st.just("string"), minLength=SIZES, maxLength=SIZES, pattern=PATTERNS),
    st.builds(lambda types: {"type": types}, st.lists(TYPES, min_size=1, max_size=2, unique=True)),
)


def around(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    named = st.dictionaries(NAMES, inner, max_size=3)
    some = st.lists(inner, min_size=1, max_size=2)
    return st.one_of(
        optional(
            type=st.just("object"),
            properties=named,
            patternProperties=st.dictionaries(PATTERNS, inner, max_size=1),
            additionalProperties=st.one_of(inner, st.booleans()),
            required=st.lists(NAMES, max_size=2),
            minProperties=st.integers(0, 1),
        ),
        optional(
            type=st.just("array"), items=inner, prefixItems=some, minItems=SIZES, maxItems=SIZES
        ),
        optional(anyOf=some, type=TYPES),
        optional(allOf=some, properties=named),
        optional(oneOf=some),
    )


SCHEMAS = st.recursive(LEAVES, around, max_leaves=6)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
def test_what_a_grammar_allows_is_valid(schema: Any, seed: int) -> None:
    try:
        constraint = json_constraint(schema)
    except InvalidRequest:
        return
    judge = Draft202012Validator(schema, format_checker=FormatChecker())
    random = Random(seed)
    for _ in range(5):
        if (text := draw_text(constraint, random, LONGEST)) is not None:
            judge.validate(json.loads(text))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schema=SCHEMAS, value=st.recursive(VALUES, lambda inner: st.dictionaries(NAMES, inner)))
def test_what_is_invalid_is_not_allowed(schema: Any, value: Any) -> None:
    try:
        constraint = json_constraint(schema)
    except InvalidRequest:
        return
    if LLMatcher(byte_tokenizer(), constraint, log_level=0, limits=LIMITS).is_error():
        return
    for space in ("", " "):
        text = json.dumps(value, ensure_ascii=False, separators=(f",{space}", f":{space}"))
        is_valid = Draft202012Validator(schema, format_checker=FormatChecker()).is_valid(value)
        assert is_valid or not accepts(json_constraint(schema, space=space), text)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(number=st.integers(0, 2**31))
def test_no_accepted_schema_fails_in_the_engine(number: int) -> None:
    assert not [fate for fate in fates(number, seeds=10) if fate.startswith(BROKEN)]
