"""Distributions: their quantiles, means and bounds, and what is no distribution."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ConfigError
from loadtest.lengths import ALLOWED, LONGEST, Lengths, check, parse

GRID = ((np.arange(100_000) + 0.5) / 100_000).tolist()
"""Shares that stand for all: means over them are integrals of the quantile function."""


def of(text: str) -> Lengths:
    return parse(text, "output_tokens")


def values(text: str) -> np.ndarray:
    return np.array([of(text).at(share) for share in GRID])


def test_a_number_is_itself() -> None:
    assert set(values("128")) == {128}
    assert of("128").smallest == 128


def test_uniform_has_each_number_equally_often() -> None:
    found, counts = np.unique(values("uniform:16,25"), return_counts=True)
    assert found.tolist() == list(range(16, 26))
    assert set(counts.tolist()) == {10_000}
    assert of("uniform:16,25").smallest == 16


def test_normal_has_its_mean_its_deviation_and_its_quantiles() -> None:
    found = values("normal:500,50")
    assert found.mean() == pytest.approx(500, abs=0.01)
    assert found.std() == pytest.approx(50, rel=0.001)
    assert of("normal:500,50").at(0.9) == round(NormalDist(500, 50).inv_cdf(0.9))


def test_lognormal_has_its_median_and_its_mean() -> None:
    found = values("lognormal:1000,0.5")
    assert np.median(found) == 1000
    assert found.mean() == pytest.approx(1000 * math.exp(0.5**2 / 2), rel=0.001)
    assert of("lognormal:1000,0.5").at(NormalDist().cdf(1)) == round(1000 * math.exp(0.5))


def test_choice_has_each_as_often_as_its_weight() -> None:
    found, counts = np.unique(values("choice:64=3,1=0,8=1"), return_counts=True)
    assert dict(zip(found.tolist(), counts.tolist(), strict=True)) == {64: 75_000, 8: 25_000}
    assert of("choice:64=3,1=0,8=1").smallest == 8


def test_a_file_has_each_line_equally_often(tmp_path: Path) -> None:
    file = tmp_path / "lengths.jsonl"
    file.write_text('7\n\n2.6\n{"output_tokens": 100, "prompt_tokens": 5}\n7\n')
    found, counts = np.unique(values(f"file:{file}"), return_counts=True)
    assert dict(zip(found.tolist(), counts.tolist(), strict=True)) == {
        3: 25_000, 7: 50_000, 100: 25_000
    }  # fmt: skip
    assert of(f"file:{file}").smallest == 3


def test_bounds_hold() -> None:
    found = values("lognormal:128,1,min=100,max=200")
    assert (found.min(), found.max()) == (100, 200)
    assert of("lognormal:128,1,min=100").smallest == 100
    assert of("uniform:5,9,min=7").smallest == values("uniform:5,9,min=7").min() == 7
    assert of("uniform:5,9,max=3").smallest == values("uniform:5,9,max=3").max() == 3
    assert values("normal:3,10").min() == 1


TEXTS = st.one_of(
    st.integers(1, LONGEST).map(str),
    st.builds("uniform:{},{}".format, st.integers(1, 99), st.integers(99, LONGEST)),
    st.builds("normal:{},{}".format, st.floats(0.1, 1e12), st.floats(0, 1e12)),
    st.builds("lognormal:{},{}".format, st.floats(0.1, 1e12), st.floats(0, 10)),
)


@given(text=TEXTS, shares=st.lists(st.floats(2**-54, 1 - 2**-53), min_size=2))
def test_quantiles_are_lengths_and_never_fall(text: str, shares: list[float]) -> None:
    found = [of(text).at(share) for share in sorted(shares)]
    assert found == sorted(found)
    assert of(text).smallest <= found[0] and found[-1] <= LONGEST
    assert all(type(one) is int for one in found)


@pytest.mark.parametrize(
    "text",
    """0 -1 many 1.5 2147483648 uniform uniform: uniform:5 uniform:9,5 uniform:1.5,2 uniform:0,3
    uniform:1,2,3 normal:0,1 normal:nan,1 normal:5,-1 normal:5,inf lognormal:5 lognormal:5,99
    lognormal:5,1,max=0 lognormal:5,1,min=9,max=3 lognormal:5,1,mid=3 choice: choice:1 choice:1=
    choice:1=0 choice:0=1 choice:1=-1,2=5 choice:1=inf gamma:1,2""".split(),
)
def test_what_is_no_distribution_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError) as found:
        check(text, "n")
    message = str(found.value)
    assert "n " in message and repr(text) in message and ALLOWED in message


@pytest.mark.parametrize(
    "line", ["0", "-3", "true", '"5"', "{}", '{"output_tokens": null}', "1e99"]
)
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "lengths.jsonl"
    file.write_text(f"5\n\n{line}\n")
    with pytest.raises(ConfigError, match=r"lengths.jsonl, line 3: .* whose output_tokens is one"):
        of(f"file:{file}")


def test_a_file_is_not_opened_to_check_the_text(tmp_path: Path) -> None:
    check(f"file:{tmp_path / 'missing'}", "n")
    with pytest.raises(ConfigError, match=r"cannot read .*missing"):
        parse(f"file:{tmp_path / 'missing'}", "n")
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigError, match="empty: no line"):
        parse(f"file:{tmp_path / 'empty'}", "n")
