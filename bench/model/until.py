"""`srm bench until`: samples drawn until enough are right, against drawing all, through HTTP.

The samples are the same: the benchmark stops unless a reply with `until` is the beginning of the
whole one. Each request runs alone, on a server that this starts, with few slots and with many: the
savings are samples that have not begun, and those that have not ended.
"""

from __future__ import annotations

import time
from http.client import HTTPConnection
from itertools import islice
from math import comb
from pathlib import Path
from statistics import mean, median
from typing import Any, Literal

import msgspec

from bench.host.serving import serving
from engine.config import DEMO_MODEL
from engine.errors import ConfigError
from engine.records import RECORDS, new_record, settings_of, write_record
from engine.settings import load
from training.evaluate import COMPLETION_TOKENS, KS, pass_at_k
from training.tasks import Problem, problems, reward

_Reply = dict[str, Any]


class UntilBenchConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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
    output: Path = RECORDS
    """Folder that the record is written to."""

    def __post_init__(self) -> None:
        for name in ("problems", "samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.num_slots or min(self.num_slots) < 1:
            raise ValueError(f"num_slots must be at least 1 each, got {self.num_slots}")
        if not self.counts or not 1 <= min(self.counts) <= max(self.counts) <= self.samples:
            raise ValueError(f"counts must lie in 1 … samples = {self.samples}, got {self.counts}")


def main(argv: list[str]) -> int:
    """Measure, write a record, print its tables."""
    config = load(UntilBenchConfig, argv, prog="srm bench until")
    record = measure(config, " ".join(["srm bench until", *argv]))
    write_record(record, "until", markdown(record), config.output)
    return 0


def measure(config: UntilBenchConfig, command: str) -> dict[str, Any]:
    """Return the whole record."""
    drawn = list(islice(problems("held-out", config.seed), config.problems))
    cases = []
    for num_slots in config.num_slots:
        flags = (f"--model={config.model}", f"--device={config.device}")
        with serving(*flags, f"--num-slots={num_slots}") as started:
            server = _Server(started.host, started.port)
            server.complete(drawn[0], n=num_slots, max_tokens=2)  # every page is touched
            runs = [
                run(server, config, problem, config.seed + number)
                for number, problem in enumerate(drawn)
            ]
        cases.append({"num_slots": num_slots, "runs": runs})
    return new_record(command, config.device) | {
        "settings": settings_of(config),
        "cases": cases,
    }


class _Server:
    """A server that is ready."""

    def __init__(self, host: str, port: int) -> None:
        self._connection = HTTPConnection(host, port, timeout=3600)

    def complete(self, problem: Problem, **fields: Any) -> _Reply:
        """Return the reply to a request of one problem, with its time in seconds."""
        body = {"prompt": problem.prompt, **fields}
        started = time.perf_counter()
        self._connection.request("POST", "/v1/completions", msgspec.json.encode(body))
        answer = self._connection.getresponse()
        content = answer.read()
        seconds = time.perf_counter() - started
        if answer.status != 200:
            raise ConfigError(f"the server said {answer.status}: {content.decode()}")
        reply: _Reply = msgspec.json.decode(content)
        return reply | {"seconds": seconds}


def run(server: _Server, config: UntilBenchConfig, problem: Problem, seed: int) -> dict[str, Any]:
    """Measure one problem: all samples, and until enough are right."""
    asked = {"n": config.samples, "max_tokens": COMPLETION_TOKENS, "seed": seed}
    whole = server.complete(problem, **asked)
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
            until(server.complete(problem, **asked, until={"match": pattern, "count": count}),
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


def markdown(record: dict[str, Any]) -> str:
    """Render the record as tables: the cost, and the estimates of pass@k."""
    settings, cases = record["settings"], record["cases"]
    lines = [
        f"{settings['problems']} problems, {settings['samples']:,} samples of each asked for, "
        "medians over the problems. A ratio is that of a problem's request to the same without "
        "`until`. Discarded are tokens that had come of samples which are not in the reply.",
        "",
        "| slots | enough | drawn | tokens | discarded | ratio of tokens, both | seconds "
        "| ratio of seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in cases:
        runs = case["runs"]
        lines.append(
            f"| {case['num_slots']:,} | all | {settings['samples']:,} "
            f"| {median(run['tokens'] for run in runs):,.0f} | 0 | 1 "
            f"| {median(run['seconds'] for run in runs):.2f} | 1 |"
        )
        for place, count in enumerate(settings["counts"]):
            pairs = [(run, run["until"][place]) for run in runs]
            taken = [one["tokens"] + one["discarded_tokens"] for _, one in pairs]
            tokens = median(
                both / run["tokens"] for both, (run, _) in zip(taken, pairs, strict=True)
            )
            seconds = median(one["seconds"] / run["seconds"] for run, one in pairs)
            drawn, kept, discarded, took = (
                median(one[name] for _, one in pairs)
                for name in ("drawn", "tokens", "discarded_tokens", "seconds")
            )
            lines.append(
                f"| {case['num_slots']:,} | {count} | {drawn:,.0f} | {kept:,.0f} "
                f"| {discarded:,.0f} | {tokens:.3f} | {took:.3f} | {seconds:.3f} |"
            )
    runs = cases[0]["runs"]
    ks = list(runs[0]["pass_at"])
    heads = " | ".join(f"pass@{int(k):,}" for k in ks)
    lines += [
        "",
        "Means over the problems, whatever the slots; a reply with `until` is the beginning of "
        "the whole one.",
        "",
        f"| from | {heads} |",
        "|---" * (1 + len(ks)) + "|",
        f"| all | {_means([run['pass_at'] for run in runs], ks)} |",
    ]
    for place, count in enumerate(settings["counts"]):
        found = [run["until"][place]["pass_at"] for run in runs]
        lines.append(f"| until {count} | {_means(found, ks)} |")
    return "\n".join(lines) + "\n"


def _means(found: list[dict[str, float]], ks: list[str]) -> str:
    return " | ".join(f"{mean(one[k] for one in found):.4f}" for k in ks)
