"""`research.experiments forms`: what training costs by form and by length, in time and memory.

It measures three forms of one SRM, and the models of `baselines` at its width. Every update has as
many tokens, in fewer sequences where they are longer, so what changes along a row is the cost of
length alone.
The paper has no table of this; it names as a limitation that the memory of its parallel form grows
with the square of the length.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import mean, median
from typing import Any

import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F

from research.experiments.harness.models import REFERENCE, model_makers
from research.experiments.harness.report import draw_lines, number, table
from research.experiments.harness.result_cache import Numbers
from research.experiments.harness.runner import (
    Report,
    Results,
    in_fresh_process,
    process_bytes,
    run_cases,
)
from research.experiments.harness.settings import ExperimentSettings
from srm.training.huggingface.units_srm import CHUNK

VOCAB_SIZE = 1_024
"""Number of token ids that random inputs are drawn from."""
GROWTH = 4
"""Most by which time or memory of any form is multiplied where sequences are twice as long."""


def _by_steps(model: Any, ids: Tensor) -> Tensor:
    state, logits = model.empty_state(len(ids)), []
    for position in range(ids.shape[1]):
        measured, state = model.step(ids[:, position], state, position)
        logits.append(measured)
    return torch.stack(logits, 1)


def _called(model: Any, ids: Tensor) -> Tensor:
    logits: Tensor = model(ids)
    return logits


FORMS: dict[str, tuple[str, Callable[[Any, Tensor], Tensor]]] = {
    "published": (REFERENCE, lambda model, ids: model(ids, chunk=ids.shape[1])),
    "chunked": (REFERENCE, _called),
    "recurrent": (REFERENCE, _by_steps),
    "Transformer": ("Transformer", _called),
    "masked mixer": ("masked mixer", _called),
    "Mamba 2": ("Mamba 2", _called),
}
"""By form: the name of its model, and the function from model and ids [rows, length] to logits
[rows, length, vocab]."""


class Settings(ExperimentSettings, frozen=True):
    """Settings of `python -m research.experiments forms`."""

    steps: int = 4
    """Number of timed updates, after a first one that is not timed."""
    rows: int = 1
    """Sequences of `n_ctx` tokens in one update; shorter sequences are proportionally more."""
    d_model: int = 128
    num_layers: int = 4
    n_ctx: int = 4_096
    """Tokens in the longest sequences; every shorter length is half of the one before."""
    shortest: int = 128
    """Least length to measure, in tokens."""
    forms: tuple[str, ...] = tuple(FORMS)
    most_seconds: float = 120.0
    """Most processor seconds of an update; a case expected to take more is not run."""
    most_gib: float = 4.0
    """Most memory in GiB; a case expected to take more is not run."""

    @property
    def lengths(self) -> list[int]:
        """Lengths, the shortest first."""
        measured = [self.n_ctx]
        while measured[0] % 2 == 0 and measured[0] // 2 >= self.shortest:
            measured.insert(0, measured[0] // 2)
        return measured


def measure(config: Settings, form: str, length: int, seed: int) -> Numbers:
    """Run forward and backward passes in float32; return processor seconds of each, and bytes.

    `bytes` is this process's peak memory less what it has after one pass over a few tokens, which
    loads the code of the matrix products. So each call needs a fresh process.
    """
    torch.set_num_threads(config.threads or os.cpu_count() or 1)
    torch.manual_seed(seed)
    _passes(config, form, rows=1, length=2, count=1)
    before = process_bytes("VmRSS")
    rows = config.rows * config.n_ctx // length
    first, *seconds = _passes(config, form, rows, length, 1 + config.steps)
    tokens = rows * length
    return {
        "tokens": tokens,
        "first_seconds": first,
        "seconds": seconds,
        "tokens_per_s": tokens / median(seconds),
        "bytes": process_bytes("VmHWM") - before,
    }


def _passes(config: Settings, form: str, rows: int, length: int, count: int) -> list[float]:
    """Make a model and run `count` passes; return the processor seconds of each."""
    name, forward = FORMS[form]
    model = model_makers(config.num_layers, length, VOCAB_SIZE)[name](config.d_model)
    ids = torch.randint(VOCAB_SIZE, (rows, length + 1))
    inputs, targets = ids[:, :-1], ids[:, 1:]
    seconds = []
    for _ in range(count):
        started = time.process_time()
        loss = F.cross_entropy(forward(model, inputs).flatten(0, 1), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        model.zero_grad()
        seconds.append(time.process_time() - started)
    return seconds


def is_followed(config: Settings, measured: list[Numbers]) -> bool:
    """Whether a form with these results at one length is run at twice the length."""
    seconds = max(max(numbers["seconds"]) for numbers in measured)
    most = max(numbers["bytes"] for numbers in measured)
    limits = (config.most_seconds, config.most_gib * 2**30)
    return all(
        GROWTH * needed <= limit for needed, limit in zip((seconds, most), limits, strict=True)
    )


def run_all(config: Settings) -> Results:
    """Return the results of each form and length, up to the longest length at which it is run."""
    measured: Results = {}
    left = list(config.forms)
    for length in config.lengths:
        cases = {
            f"{form} {length}": in_fresh_process(partial(measure, config, form, length))
            for form in left
        }
        measured |= run_cases(config, cases, {})
        left = [form for form in left if is_followed(config, measured[f"{form} {length}"])]
    return measured


def by_length(results: Results) -> dict[str, dict[int, list[Numbers]]]:
    """Return the results of each form by length."""
    forms: dict[str, dict[int, list[Numbers]]] = {}
    for case, of in results.items():
        form, length = case.rsplit(" ", 1)
        forms.setdefault(form, {})[int(length)] = of
    return forms


def page(config: Settings, results: Results) -> list[str]:
    """Return the record's text: two tables, what was not run, and what the paper says."""
    measured = by_length(results)
    blocks = [
        f"Forward and backward passes over {config.rows * config.n_ctx:,} tokens, in float32, each "
        "case in a fresh process with each seed. Published, chunked and recurrent are forms of one "
        f"SRM; the chunked one is the published one up to {CHUNK} tokens. Other models have its "
        "width."
    ]
    for title, member, unit, shown in (
        ("Tokens a processor second, the median of updates, mean of seeds", "tokens_per_s", 1, 0),
        ("Memory above what the process had before, at its most, in MiB", "bytes", 2**20, 1),
    ):
        rows = (
            [form, *(_mean(of.get(length), member, unit, shown) for length in config.lengths)]
            for form, of in measured.items()
        )
        heads = ["form", *(f"{length:,} tokens" for length in config.lengths)]
        blocks += [f"{title}:", table(heads, rows)]
    blocks += [
        f"Not run: {form} at {2 * longest:,} tokens and more. At {longest:,} it took "
        f"{max(max(run['seconds']) for run in of[longest]):.1f} s an update and "
        f"{max(run['bytes'] for run in of[longest]) / 2**30:.2f} GiB, and {GROWTH} times "
        f"as much is above {config.most_seconds:g} s or {config.most_gib:g} GiB."
        for form, of in measured.items()
        if (longest := max(of)) < config.n_ctx
    ]
    return [*blocks, limitation(measured.get("published", {}))]


