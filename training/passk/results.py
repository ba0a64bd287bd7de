"""The results of a run, computed from its journal: numbers for a record, and a table of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from srm.training.passk.config import PassKConfig
from srm.training.passk.journal import JournalEntry
from srm.training.passk.problems import PromptProblem
from srm.training.statistics.coverage import (
    CONFIDENCE,
    Floats,
    Interval,
    Tally,
    intervals,
    pass_table,
    redrawn_means,
    resampled_means,
    spaced,
)
from srm.training.statistics.power_law import PowerLaw, fit, fits

RESAMPLED = 1_000
"""Number of bootstrap resamples for the intervals."""


class Solved(msgspec.Struct, frozen=True):
    """One problem."""

    question: str
    drawn: int
    right: int
    is_until: bool
    sampled: int
    completion_tokens: int
    prompt_tokens: int
    texts_scored: int


class CoveragePoint(msgspec.Struct, frozen=True):
    """Coverage at one k."""

    k: int
    coverage: float
    over_problems: Interval | None
    """Interval if problems, and their samples, were drawn again; None where there is one
    problem."""
    over_samples: Interval
    """Interval if the samples of the same problems were drawn again."""
    completion_tokens: float
    """Mean number of completion tokens in k samples of a problem."""


class Law(msgspec.Struct, frozen=True):
    """The power law c(k) = exp(a k^b) fitted to the coverage."""

    a: float
    b: float
    a_interval: Interval | None
    b_interval: Interval | None
    """Interval of b if problems were drawn again; None where there is one problem."""
    largest_error: float
    """Largest difference between law and coverage at any point."""
    resampled: int
    without_law: int
    """Number of resampled curves without a law, being constant in k; they are left out of the
    intervals."""


class Totals(msgspec.Struct, frozen=True):
    """Totals of the run."""

    requests: int
    sampled: int
    completion_tokens: int
    prompt_tokens: int
    texts_scored: int
    sampling_s: float
    """Seconds from first request to last reply, summed over sessions."""
    tokens_per_s: float
    sessions: int


class Results(msgspec.Struct, frozen=True):
    """All that is computed of a run."""

    fingerprints: list[str]
    """Fingerprints of the server's weights that replies gave; empty if they gave none."""
    totals: Totals
    points: list[CoveragePoint]
    power_law: Law | None
    """None for fewer than three values of k, and where the coverage is the same at all of them."""
    problems: list[Solved]


def results_of(
    config: PassKConfig, problems: Sequence[PromptProblem], answers: Sequence[JournalEntry]
) -> Results:
    """Compute the results of a run whose journal has these answers."""
    fingerprints = {answer.fingerprint for answer in answers if answer.fingerprint is not None}
    solved = _solved(problems, answers)
    return results_of_counts(config, sorted(fingerprints), _totals(answers), solved)


def results_of_counts(
    config: PassKConfig, fingerprints: list[str], totals: Totals, solved: list[Solved]
) -> Results:
    """Compute coverage, its intervals and its power law from the counts of each problem."""
    counts = [Tally(problem.drawn, problem.right, problem.is_until) for problem in solved]
    ks = spaced(config.samples)
    table = pass_table(counts, ks)
    coverage = table.mean(axis=0)
    many = resampled_means(table, RESAMPLED, config.seed) if len(solved) > 1 else None
    own = intervals(redrawn_means(counts, ks, RESAMPLED, config.seed))
    over = intervals(many) if many is not None else [None] * len(ks)
    per_sample = float(np.mean([problem.completion_tokens / problem.sampled for problem in solved]))
    return Results(
        fingerprints=fingerprints,
        totals=totals,
        points=[
            CoveragePoint(k, float(coverage[at]), over[at], own[at], k * per_sample)
            for at, k in enumerate(ks)
        ],
        power_law=_law(ks, coverage, many),
        problems=solved,
    )


