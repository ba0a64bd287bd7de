"""Which finished samples become choices; and regular expressions, searched in linear time."""

from __future__ import annotations

import asyncio
import math
import re
import threading
from array import array
from collections.abc import Sequence
from itertools import permutations

import pytest
import re2
from hypothesis import given
from hypothesis import strategies as st

from srm.engine.early_stop import AHEAD, EarlyStop, SharedBudget
from srm.engine.messages import Output
from srm.errors import InvalidRequest
from srm.server.generation.dedup_counts import Budget, DedupCounts
from srm.server.generation.detokenize import ChoicePart
from srm.server.generation.matching import MAX_PROGRAM, Mark, Pattern
from srm.server.generation.sample_selection import Ranking, SampleSelection
from srm.server.schema.completion_request import parse_completion


def sample(
    index: int, text: str, num_tokens: int = 1, logprobs: Sequence[float] = ()
) -> ChoicePart:
    tokens = Output("", index, bytes(4 * num_tokens), array("f", logprobs).tobytes())
    return ChoicePart(index, True, text, tokens, [], "stop", None)


def test_a_spent_budget_holds_no_first_sample_back() -> None:
    early_stops = [EarlyStop[ChoicePart](20, 1) for _ in range(3 * AHEAD)]
    budget = SharedBudget(early_stops, 1)
    assert budget.start_more() == dict.fromkeys(range(3 * AHEAD), 1)
    for prompt, early_stop in enumerate(early_stops):
        assert len(budget.spend(prompt, early_stop.add_sample(0, False, sample(0, "")))) == 1
        assert budget.start_more() == {}
    assert budget.is_spent and {early_stop.end for early_stop in early_stops} == {1}


SCORES = [[-1.0], [-0.5, -0.75], [-4.0, 0.0, 0.0, 0.0], [-math.inf, 0.0], []]
"""Means: -1, -0.625, -1, minus infinity, 0."""


def test_the_best_by_mean_logprob_in_any_order() -> None:
    for order in permutations(range(5)):
        ranking = Ranking(n=4, best_of=5)
        assert not ranking.choices(sample(4, "of another prompt"))
        *early, result = (ranking.choices(sample(5 + i, f"{i}", 1, SCORES[i])) for i in order)
        assert early == [[]] * 4
        assert [(item.index, item.text) for item in result] == [
            (4, "4"),
            (5, "1"),
            (6, "0"),
            (7, "2"),
        ]


@pytest.mark.parametrize("keeps_first", [False, True])
def test_equal_samples_take_no_room(keeps_first: bool) -> None:
    budget = Budget(10_000)
    counts = [DedupCounts("text", keeps_first, budget) for _ in range(2)]
    for index in reversed(range(1_000)):
        counts[index % 2].add(sample(index, "same"))
    assert [dedup_counts.by_count()[0].count for dedup_counts in counts] == [500, 500]
    with pytest.raises(InvalidRequest, match="more than 10000 bytes") as refused:
        for index in range(20):
            counts[0].add(sample(index, f"other {index}"))
    assert refused.value.param == "return"


def test_a_kept_sample_counts_with_all_that_is_in_it() -> None:
    dedup_counts = DedupCounts("text", keeps_first=True, budget=Budget(3_000))
    dedup_counts.add(sample(7, "same", num_tokens=500))
    dedup_counts.add(sample(5, "same", num_tokens=400))  # in its place
    (first,) = dedup_counts.firsts()
    assert (first.index, first.count) == (5, 2)
    with pytest.raises(InvalidRequest, match="more than 3000 bytes"):
        dedup_counts.add(sample(8, "other", num_tokens=400))


CATASTROPHIC = (  # for engines that go back
    r"(a+)+$",
    r"(a|a)*b",
    r"(a|aa)+c",
    r"(.*)*x",
    r"(x+x+)+y",
    r"(?:a?){100}a{100}",
    r"((a{0,50}){0,9})b",
    r"(.*a){20}z",
    r"(a|b)*a(a|b){200}c",
    r"(.{1,30}){1,10}z",
)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("(", "missing )"),
        ("[b-a]", "invalid character class range"),
        (r"(a)\1", "invalid escape sequence"),
        ("(?=a)", "invalid perl operator"),
        ("a{1001}", "invalid repetition size"),
        ("a**", "bad repetition operator"),
        ("[a-z]{1000}" * 5, f"of at most {MAX_PROGRAM} allowed"),
        ("(?i)" + r"\pL{900}", "pattern too large"),
        ("(" * 1000, "missing )"),
        ("\ud800", "no text in UTF-8"),
    ],
)
def test_what_is_no_pattern_is_refused_with_the_reason(source: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(reason)) as refused:
        Pattern(source, wants_group=False)
    assert refused.value.param == "until"
    assert repr(source[:80])[1:-1] in refused.value.message
    assert len(refused.value.message) < 400


def test_a_group_that_is_missing_is_refused() -> None:
    body = b'{"prompt": "a", "until": {"match": "(?:a)"}, "count_by": "group", "return": "counts"}'
    with pytest.raises(InvalidRequest, match="needs a group") as refused:
        SampleSelection(parse_completion(body), 1)
    assert refused.value.param == "count_by"


def test_a_pattern_without_a_group_finds_what_it_matches() -> None:
    assert Pattern("a.", wants_group=True).find("cabbage") == Mark(matched=True, group="ab")
    assert Pattern("(z)?a", wants_group=True).find("a") == Mark(matched=True)


@pytest.mark.parametrize("source", CATASTROPHIC)
async def test_no_pattern_takes_more_than_the_text_is_long(source: str) -> None:
    pattern = Pattern(source, wants_group="(a" in source)
    for size in (10, 1_000, 100_000):  # going back, the smallest of these takes minutes already
        assert len(await pattern.find_all(["a" * size, "ab" * size, "a" * size + "!"])) == 3


async def test_searches_long_texts_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    pattern, is_here = Pattern("(.{1,30}){1,10}z", wants_group=False), list[bool]()
    find = pattern.find

    def noted(text: str) -> Mark:
        is_here.append(threading.current_thread() is threading.main_thread())
        return find(text)

    monkeypatch.setattr(pattern, "find", noted)
    marks = await pattern.find_all(["az", "a" * 50_000, "az", "a" * 50_000])
    assert [mark.matched for mark in marks] == [True, False, True, False]
    await pattern.find_all(["z", "a"])
    assert is_here == [False] * 4 + [True] * 2


def test_remembers_no_pattern_of_a_request_that_is_over() -> None:
    Pattern("a", wants_group=False)
    assert re2._Regexp._make.cache_info().currsize == 0


texts = st.lists(st.text().filter(str.isprintable), max_size=40)  # $ differs at line ends


@given(texts, st.sampled_from(["a", "^.$", r"(\d+)", "é|€", r"(x)?y"]))
def test_it_finds_what_others_find(texts: list[str], source: str) -> None:
    pattern, same = Pattern(source, wants_group="(" in source), re.compile(source, re.ASCII)
    for text, mark in zip(texts, asyncio.run(pattern.find_all(texts)), strict=True):
        match = same.search(text)
        assert mark.matched == (match is not None)
        assert mark.group == (match[1] if match and "(" in source else None)
