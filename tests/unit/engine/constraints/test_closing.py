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

from srm.engine.constraints.closing import LONGEST, LOOKS, Openings, make_closing
from srm.engine.constraints.constraint import json_constraint
from srm.engine.constraints.grammars import Grammar, Matchers
from tests.engines.tables import of_demo

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
    whole = {"type": "object", "properties": fields, "required": [*fields]}
    vocabulary, constraint = of_demo(), json_constraint(whole)
    grammar = Grammar(partial(vocabulary.matcher, constraint), len(vocabulary.tokens))
    openings = Openings(vocabulary.tokens, grammar.num_words)
    grammar.closing = make_closing(constraint, vocabulary.tokenizer, openings, grammar.start)
    return grammar


def find_at(grammar: Grammar, tokens: bytes, slot: int) -> tuple[Grammar, bytes]:
    return grammar, tokens


@pytest.mark.parametrize("schema", ENDINGS, ids=json.dumps)
def test_masked_json_ends_where_a_repetition_must_be_left(schema: dict[str, Any]) -> None:
    vocabulary, grammar = of_demo(), masked(schema)
    for seed in range(10):
        random, matchers, sampled = Random(seed), Matchers(), list[int]()
        for left in range(50, 0, -1):
            last, masks = None, grammar.first_mask[None].copy()
            if sampled:
                last, so_far = sampled[-1], np.array(sampled, np.int32).tobytes()
                masks = matchers.next_masks([0], [last], partial(find_at, grammar, so_far))
            matchers.close([0], [left], [last], masks, lambda _: grammar)
            bits = np.unpackbits(masks[0].view(np.uint8), bitorder="little")
            token = random.choice(np.flatnonzero(bits).tolist())
            if token == vocabulary.eos:
                break
            sampled.append(token)
        assert "meta" in json.loads(vocabulary.text(sampled))


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
    grammars = [other if row % 10 == 9 else never for row in rows]
    for row, grammar in enumerate(grammars):
        matcher = grammar.start()
        matcher.consume_tokens([known[bytes([byte])] for byte in b'{"e":"12'])
        matchers._of[row] = cast(LLMatcher, CountingMatcher(matcher, counts)), grammar
    ended, in_all = set[int](), 0
    for left in range(60, 20, -1):
        counts.clear()
        masks = np.full((len(rows), never.num_words), -1, np.int32)
        lasts: list[int | None] = [known[b"2"]] * len(rows)
        matchers.close([*rows], [left] * len(rows), lasts, masks, grammars.__getitem__)
        in_all += counts["validate_tokens"]
        assert counts["compute_bitmask"] == 0
        assert counts["consume_token"] <= LOOKS, "each look goes on by one byte"
        assert counts["validate_tokens"] <= 600 * LOOKS
        ended |= {row for row in rows if matchers._reaches[row].most >= 0}
    assert ended == {row for row in rows if row % 10 == 9}
    assert in_all <= 100 * 100 * LONGEST
