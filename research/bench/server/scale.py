"""`srm bench scale`: what fleets of GPUs take, from measured unit costs and stated assumptions.

Unit costs are read from the newest records of this machine. The speed of a GPU is given as a range:
by itself what an H100 did through HTTP, and what its engine did alone. Counts follow from both;
what failures cost is simulated: each replica runs, fails or is stopped, and comes back, and the
lines that it had are made again.
"""

from __future__ import annotations

import math
from itertools import product
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from research.bench.frame import Record, Settings, run
from research.bench.records.table import newest
from research.bench.server.scale_table import markdown
from srm.errors import ConfigError
from srm.loadtest.records import RECORDS

_DAY_S = 24 * 3600
_PROMPT_COST = 167.8 / 184.5
"""Operations of a prompt's token as a fraction of those of a decoded one, at d 1,024
(docs/performance.md)."""


class ScaleConfig(Settings, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm bench scale`; all but the records' figures are assumptions."""

    gpus: tuple[int, ...] = (8, 64, 1_000)
    """Numbers of GPUs, each with a server of its own."""
    gpu_tokens_per_s: tuple[float, ...] = (2.26e6, 2.79e6)
    """Least and most tokens a second of one GPU; an H100, through HTTP and its engine alone."""
    running: int = 65_536
    """Sequences that one GPU runs at once."""
    state_bytes: int = 32_768
    """Bytes of a sequence's state."""
    router_rate: float = 2_000.0
    """Requests a second that one core of a router passes on."""
    mtbf_h: float = 50_000.0
    """Mean hours between two failures of a GPU."""
    stops_a_day: float = 1.0
    """Planned stops of each replica, a day."""
    restart_s: float = 120.0
    """Seconds until a replica is back."""
    days: float = 30.0
    """Number of simulated days."""
    gpu_price: float = 3.0
    """Price of a GPU with its host, in dollars an hour."""
    core_price: float = 0.04
    """Price of a processor core beyond the GPUs' hosts, in dollars an hour."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.gpu_tokens_per_s) != 2:
            raise ValueError(f"gpu_tokens_per_s must be two numbers, got {self.gpu_tokens_per_s}")


class _Load(NamedTuple):
    """A kind of request that loads the fleet."""

    name: str
    prompt_tokens: int
    samples: int
    output_tokens: int
    kind: str
    """`whole`, `streamed` or `batch`."""


LOADS = (
    _Load("rollouts, whole replies", 256, 64, 512, "whole"),
    _Load("chats, streamed", 256, 1, 256, "streamed"),
    _Load("batch lines of many samples", 256, 64, 512, "batch"),
    _Load("batch lines of one sample", 256, 1, 256, "batch"),
)


class UnitCosts(NamedTuple):
    """Measured cost of one unit of each kind."""

    whole_ns: float
    streamed_ns: float
    whole_bytes: float
    streamed_bytes: float
    host_ns: float
    owner_us: float
    worker_us: float
    line_bytes: float
    records: dict[str, str]
    """Names of the records, by their kinds."""


def main(argv: list[str]) -> int:
    """Compute, write a record, print its tables."""
    return run(ScaleConfig, argv, "scale", measure, markdown)


def measure(config: ScaleConfig) -> Record:
    """Return the unit costs, the plan of each load and the simulated losses."""
    costs = unit_costs()
    kinds = list(product(config.gpus, config.gpu_tokens_per_s))
    return {
        "unit_costs": costs._asdict(),
        "cases": [
            planned(load, gpus, speed, costs, config) for load in LOADS for gpus, speed in kinds
        ],
        "losses": [simulated(LOADS[-1], gpus, speed, config) for gpus, speed in kinds],
    }


def unit_costs() -> UnitCosts:
    """Read the newest records. Raises ConfigError if one of them is missing."""
    costs: dict[str, Any] = {}
    for kind in ("text", "host", "fleet"):
        if (last := newest(kind, RECORDS)) is None:
            raise ConfigError(f"{RECORDS} has no record of {kind}: unit costs are read from it")
        costs[kind] = last
    texts = {case["name"]: case["raw"] for case in costs["text"][1]["cases"]}
    whole, streamed = texts["whole of many"], texts["streams"]
    lines = max(costs["fleet"][1]["cases"], key=lambda case: (case["engines"], case["lines_per_s"]))
    cpu, remote = lines["cpu_s_per_line"], 1 - 1 / lines["engines"]
    return UnitCosts(
        whole_ns=1e9 / median(text["tokens_per_api_s"] for text in whole),
        streamed_ns=1e9 / median(stream["tokens_per_api_s"] for stream in streamed),
        whole_bytes=median(text["bytes"] / text["tokens"] for text in whole),
        streamed_bytes=median(stream["bytes"] / stream["tokens"] for stream in streamed),
        host_ns=max(
            case["schedule"] + case["complete"]
            for case in costs["host"][1]["cases"]
            if case["running"] > 65_536
        ),
        owner_us=1e6 * cpu["owner jobs"],
        worker_us=1e6 * cpu["others api"] / remote,
        line_bytes=lines["network_bytes_per_line"] / remote,
        records={kind: path.stem for kind, (path, _) in costs.items()},
    )


def planned(
    load: _Load, gpus: int, speed: float, costs: UnitCosts, config: ScaleConfig
) -> dict[str, Any]:
    """Return what so many GPUs of this speed take under a load that keeps them busy."""
    outputs = load.samples * load.output_tokens
    work = outputs + _PROMPT_COST * load.prompt_tokens  # decoded tokens that it is worth
    requests = gpus * speed / work
    tokens = requests * outputs
    text_ns = costs.streamed_ns if load.kind == "streamed" else costs.whole_ns
    text_bytes = costs.streamed_bytes if load.kind == "streamed" else costs.whole_bytes
    api_cores = tokens * text_ns / 1e9
    network = tokens * text_bytes
    owner_cores = 0.0
    if load.kind == "batch":
        # A line costs what it does whatever its length, and its tokens as in a whole reply.
        api_cores += requests * costs.worker_us / 1e6
        network += requests * costs.line_bytes
        owner_cores = requests * costs.owner_us / 1e6
    host_cores = tokens * costs.host_ns / 1e9
    router_cores = 0.0 if load.kind == "batch" else requests / config.router_rate
    cores = api_cores + host_cores + router_cores + owner_cores
    dollars_per_h = gpus * config.gpu_price + cores * config.core_price
    return {
        "load": load.name,
        "prompt_tokens": load.prompt_tokens,
        "samples": load.samples,
        "output_tokens": load.output_tokens,
        "gpus": gpus,
        "gpu_tokens_per_s": speed,
        "tokens_per_s": tokens,
        "requests_per_s": requests,
        "network_bytes_per_s": network,
        "api_cores": math.ceil(api_cores),
        "host_cores": host_cores,
        "router_cores": math.ceil(router_cores),
        "owners": math.ceil(owner_cores),
        "price": dollars_per_h / 3600 / tokens * 1e9,
    }


def simulated(load: _Load, gpus: int, speed: float, config: ScaleConfig) -> dict[str, Any]:
    """Return what failures and stops of replicas cost in some days.

    Times between them are exponential. A replica's sequences have all ages when it goes, and are
    made again from the beginning by those that are left.
    """
    rng = np.random.default_rng(0)
    seconds = config.days * _DAY_S
    counts = {
        "failures": rng.poisson(gpus * seconds / (3600 * config.mtbf_h)),
        "stops": rng.poisson(gpus * config.days * config.stops_a_day),
    }
    total = int(sum(counts.values()))
    begins = np.sort(rng.uniform(0, seconds, total))
    away = np.arange(1, total + 1) - np.searchsorted(begins, begins - config.restart_s)
    ages = rng.integers(0, load.output_tokens, (total, 256)).mean(axis=1)
    redone = float((config.running * ages).sum())
    return {
        "gpus": gpus,
        "gpu_tokens_per_s": speed,
        **{name: int(count) for name, count in counts.items()},
        "most_away": int(away.max(initial=0)),
        "away": total * config.restart_s / (gpus * seconds),
        "redone": redone / (speed * gpus * seconds),
        "state_bytes": config.running * config.state_bytes,
        "recompute_s": config.running * load.output_tokens / 2 / speed,
    }
