"""docs/loadtest-measures.md names every measure, objective and limit there is, and no other."""

from __future__ import annotations

import re

import pytest

from srm.loadtest.analysis import verdict
from srm.loadtest.histogram import LONGEST_S
from srm.loadtest.objectives import COMPARISONS, OBJECTIVES, parse, parse_condition
from srm.loadtest.quantities import DISTRIBUTIONS
from srm.loadtest.recording import ERRORS
from srm.loadtest.summary import Distribution, Summary
from tests.kit.serving import ROOT

PAGE = (ROOT / "docs/loadtest-measures.md").read_text()
SECTIONS = dict(re.findall(r"^## (.*)\n((?:(?!^## ).*\n)*)", PAGE, re.M))


def first_cells(heading: str) -> list[str]:
    rows = re.findall(r"^\|(.*?)\|", SECTIONS[heading], re.M)
    return [name for row in rows for name in re.findall(r"`(\w+)`", row)]


def test_every_field_of_the_summary_is_a_measure() -> None:
    apart = ("name", "window", "objectives")
    measures = [name for name in Summary.__struct_fields__ if name not in apart]
    assert sorted(first_cells("Measures")) == sorted(measures)
    assert all(f"`{name}`" in SECTIONS["Measures"] for name in apart)
    assert set(first_cells("Other tools")) <= {"itl", *Summary.__struct_fields__}


def test_every_statistic_and_kind_of_error_is_named() -> None:
    for name in Distribution.__struct_fields__:
        assert f"`{name}`" in SECTIONS["Distributions"]
    (row,) = re.findall(r"^\| `errors` \|.*$", SECTIONS["Measures"], re.M)
    assert re.findall(r"`(\w+)`", row)[1:] == list(ERRORS[1:])
    assert f"above {int(LONGEST_S / 86400)} days" in SECTIONS["Distributions"].replace("\n", " ")


def test_every_objective_and_comparison_is_there_and_examples_are_some() -> None:
    assert first_cells("Objectives") == list(OBJECTIVES)
    for text in re.findall(r"`(\w+<=?[^`]+)`", SECTIONS["Objectives"]):
        for objective in text.split(","):
            parse(objective)

    text = SECTIONS["Conditions"]
    assert set(COMPARISONS) <= set(re.findall(r"`([<>=]+)`", text))
    examples = [part for many in re.findall(r"`(\w+[<>][^`]+)`", text) for part in many.split(",")]
    assert len(examples) == 2
    names = set(re.findall(r"`(\w+)`", text))
    assert set(DISTRIBUTIONS) <= names
    others = names - set(DISTRIBUTIONS) - {"fail_if", "ms"}
    for condition in (*examples, *(f"{name}>0" for name in others)):
        parse_condition(condition)


@pytest.mark.parametrize(
    "limit",
    [
        f"`cpu_share` above {verdict.BUSY}",
        f"`lateness` above {verdict.LATE_S * 1e3:.0f} ms, or above {verdict.LATE_SHARE} of",
        f"`lag_max_s` above {verdict.LAG_S * 1e3:.0f} ms",
        f"more than {verdict.CACHED_SHARE:.0%} of the prompt tokens",
        f"fewer than {verdict.FOR_P999} completed",
        f"less than {verdict.WINDOW_E2E} times the median E2E",
        f"more than {verdict.GROWTH_DEVIATIONS} · √(2 · mean) and {verdict.GROWTH_SHARE} · mean",
    ],
)
def test_limits_of_warnings_are_those_of_the_code(limit: str) -> None:
    assert limit in SECTIONS["Warnings"]
