"""Objectives and conditions: what is understood, what is refused, and what holds."""

from __future__ import annotations

import math

import msgspec
import pytest

from srm.errors import ConfigError
from srm.loadtest import objectives
from srm.loadtest.quantities import DISTRIBUTIONS
from srm.loadtest.summary import Distribution, Summary

EMPTY = Distribution(0, *[math.nan] * 9)
CUT = {"cut": 1, "timeout": 2}


def summary(**fields: object) -> Summary:
    """Everything 0 or NaN but for what is given."""
    kinds = {int: 0, float: 0.0, Distribution: EMPTY, str: "", dict[str, int]: {}}
    values = {field.name: kinds.get(field.type, ()) for field in msgspec.structs.fields(Summary)}
    return Summary(**{**values, "window": (0.0, 1.0), "planned": 10, **fields})  # type: ignore[arg-type]


def p99(value: float) -> Distribution:
    return msgspec.structs.replace(EMPTY, count=1, p99=value)


@pytest.mark.parametrize(
    ("text", "parts", "limit"),
    [
        ("ttft<0.5", ("ttft", "<"), 0.5),
        ("ttft<500ms", ("ttft", "<"), 0.5),
        (" tpot <= 50 ms ", ("tpot", "<="), 0.05),
        ("itl<2s", ("itl", "<"), 2.0),
        ("e2e<1e-1", ("e2e", "<"), 0.1),
        ("e2e<.5", ("e2e", "<"), 0.5),
    ],
)
def test_objectives(text: str, parts: tuple[str, str], limit: float) -> None:
    result = objectives.parse(text)
    assert (result.name, result.comparison) == parts
    assert result.limit == pytest.approx(limit)


@pytest.mark.parametrize(
    ("kind", "message", "texts"),
    [
        ("objective", "is not a name, one of < <= > >=, and a number",
         "ttft ttft< ttft<fast ttft<1.2.3 ttft<-1 ttft<nan ttft=1 ttft<5m ttft<1,tpot<1"),
        ("objective", " is none of ttft, tpot, itl, e2e", "latency<1 ttft_p99<1"),
        ("objective", "a limit from above is wanted", "ttft>1"),
        ("condition", " is none of {ttft,ttft_sent,itl,",
         "ttft>1 ttft_p98>1 ttft_count>1 name<1 errors_none>0"),
        ("condition", "good_share is not a time and has no unit", "good_share<5ms"),
        ("condition", "is not a name", "errors!=0"),
    ],
)  # fmt: skip
def test_other_objectives_and_conditions_are_refused(kind: str, message: str, texts: str) -> None:
    for text in texts.split():
        with pytest.raises(ConfigError, match=f"^{kind} ") as error:
            objectives.parse(text) if kind == "objective" else objectives.check(summary(), [text])
        assert message in error.value.message
        assert repr(text) in error.value.message


@pytest.mark.parametrize(
    ("text", "fields", "held"),
    [
        ("ttft_p99>0.5", {"ttft": p99(0.51)}, "ttft_p99 is 0.51"),
        ("ttft_p99>500ms", {"ttft": p99(0.51)}, "ttft_p99 is 0.51"),
        ("ttft_p99>0.5", {"ttft": p99(0.5)}, ""),
        ("ttft_p99>=0.5", {"ttft": p99(0.5)}, "ttft_p99 is 0.5"),
        ("ttft_p99>0.5", {}, "ttft_p99 was not measured"),
        ("ttft_p99>0.5", {"planned": 0}, "no request was measured"),
        ("ttft_sent_p99>0.5", {"ttft_sent": p99(0.6)}, "ttft_sent_p99 is 0.6"),
        ("good_share<0.95", {"good_share": 0.9}, "good_share is 0.9"),
        ("good_share<0.95", {"good_share": 0.95}, ""),
        ("good_share<0.95", {"good_share": math.nan}, "good_share was not measured"),
        ("output_tokens_per_s<1000", {"output_tokens_per_s": 999.0}, "is 999"),
        ("errors>0", {"errors": CUT}, "errors is 3"),
        ("errors>0", {"errors": {}}, ""),
        ("errors>0", {"planned": 0}, "no request was measured"),
        ("errors_timeout>1", {"errors": CUT}, "errors_timeout is 2"),
        ("errors_client>0", {"errors": CUT}, ""),
        ("error_share>0.2", {"errors": CUT}, "error_share is 0.3"),
        ("rejected_share>0", {"rejected_share": 0.1}, "rejected_share is 0.1"),
        ("cpu_share>0.9", {"cpu_share": 0.95}, "cpu_share is 0.95"),
        ("lag_max_s>100ms", {"lag_max_s": 0.2}, "lag_max_s is 0.2"),
        ("concurrency_max<=3", {"concurrency_max": 3}, "concurrency_max is 3"),
    ],
)
def test_conditions_hold_for_unmeasured_values_too(
    text: str, fields: dict[str, object], held: str
) -> None:
    joined = "".join(objectives.check(summary(**fields), [text]))
    assert joined == "" if not held else joined.startswith(f"{text}: ") and joined.endswith(held)


def test_every_name_is_one_of_the_summary() -> None:
    whole = summary(ttft=p99(1.0))
    for name in (*objectives.TIMES, *objectives.NUMBERS):
        assert objectives.parse_condition(f"{name}>1").name == name
        assert isinstance(objectives.measure(whole, name), float)
    assert len(objectives.TIMES) == len(DISTRIBUTIONS) * len(objectives.STATISTICS) + 1
    assert set(objectives.OBJECTIVES) < set(DISTRIBUTIONS)
