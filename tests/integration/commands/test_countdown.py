"""The bundled model of puzzles, asked as its card does."""

from __future__ import annotations

import json
import re

from research.experiments.tasks.tasks import draw_random
from srm.engine.config import COUNTDOWN_MODEL
from srm.loadtest.records import ROOT
from srm.server.supervise.launch import EXAMPLE as OWN_EXAMPLE
from srm.training.problems.countdown import is_solved, parse_prompt
from tests.kit.serving import Server

PUZZLE_RECORD = ROOT / "research" / "records" / "2026-11-28-c64c155b-passk.json"
CARD = COUNTDOWN_MODEL / "README.md"
EXAMPLE = re.compile(r"'(\{\s*\"prompt\": \"make .*?\})'", re.S)


def test_the_cards_puzzle_is_solved_in_one_of_many_samples() -> None:
    (example,) = EXAMPLE.findall(CARD.read_text())
    body = json.loads(example)
    assert body == json.loads((COUNTDOWN_MODEL / OWN_EXAMPLE).read_text())
    problem = parse_prompt(body["prompt"])
    assert body["verify"] == {"number": problem.target, "using": list(problem.numbers)}
    with Server(COUNTDOWN_MODEL, "--dtype=float32", "--num-slots=256") as server:
        reply = server.http.post("/v1/completions", json=body, timeout=600).json()
    (samples,) = reply["samples"]
    assert samples["reached"] and samples["matched"] == 1
    *wrong, right = (choice["text"] for choice in reply["choices"])
    assert is_solved(problem, right)
    assert not any(is_solved(problem, text) for text in wrong)


def test_the_cards_puzzle_beats_chance_eight_times() -> None:
    card = CARD.read_text()
    (example,) = EXAMPLE.findall(card)
    prompt = json.loads(example)["prompt"]
    (counted,) = json.loads(PUZZLE_RECORD.read_text())["problems"]
    (by_chance,) = draw_random([parse_prompt(prompt)], counted["drawn"], seed=0)
    assert counted["question"] == prompt and counted["right"] >= 8 * by_chance
    stated = " ".join(card.split())
    assert f"Of {counted['drawn']:,} answers to `{prompt}` {counted['right']:,} are right" in stated
    assert f"of {counted['drawn']:,} random combinations {by_chance}." in stated
