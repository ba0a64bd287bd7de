"""What constraints allow is valid by other programs' judgement, and tables allow the same."""

from __future__ import annotations

import json
import re
from random import Random
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from jsonschema import Draft202012Validator, FormatChecker
from llguidance import LLMatcher

from srm.engine.constraints.automaton import TokenAutomaton
from srm.engine.constraints.byte_table import START
from srm.engine.constraints.constraint import choice_constraint, json_constraint, regex_constraint
from srm.engine.constraints.trial import LIMITS
from srm.errors import InvalidRequest
from tests.kit.engines.matching import accepts, byte_tokenizer, draw_text
from tests.kit.engines.tables import Vocabulary, cover, of_bytes, of_demo, walk_both
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
@pytest.mark.parametrize("seeds", [5, pytest.param(10, marks=pytest.mark.slow)])
def test_no_accepted_schema_fails_in_the_engine(seeds: int, number: int) -> None:
    assert not [fate for fate in fates(number, seeds) if fate.startswith(BROKEN)]


MOST_COVERED = 8_000
"""Entries of tables that are looked at everywhere."""
SEEDS = st.integers(0, 2**32)
VOCABULARIES = st.sampled_from([of_bytes, of_demo])
SLOW = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])

BOUNDS = st.integers(-1_200, 1_200) | st.integers() | st.floats(-1e9, 1e9)
REGULAR_LEAVES = st.one_of(
    st.sampled_from([{"type": "string"}, {"type": "boolean"}, {"type": "number"}, False]),
    st.builds(lambda value: {"const": value}, VALUES | st.floats(-1e9, 1e9)),
    st.builds(
        lambda values, more: {"enum": values, **more},
        st.lists(VALUES, min_size=1),
        optional(type=st.lists(TYPES, min_size=1, unique=True)),
    ),
    st.builds(
        lambda name: {"type": "string", "format": name},
        FORMATS | st.sampled_from(["date-time", "time", "duration", "ipv6", "uri"]),
    ),
    optional(
        type=st.sampled_from(["integer", "number"]),
        minimum=BOUNDS | NUMBERS,
        maximum=BOUNDS,
        exclusiveMinimum=NUMBERS,
        exclusiveMaximum=NUMBERS | BOUNDS,
    ),
    optional(type=st.just("string"), minLength=SIZES, maxLength=SIZES, pattern=PATTERNS),
    st.builds(lambda types: {"type": types}, st.lists(TYPES, min_size=1, max_size=2, unique=True)),
)


def around_regular(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    some = st.lists(inner, min_size=1, max_size=2)
    named = st.dictionaries(NAMES, inner, max_size=4)
    return st.one_of(
        st.builds(
            lambda **fields: {"type": "object", **fields},
            properties=named,
            additionalProperties=st.just(False) | inner,
            required=st.lists(NAMES, max_size=2),
        ),
        st.builds(
            lambda items, more: {"type": "array", "items": items, **more},
            inner,
            optional(prefixItems=some, minItems=SIZES, maxItems=SIZES),
        ),
        st.builds(lambda branches: {"anyOf": branches}, some),
    )


REGULAR = st.recursive(REGULAR_LEAVES, around_regular, max_leaves=6)
TEXTS = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=9)
CHARACTERS = st.sampled_from(["a", "b", "0", " ", "/", "é", "😀", r"\.", r"\n", r"\x41", '"', "-"])
ATOMS = CHARACTERS | st.sampled_from(
    [
        ".",
        "[ab]",
        "[^a]",
        "[a-c0-9]",
        "[^a-zé-ü]",
        r"\d",
        r"\w",
        r"\s",
        r"\D",
        r"[\d\-x]",
        r"[^\s/]",
    ]
)
COUNTS = st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{2,}", "*?", "{0,2}"])
REGEXES = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.builds(lambda part, count: f"(?:{part}){count}", inner, COUNTS),
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"({'|'.join(parts)})"),
    ),
    max_leaves=8,
)


def walk(vocabulary: Vocabulary, constraint: str, seed: int) -> list[str] | None:
    """The whole texts of a few walks; None if there is no table."""
    if vocabulary.matcher(constraint).is_error():
        return None
    table = vocabulary.table(constraint)
    if table is None:
        return None
    if table.next_state.size < MOST_COVERED:
        cover(vocabulary, constraint, table)
    random = Random(seed)
    texts = [walk_both(vocabulary, constraint, table, random, 150) for _ in range(4)]
    texts += [
        text_of(vocabulary, table, random, int(table.distance[START]) + n) for n in (0, 1, 30)
    ]
    return [text.decode() for text in texts if text is not None]


def text_of(vocabulary: Vocabulary, table: TokenAutomaton, random: Random, left: int) -> bytes:
    """A text of at most so many tokens with its end; only those are allowed that let it end."""
    state, sampled = START, list[int]()
    while True:
        token = int(random.choice(np.flatnonzero(table.allowed(state, left)).tolist()))
        if token == vocabulary.eos:
            return vocabulary.text(sampled)
        left -= 1
        sampled.append(token)
        state = table.walk(np.array([token], np.int32), state)


@SLOW
@given(schema=SCHEMAS | REGULAR, make=VOCABULARIES, space=st.sampled_from(["", " "]), seed=SEEDS)
def test_schemas_of_tables(schema: Any, make: Any, space: str, seed: int) -> None:
    try:
        constraint = json_constraint(schema, space=space)
    except InvalidRequest:
        return
    judge = Draft202012Validator(schema)
    for text in walk(make(), constraint, seed) or ():
        judge.validate(json.loads(text))


@SLOW
@given(regex=REGEXES, make=VOCABULARIES, seed=SEEDS)
def test_regexes_of_tables(regex: str, make: Any, seed: int) -> None:
    texts = walk(make(), regex_constraint(regex), seed)
    assert texts is not None
    for text in texts:
        assert re.fullmatch(regex, text, re.ASCII)


@SLOW
@given(
    pattern=REGEXES,
    ends=st.sampled_from([("", ""), ("^", ""), ("", "$"), ("^", "$")]),
    sizes=optional(minLength=SIZES, maxLength=st.integers(3, 9)),
    seed=SEEDS,
)
def test_patterns_of_tables(pattern: str, ends: tuple[str, str], sizes: Any, seed: int) -> None:
    schema = {"type": "string", "pattern": pattern.join(ends), **sizes}
    try:
        constraint = json_constraint(schema)
    except InvalidRequest:
        return
    for text in walk(of_bytes(), constraint, seed) or ():
        Draft202012Validator(schema).validate(json.loads(text))


@SLOW
@given(choices=st.lists(TEXTS, min_size=1), make=VOCABULARIES, seed=SEEDS)
def test_choices_of_tables(choices: list[str], make: Any, seed: int) -> None:
    texts = walk(make(), choice_constraint(choices), seed)
    assert texts and set(texts) <= set(choices)
