"""What distinct samples may take while they are counted."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator

import pytest

from engine.errors import InvalidRequest
from server.generation.dedup_counts import Budget, DedupCounts
from server.generation.read_ahead import read_ahead
from server.text.sample import Delta


def sample(index: int, text: str, num_tokens: int = 1) -> Delta:
    ids = array("i", range(num_tokens)).tobytes()
    return Delta(
        index=index,
        is_first=True,
        text=text,
        token_ids=ids,
        logprobs=b"",
        top_ids=b"",
        top_logprobs=b"",
        text_offset=[],
        finish_reason="stop",
        stop_reason=None,
    )


@pytest.mark.parametrize("keeps_first", [False, True])
def test_equal_samples_take_nothing_and_distinct_ones_are_limited(keeps_first: bool) -> None:
    budget = Budget(10_000)
    tallies = [
        DedupCounts(by_group=False, keeps_first=keeps_first, budget=budget) for _ in range(2)
    ]
    for index in reversed(range(1_000)):
        tallies[index % 2].add(sample(index, "same"))
    assert [tally.by_count()[0].count for tally in tallies] == [500, 500]
    with pytest.raises(InvalidRequest, match="more than 10000 bytes") as refused:
        for index in range(20):
            tallies[0].add(sample(index, f"other {index}"))
    assert refused.value.param == "return"


def test_a_kept_sample_counts_with_all_that_is_in_it() -> None:
    tally = DedupCounts(by_group=False, keeps_first=True, budget=Budget(3_000))
    tally.add(sample(7, "same", num_tokens=500))
    tally.add(sample(5, "same", num_tokens=400))  # in its place
    (first,) = tally.firsts()
    assert (first.index, first.count) == (5, 2)
    with pytest.raises(InvalidRequest, match="more than 3000 bytes"):
        tally.add(sample(8, "other", num_tokens=400))


async def test_the_source_goes_on_while_nobody_takes() -> None:
    made: list[int] = []

    async def source() -> AsyncGenerator[int, None]:
        for number in range(5):
            made.append(number)
            yield number

    ahead = read_ahead(source())
    assert await anext(ahead) == 0
    await asyncio.sleep(0)
    assert made == [0, 1, 2, 3, 4]
    assert [number async for number in ahead] == [1, 2, 3, 4]


async def test_what_the_source_raises_comes_after_all_it_made() -> None:
    closed = []

    async def source() -> AsyncGenerator[int, None]:
        try:
            yield 1
            raise ValueError("no more")
        finally:
            closed.append(True)

    ahead = read_ahead(source())
    assert await anext(ahead) == 1
    with pytest.raises(ValueError, match="no more"):
        await anext(ahead)
    assert closed == [True]


async def test_who_leaves_early_ends_the_source() -> None:
    closed = []

    async def source() -> AsyncGenerator[int, None]:
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            closed.append(True)

    ahead = read_ahead(source())
    assert await anext(ahead) == 1
    await ahead.aclose()
    assert closed == [True]
