"""Distributions: their quantiles, means and bounds, and what is no distribution."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from srm.errors import ConfigError
from srm.loadtest.lengths import ALLOWED, LONGEST, Lengths, check, parse

GRID = ((np.arange(100_000) + 0.5) / 100_000).tolist()
"""Shares that stand for all: means over them are integrals of the quantile function."""
MANY = '7\n\n2.6\n{"output_tokens": 100, "prompt_tokens": 5}\n7\n'


def parse_lengths(text: str) -> Lengths:
    return parse(text, "output_tokens")


def values(text: str) -> np.ndarray:
    return np.array([parse_lengths(text).at(share) for share in GRID])


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("128", {128: 100_000}),
        ("uniform:16,25", dict.fromkeys(range(16, 26), 10_000)),
        ("choice:64=3,1=0,8=1", {64: 75_000, 8: 25_000}),
        ("file:lengths.jsonl", {3: 25_000, 7: 50_000, 100: 25_000}),
    ],
)
def test_each_number_is_as_often_as_it_should_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, counts: dict[int, int]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lengths.jsonl").write_text(MANY)
    result = parse_lengths(text)
    assert Counter(map(result.at, GRID)) == counts
    assert result.smallest == min(counts)


@pytest.mark.parametrize(
    ("text", "middle", "mean", "share", "quantile"),
    [
        ("normal:500,50", 500, 500, 0.9, NormalDist(500, 50).inv_cdf(0.9)),
        ("lognormal:1000,0.5", 1000, 1000 * math.exp(0.5**2 / 2),
         NormalDist().cdf(1), 1000 * math.exp(0.5)),
    ],
)  # fmt: skip
def test_normal_and_lognormal_have_their_mean_and_their_quantiles(
    text: str, middle: float, mean: float, share: float, quantile: float
) -> None:
    result = values(text)
    assert np.median(result) == middle
    assert result.mean() == pytest.approx(mean, rel=0.001)
    assert parse_lengths(text).at(share) == round(quantile)


def test_bounds_hold() -> None:
    result = values("lognormal:128,1,min=100,max=200")
    assert (result.min(), result.max()) == (100, 200)
    assert parse_lengths("lognormal:128,1,min=100").smallest == 100
    assert parse_lengths("uniform:5,9,min=7").smallest == values("uniform:5,9,min=7").min() == 7
    assert parse_lengths("uniform:5,9,max=3").smallest == values("uniform:5,9,max=3").max() == 3
    assert values("normal:3,10").min() == 1


TEXTS = st.one_of(
    st.integers(1, LONGEST).map(str),
    st.builds("uniform:{},{}".format, st.integers(1, 99), st.integers(99, LONGEST)),
    st.builds("normal:{},{}".format, st.floats(0.1, 1e12), st.floats(0, 1e12)),
    st.builds("lognormal:{},{}".format, st.floats(0.1, 1e12), st.floats(0, 10)),
)


@given(text=TEXTS, shares=st.lists(st.floats(2**-54, 1 - 2**-53), min_size=2))
def test_quantiles_are_lengths_and_never_fall(text: str, shares: list[float]) -> None:
    results = [parse_lengths(text).at(share) for share in sorted(shares)]
    assert results == sorted(results)
    assert parse_lengths(text).smallest <= results[0] and results[-1] <= LONGEST
    assert all(type(item) is int for item in results)


@pytest.mark.parametrize(
    "text",
    """0 -1 many 1.5 2147483648 uniform uniform: uniform:5 uniform:9,5 uniform:1.5,2 uniform:0,3
    uniform:1,2,3 normal:0,1 normal:nan,1 normal:5,-1 normal:5,inf lognormal:5 lognormal:5,99
    lognormal:5,1,max=0 lognormal:5,1,min=9,max=3 lognormal:5,1,mid=3 choice: choice:1 choice:1=
    choice:1=0 choice:0=1 choice:1=-1,2=5 choice:1=inf gamma:1,2""".split(),
)
def test_what_is_no_distribution_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError) as raises:
        check(text, "n")
    message = str(raises.value)
    assert "n " in message and repr(text) in message and ALLOWED in message


BAD = r"lengths.jsonl, line 2: .* whose output_tokens is one"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"cannot read .*lengths.jsonl"),
        ("", "lengths.jsonl: no line"),
        *((f"\n{line}\n", BAD) for line in ("0", "-3", "true", '"5"', "{}", "1e99")),
        ('\n{"output_tokens": null}\n', BAD),
    ],
)
def test_a_bad_file_is_named_but_not_opened_to_check_the_text(
    tmp_path: Path, content: str | None, message: str
) -> None:
    file = tmp_path / "lengths.jsonl"
    if content is not None:
        file.write_text(content)
    check(f"file:{file}", "output_tokens")
    with pytest.raises(ConfigError, match=message):
        parse_lengths(f"file:{file}")
