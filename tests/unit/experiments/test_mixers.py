"""Every mixer is trained as its case says, and set beside the paper's figure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from research.experiments.harness.corpus import standard_library
from research.experiments.harness.models import HEADS, SRMS, make_variant
from research.experiments.mixers import CASES, CHANGES, PAPER, Settings, page
from srm.loadtest.records import ROOT
from srm.training.model import SRM
from tests.unit.experiments.conftest import Experiment


@pytest.mark.usefixtures("library")
def test_all_cases_are_trained_once_and_shown(run_experiment: Experiment) -> None:
    record, text, picture = run_experiment("mixers")
    assert set(record["results"]) == set(CASES)
    for case, (item, other) in record["results"].items():
        assert (item["seed"], other["seed"]) == (0, 1)
        assert item["loss"] != other["loss"] and len(item["training_losses"]) == 2
        assert f"\n| {case} | {item['parameters']:,} | " in text
    for case, loss in PAPER.items():
        assert f" | {loss:.3f} | " in text and f"<!-- {case} -->" in picture
    assert "of 45 pairs of cases stand in the paper's order" in text


def test_variants_have_the_parts_in_their_names() -> None:
    for name, members in SRMS.items():
        made = make_variant(name, 8, 1, 16, 300)
        assert isinstance(made, SRM) and made.config.n_ctx == 16
        assert made.config.decay == ("decay" in name or name == "parallel heads")
        is_headless = name.startswith(("row", "headless", "kernel")) or name == "column"
        assert made.config.num_heads == (1 if is_headless else HEADS)
        has_projections = not is_headless and "no projections" not in name
        assert made.config.use_projections == has_projections
        assert made.config.kernel_size == members.get("kernel_size", made.config.kernel_size)
    assert {*PAPER, *(case for _, *both in CHANGES for case in both)} <= set(CASES) <= set(SRMS)


def test_the_page_says_what_decay_does() -> None:
    numbers = {"parameters": 1_000, "processor_seconds": 2.0}
    losses = {case: 3.0 - 0.5 * ("decay" in case) for case in CASES} | {"parallel decay": 3.5}
    results = {
        case: [{"loss": loss + noise, **numbers} for noise in (0.0, 0.01)]
        for case, loss in losses.items()
    }
    text = "\n".join(page(Settings(), results))
    assert " 4 of 5 cases with decay have less loss than every case without.\n" in text
    assert "| decay, mixed | -0.500 | -0.226 |" in text
    assert "| row | 1,000 | 3.005 ± 0.007 | 3.465 | 2 |" in text


def test_held_out_files_are_not_trained_on(library: Path) -> None:
    corpus = standard_library(300)
    assert len(corpus.training) > 8 * len(corpus.held_out) / 2 > 1_000
    names = [path.read_text() for path in sorted(library.iterdir())]
    for other in names[::10]:
        assert other not in names[1:10] + names[11:]
    same = standard_library(300)
    (inputs, targets), again = corpus.batches(2, 16, 0)[3], same.batches(2, 16, 0)[3]
    assert torch.equal(inputs, again[0]) and torch.equal(inputs[:, 1:], targets[:, :-1])
    (library / "module_03.py").write_text("changed = 1\n")
    assert standard_library(300).sha256 != corpus.sha256 == same.sha256


def test_an_interrupted_experiment_says_that_it_goes_on(tmp_path: Path) -> None:
    program = (
        "import runpy, sys\nfrom research.experiments import mixers\n\ndef interrupted(config):\n"
    )
    program += (
        "    raise KeyboardInterrupt\n\nmixers.run = interrupted\nsys.argv[1:] = ['mixers']\n"
    )
    program += "runpy.run_module('research.experiments', run_name='__main__')\n"
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 130
    assert ended.stderr == "experiments: interrupted; the same command goes on at this case\n"
