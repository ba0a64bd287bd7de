"""`python -m research.experiments mixers`: the loss of every token mixer after the same training.

The paper trained models of d 512 and 16 layers on 13.1 billion tokens of FineWeb-edu (table 1 and
the appendix); here small ones are trained on some hundred thousand tokens of Python.
"""

from __future__ import annotations

from functools import partial
from statistics import mean

from research.experiments.harness.corpus import Corpus, standard_library
from research.experiments.harness.models import make_variant
from research.experiments.harness.ordering import ordering
from research.experiments.harness.report import beside, number, spread, table
from research.experiments.harness.result_cache import Numbers
from research.experiments.harness.runner import Report, Results, fit_text, run_cases, values_of
from research.experiments.harness.settings import ExperimentSettings

CASES = (
    *("row", "column", "column heads", "combined", "combined decay", "mixed", "mixed decay"),
    *("mixed no projections", "mixed decay no projections", "parallel", "parallel decay"),
    *("diagonal", "diagonal decay"),
)
PAPER = {
    "row": 3.465,
    "column": 3.357,
    "column heads": 3.275,
    "combined": 3.219,
    "combined decay": 3.033,
    "mixed": 3.228,
    "mixed decay": 3.002,
    "mixed decay no projections": 3.056,
    "diagonal": 3.243,
    "diagonal decay": 2.981,
}
"""The paper's losses, for the cases that it has."""
CHANGES = (
    ("row to column", "row", "column"),
    ("heads, projected", "column", "column heads"),
    ("half of them row heads", "column heads", "mixed"),
    ("each both at once", "mixed", "combined"),
    ("decay, mixed", "mixed", "mixed decay"),
    ("decay, combined", "combined", "combined decay"),
    ("decay, constant diagonal", "diagonal", "diagonal decay"),
    ("no projections", "mixed decay", "mixed decay no projections"),
    ("constant diagonal", "mixed", "diagonal"),
    ("constant diagonal, decay", "mixed decay", "diagonal decay"),
)
"""Each change has a name, the case before it and the case after it."""


class Settings(ExperimentSettings, frozen=True):
    """Settings of `python -m research.experiments mixers`."""

    steps: int = 256
    rows: int = 8
    d_model: int = 128
    num_layers: int = 4
    n_ctx: int = 256
    learning_rate: float = 1e-2
    max_vocab_size: int = 1_024


def losses(case: str, config: Settings, corpus: Corpus, seed: int) -> Numbers:
    """Train one case; return its loss on held-out text, in nats per token."""
    sizes = config.d_model, config.num_layers, config.n_ctx, corpus.vocab_size
    make = partial(make_variant, case, *sizes)
    return fit_text(corpus, config, make, seed, config.steps, config.learning_rate)[2]


def page(_: Settings, results: Results) -> list[str]:
    """Return the record's text: what agrees, a table of cases, one of changes."""
    ours = values_of(results, "loss")
    means = {case: mean(result) for case, result in ours.items()}
    with_decay = {case: loss for case, loss in means.items() if "decay" in case}
    best = min(loss for case, loss in means.items() if case not in with_decay)
    beaten = sum(loss < best for loss in with_decay.values())
    sizes = values_of(results, "parameters")
    seconds = values_of(results, "processor_seconds")
    rows = (
        [case, f"{size[0]:,}", spread(ours[case]), number(PAPER.get(case)), f"{took:.0f}"]
        for case in sorted(ours, key=means.__getitem__)
        for size, took in [(sizes[case], mean(seconds[case]))]
    )
    changes = (
        [name, f"{means[to] - means[of]:+.3f}", f"{PAPER[to] - PAPER[of]:+.3f}"]
        for name, of, to in CHANGES
    )
    return [
        f"{ordering(ours, PAPER).sentence()} {beaten} of {len(with_decay)} cases with decay "
        "have less loss than every case without.",
        table(["case", "parameters", "loss", "the paper's", "processor s"], rows),
        "What a change does to the loss:",
        table(["change", "ours", "the paper's"], changes),
    ]


def run(config: Settings) -> Report:
    """Run all cases."""
    corpus = standard_library(config.max_vocab_size)
    cases = {case: partial(losses, case, config, corpus) for case in CASES}
    results = run_cases(config, cases, {"texts": corpus.sha256})
    figure = beside(values_of(results, "loss"), PAPER, "loss (nats per token)")
    return results, page(config, results), figure
