"""A small standard library, and an experiment's run at tiny sizes."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from research.experiments.__main__ import main
from research.experiments.harness import runner
from research.experiments.harness.result_cache import Numbers
from srm.engine.config import EngineConfig, ModelConfig
from srm.training.grpo.engine_sampler import EngineSampler, folded
from tests.kit.engines.making import engine_of
from tests.kit.one_thread import one_thread  # noqa: F401 - a fixture of all below

TINY = {"steps": 2, "rows": 2, "d_model": 8, "num_layers": 1, "n_ctx": 16, "max_vocab_size": 300}

Experiment = Callable[..., tuple[dict[str, Any], str, str]]


def numpy_sampler(
    config: ModelConfig, tensors: Mapping[str, Tensor], _: EngineConfig, version: int, __: float
) -> EngineSampler:
    """As `engine_sampler`, of the numpy engine."""
    engine = engine_of(folded(config, tensors, version), max_waiting=1_000)
    return EngineSampler(engine, lambda: None)


def done_before(*_: object) -> Numbers:
    raise AssertionError("this case has a result")


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
def run_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Experiment:
    """run_experiment(name, *flags, **constants): its record, page and picture, with tiny models and
    two seeds; twice, the second time from disk. `again` has what a case would call if it were
    run. The page is what the record's numbers say."""

    def run(
        name: str,
        *flags: str,
        again: Iterable[tuple[Any, str]] = ((runner, "Run"),),
        **constants: Any,
    ) -> tuple[dict[str, Any], str, str]:
        folder = tmp_path / "output"
        argv = [name, f"--output={folder}", f"--results={tmp_path / 'results'}", "--threads=1"]
        argv += ["--seeds=0,1", *flags]
        constants = TINY | constants
        assert main(argv, **constants) == 0
        (page,) = folder.glob(f"*-experiment-{name}.md")
        first = page.read_text()
        with monkeypatch.context() as patch:
            for module, function in again:
                patch.setattr(module, function, done_before)
            assert main(argv, **constants) == 0
        assert page.read_text() == first
        record = json.loads(page.with_suffix(".json").read_text())
        assert record["commit"] in first and f"]({page.with_suffix('.svg').name})" in first
        assert main(["page", str(page.with_suffix(".json"))]) == 0
        return record, first, page.with_suffix(".svg").read_text()

    return run