def _solved(problems: Sequence[PromptProblem], answers: Sequence[JournalEntry]) -> list[Solved]:
    of: list[list[JournalEntry]] = [[] for _ in problems]
    for answer in answers:
        of[answer.problem].append(answer)
    return [
        Solved(
            question=problem.question.question,
            drawn=sum(answer.drawn for answer in own),
            right=sum(answer.right for answer in own),
            is_until=any(answer.is_enough for answer in own),
            **_sums(own),
        )
        for problem, own in zip(problems, of, strict=True)
    ]


def _totals(answers: Sequence[JournalEntry]) -> Totals:
    sessions: dict[int, float] = {}
    for answer in answers:
        sessions[answer.session] = max(answer.session_s, sessions.get(answer.session, 0.0))
    sums, seconds = _sums(answers), sum(sessions.values())
    return Totals(
        requests=len(answers),
        **sums,
        sampling_s=seconds,
        tokens_per_s=sums["completion_tokens"] / seconds,
        sessions=len(sessions),
    )


def _sums(answers: Sequence[JournalEntry]) -> dict[str, int]:
    names = ("sampled", "completion_tokens", "prompt_tokens", "texts_scored")
    return {name: sum(getattr(answer, name) for answer in answers) for name in names}


def _law(ks: Sequence[int], coverage: Floats, many: Floats | None) -> Law | None:
    law = fit(ks, coverage)
    if law is None:
        return None
    laws: list[PowerLaw] = [] if many is None else fits(ks, many, law)
    of_a, of_b = intervals(np.array(laws)) if laws else (None, None)
    return Law(
        a=law.a,
        b=law.b,
        a_interval=of_a,
        b_interval=of_b,
        largest_error=float(np.abs(law.coverage(ks) - coverage).max()),
        resampled=0 if many is None else len(many),
        without_law=0 if many is None else len(many) - len(laws),
    )


def page(config: PassKConfig, about: Mapping[str, Any], results: Results, picture: str) -> str:
    """Return the results as Markdown; `about` is the journal's description of the run."""
    totals, law = results.totals, results.power_law
    percent = f"{CONFIDENCE:.0%}"
    drawing = f"until {config.until} are right, at most " if config.until else ""
    lines = [
        f"{len(results.problems):,} problems, {drawing}{config.samples:,} samples of each, "
        f"{about['n']:,} a request, of {about['model']}: temperature {config.temperature:g}, top_p "
        f"{config.top_p:g}, at most {config.max_tokens:,} tokens; right by {config.reward}.",
        "",
        f"{totals.sampled:,} samples, {totals.completion_tokens:,} tokens in "
        f"{totals.sampling_s:,.1f} s: {totals.tokens_per_s:,.0f} tokens a second. "
        f"{totals.requests:,} requests, {totals.texts_scored:,} texts scored.",
        "",
        f"| k | pass@k | {percent} over problems | {percent} over samples | tokens of k samples |",
        "|---|---|---|---|---|",
    ]
    last = results.points[-1].k
    for point in results.points:
        if point.k != last and str(point.k).strip("0") != "1":
            continue  # only powers of ten
        over = _shown(point.over_problems)
        lines.append(
            f"| {point.k:,} | {point.coverage:.4f} | {over} | {_shown(point.over_samples)} | "
            f"{point.completion_tokens:,.0f} |"
        )
    lines.append("")
    if law is None:
        lines.append(
            "Power law: none, which would need three values of k and a coverage that differs."
        )
    else:
        lines.append(
            f"Power law: pass@k = exp(a · k^b), a = {law.a:.4f} ({_shown(law.a_interval)}), "
            f"b = {law.b:.4f} ({_shown(law.b_interval)}), {percent} over problems; it is at most "
            f"{law.largest_error:.4f} beside the curve."
        )
        if law.without_law:
            lines.append(
                f"{law.without_law} of {law.resampled} resampled curves have no such law and are "
                "not in its intervals."
            )
    return "\n".join([*lines, "", f"![coverage against samples and tokens]({picture})", ""])


def _shown(interval: Interval | None) -> str:
    return "–" if interval is None else f"{interval.low:.4f} … {interval.high:.4f}"
