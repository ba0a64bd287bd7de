"""How masked JSON ends before its last token, and how much a step does for that."""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from random import Random
from typing import Any, cast

import numpy as np
import pytest
from llguidance import LLMatcher

from srm.engine.constraints import grammars
from srm.engine.constraints.closing import LONGEST, LOOKS, UNKNOWN
from srm.engine.constraints.constraint import json_constraint
from srm.engine.constraints.grammars import RENEWED_AFTER, Grammar, Matchers
from tests.kit.engines.tables import of_demo

ENDINGS: list[dict[str, Any]] = [
    {"type": "string", "pattern": pattern}
    for pattern in (
        r"^\d+-\d+$",
        r"^[a-z]+@[a-z]+\.com$",
        r"^\S+ \S+$",
        "^a+b$",
        "^[a-z]+x[a-z]+y$",
        r"^.*\.json$",
        "foo.*bar",
    )
]
ENDINGS += [
    {"type": "string", "format": "email"},
    {"type": "integer", "multipleOf": 7, "minimum": 1_000},
    {"type": "array", "items": {"type": "number", "minimum": 10}, "minItems": 2},
]


def masked(schema: dict[str, Any]) -> Grammar:
    """The grammar, over the demo's tokens, of objects of these and of any other properties."""
    fields = {"e": schema, "meta": {"type": "object"}}
    return grammar_of({"type": "object", "properties": fields, "required": [*fields]})


def grammar_of(schema: dict[str, Any]) -> Grammar:
    return of_demo().grammar(json_constraint(schema))


def find_at(grammar: Grammar, tokens: bytes, slot: int) -> tuple[Grammar, bytes]:
    return grammar, tokens


def sample_rows(grammar: Grammar, seeds: list[int], max_tokens: int) -> tuple[list[str], int]:
    """A text by each seed, all in the same steps, and how often one had to wait."""
    vocabulary, matchers, num_waits = of_demo(), Matchers(), 0
    randoms, sampled = [Random(seed) for seed in seeds], [list[int]() for _ in seeds]
    running = [*range(len(seeds))]
    while running:
        begun = [row for row in running if sampled[row]]
        order = begun + [row for row in running if not sampled[row]]
        masks = np.repeat(grammar.first_mask[None], len(order), axis=0)
        if begun:
            find = lambda row: (grammar, np.array(sampled[row], np.int32).tobytes())  # noqa: E731
            masks[: len(begun)] = matchers.next_masks(
                begun, [sampled[row][-1] for row in begun], find
            )
        lefts = [max_tokens - len(sampled[row]) for row in order]
        lasts = [sampled[row][-1] if sampled[row] else None for row in order]
        waiting = matchers.close(order, lefts, lasts, masks, lambda _: grammar)
        num_waits += len(waiting)
        for place, row in enumerate(order):
            if place not in waiting:
                bits = np.unpackbits(masks[place].view(np.uint8), bitorder="little")
                token = randoms[row].choice(np.flatnonzero(bits).tolist())
                if token == vocabulary.eos:
                    running.remove(row)
                else:
                    sampled[row].append(token)
                    assert len(sampled[row]) < max_tokens, "there is no room for its end"
    return [vocabulary.text(tokens).decode() for tokens in sampled], num_waits


@pytest.mark.parametrize("schema", ENDINGS, ids=json.dumps)
def test_masked_json_ends_where_a_repetition_must_be_left(schema: dict[str, Any]) -> None:
    grammar = masked(schema)
    for seed in range(10):
        [text], _ = sample_rows(grammar, [seed], 50)
        assert "meta" in json.loads(text)


@pytest.mark.parametrize("least", [0, 4])
def test_the_end_of_a_long_string_is_that_of_its_text(least: int) -> None:
    """The end of the empty text, a whole string, was written within the string."""
    grammar = grammar_of({"type": "string", "minLength": least})
    for max_tokens in (20, 30, 39):
        texts, _ = sample_rows(grammar, [*range(60)], max_tokens)
        assert all(isinstance(json.loads(text), str) for text in texts)


def test_the_shortest_text_leaves_out_a_nameless_property() -> None:
    """The search took what ends a string first, and so the name that is empty."""
    fields = {"": {"const": "v" * 30}, "a": {"type": "object"}}
    grammar = grammar_of({"type": "object", "properties": fields, "required": ["a"]})
    assert grammar.closing and grammar.closing.start
    assert of_demo().text([*grammar.closing.start[:-1]]) == b'{"a":{}}'


