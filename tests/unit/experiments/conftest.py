"""A small standard library, and an experiment's run at tiny sizes."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from research.experiments.__main__ import main
from research.experiments.harness import runner

TINY = "--steps=2 --rows=2 --d-model=8 --num-layers=1 --n-ctx=16 --seeds=0,1 --threads=1".split()

Experiment = Callable[..., tuple[dict[str, Any], str, str]]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Twenty modules of distinct numbers."""
    folder = tmp_path / "lib"
    folder.mkdir()
    for name in range(20):
        lines = (f"value_{name}_{line} = {name * line}\n" for line in range(60))
        (folder / f"module_{name:02}.py").write_text("".join(lines))
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(folder)})
    return folder


@pytest.fixture
def run_tiny(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Experiment]:
    """run_tiny(name, *flags): its record, page and picture; twice, the second time from disk."""

    def run(name: str, *flags: str) -> tuple[dict[str, Any], str, str]:
        folder = tmp_path / "output"
        places = [f"--output={folder}", f"--results={tmp_path / 'results'}"]
        assert main([name, *TINY, *places, *flags]) == 0
        (page,) = folder.glob(f"*-experiment-{name}.md")
        first = page.read_text()
        monkeypatch.setattr(runner, "Run", None)  # nothing is trained again
        assert main([name, *TINY, *places, *flags]) == 0
        assert page.read_text() == first
        record = json.loads(page.with_suffix(".json").read_text())
        assert record["settings"]["seeds"] == [0, 1] and record["commit"] in first
        assert f"]({page.with_suffix('.svg').name})" in first
        return record, first, page.with_suffix(".svg").read_text()

    yield run