def _mean(results: list[Numbers] | None, member: str, unit: int, digits: int) -> str:
    return number(mean(result[member] for result in results) / unit if results else None, digits)


def limitation(published: Mapping[int, list[Numbers]]) -> str:
    """Say whether the memory of the published form grows as the paper says.

    The memory added by the last doubling of the length is compared with that of the doubling
    before: quadratic growth adds four times as much, linear growth twice.
    """
    message = (
        "The paper names as a limitation that the memory of its parallel form grows with the "
        "square of the length."
    )
    most = [mean(numbers["bytes"] for numbers in published[length]) for length in sorted(published)]
    if len(most) < 3:
        return f"{message} Whether ours does takes three lengths of it."
    added = [most[-1] - most[-2], most[-2] - most[-3]]
    agrees = added[1] > 0 and added[0] >= 3 * added[1]
    before, last = (f"{size / 2**20:,.0f} MiB" for size in (added[1], added[0]))
    return (
        f"{message} The last doubling added {last} to ours and the one before {before}: "
        f"that {'agrees, a square adds' if agrees else 'does not agree, a square would add'} "
        "four times as much."
    )


def draw(measured: Mapping[str, Mapping[int, list[Numbers]]]) -> Figure:
    """Plot tokens a second and memory by length, a line for each form."""
    figure, panels = plt.subplots(1, 2, figsize=(10, 4.5))
    for axes, member, unit, label in (
        (panels[0], "tokens_per_s", 1, "tokens a processor second"),
        (panels[1], "bytes", 2**20, "MiB at the most"),
    ):
        lines = {
            form: ([*of], [mean(run[member] for run in runs) / unit for runs in of.values()])
            for form, of in measured.items()
        }
        draw_lines(lines, axes, yscale="log", xlabel="tokens of a sequence", ylabel=label)
        axes.set_xscale("log", base=2)
    return figure


def run(config: Settings) -> Report:
    """Run all cases."""
    results = run_all(config)
    return results, page(config, results), draw(by_length(results))
