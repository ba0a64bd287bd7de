"""Pairs of cases against the paper's; results on disk, taken once, whole, and for nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from research.experiments.__main__ import main
from research.experiments.harness import runner
from research.experiments.harness.ordering import Ordering, ordering
from research.experiments.harness.result_cache import cached
from srm.errors import ConfigError
from tests.unit.experiments.conftest import done_before


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


def test_a_result_is_measured_once_and_read_as_it_was(tmp_path: Path) -> None:
    path, about = tmp_path / "new" / "row-0.json", {"seeds": (0, 1), "steps": 3}
    result = cached(path, about, lambda: {"loss": 0.1 + 0.2, "parts": (1, 2)})
    assert result == {"loss": 0.1 + 0.2, "parts": [1, 2]} == cached(path, about, done_before)


def test_a_result_of_other_settings_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "row-0.json"
    cached(path, {"steps": 3}, dict)
    with pytest.raises(ConfigError, match=r"row-0.json is of another steps, 3 and not 4"):
        cached(path, {"steps": 4}, done_before)
    with pytest.raises(ConfigError, match="another texts, None and not 'ab'"):
        cached(path, {"steps": 3, "texts": "ab"}, done_before)


def test_no_changed_byte_is_read_as_another_result(tmp_path: Path) -> None:
    path, about = tmp_path / "row-0.json", {"steps": 3}
    result = cached(path, about, lambda: {"loss": 1.25})
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            assert cached(path, about, done_before) == result  # what changed was a blank
        except ConfigError as error:
            assert str(path) in str(error)
    path.write_bytes(whole[:-9])
    with pytest.raises(ConfigError, match="is damaged, remove it"):
        cached(path, about, done_before)


def test_the_setting_that_differs_is_named(tmp_path: Path) -> None:
    path, many = tmp_path / "row-0.json", {f"setting {number}": number for number in range(99)}
    cached(path, {"settings": {**many, "last": 1}}, dict)
    with pytest.raises(ConfigError, match=r"is of another last, 1 and not 2: remove it"):
        cached(path, {"settings": {**many, "last": 2}}, dict)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "experiments are mixers"),
        ("mixer", "experiments are mixers"),
        ("mixers --steps=3", "there is no flag --steps"),
        ("mixers --seeds=0", "seeds must be two or more different numbers"),
        ("mixers --seeds=1,1", "seeds must be two or more different numbers"),
        (f"mixers --seeds=0,{2**64}", "numbers of 0 … 2..64 - 1, got"),
        ("mixers --threads=5000", "threads must be at most 4096, got 5000"),
        ("coverage --budgets=0", "budgets must rise from above 0, got"),
        ("coverage --samples=0", "samples must be at least 1, got 0"),
        ("coverage --d-model=12", "widths must be multiples of 8, got 12"),
        ("coverage --search-minutes=0", "search_minutes must be above 0, got 0"),
        ("coverage --device=gpu", "device = gpu, and torch finds no GPU"),
        ("throughput --kinds=SRM,LSTM", r"kinds must be some of SRM, .*, got \['LSTM'\]"),
        ("throughput --seeds=0,0", "seeds must be one or more different numbers"),
        ("trainers --environment=/none", "environment: /none/bin/python is missing"),
    ],
)
def test_impossible_settings_are_refused(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        main(flags.split())


@pytest.mark.parametrize("setting", ["results", "output"])
@pytest.mark.parametrize("name", ["mixers", "finetuning"])
def test_a_folder_that_cannot_be_written_is_refused_first(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, setting: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(runner, "cached", None)  # no case is run
    places = {"results": tmp_path / "results", "output": tmp_path / "out"}
    places[setting] = tmp_path / "file" / "folder"
    with pytest.raises(ConfigError, match=f"{setting}: .*: Not a directory"):
        main([name, *(f"--{key}={folder}" for key, folder in places.items())])
