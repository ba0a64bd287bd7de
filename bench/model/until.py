"""`srm bench until`: samples drawn until enough are right, against drawing all, through HTTP.

The samples are the same: the benchmark stops unless a reply with `until` is the beginning of the
whole one. Each request runs alone, on a server that this starts, with few slots and with many: the
savings are samples that have not begun, and those that have not ended.
"""

from __future__ import annotations

import time
from itertools import islice
from math import comb
from pathlib import Path
from statistics import mean, median
from typing import Any, Literal

import httpx

from bench.frame import Record, Settings, run, table
from bench.host.serving import serving
from engine.config import DEMO_MODEL
from engine.errors import ConfigError
from training.evaluate import COMPLETION_TOKENS, KS, pass_at_k
from training.tasks import Problem, problems, reward

_Reply = dict[str, Any]


class UntilBenchConfig(Settings, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm bench until`."""

    model: Path = DEMO_MODEL
    """Folder with config.json, model.safetensors and tokenizer.json."""
    device: Literal["cpu", "gpu"] = "cpu"
    """What the model runs on: the processor, or the first GPU."""
    num_slots: tuple[int, ...] = (64, 1_024)
    """Slots of the servers, one after the other."""
    problems: int = 50
    """Held-out problems, each a request of its own, one after the other."""
    samples: int = 1_000
    """Completions asked for in each request."""
    counts: tuple[int, ...] = (1, 10)
    """How many right ones are enough, each in requests of its own."""
    seed: int = 0
    """Of the problems and of the sampling."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if max(self.counts) > self.samples:
            raise ValueError(f"counts must lie in 1 … samples = {self.samples}, got {self.counts}")


def main(argv: list[str]) -> int:
    """Measure, write a record, print its tables."""
    return run(UntilBenchConfig, argv, "until", measure, markdown)


def measure(config: UntilBenchConfig) -> Record:
    """Return the runs with each number of slots."""
    drawn = list(islice(problems("held-out", config.seed), config.problems))
    cases = []
    for num_slots in config.num_slots:
        flags = (f"--model={config.model}", f"--device={config.device}")
        with (
            serving(*flags, f"--num-slots={num_slots}") as server,
            httpx.Client(base_url=server.url, timeout=3600) as client,
        ):
            complete(client, drawn[0], n=num_slots, max_tokens=2)  # every page is touched
            runs = [
                measure_problem(client, config, problem, config.seed + number)
                for number, problem in enumerate(drawn)
            ]
        cases.append({"num_slots": num_slots, "runs": runs})
    return {"cases": cases}


def complete(client: httpx.Client, problem: Problem, **fields: Any) -> _Reply:
    """Return the reply to a request of one problem, with its time in seconds."""
    body = {"prompt": problem.prompt, **fields}
    started = time.perf_counter()
    answer = client.post("/v1/completions", json=body)
    seconds = time.perf_counter() - started
    if answer.status_code != 200:
        raise ConfigError(f"the server said {answer.status_code}: {answer.text}")
    reply: _Reply = answer.json()
    return reply | {"seconds": seconds}


def measure_problem(
    client: httpx.Client, config: UntilBenchConfig, problem: Problem, seed: int
) -> dict[str, Any]:
    """Measure one problem: all samples, and until enough are right."""
    asked = {"n": config.samples, "max_tokens": COMPLETION_TOKENS, "seed": seed}
    whole = complete(client, problem, **asked)
    texts = [choice["text"] for choice in whole["choices"]]
    is_right = [bool(reward(problem, text)) for text in texts]
    pattern = rf"####\s*{problem.answer}(?:\D|$)"
    return {
        "kind": problem.kind,
        "question": problem.question,
        "right": sum(is_right),
        "seconds": whole["seconds"],
        "tokens": whole["usage"]["completion_tokens"],
        "pass_at": {
            str(k): pass_at_k(config.samples, sum(is_right), k) for k in KS if k <= config.samples
        },
        "until": [
            until(complete(client, problem, **asked, until={"match": pattern, "count": count}),
                  count, texts, is_right)
            for count in config.counts
        ],
    }  # fmt: skip


def until(reply: _Reply, count: int, texts: list[str], is_right: list[bool]) -> dict[str, Any]:
    """Summarize a reply with `until`; its samples must be the first of all."""
    (samples,), choices, usage = reply["samples"], reply["choices"], reply["usage"]
    drawn = samples["drawn"]
    assert [choice["text"] for choice in choices] == texts[:drawn], "they are other samples"
    assert [choice["matched"] for choice in choices] == is_right[:drawn], "the pattern is wrong"
    return {
        "count": count,
        "drawn": drawn,
        "matched": samples["matched"],
        "reached": samples["reached"],
        "seconds": reply["seconds"],
        "tokens": usage["completion_tokens"],
        "discarded_tokens": usage["discarded_tokens"],
        "pass_at": {
            str(k): pass_at_k_until(drawn, samples["matched"], samples["reached"], k)
            for k in KS
            if k <= samples["requested"]
        },
    }


def pass_at_k_until(drawn: int, right: int, reached: bool, k: int) -> float:
    """Return the unbiased estimate of pass@k from samples drawn until `right` of them were right.

    If `reached`, the last sample drawn is right, and the order of the others is random: the first k
    are all wrong in C(drawn - 1 - k, right - 1) of C(drawn - 1, right - 1) orders.
    """
    if not reached:
        return pass_at_k(drawn, right, k)
    if not 1 <= right <= drawn or k < 1:
        raise ValueError(f"needs 1 ≤ right ≤ drawn and 1 ≤ k: {right}, {drawn}, {k}")
    return 1 - comb(max(drawn - 1 - k, 0), right - 1) / comb(drawn - 1, right - 1) * (k < drawn)


def markdown(record: Record) -> list[str]:
    """Render the record as tables: the cost, and the estimates of pass@k."""
    settings, cases = record["settings"], record["cases"]
    rows = []
    for case in cases:
        runs = case["runs"]
        rows.append(
            f"{case['num_slots']:,} | all | {settings['samples']:,} "
            f"| {median(run['tokens'] for run in runs):,.0f} | 0 | 1 "
            f"| {median(run['seconds'] for run in runs):.2f} | 1"
        )
        for place, count in enumerate(settings["counts"]):
            found = [run["until"][place] for run in runs]
            tokens, seconds = (
                median(sum(one[name] for name in names) / run[names[0]]
                       for one, run in zip(found, runs, strict=True))
                for names in (("tokens", "discarded_tokens"), ("seconds",))
            )  # fmt: skip
            drawn, kept, discarded, took = (
                median(one[name] for one in found)
                for name in ("drawn", "tokens", "discarded_tokens", "seconds")
            )
            rows.append(
                f"{case['num_slots']:,} | {count} | {drawn:,.0f} | {kept:,.0f} "
                f"| {discarded:,.0f} | {tokens:.3f} | {took:.3f} | {seconds:.3f}"
            )
    runs = cases[0]["runs"]
    ks = list(runs[0]["pass_at"])
    estimates = {"all": [run["pass_at"] for run in runs]} | {
        f"until {count}": [run["until"][place]["pass_at"] for run in runs]
        for place, count in enumerate(settings["counts"])
    }
    return [
        f"{settings['problems']} problems, {settings['samples']:,} samples of each asked for, "
        "medians over the problems. A ratio is that of a problem's request to the same without "
        "`until`. Discarded are tokens that had come of samples which are not in the reply.",
        "",
        *table(
            "slots | enough | drawn | tokens | discarded | ratio of tokens, both | seconds "
            "| ratio of seconds",
            rows,
        ),
        "",
        "Means over the problems, whatever the slots; a reply with `until` is the beginning of "
        "the whole one.",
        "",
        *table(
            " | ".join(["from", *(f"pass@{int(k):,}" for k in ks)]),
            (
                " | ".join([name, *(f"{mean(one[k] for one in found):.4f}" for k in ks)])
                for name, found in estimates.items()
            ),
        ),
    ]
