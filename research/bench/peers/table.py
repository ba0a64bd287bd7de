"""The result of a peer's run, as data, and the record of a comparison as tables."""

from __future__ import annotations

import msgspec

from research.bench.frame import Record, table
from research.bench.peers.shapes import Shape


class PeerPoint(msgspec.Struct, frozen=True):
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


class PeerResult(msgspec.Struct, frozen=True):
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
    points: tuple[PeerPoint, ...]
    failure: str = ""
    """Why the run ended early; empty: it did not."""

    @property
    def best(self) -> PeerPoint | None:
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
        largest = max(fitting, default=0)
        return min(largest, self.most) if self.most else largest

    def fitting(self, memory_bytes: float) -> int:
        """Return how many states fit that memory, nothing else counted, within `most`."""
        num_states = int(memory_bytes // self.state_bytes)
        return min(num_states, self.most) if self.most else num_states


USEFUL = 0.9
"""Share of an engine's own best rate that a concurrency must reach to count as useful."""
MEMORY_GIB = 8
"""Memory for which the sequences that fit at once are counted."""
QUIET = 0.2
"""Foreign CPUs above which a figure is marked."""
_HOW = {"http": "Over HTTP, loaded by `srm loadtest`", "offline": "Offline, in one process"}


def markdown(record: Record) -> list[str]:
    """Render all tables."""
    results = msgspec.convert(record["results"], list[PeerResult])
    peak, settings = record["peak_gflops"], record["settings"]
    peaks = ", ".join(f"{dtype} {gflops:,.0f} GFLOP/s" for dtype, gflops in peak.items())
    lines = [
        f"Prompts of {settings['prompt_tokens']} random tokens, {settings['output_tokens']} "
        "generated greedily, none ended early; tok/s are generated tokens by the whole time of "
        f"whole waves of requests, prompts included. GEMM peaks of this run: {peaks}. Figures with "
        f"more than {QUIET} foreign CPUs meanwhile are marked †. What the columns mean, and what "
        "is not comparable, is in [peers.md](../peers.md).",
        "",
    ]
    for how, title in _HOW.items():
        if chosen := [peer for peer in results if peer.how == how]:
            lines += [f"## {title}", "", *_best(chosen, peak), "", *_ratios(chosen)]
    lines += ["## How many sequences at once", "", *_useful(results), ""]
    lines += ["## Every concurrency", "", *_points(results), ""]
    failures = [
        f"- `{peer.name}`: {peer.failure.splitlines()[-1]}" for peer in results if peer.failure
    ]
    if failures:
        lines += ["## Ended early", "", *failures, ""]
    return lines[:-1]


def _rate(result: PeerResult) -> float:
    return result.best.tokens_per_s if result.best else 0.0


def _tokens_per_s(point: PeerPoint) -> str:
    is_loud = point.foreign_cpus is not None and point.foreign_cpus > QUIET
    return f"{point.tokens_per_s:,.0f}{'†' if is_loud else ''}"


def _ttft(point: PeerPoint, digits: int) -> str:
    if point.ttft_p50 is None or point.ttft_p99 is None:
        return "–"
    return f"{point.ttft_p50:.{digits}f} / {point.ttft_p99:.{digits}f} s"


def _best(results: list[PeerResult], peak: dict[str, float]) -> list[str]:
    rows = []
    for result in sorted(results, key=_rate, reverse=True):
        if (best := result.best) is not None:
            gflops = best.tokens_per_s * result.flops_per_token / 1e9
            rows.append(
                f"{result.engine} | {result.version} | {result.model} | {result.dtype} "
                f"| {best.concurrency} | {_tokens_per_s(best)} "
                f"| {result.flops_per_token / 1e6:.1f} "
                f"| {gflops / peak.get(result.dtype, float('nan')):.0%} | {_ttft(best, 2)} "
                f"| {best.rss_bytes / 2**20:,.0f} MiB"
            )
    return table(
        "engine | version | model | dtype | best at | tok/s | MFLOP a token | of the peak "
        "| TTFT p50 / p99 | peak RSS",
        rows,
    )


def _ratios(results: list[PeerResult]) -> list[str]:
    """Render the ratios of our tok/s to theirs, each at its best, and the same ratios of FLOP/s."""
    best = [peer for peer in results if peer.best]
    others = [peer for peer in best if peer.version != "this commit"]
    ours = [peer for peer in best if peer.version == "this commit" and peer.model.startswith("srm")]
    if not ours or not others:
        return []

    def cell(own: PeerResult, other: PeerResult) -> str:
        if other.model.startswith("srm") and own.model != other.model:
            return "–"
        ratio = _rate(own) / _rate(other)
        return f"{ratio:.2f} ({ratio * own.flops_per_token / other.flops_per_token:.2f})"

    return [
        "Ours by theirs, each at its best: tok/s (and GFLOP/s, which leaves out that models cost "
        "different amounts a token).",
        "",
        *table(
            " | ".join(["against", "model", *(peer.model for peer in ours)]),
            (
                " | ".join([other.engine, other.model, *(cell(peer, other) for peer in ours)])
                for other in others
            ),
        ),
        "",
    ]


def _useful(results: list[PeerResult]) -> list[str]:
    memory, rows = MEMORY_GIB * 2**30, []
    measured = {peer.name: peer.useful(USEFUL, memory) for peer in results}
    most = max(
        (measured[peer.name] for peer in results if peer.version == "this commit"), default=0
    )
    widest = int(memory // Shape("srm", 1024).state_bytes())
    for peer in results:
        useful, fitting = measured[peer.name], peer.fitting(memory)
        is_other = peer.version != "this commit"
        rows.append(
            f"{peer.engine}, {peer.how} | {peer.model} | {peer.state_bytes / 2**10:,.0f} KiB "
            f"| {f'{useful:,}' if useful else '–'} "
            f"| {fitting:,}{' (its limit)' if fitting == peer.most else ''} "
            f"| {f'{most / useful:,.0f}' if is_other and most and useful else '–'} "
            f"| {f'{widest / fitting:,.0f}' if is_other else '–'}"
        )
    return [
        f"*measured*: the largest concurrency tried at which the engine gave {USEFUL:.0%} of its "
        f"own best, its processes within {MEMORY_GIB:g} GiB. *computed*: how many states of "
        f"sequences of the whole context fit {MEMORY_GIB:g} GiB, nothing else counted, within "
        "what the engine can run at all.",
        "",
        *table(
            "engine | model | state of a sequence | measured | computed "
            "| ours measured by theirs | SRM 1024 computed by theirs",
            rows,
        ),
    ]


def _points(results: list[PeerResult]) -> list[str]:
    return table(
        "engine | model | sequences | tok/s | TTFT p50 / p99 | ITL p50 | peak RSS "
        "| foreign CPUs | client CPU",
        (
            f"{peer.engine}, {peer.how} | {peer.model} | {point.concurrency:,} "
            f"| {_tokens_per_s(point)} | {_ttft(point, 3)} "
            f"| {'–' if point.itl_p50 is None else f'{point.itl_p50 * 1e3:.1f} ms'} "
            f"| {point.rss_bytes / 2**20:,.0f} MiB "
            f"| {'–' if point.foreign_cpus is None else f'{point.foreign_cpus:.2f}'} "
            f"| {'–' if point.client_cpu is None else f'{point.client_cpu:.0%}'}"
            for peer in results
            for point in peer.points
        ),
    )
