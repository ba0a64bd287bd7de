"""Forms are fitted to matrices by least squares; a trained masked mixer's are shown."""

from __future__ import annotations

import numpy as np
import pytest

from research.experiments.matrices import (
    FORMS,
    KINDS,
    MIXED,
    Matrices,
    _packed,
    _unpacked,
    explained,
    fit_form,
    power,
    shuffle,
)
from tests.unit.experiments.conftest import Experiment

N = 9


def lower(matrix: Matrices) -> Matrices:
    return np.tril(matrix)


def made_of(row: float | None, column: float | None, count: int = 3) -> Matrices:
    """Matrices of row and column units with these λ, whose weights are random."""
    random = np.random.default_rng(5)
    gaps = np.arange(N)[:, None] - np.arange(N)
    total = np.zeros((count, N, N))
    for decay, shape in ((row, (count, 1, N)), (column, (count, N, 1))):
        if decay is not None:
            total += random.normal(size=shape) * decay ** np.maximum(gaps, 0)
    return lower(total)


@pytest.mark.parametrize("form", FORMS)
def test_no_other_weights_fit_better(form: str) -> None:
    """The error stands at right angles on each row or column of the fit's own λ: moving any weight
    of it makes the error larger."""
    matrices = lower(np.random.default_rng(1).normal(size=(2, N, N)))
    fits = fit_form(matrices, form)
    errors = np.square(matrices - fits).sum((1, 2))
    rows, columns = FORMS[form]
    gaps = np.maximum(np.arange(N)[:, None] - np.arange(N), 0)
    for number, error in enumerate(errors):
        nearest = np.inf
        for row in rows or (None,):
            for column in columns or (None,):
                parts = []
                for place in range(N):
                    unit = np.arange(N) == place
                    if row is not None:
                        parts.append(lower(unit[None, :] * row**gaps).ravel())
                    if column is not None:
                        parts.append(lower(unit[:, None] * column**gaps).ravel())
                design = np.stack(parts, 1)
                weights = np.linalg.lstsq(design, matrices[number].ravel(), rcond=None)[0]
                left = matrices[number].ravel() - design @ weights
                nearest = min(nearest, float(left @ left))
        assert error == pytest.approx(nearest)


def test_random_entries_are_explained_by_chance_alone() -> None:
    matrices = lower(np.random.default_rng(2).normal(size=(400, N, N)))
    share = np.mean(explained(matrices, fit_form(matrices, "row")))
    assert share == pytest.approx(2 / (N + 1), abs=0.02)


def test_shuffled_matrices_have_the_same_entries_elsewhere() -> None:
    matrices = made_of(1.0, None)
    assert explained(matrices, fit_form(matrices, "row")) == pytest.approx([1] * 3)
    assert max(explained(matrices, fit_form(matrices, "column"))) < 0.999
    shuffled = shuffle(matrices, 0)
    assert np.array_equal(shuffled, lower(shuffled)) and not np.array_equal(shuffled, matrices)
    for matrix, other in zip(matrices, shuffled, strict=True):
        assert sorted(matrix.ravel()) == sorted(other.ravel())
    assert np.mean(explained(shuffled, fit_form(shuffled, "row"))) < 0.6


def test_a_drawn_matrix_is_the_measured_one() -> None:
    matrices = made_of(0.9, 1.0)
    for text, matrix in zip(_packed(matrices), matrices, strict=True):
        drawn = _unpacked(text, N)
        assert np.isnan(drawn[np.triu_indices(N, 1)]).all()
        near = np.nan_to_num(drawn) * np.abs(matrix).max()
        np.testing.assert_allclose(near, matrix, atol=np.abs(matrix).max() / 200)


@pytest.mark.usefixtures("library")
def test_heads_are_fitted_and_shown(run_experiment: Experiment) -> None:
    record, text, picture = run_experiment("matrices", num_layers=2)
    ((first, second),) = record["results"].values()
    for run in (first, second):
        assert list(run["shares"]) == list(KINDS)
        assert all(len(heads) == 8 for heads in run["shares"]["trained"].values())
        assert list(run["losses"]) == ["trained", *FORMS, "untrained", "shuffled"]
        for kind in KINDS:
            wide, narrow = (run["shares"][kind][form] for form in ("row + column, decay", "row"))
            assert all(wide[i] >= narrow[i] - 1e-9 for i in range(8))
    assert first["losses"]["trained"] != first["losses"]["row"] != second["losses"]["row"]
    for name in (*FORMS, MIXED):
        assert f"\n| {name} | " in text
    assert list(first["of_shuffled"]) == list(FORMS)
    assert first["of_shuffled"]["row"] != first["losses"]["row"]
    assert "\nFits of shuffled matrices keep nothing" in text
    assert "\n| 2, 4 | " in text and "block 2, head 4" in picture


def test_a_form_no_better_than_its_control_says_nothing() -> None:
    runs = [
        {
            "losses": dict.fromkeys(FORMS, 4.2),
            "of_shuffled": dict.fromkeys(FORMS, 4.3) | {"row": of},
        }
        for of in (4.1, 4.3)
    ]
    words = power(runs)
    assert "row -0.000 ± 0.141, which says nothing; column 0.100 ± 0.000; " in words
    assert words.count("says nothing") == 1
