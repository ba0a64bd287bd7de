"""The result of a peer's run, as data, and the record of a comparison as tables."""

from __future__ import annotations

from typing import Any

import msgspec

from bench.peers.shapes import Shape


class Point(msgspec.Struct, frozen=True):
    """The measurement at one concurrency. Times are seconds; offline programs leave some null."""

    concurrency: int
    tokens_per_s: float
    """Generated tokens divided by the whole time of whole waves of requests, prompts included."""
    seconds: list[float]
    """The time of each repetition."""
    rss_bytes: int
    """Peak memory of the engine's processes."""
    foreign_cpus: float | None
    """Cores used by other processes meanwhile; null: too short to measure."""
    ttft_p50: float | None = None
    ttft_p99: float | None = None
    itl_p50: float | None = None
    client_cpu: float | None = None
    """Share of one core used by the busiest client process."""
    warnings: tuple[str, ...] = ()
    """Warnings of the load generator about its own figures."""


class Result(msgspec.Struct, frozen=True):
    """The result of one peer."""

    name: str
    engine: str
    how: str
    version: str
    model: str
    dtype: str
    flops_per_token: int
    state_bytes: int
    """Bytes of one sequence's state at the whole context, computed from shapes."""
    most: int
    """Most sequences that the engine can run at once, whatever the memory; 0: no limit known."""
    command: str
    settings: str
    """The run's settings; a result of other settings is not reused."""
    points: tuple[Point, ...]
    failure: str = ""
    """Why the run ended early; empty: it did not."""

    @property
    def best(self) -> Point | None:
        """The point with the highest rate."""
        return max(self.points, key=lambda point: point.tokens_per_s, default=None)

    def useful(self, share: float, memory_bytes: float) -> int:
        """Return the most sequences tried that reach `share` of the best rate within that memory.

        Requests beyond what the engine can run at once wait, and are not counted.
        """
        best = self.best
        fitting = [
            point.concurrency
            for point in self.points
            if best
            and point.tokens_per_s >= share * best.tokens_per_s
            and point.rss_bytes <= memory_bytes
        ]
        found = max(fitting, default=0)
        return min(found, self.most) if self.most else found

    def fitting(self, memory_bytes: float) -> int:
        """Return how many states fit that memory, nothing else counted, within `most`."""
        found = int(memory_bytes // self.state_bytes)
        return min(found, self.most) if self.most else found


USEFUL = 0.9
"""Share of an engine's own best rate that a concurrency must reach to count as useful."""
QUIET = 0.2
"""Foreign CPUs above which a figure is marked."""
_HOW = {"http": "Over HTTP, loaded by `srm loadtest`", "offline": "Offline, in one process"}


def markdown(record: dict[str, Any]) -> str:
    """Render all tables."""
    results = msgspec.convert(record["results"], list[Result])
    peak = record["peak_gflops"]
    settings = record["settings"]
    memory = settings["memory_gib"]
    lines = [
        f"Prompts of {settings['prompt_tokens']} random tokens, {settings['output_tokens']} "
        "generated greedily, none ended early; tok/s are generated tokens by the whole time of "
        "whole waves of requests, prompts included. GEMM peaks of this run: "
        + ", ".join(f"{dtype} {gflops:,.0f} GFLOP/s" for dtype, gflops in peak.items())
        + f". Figures with more than {QUIET} foreign CPUs meanwhile are marked †. What the "
        "columns mean, and what is not comparable, is in [peers.md](../peers.md).",
        "",
    ]
    for how, title in _HOW.items():
        chosen = [one for one in results if one.how == how]
        if not chosen:
            continue
        ours = [one for one in chosen if one.model.startswith("srm") and _is_ours(one)]
        lines += [f"## {title}", "", *_best(chosen, peak), "", *_ratios(chosen, ours)]
    lines += ["## How many sequences at once", "", *_useful(results, memory), ""]
    lines += ["## Every concurrency", "", *_points(results), ""]
    failures = [f"- `{one.name}`: {one.failure.splitlines()[-1]}" for one in results if one.failure]
    if failures:
        lines += ["## Ended early", "", *failures, ""]
    return "\n".join(lines)


def _is_ours(result: Result) -> bool:
    return result.version == "this commit" and not result.name.endswith("-slots")


def _mark(point: Point) -> str:
    return "†" if point.foreign_cpus is not None and point.foreign_cpus > QUIET else ""


def _best(results: list[Result], peak: dict[str, float]) -> list[str]:
    lines = [
        "| engine | version | model | dtype | best at | tok/s | MFLOP a token | of the peak "
        "| TTFT p50 / p99 | peak RSS |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in sorted(results, key=_rate, reverse=True):
        best = one.best
        if best is None:
            continue
        share = best.tokens_per_s * one.flops_per_token / 1e9 / peak.get(one.dtype, float("nan"))
        ttft = "–" if best.ttft_p50 is None else f"{best.ttft_p50:.2f} / {best.ttft_p99:.2f} s"
        lines.append(
            f"| {one.engine} | {one.version} | {one.model} | {one.dtype} | {best.concurrency} "
            f"| {best.tokens_per_s:,.0f}{_mark(best)} | {one.flops_per_token / 1e6:.1f} "
            f"| {share:.0%} | {ttft} | {best.rss_bytes / 2**20:,.0f} MiB |"
        )
    return lines


def _rate(result: Result) -> float:
    return result.best.tokens_per_s if result.best else 0.0


def _ratios(results: list[Result], ours: list[Result]) -> list[str]:
    """Render the ratios of our tok/s to theirs, each at its best, and the same ratios of FLOP/s."""
    ours = [one for one in ours if one.best]
    others = [one for one in results if one.best and one.version != "this commit"]
    if not ours or not others:
        return []
    lines = [
        "Ours by theirs, each at its best: tok/s (and GFLOP/s, which leaves out that models cost "
        "different amounts a token).",
        "",
        "| against | model | " + " | ".join(one.model for one in ours) + " |",
        "|---|---|" + "---|" * len(ours),
    ]
    for other in others:
        cells = [
            f"{_rate(one) / _rate(other):.2f} "
            f"({_rate(one) * one.flops_per_token / _rate(other) / other.flops_per_token:.2f})"
            if not other.model.startswith("srm") or one.model == other.model
            else "–"
            for one in ours
        ]
        lines.append(f"| {other.engine} | {other.model} | {' | '.join(cells)} |")
    return [*lines, ""]


def _useful(results: list[Result], memory_gib: float) -> list[str]:
    memory = memory_gib * 2**30
    lines = [
        f"*measured*: the largest concurrency tried at which the engine gave {USEFUL:.0%} of its "
        f"own best, its processes within {memory_gib:g} GiB. *computed*: how many states of "
        f"sequences of the whole context fit {memory_gib:g} GiB, nothing else counted, within "
        "what the engine can run at all.",
        "",
        "| engine | model | state of a sequence | measured | computed | ours measured by theirs "
        "| SRM 1024 computed by theirs |",
        "|---|---|---|---|---|---|---|",
    ]
    measured = {one.name: one.useful(USEFUL, memory) for one in results}
    most = max((measured[one.name] for one in results if one.version == "this commit"), default=0)
    widest = int(memory // Shape("srm", 1024).state_bytes())
    for one in results:
        found, fitting = measured[one.name], one.fitting(memory)
        limit = " (its limit)" if fitting == one.most else ""
        rate = f" at {_rate(one):,.0f} tok/s" if one.name.endswith("-slots") else ""
        is_other = one.version != "this commit"
        ratio = f"{most / found:,.0f}" if is_other and most and found else "–"
        ratio_computed = f"{widest / fitting:,.0f}" if is_other else "–"
        lines.append(
            f"| {one.engine}, {one.how} | {one.model} | {one.state_bytes / 2**10:,.0f} KiB "
            f"| {f'{found:,}' if found else '–'}{rate} | {fitting:,}{limit} "
            f"| {ratio} | {ratio_computed} |"
        )
    return lines


def _points(results: list[Result]) -> list[str]:
    lines = [
        "| engine | model | sequences | tok/s | TTFT p50 / p99 | ITL p50 | peak RSS "
        "| foreign CPUs | client CPU |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in results:
        for point in one.points:
            is_http = point.ttft_p50 is not None and point.ttft_p99 is not None
            ttft = f"{point.ttft_p50:.3f} / {point.ttft_p99:.3f} s" if is_http else "–"
            itl = "–" if point.itl_p50 is None else f"{point.itl_p50 * 1e3:.1f} ms"
            client = "–" if point.client_cpu is None else f"{point.client_cpu:.0%}"
            foreign = "–" if point.foreign_cpus is None else f"{point.foreign_cpus:.2f}"
            lines.append(
                f"| {one.engine}, {one.how} | {one.model} | {point.concurrency:,} "
                f"| {point.tokens_per_s:,.0f}{_mark(point)} | {ttft} | {itl} "
                f"| {point.rss_bytes / 2**20:,.0f} MiB | {foreign} | {client} |"
            )
    return lines
