"""`research.experiments matrices`: how much of a trained masked mixer's matrices an SRM can be.

The paper's first step is that trained masked mixers weigh tokens by rows, by columns and by
distance (its figures 1 and S1), and an SRM is a mixer that weighs them so alone. Here a masked
mixer is trained on text. To the matrix of each head the forms of an SRM's heads are fitted by least
squares: a weight for each token that is read (row), or at which the sum is read (column), or both
added, each with decay or without. The same is done with the matrices before training, with what
training changed, and with the trained entries in random places. In a second measure the fits take
the matrices' place in the trained model, and its loss on held-out text is taken again. The control
is the fits of the entries in random places, which keep nothing of what training put where.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from statistics import mean

import numpy as np
import numpy.typing as npt
import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from research.experiments.harness.corpus import Corpus, standard_library
from research.experiments.harness.models import HEADS
from research.experiments.harness.report import spread, table
from research.experiments.harness.result_cache import Numbers
from research.experiments.harness.runner import Report, Results, fit_text, run_cases
from research.experiments.harness.settings import ExperimentSettings
from srm.engine.weights.tensors import DECAY_RANGE
from srm.training.baselines.masked_mixer import MaskedMixer, MaskedMixerModel, MaskedMixerShape
from srm.training.model import LanguageModel

Matrices = npt.NDArray[np.float64]
"""Lower-triangular matrices, [matrices, n, n]."""
IN_RANGE = tuple(np.linspace(*DECAY_RANGE, 11))
"""The λ that are tried, of those that an SRM may have."""
ANY = (*np.linspace(0, 0.85, 18), *IN_RANGE)
"""The λ that are tried where any may be."""
FORMS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "row": ((1.0,), ()),
    "column": ((), (1.0,)),
    "row + column": ((1.0,), (1.0,)),
    "row, decay": (IN_RANGE, ()),
    "column, decay": ((), IN_RANGE),
    "row + column, decay": (IN_RANGE, IN_RANGE),
    "row + column, any decay": (ANY, ANY),
}
"""By form, the λ of its row unit and of its column unit; no λ, no such unit. An SRM can be all but
the last."""
MIXED = "row or column, decay"
"""The better of two forms for each head: heads of a mixed mixer are of either."""
KINDS = ("trained", "change", "untrained", "shuffled")
CASE = "masked mixer"
_LEVELS = 127
"""Levels above 0 that a drawn entry may have."""


class Settings(ExperimentSettings, frozen=True):
    """Settings of `python -m research.experiments matrices`."""

    seeds: tuple[int, ...] = (0, 1)
    steps: int = 400
    rows: int = 16
    d_model: int = 128
    num_layers: int = 4
    n_ctx: int = 64
    """Tokens in a sequence, which are the rows and columns of a matrix."""
    learning_rate: float = 1.2e-2
    max_vocab_size: int = 1_024


def fit_form(matrices: Matrices, form: str) -> Matrices:
    """Return the nearest matrices of a form, each with the λ that brings it nearest."""
    rows, columns = FORMS[form]
    best = np.zeros_like(matrices)
    least = np.full(len(matrices), np.inf)
    for row, column in product(rows or (None,), columns or (None,)):
        fits = _nearest(matrices, row, column)
        errors = np.square(matrices - fits).sum((1, 2))
        is_nearer = errors < least
        best[is_nearer], least[is_nearer] = fits[is_nearer], errors[is_nearer]
    return best


def _nearest(matrices: Matrices, row: float | None, column: float | None) -> Matrices:
    """Return the nearest α_s · row^(t-s) + α'_t · column^(t-s); a unit without λ is left out."""
    n = matrices.shape[-1]
    by_row, by_column = _powers(row, n), _powers(column, n)
    # the normal equations of both units, from which those of the first are eliminated: sums of
    # squares by unit, and products of both
    row_squares, column_squares = np.square(by_row).sum(0), np.square(by_column).sum(1)
    row_sums = (matrices * by_row).sum(1)
    column_sums = (matrices * by_column).sum(2)
    share = by_row * by_column / np.where(row_squares > 0, row_squares, 1)
    left = np.diag(column_squares) - share @ (by_row * by_column).T
    # torch's, which keeps to the threads that are set: numpy takes all cores for small matrices
    inverse = torch.linalg.pinv(torch.from_numpy(left), rtol=1e-10, hermitian=True).numpy()
    read = (column_sums - row_sums @ share.T) @ inverse
    written = (row_sums - read @ (by_row * by_column)) / np.where(row_squares > 0, row_squares, 1)
    nearest: Matrices = written[:, None, :] * by_row + read[:, :, None] * by_column
    return nearest


