"""Regexes, choices and grammars in Lark's notation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from srm.engine.constraints.constraint import (
    MAX_GRAMMAR,
    MAX_REGEX,
    choice_constraint,
    lark_constraint,
    regex_constraint,
)
from srm.engine.constraints.trial import tokenizer_of, why_not
from srm.errors import InvalidRequest
from tests.kit.engines.matching import accepts, byte_tokenizer


def test_a_regex_matches_the_whole_completion_and_its_classes_are_ascii() -> None:
    for regex, allowed, forbidden in (
        ("a|bc", ["a", "bc"], ["ab", "b", ""]),
        (r"#### \d+", ["#### 12"], ["#### ", "x#### 1", "#### ٣"]),
        (r"a/\w\s", ["a/b\n", "a/_ "], ["a/é "]),
        ("^[^a]$", ["é", "\n"], ["a", "bb"]),
        ("(?i)yes", ["YES"], ["no"]),
    ):
        constraint = regex_constraint(regex)
        assert all(accepts(constraint, text) for text in allowed)
        assert not any(accepts(constraint, text) for text in forbidden)


def test_a_choice_is_one_of_its_texts_whatever_is_in_them() -> None:
    texts = ['"', "\\", "a\nb", "é/😀", "\0", "a", "ab", "<|x|>"]
    constraint = choice_constraint([*texts, "a"])
    assert all(accepts(constraint, text) for text in texts)
    assert not accepts(constraint, "b") and not accepts(constraint, "")
    many = choice_constraint([f"x{i}" for i in range(10_000)])
    assert accepts(many, "x9999") and not accepts(many, "x10000")


def test_a_grammar_may_be_recursive() -> None:
    constraint = lark_constraint('start: "(" start ")" | /[0-9]+/')
    assert accepts(constraint, "((7))") and not accepts(constraint, "((7)")


@pytest.mark.parametrize(
    ("make", "asked", "message"),
    [
        (regex_constraint, "", "it must have 1 to"),
        (regex_constraint, "a" * (MAX_REGEX + 1), "it must have 1 to"),
        (regex_constraint, "\ud800", "half of a surrogate pair"),
        (choice_constraint, [], "at least one and none of them empty"),
        (choice_constraint, ["a", ""], "at least one and none of them empty"),
        (choice_constraint, ["a" * (MAX_GRAMMAR + 1)], "at most 100000 are taken"),
        (choice_constraint, ["\udfff"], "half of a surrogate pair"),
        (lark_constraint, "a" * (MAX_GRAMMAR + 1), "at most 100000 are taken"),
        (lark_constraint, 'start: %json {"type": "string"}', "'%json' is not supported"),
        (lark_constraint, 'start[temperature=0.5]: "a"', "is not supported in a grammar"),
    ],
)
def test_what_is_none_is_refused(make: Callable[[Any], str], asked: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        make(asked)


def test_a_trial_says_what_cannot_be_compiled_written_or_followed() -> None:
    for constraint, fault in (
        (regex_constraint("(a"), 'invalid regex "(a": unclosed group'),
        (regex_constraint(r"a\z1"), 'invalid regex "a\\\\z1": lookarounds not supported'),
        (regex_constraint("a(?=b)"), "look-around"),
        (regex_constraint("[a&&b]"), "can meet it"),
        (lark_constraint('start: "a" start'), "oo many items"),
        (lark_constraint("start: x"), 'unknown name: "x"'),
    ):
        assert fault in why_not(constraint, byte_tokenizer())
    two = tokenizer_of([b"a", b"bc", b""], 2)
    assert why_not(regex_constraint("a(bc)*"), two) == ""
    assert why_not(regex_constraint("b"), two).startswith(
        "no text of the model's tokens can meet it"
    )
    assert why_not(regex_constraint("abx"), two).startswith(
        "no text of the model's tokens can meet it"
    )
