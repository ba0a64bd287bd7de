"""Regular expressions of requests: refused with a reason, or searched in linear time."""

from __future__ import annotations

import asyncio
import re
import threading

import pytest
import re2
from hypothesis import given
from hypothesis import strategies as st

from srm.errors import InvalidRequest
from srm.server.generation.matching import MAX_PROGRAM, Mark, Pattern
from srm.server.generation.sample_selection import SampleSelection
from srm.server.schema.completion_request import parse_completion

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


async def test_a_long_text_under_a_large_program_is_searched_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def test_nothing_is_remembered_of_a_pattern_when_its_request_is_over() -> None:
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