def _powers(decay: float | None, n: int) -> npt.NDArray[np.float64]:
    """Return decay^(t-s) for s ≤ t, else 0; 0 all over without one."""
    gaps = np.arange(n)[:, None] - np.arange(n)
    if decay is None:
        return np.zeros((n, n))
    return np.where(gaps >= 0, decay ** np.maximum(gaps, 0), 0.0)


def explained(matrices: Matrices, fits: Matrices) -> list[float]:
    """Return the share of each matrix's squared entries that its fit explains."""
    squares = np.square(matrices).sum((1, 2))
    return [float(x) for x in 1 - np.square(matrices - fits).sum((1, 2)) / squares]


def shuffle(matrices: Matrices, seed: int) -> Matrices:
    """Return the matrices with the entries of each in random places below the diagonal and on
    it."""
    random, lower = np.random.default_rng(seed), np.tril_indices(matrices.shape[-1])
    shuffled = np.zeros_like(matrices)
    for matrix, source in zip(shuffled, matrices, strict=True):
        matrix[lower] = random.permutation(source[lower])
    return shuffled


def matrices_of(model: LanguageModel) -> Matrices:
    """Return the matrices of all heads, layer by layer."""
    stacked = torch.cat([mixer.weight.detach() for mixer in _mixers(model)])
    return stacked.tril().double().numpy()


def _mixers(model: LanguageModel) -> list[MaskedMixer]:
    return [module for module in model.modules() if isinstance(module, MaskedMixer)]


def _replace(model: LanguageModel, matrices: Matrices) -> None:
    """Give a model these matrices."""
    parts = torch.from_numpy(matrices).float().view(-1, HEADS, *matrices.shape[1:])
    with torch.no_grad():
        for mixer, part in zip(_mixers(model), parts, strict=True):
            mixer.weight.copy_(part)


def measure(config: Settings, corpus: Corpus, seed: int) -> Numbers:
    """Train a masked mixer; return what the forms explain of its matrices, and the losses with
    their fits, and with those of shuffled ones, in place of them."""
    shape = MaskedMixerShape(
        config.d_model, config.num_layers, HEADS, config.n_ctx, corpus.vocab_size
    )
    before: list[Matrices] = []

    def make() -> LanguageModel:
        model = MaskedMixerModel(shape)
        before.append(matrices_of(model))
        return model

    run, model, took = fit_text(corpus, config, make, seed, config.steps, config.learning_rate)
    evaluation = corpus.evaluation(config.rows, config.n_ctx)
    (untrained,), trained = before, matrices_of(model)
    stacks = dict(
        zip(KINDS, (trained, trained - untrained, untrained, shuffle(trained, seed)), strict=True)
    )
    losses: dict[str, float] = {"trained": took.pop("loss")}
    of_shuffled: dict[str, float] = {}
    shares: dict[str, dict[str, list[float]]] = {kind: {} for kind in KINDS}
    for form in FORMS:
        fits = {kind: fit_form(stack, form) for kind, stack in stacks.items()}
        for kind, stack in stacks.items():
            shares[kind][form] = explained(stack, fits[kind])
        for kind, by_form in (("trained", losses), ("shuffled", of_shuffled)):
            _replace(model, fits[kind])
            by_form[form] = run.evaluate(evaluation)
    for name in ("untrained", "shuffled"):
        _replace(model, stacks[name])
        losses[name] = run.evaluate(evaluation)
    took.pop("training_losses")
    measured = {"shares": shares, "losses": losses, "of_shuffled": of_shuffled}
    return {**measured, "matrices": _packed(trained), **took}


