"""`python -m research.experiments trainers`, tiny: TRL over our server, and `srm train grpo`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from research.experiments.__main__ import main
from research.experiments.harness.settings import configure
from research.experiments.trainers import SRM, START, TRL, Settings
from srm.training.questions.questions import Question
from srm.training.questions.rewards import gsm8k_strict
from tests.clients.conftest import BIN

SIZES = {"steps": 2, "problems": 4, "questions": 2, "rollouts": 4} | {
    "max_tokens": 48, "held_out": 3, "samples": 4
}  # fmt: skip


@pytest.mark.skipif(not (BIN / "python").exists(), reason="`make test-clients` makes .venv-clients")
def test_trl_is_asked_and_judged_as_our_trainer_is(tmp_path: Path) -> None:
    """The same problems in the same order; each reward is that of `gsm8k_strict`."""
    places = {"environment": BIN.parent, "results": tmp_path / "results", "output": tmp_path}
    argv = ["--threads=1", *(f"--{name}={value}" for name, value in places.items())]
    assert main(["trainers", *argv], **SIZES) == 0
    config = configure(Settings, argv, **SIZES)
    (page,) = config.output.glob("*-experiment-trainers.md")
    record = json.loads(page.with_suffix(".json").read_text())
    assert [len(record["results"][case]) for case in (START, TRL, SRM)] == [1, 2, 2]
    for case in (TRL, SRM):
        for seed in record["results"][case]:
            assert len(seed["right"]) == 3 and len(seed["known"]) == 4
            assert all(
                0 < waited < seconds
                for waited, seconds in zip(seed["waited"], seed["seconds"], strict=True)
            )
            assert len(seed["rewards"]) == 2 and all(
                8 <= tokens <= 384 for tokens in seed["tokens"]
            )
    for seed in config.seeds:
        folder = config.folder / f"trl-{seed}"
        last = config.task(seed, folder)["rows"][-2:]
        judged = json.loads((folder / "result.json").read_text())["judged"]
        assert [answer for _, answer, _ in judged] == [
            row["answer"] for row in last for _ in range(4)
        ]
        for completion, answer, reward in judged:
            assert reward == gsm8k_strict(completion, Question("", answer))
