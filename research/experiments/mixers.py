"""`python -m research.experiments mixers`: the loss of every token mixer after the same training.

The paper trained models of d 512 and 16 layers on 13.1 billion tokens of FineWeb-edu (table 1 and
the appendix); here small ones are trained on some hundred thousand tokens of Python.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean
from typing import Any

from research.experiments.harness.corpus import Corpus, standard_library
from research.experiments.harness.ordering import ordering
from research.experiments.harness.report import beside, number, spread, table
from research.experiments.harness.result_cache import Numbers
from research.experiments.harness.runner import Results, fit, publish, run_cases, values_of
from research.experiments.harness.settings import ModelSettings
from srm.engine.config import ModelConfig
from srm.settings import load
from srm.training.model import SRM
from srm.training.text.tokenizer import MIN_VOCAB_SIZE

CASES: dict[str, dict[str, Any]] = {
    "row": {"mixer": "row"},
    "column": {"mixer": "column"},
    "column heads": {"mixer": "column_heads"},
    "combined": {"mixer": "combined"},
    "combined decay": {"mixer": "combined", "decay": True},
    "mixed": {"mixer": "mixed"},
    "mixed decay": {"mixer": "mixed", "decay": True},
    "mixed no projections": {"mixer": "mixed", "use_projections": False},
    "mixed decay no projections": {"mixer": "mixed", "decay": True, "use_projections": False},
    "parallel": {"mixer": "parallel"},
    "parallel decay": {"mixer": "parallel", "decay": True},
    "diagonal": {"mixer": "diagonal"},
    "diagonal decay": {"mixer": "diagonal", "decay": True},
}
"""The cases, as settings of ModelConfig: without decay where it is not named, and
projected with heads."""
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


class MixersConfig(ModelSettings, frozen=True):
    """Settings of `python -m research.experiments mixers`."""

    learning_rate: float = 1e-2
    """Peak learning rate: reached after a tenth of the updates, then falling to 0."""
    num_heads: int = 4
    """Number of heads of the mixers that have heads."""
    max_vocab_size: int = 1_024
    """Most entries of the tokenizer that is trained."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for case in CASES:  # reports an invalid shape before any work
            shape(case, self, MIN_VOCAB_SIZE)


def shape(case: str, config: MixersConfig, vocab_size: int) -> ModelConfig:
    """Return the model of a case."""
    is_headless = CASES[case]["mixer"] in {"row", "column"}
    fixed = {"vocab_size": vocab_size, "decay": False, "use_projections": not is_headless}
    fixed["num_heads"] = 1 if is_headless else config.num_heads
    return ModelConfig(**(config.only("d_model", "num_layers", "n_ctx") | fixed | CASES[case]))


def losses(case: str, config: MixersConfig, corpus: Corpus, seed: int) -> Numbers:
    """Train one case; return its loss on held-out text, in nats per token."""
    model = shape(case, config, corpus.vocab_size)
    batches = corpus.batches(config.rows, config.n_ctx, seed)
    run, _, took = fit(lambda: SRM(model), batches, seed, config.steps, config.learning_rate)
    loss = run.evaluate(corpus.evaluation(config.rows, config.n_ctx))
    return {"loss": loss, **took}


def page(results: Results) -> list[str]:
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
        "",
        *table(["case", "parameters", "loss", "the paper's", "processor s"], rows),
        "",
        "What a change does to the loss:",
        "",
        *table(["change", "ours", "the paper's"], changes),
    ]


def main(argv: list[str]) -> int:
    """Run all cases and write the record."""
    config = load(MixersConfig, argv, prog="python -m research.experiments mixers")
    corpus = standard_library(config.max_vocab_size)

    def case_of(case: str) -> Callable[[int], Numbers]:
        return lambda seed: losses(case, config, corpus, seed)

    cases = {case: case_of(case) for case in CASES}
    results = run_cases("mixers", config, cases, {"texts": corpus.sha256})
    figure = beside(values_of(results, "loss"), PAPER, "loss (nats per token)")
    publish("mixers", argv, config, results, page(results), figure)
    return 0
