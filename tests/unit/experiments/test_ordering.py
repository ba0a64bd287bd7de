"""Pairs of cases, ours against the paper's."""

from __future__ import annotations

from research.experiments.harness.ordering import Ordering, ordering


def test_pairs_are_counted_that_the_paper_tells_apart() -> None:
    """a < b < c = d in the paper; e is not in it."""
    paper = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 3.0}
    ours = {"a": [5.0, 5.2], "b": [4.0, 6.0], "c": [9.0, 9.1], "d": [5.0, 5.1], "e": [0.0, 0.1]}
    # Means 5.1, 5, 9.05, 5.05: a-c, b-c and b-d are in order; b is too noisy for a-b and b-d, and
    # a and d are too near to each other.
    assert ordering(ours, paper) == Ordering(pairs=5, in_order=3, clear=2, clear_in_order=2)
    turned = {name: -figure for name, figure in paper.items()}
    assert ordering(ours, turned) == Ordering(pairs=5, in_order=2, clear=2, clear_in_order=0)


def test_it_is_said_in_a_sentence() -> None:
    assert Ordering(45, 24, 30, 20).sentence() == (
        "24 of 45 pairs of cases stand in the paper's order; of the 30 whose means differ by more "
        "than twice their standard error, 20 do."
    )
