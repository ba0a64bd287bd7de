"""The bundled model of puzzles, asked as README and its card do."""

from __future__ import annotations

import json
import re

from srm.engine.config import COUNTDOWN_MODEL
from srm.loadtest.records import ROOT
from srm.training.problems.countdown import is_solved, parse_prompt
from tests.serving import Server

EXAMPLE = re.compile(r"'(\{\s*\"prompt\": \"make .*?\})'", re.S)


def test_the_readmes_puzzle_is_solved_in_one_of_many_samples() -> None:
    (example,) = EXAMPLE.findall((ROOT / "README.md").read_text())
    body = json.loads(example)
    problem = parse_prompt(body["prompt"])
    assert body["verify"] == {"number": problem.target, "using": list(problem.numbers)}
    with Server(COUNTDOWN_MODEL, "--dtype=float32", "--num-slots=256") as server:
        reply = server.http.post("/v1/completions", json=body, timeout=600).json()
    (samples,) = reply["samples"]
    assert samples["reached"] and samples["matched"] == 1
    *wrong, right = (choice["text"] for choice in reply["choices"])
    assert is_solved(problem, right)
    assert not any(is_solved(problem, text) for text in wrong)
