"""`srm bench first-tokens`: how soon first tokens come, by what a step gives to prompts.

The scheduler is the one that serves; device and clock are counted, so the figures are the same on
any machine. A step takes a time of its own and one for each row, as steps of this width took in a
record of `srm bench engine`; a prompt's token, which has no output head, takes the part of a row
that its operations are. As in an engine, a step is scheduled while the one before it runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from bench.frame import Record, Settings, run, table
from engine.config import EngineConfig, ModelConfig
from engine.messages import Request, SamplingParams
from engine.scheduler.scheduler import Scheduler
from engine.state.latency import F64
from engine.steps.batch import Batch, StepResult

SLOTS, N_CTX = 2_048, 512
BEFORE: dict[str, Any] = {"prefill_step_tokens": 4_096, "max_prefill_share": 0.5}
"""Settings under which, with at most 2,048 running sequences, all of them decode and prompts fill
the step."""


class FirstTokensConfig(Settings, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm bench first-tokens`. The defaults are float32 on 2 cores."""

    widths: tuple[int, ...] = (256, 512)
    """Values of d_model; each model has 8 layers and a vocabulary of 8,192 tokens."""
    step_ms: tuple[float, ...] = (5.0, 7.1)
    """Milliseconds that a step takes besides its rows, for each width."""
    row_us: tuple[float, ...] = (101.0, 450.0)
    """Microseconds that a decoded row takes, for each width."""
    at_once: tuple[int, ...] = (1_024, 256)
    """Numbers of requests sent at once."""
    loads: tuple[float, ...] = (0.3, 0.8)
    """Loads that arrive at random times, as fractions of the most that the device can do."""
    requests: int = 2_000
    """Number of requests in each of these loads."""
    prompt_tokens: int = 32
    """Length of a prompt, in tokens."""
    output_tokens: int = 128
    """Length of a completion, in tokens."""
    step_tokens: tuple[int, ...] = (256, 512, 1_024, 2_048, 4_096)
    """Values of `prefill_step_tokens` to try."""
    shares: tuple[float, ...] = (0.25, 0.5, 0.75, 0.9, 0.95, 1.0)
    """Values of `max_prefill_share` to try."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not len(self.widths) == len(self.step_ms) == len(self.row_us):
            raise ValueError(
                "widths, step_ms and row_us must be of one length, got "
                f"{len(self.widths)}, {len(self.step_ms)} and {len(self.row_us)}"
            )
        for name, low, high in (("at_once", 1, SLOTS), ("step_tokens", 2, 2 * SLOTS)):
            if not all(low <= one <= high for one in getattr(self, name)):
                raise ValueError(f"{name} must be {low} … {high}, got {getattr(self, name)}")
        if max(self.shares) > 1:
            raise ValueError(f"shares must be in (0, 1], got {self.shares}")
        if self.prompt_tokens + self.output_tokens > N_CTX:
            raise ValueError(
                f"prompt_tokens and output_tokens must be at most {N_CTX} together, got "
                f"{self.prompt_tokens} and {self.output_tokens}"
            )


class Device(NamedTuple):
    """Seconds that each part of a step takes."""

    step_s: float
    row_s: float
    prompt_token_s: float

    def seconds(self, batch: Batch) -> float:
        """Return how long the step takes."""
        prompts = batch.num_tokens - batch.num_decode
        return self.step_s + self.row_s * batch.num_decode + self.prompt_token_s * prompts


def main(argv: list[str]) -> int:
    """Count, write a record, print its tables."""
    return run(FirstTokensConfig, argv, "first-tokens", measure, markdown)


def measure(config: FirstTokensConfig) -> Record:
    """Return the cases of each model."""
    cases = []
    for width, step_ms, row_us in zip(config.widths, config.step_ms, config.row_us, strict=True):
        model = ModelConfig(d_model=width, num_layers=8, num_heads=4, n_ctx=N_CTX, vocab_size=8192)
        part = model.prefill_flops_per_token / model.flops_per_token
        device = Device(step_ms / 1e3, row_us / 1e6, part * row_us / 1e6)
        cases += _cases(model, device, config)
    return {"cases": cases}


def _cases(model: ModelConfig, device: Device, config: FirstTokensConfig) -> list[Record]:
    default = EngineConfig()
    limit, share = default.prefill_step_limit(model), default.max_prefill_share
    tried = [BEFORE, _limits(limit, share)]
    shares = [_limits(limit, one) for one in config.shares]
    steps = [_limits(tokens, share) for tokens in config.step_tokens]
    bursts = [BEFORE, *shares, *(one for one in steps if one not in shares)]
    request_s = device.prompt_token_s * (config.prompt_tokens - 1)
    request_s += device.row_s * config.output_tokens
    gaps = np.random.default_rng(0).exponential(request_s, config.requests)
    found = []
    for count in config.at_once:
        for limits in bursts:
            one = _serve(model, device, np.zeros(count), limits, config)
            found.append({"width": model.d_model, "at_once": count, **limits, **one})
    for load in config.loads:
        for limits in tried:
            one = _serve(model, device, np.cumsum(gaps / load), limits, config)
            found.append({"width": model.d_model, "load": load, **limits, **one})
    return found


def _limits(tokens: int, share: float) -> dict[str, Any]:
    return {"prefill_step_tokens": tokens, "max_prefill_share": share}


@dataclass(slots=True)
class _Times:
    """The times at which each request's tokens came, in seconds."""

    first: F64
    last: F64
    gaps: list[F64] = field(default_factory=list)

    def note(self, requests: np.ndarray[Any, Any], now: float) -> None:
        is_first = np.isnan(self.first[requests])
        self.first[requests[is_first]] = now
        self.gaps.append(now - self.last[requests[~is_first]])
        self.last[requests] = now


