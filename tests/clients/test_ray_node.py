"""A batch over a Ray cluster goes on when a node is killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import srm.__main__ as srm
from srm.engine.config import DEMO_MODEL
from tests.clients.conftest import DEPLOY_PYTHON, PROGRAMS, Run
from tests.kit.serving import ROOT

LINES, SHARD_LINES = 400, 20
FLAGS = f"--model={DEMO_MODEL}", "--max-step-rows=256"


def test_a_killed_node_loses_doubles_and_changes_no_line(run: Run, tmp_path: Path) -> None:
    asked, alone, output = tmp_path / "in.jsonl", tmp_path / "alone.jsonl", tmp_path / "out"
    asked.write_text("".join(json.dumps(line(number)) + "\n" for number in range(LINES)))
    assert srm.main(["batch", str(asked), f"-o{alone}", *FLAGS]) == 0
    program, quarter = str(PROGRAMS / "ray" / "batch_with_a_kill.py"), LINES // SHARD_LINES // 4
    shards = f"--shard-lines={SHARD_LINES}"
    run(DEPLOY_PYTHON, program, str(ROOT), str(quarter), str(output), str(asked), shards, *FLAGS)
    answers = [entry for path in output.glob("batch_*") for entry in path.read_bytes().splitlines()]
    assert sorted(answers) == sorted(alone.read_bytes().splitlines())


def line(number: int) -> dict[str, Any]:
    """A line: greedy, or sampled by its number or by a seed of its own, once or twice."""
    kinds: list[dict[str, Any]] = [{"temperature": 0}, {}, {"seed": number, "n": 2}]
    prompt = f"Question: How many are {number} hats and 3 hats?\nAnswer:"
    return {"prompt": prompt, "max_tokens": 32} | kinds[number % 3]