def _packed(matrices: Matrices) -> list[str]:
    """Return the entries of each matrix below the diagonal and on it, in base64: signed bytes of
    which 127 is the largest."""
    lower = np.tril_indices(matrices.shape[-1])
    levels = (_LEVELS * matrix[lower] / np.abs(matrix).max() for matrix in matrices)
    return [base64.b64encode(entries.round().astype(np.int8)).decode() for entries in levels]


def _unpacked(text: str, n: int) -> Matrices:
    matrix = np.full((n, n), np.nan)
    entries = np.frombuffer(base64.b64decode(text), np.int8)
    matrix[np.tril_indices(n)] = entries / _LEVELS
    return matrix


def with_mixed(shares: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Return the shares by form, with that of the better form of each head."""
    pairs = zip(shares["row, decay"], shares["column, decay"], strict=True)
    return {form: list(of) for form, of in shares.items()} | {MIXED: [max(pair) for pair in pairs]}


def page(config: Settings, results: Results) -> list[str]:
    """Return the record's text: shares by form and kind, by head, and losses with the fits."""
    runs = results[CASE]
    by_kind = {kind: [with_mixed(run["shares"][kind]) for run in runs] for kind in KINDS}
    forms = list(by_kind["trained"][0])
    rows = [
        [form, *(spread([mean(run[form]) for run in by_kind[kind]]) for kind in KINDS)]
        for form in forms
    ]
    first = by_kind["change"][0]
    heads = [
        [
            f"{number // HEADS + 1}, {number % HEADS + 1}",
            *(f"{first[form][number]:.3f}" for form in forms),
        ]
        for number in range(config.num_layers * HEADS)
    ]
    losses = [[name, spread([run["losses"][name] for run in runs])] for name in runs[0]["losses"]]
    for row in losses:
        of = [run["of_shuffled"][row[0]] for run in runs if row[0] in FORMS]
        row.append(spread(of) if of else "–")
    n = config.n_ctx
    return [
        f"A masked mixer of d {config.d_model} with {config.num_layers} blocks of {HEADS} heads, "
        f"{n} tokens, {config.steps:,} updates. Share of the squared entries that a form explains, "
        "the mean of all heads. Of random entries a row or a column explains about "
        f"{2 / (n + 1):.3f}, both {4 / (n + 1):.3f}. The change is trained less untrained.",
        table(["form", *KINDS], rows),
        f"The change by block and head, seed {config.seeds[0]}:",
        table(["block, head", *forms], heads),
        "Loss on held-out text, in nats per token, of the trained model, and of it with its "
        "matrices replaced by their fits, by those before training, and by shuffled ones. Beside "
        "it, the loss with fits of the shuffled ones:",
        table(["matrices", "loss", "of shuffled ones"], losses),
        power(runs),
    ]


def power(runs: Sequence[Numbers]) -> str:
    """Say by form how much better its fits of trained matrices are than those of shuffled ones."""
    parts = []
    for form in FORMS:
        gains = [run["of_shuffled"][form] - run["losses"][form] for run in runs]
        parts.append(f"{form} {spread(gains)}{'' if min(gains) > 0 else ', which says nothing'}")
    return (
        "Fits of shuffled matrices keep nothing of what training put where. Fits of the trained "
        f"ones are better by, in nats: {'; '.join(parts)}."
    )


def draw(config: Settings, results: Results) -> Figure:
    """Draw the trained matrices of the first seed, a row of pictures for each block."""
    packed = results[CASE][0]["matrices"]
    sizes = config.num_layers, HEADS
    figure, panels = plt.subplots(*sizes, figsize=(8, 2 * config.num_layers), squeeze=False)
    for number, text in enumerate(packed):
        axes = panels[divmod(number, HEADS)]
        matrix = _unpacked(text, config.n_ctx)
        most = np.nanquantile(np.abs(matrix), 0.99)
        axes.imshow(matrix, cmap="RdBu", vmin=-most, vmax=most, interpolation="nearest")
        axes.set(xticks=[], yticks=[])
        axes.set_title(f"block {number // HEADS + 1}, head {number % HEADS + 1}", fontsize=8)
    return figure


def run(config: Settings) -> Report:
    """Run all seeds."""
    corpus = standard_library(config.max_vocab_size)
    cases = {CASE: partial(measure, config, corpus)}
    results = run_cases(config, cases, {"texts": corpus.sha256})
    return results, page(config, results), draw(config, results)