def _serve(
    model: ModelConfig,
    device: Device,
    arrivals: F64,
    limits: dict[str, Any],
    config: FirstTokensConfig,
) -> dict[str, Any]:
    """Serve a request at each of these times, in seconds, to the end."""
    scheduler = Scheduler(
        model,
        EngineConfig(
            num_slots=SLOTS, prefix_cache=False, max_waiting=len(arrivals) + SLOTS, **limits
        ),
    )
    times = _Times(np.full(len(arrivals), np.nan), np.full(len(arrivals), np.nan))
    edges, arrived, now = [0.0, 0.0], 0, 0.0  # seconds, where steps begin and end
    landing: Batch | None = None
    while True:
        while arrived < len(arrivals) and arrivals[arrived] <= now:
            scheduler.add(_request(arrived, config))
            arrived += 1
        batch = scheduler.schedule()
        if batch is not None:
            begin = max(now, edges[-1])
            edges += [begin, begin + device.seconds(batch)]
        if landing is not None:  # its step is the last one, or the last but one
            now = scheduler.latencies.now = edges[-1 if batch is None else -3]
            token_ids = np.full(landing.num_decode, model.eos_token_id, np.int32)
            result = StepResult(token_ids, np.zeros(len(token_ids), np.float32))
            scheduler.complete(landing, result)
            scheduler.latencies.publish(is_idle=False)
            times.note(landing.sequence_ids, now)
        elif batch is None:
            if arrived == len(arrivals):
                break
            now = float(arrivals[arrived])
        landing = batch
    ttft, gaps = times.first - arrivals, np.concatenate(times.gaps)
    # How many steps a request waited; of the one that ran when it came, the part that was left.
    begun = np.interp(arrivals, edges, np.arange(len(edges)) // 2 + np.arange(len(edges)) % 2)
    steps = np.searchsorted(edges[1::2], times.first) + 1 - begun
    return {
        "tokens_per_s": config.output_tokens * len(arrivals) / now,
        "ttft_p50": float(np.median(ttft)),
        "ttft_p99": float(np.quantile(ttft, 0.99)),
        "ttft_p99_steps": float(np.quantile(steps, 0.99)),
        "itl_p99": float(np.quantile(gaps, 0.99)),
        "itl_most": float(gaps.max()),
        "steps": len(edges) // 2 - 1,
    }


def _request(number: int, config: FirstTokensConfig) -> Request:
    return Request(
        id=str(number),
        prompt_token_ids=np.full(config.prompt_tokens, 2, "<i4").tobytes(),
        params=SamplingParams(max_tokens=config.output_tokens, ignore_eos=True),
    )


def markdown(record: Record) -> list[str]:
    """Render the record as tables."""
    settings, cases = record["settings"], record["cases"]
    bursts = [case for case in cases if "at_once" in case]
    models = [
        f"d {width}: {step_ms:g} ms and {row_us:g} µs a decoded row"
        for width, step_ms, row_us in zip(
            settings["widths"], settings["step_ms"], settings["row_us"], strict=True
        )
    ]
    return [
        f"Counted, not timed: prompts of {settings['prompt_tokens']} tokens, outputs of "
        f"{settings['output_tokens']}; a step takes with {'; '.join(models)}. "
        "The first line of each is a step of all running sequences, filled with prompts up to "
        "4,096 tokens, to which others are compared. Then one setting is varied from its default.",
        "",
        *table(
            "model | sent at once | step with prompts | share | tok/s | TTFT p50 | p99 | ITL p99 "
            "| longest",
            map(_burst_row, bursts, _first_of_each(bursts)),
        ),
        "",
        "As a share of what the device can do at most, arriving at random:",
        "",
        *table(
            "model | load | step with prompts | share | TTFT p50 | p99 | in steps | ITL p99",
            (
                f"d {case['width']} | {case['load']:.0%} | {case['prefill_step_tokens']:,} "
                f"| {case['max_prefill_share']:g} | {1e3 * case['ttft_p50']:.0f} ms "
                f"| {1e3 * case['ttft_p99']:.0f} ms | {case['ttft_p99_steps']:.2f} "
                f"| {1e3 * case['itl_p99']:.0f} ms"
                for case in cases
                if "load" in case
            ),
        ),
    ]


def _first_of_each(bursts: list[Record]) -> list[Record]:
    """Return for each case the first one of its model and number of requests."""
    first: dict[tuple[int, int], Record] = {}
    return [first.setdefault((case["width"], case["at_once"]), case) for case in bursts]


def _burst_row(case: Record, before: Record) -> str:
    def times(name: str) -> str:
        return f"{case[name]:.2f} s ({case[name] / before[name]:.2f})"

    rate = case["tokens_per_s"]
    return (
        f"d {case['width']} | {case['at_once']:,} | {case['prefill_step_tokens']:,} "
        f"| {case['max_prefill_share']:g} | {rate:,.0f} ({rate / before['tokens_per_s'] - 1:+.1%}) "
        f"| {times('ttft_p50')} | {times('ttft_p99')} | {case['itl_p99']:.2f} s "
        f"| {case['itl_most']:.2f} s"
    )
