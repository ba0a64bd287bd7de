"""verl's trainers: its replicas, clients and workers make rollouts by a server that goes on with
their weights (`srm/verl.py`)."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from statistics import fmean
from urllib.parse import urlsplit

from srm.engine.config import DEMO_MODEL
from srm.engine.weights.convert import convert
from srm.training.problems.drawn import problems
from tests.clients.conftest import Noted, Printed
from tests.clients.expected import TOLERANCE
from tests.kit.serving import ROOT, Server, free_port

PROMPTS = [problem.prompt for problem in islice(problems("held-out", 5), 4)]


def test_rollouts_go_on_with_the_weights_of_each_step(
    printed: Printed, noted: Noted, tmp_path: Path
) -> None:
    """Every token's log-probability is that of the model which the workers held."""
    model, weights = tmp_path / "demo", tmp_path / "weights"
    weights.mkdir()
    convert(DEMO_MODEL, None, model, form="transformers")
    flags = ("--num-slots=64", f"--admin-port={free_port()}")
    with Server(model, *flags, engine_module="srm.engine", start_s=600) as server:
        arguments = (str(ROOT), str(model), server.admin_url, str(weights), json.dumps(PROMPTS))
        result = printed("verl_rollouts", *arguments)
    assert result["address"] == [urlsplit(server.admin_url).netloc]
    assert result["before"]["global_steps"] is None  # of weights that nobody sent
    assert [span["version"] for span in result["before"]["weight_versions"]] == [1]
    for step, made in enumerate(result["steps"], 1):
        assert {*made["reasons"]} == {"completed"} and len(made["reasons"]) == 16
        assert len(made["now"]) == sum(made["tokens"]) > 16
        assert max(made["now"]) < TOLERANCE
        if step > 1:
            assert fmean(gap > 1e-2 for gap in made["first"]) > 0.3  # most others are certain
        for fields, tokens in zip(made["fields"], made["tokens"], strict=True):
            steps = [fields[f"{name}global_steps"] for name in ("", "min_", "max_")]
            assert steps == [step] * 3
            assert fields["weight_versions"] == [{"version": 1 + step, "start": 0, "end": tokens}]
    noted("verl", "`LLMServerManager`, `LLMServerClient.generate`", "`BaseRollout.update_weights`")
    check_straddled(result["straddled"])
    noted("verl", "`abort_all_requests`, `FullyAsyncLLMServerClient`, `resume_generation`")
    assert result["rejected"] == ["aborted", []]
    assert result["no scores"] is None
    assert {step for _, _, step in result["crowd"]} == {7}
    completed = [tokens for reason, tokens, _ in result["crowd"] if reason == "completed"]
    assert len(result["crowd"]) == 18 and len(completed) >= 2  # at most 16 ran when aborted
    assert {*completed} == {400}
    refusals = result["refusals"]
    assert "image_data" in refusals["an image"]
    assert "temperature" in refusals["a temperature"] and "400" in refusals["a temperature"]
    assert "model.lora.merge" in refusals["an adapter"]
    assert "delta_flush" in refusals["a delta"]
    assert "urls: replica 2 has none" in refusals["a server too few"]
    assert "folder: is missing" in refusals["no folder"]
    assert "unknown url" in refusals["a misspelt setting"]
    assert "not finite" in refusals["no number"]
    for name in ("a string", "a number"):
        assert "engine_kwargs.srm.urls: " in refusals[name], refusals
        assert "no list of strings" in refusals[name]
    for name in ("a reward model", "a teacher"):
        assert "rollout.name: srm makes the actor's rollouts alone" in refusals[name]
    assert "rollout.full_determinism" in refusals["determinism"]
    assert "POST http://127.0.0.1:1/abort_requests: Client" in refusals["no server"]
    assert "prompt_logprobs: " in refusals["prompt_logprobs"]
    assert "tokens are of weights" in refusals["foreign weights"]
    assert result["left"] == []  # no folder of weights


def check_straddled(samples: list[dict[str, list[float]]]) -> None:
    """Each has a place before which its tokens are of the old weights, and behind it of the new."""
    switched = 0
    for sample in samples:
        old, new, steps = sample["old"], sample["new"], sample["steps"]
        assert len(old) == 400
        before = next((i for i, gap in enumerate(old) if gap > TOLERANCE), 400)
        assert max(new[before:], default=0) < TOLERANCE
        assert steps in ([3, 3], [3, 4], [4, 4])
        assert before == 400 or steps != [3, 3]
        assert max(new) < TOLERANCE or steps != [4, 4]
        switched += steps == [3, 4]
    assert switched