def test_masked_json_is_the_same_alone_and_among_many() -> None:
    grammar, seeds = masked(ENDINGS[0]), [*range(300)]
    texts, num_waits = sample_rows(grammar, seeds, 100)
    assert num_waits, "each had its looks at once"
    assert texts == [sample_rows(grammar, [seed], 100)[0][0] for seed in seeds]


def test_a_text_that_can_only_end_takes_no_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar, counts = masked({"type": "integer"}), list[int]()
    monkeypatch.setattr(grammars, "make_masks", lambda own, size: counts.append(len(own)))
    assert grammar.closing and grammar.closing.start
    texts, _ = sample_rows(grammar, [*range(8)], len(grammar.closing.start))
    assert {*texts} == {'{"e":0,"meta":{}}'} and not counts


def test_a_text_that_leaves_its_end_is_masked_again() -> None:
    grammar, matchers, vocabulary = grammar_of({"type": "string"}), Matchers(), of_demo()
    quote, letter = (vocabulary.tokens.index(text) for text in (b'"', b"a"))
    masks = grammar.first_mask[None].copy()
    matchers.close([0], [3], [None], masks, lambda _: grammar)
    assert [*matchers._ends[0]] == [quote, quote, vocabulary.eos]
    text = np.array([quote, letter], np.int32).tobytes()
    left = matchers.next_masks([0], [letter], partial(find_at, grammar, text))
    matcher = grammar.start(text)
    assert np.array_equal(left, grammars.make_masks([matcher], grammar.num_words))
    matchers.close([0], [1], [letter], left, lambda _: grammar)
    assert [*matchers._ends[0]] == [quote, vocabulary.eos]
    matchers.forget([0])
    assert not matchers._ends


class CountingMatcher:
    """A matcher, and how often it and its copies were asked for what may follow."""

    def __init__(self, matcher: LLMatcher, counts: Counter[str]) -> None:
        self._matcher, self._counts = matcher, counts

    def deep_copy(self) -> CountingMatcher:
        return CountingMatcher(self._matcher.deep_copy(), self._counts)

    def __getattr__(self, name: str) -> Any:
        self._counts[name] += 1
        return getattr(self._matcher, name)


def test_the_ends_of_a_step_take_a_bounded_number_of_looks() -> None:
    """However many rows have none, and however often: those without a look have the next step's."""
    never, other = masked({"type": "string", "minLength": 1_001}), masked(ENDINGS[0])
    counts, rows = Counter[str](), range(100)
    matchers = Matchers()
    known = {text: token for token, text in enumerate(of_demo().tokens)}
    own_grammars = [other if row % 10 == 9 else never for row in rows]
    for row, grammar in enumerate(own_grammars):
        matcher = grammar.start()
        matcher.consume_tokens([known[bytes([byte])] for byte in b'{"e":"12'])
        matchers._of[row] = cast(LLMatcher, CountingMatcher(matcher, counts)), grammar
    ended, in_all = set[int](), 0
    for left in range(60, 20, -1):
        counts.clear()
        masks = np.full((len(rows), never.num_words), -1, np.int32)
        lasts: list[int | None] = [known[b"2"]] * len(rows)
        matchers.close([*rows], [left] * len(rows), lasts, masks, own_grammars.__getitem__)
        in_all += counts["validate_tokens"]
        assert counts["compute_bitmask"] == 0
        assert counts["consume_token"] <= LOOKS, "each look goes on by one byte"
        assert counts["validate_tokens"] <= 600 * LOOKS
        ended |= {row for row in rows if matchers._reaches.get(row, UNKNOWN).most >= 0}
    assert ended == {row for row in rows if row % 10 == 9}
    assert in_all <= 100 * 100 * LONGEST


def test_rows_of_a_grammar_go_on_when_one_has_it_renewed() -> None:
    """The engine ended with a KeyError: renewing drops the matchers of all rows."""
    grammar, matchers = grammar_of({"type": "string"}), Matchers()
    quote, letter = (of_demo().tokens.index(text) for text in (b'"', b"a"))
    text = np.array([quote, letter], np.int32).tobytes()
    matchers.next_masks([0, 1], [letter] * 2, partial(find_at, grammar, text))
    matchers.num_masks = RENEWED_AFTER
    masks = matchers.next_masks([0, 1], [letter, of_demo().eos], partial(find_at, grammar, text))
    assert masks.any(axis=1).all() and {*matchers._of} == {0, 1}
