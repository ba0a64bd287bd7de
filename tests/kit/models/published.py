"""Outputs of the published code, to be met exactly: fixtures that lie beside the repository.

`shared/fixtures` next to a folder above the repository, or where PUBLISHED_FIXTURES says. Its
README.md tells what the files are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from srm.engine.weights.convert import convert
from tests.kit.serving import ROOT

ABSENT = "the fixtures of the published code are not beside this repository"


def _folder() -> Path | None:
    given = os.environ.get("PUBLISHED_FIXTURES")
    places = [Path(given)] if given else [above / "shared" / "fixtures" for above in ROOT.parents]
    return next((place for place in places if place.is_dir()), None)


FOLDER = _folder()
NAMES = sorted(path.stem for path in FOLDER.glob("*.safetensors")) if FOLDER else []


def parametrized(quick: int | None = None) -> pytest.MarkDecorator:
    """One test for each fixture, slow after the first `quick`; or one that is skipped."""
    absent = pytest.param("", marks=pytest.mark.skip(reason=ABSENT))
    names = NAMES if quick is None else NAMES[:quick]
    rest = [pytest.param(name, marks=pytest.mark.slow) for name in NAMES[len(names) :]]
    return pytest.mark.parametrize("name", [*names, *rest] or [absent])


def convert_fixture(name: str, output: Path) -> Path:
    """A model folder in `output`, by `srm convert`."""
    if FOLDER is None or name not in NAMES:
        pytest.skip(f"{ABSENT}: {name}")
    convert(FOLDER / f"{name}.safetensors", FOLDER / f"{name}.json", output)
    return output


def cases(
    name: str,
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float32]]]:
    """For each length: ids [4, length], the positions kept, and logits [4, positions, vocab]."""
    assert FOLDER is not None
    with np.load(FOLDER / f"{name}.npz") as arrays:
        for key in arrays.files:
            if key.startswith("logits_"):
                length = key.removeprefix("logits_")
                yield arrays[f"input_ids_{length}"], arrays[f"positions_{length}"], arrays[key]
