"""TRL's VLLMClient: generation as its trainers do it, scores of given sequences, and chats; and its
GRPOTrainer, whose rollouts a server makes that goes on with its weights (`srm/trl.py`)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from srm.engine.config import DEMO_MODEL
from srm.engine.weights.convert import convert
from srm.training.checkpoint import load_model
from srm.training.problems.drawn import problems
from tests.clients.conftest import Noted, Printed
from tests.clients.expected import TOLERANCE, scores, tokenizer
from tests.kit.serving import ROOT, Server, free_port

PROMPTS = [problem.prompt for problem in islice(problems("held-out", 5), 6)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model as transformers loads it."""
    folder = tmp_path_factory.mktemp("trl") / "demo"
    convert(DEMO_MODEL, None, folder, form="transformers")
    return folder


@pytest.fixture(scope="module")
def trainers(model: Path) -> Iterator[Server]:
    """A server of a trainer's own, which may change its weights."""
    flags = ("--num-slots=64", f"--admin-port={free_port()}", "--served-model-name=demo")
    with Server(model, *flags, engine_module="srm.engine", start_s=600) as running:
        yield running


def test_generation_scores_and_chats(
    demo: Server, trainers: Server, printed: Printed, noted: Noted
) -> None:
    result = printed("trl_client", demo.url, json.dumps(PROMPTS), trainers.admin_url)
    assert (result["model"], result["world_size"]) == ("demo", 1)
    generated, scored, chats = result["generated"], result["scored"], result["chats"]
    assert result["by_ids"] == generated
    assert len(generated["prompt_ids"]) == 6
    assert len(generated["completion_ids"]) == 24
    for index, completion in enumerate(generated["completion_ids"]):
        assert 1 <= len(completion) <= 24
        assert [ids[0] for ids in generated["logprob_token_ids"][index]] == completion
        expected, _ = scores(generated["prompt_ids"][index // 4], completion, temperature=0.9)
        results = [logprob[0] for logprob in generated["logprobs"][index]]
        assert results == pytest.approx(expected, abs=TOLERANCE)
    for i, prompt in enumerate(generated["prompt_ids"]):
        completion = generated["completion_ids"][4 * i]
        assert scored["actual_token_ids"][i] == [[token] for token in completion]
        expected, _ = scores(prompt, completion)
        results = [item for (item,) in scored["actual_logprobs"][i]]
        assert results == pytest.approx(expected, abs=TOLERANCE)
        assert [len(top) for top in scored["logprobs"][i]] == [5] * len(completion)
    assert len(chats["prompt_ids"]) == 2
    assert len(chats["completion_ids"]) == 4
    message = zip(
        chats["completion_ids"], chats["logprobs"], chats["logprob_token_ids"], strict=True
    )
    for completion, logprobs, ids in message:
        assert [own_id[0] for own_id in ids] == completion
        assert all(logprob[0] <= 0 for logprob in logprobs)
    noted("trl", "`VLLMClient.generate`", "`.chat`", "`.get_sequence_logprobs(top_logprobs=20)`")
    check_features(result["by_features"])
    noted("trl", "`.generate(features=[None, …])`, which asks `/inference/v1/generate`")
    texts = tokenizer().decode_batch(result["by_regex"])
    assert len(texts) == 8 and all(re.fullmatch(r"#### \d{1,3}", text) for text in texts)
    noted("trl", "`.generate(structured_outputs_regex=…)`", "`.chat(structured_outputs_regex=…)`")
    assert result["with_tools"] == chats  # tool_choice is none, and the template shows no tools
    noted("trl", "`.chat(tools=…)`")
    assert result["server_info"]["model_config"]["dtype"] == "torch.float32"
    noted("trl", "`.get_server_info`", "`.reset_prefix_cache`, on `admin_port`")
    check_refusals(result["refusals"], noted)


def check_features(made: dict[str, Any]) -> None:
    assert len(made["completion_ids"]) == 24
    for i, completion in enumerate(made["completion_ids"]):
        expected, _ = scores(made["prompt_ids"][i // 4], completion, temperature=0.9)
        results = [logprob[0] for logprob in made["logprobs"][i]]
        assert results == pytest.approx(expected, abs=TOLERANCE)


def check_refusals(refusals: dict[str, str], noted: Noted) -> None:
    alternatives = refusals.pop("get_sequence_logprobs")
    assert "400" in alternatives and "max_logprobs" in alternatives
    noted(
        "trl",
        "`.get_sequence_logprobs` with its 100 alternatives",
        result="400, which names the setting `max_logprobs`",
    )
    assert len(refusals) == 4
    for name, refusal in refusals.items():
        assert refusal.startswith(("Request failed: 404", "Request failed: 400")), (name, refusal)
        assert "folder" in refusal and "weight_dir" in refusal, (name, refusal)
    noted(
        "trl",
        "the routes of `.init_communicator` and `.update_named_params`",
        result="404 and 400, which name the folder's route: `srm.trl` takes it",
    )


def test_grpo_goes_on_with_the_weights_of_each_step(
    trainers: Server, model: Path, printed: Printed, noted: Noted, tmp_path: Path
) -> None:
    """Every token's log-probability is that of the model which the trainer held."""
    output = tmp_path / "out"
    output.mkdir()
    before = weights_version(trainers)
    reply = printed(
        "trl_grpo", str(ROOT), str(model), trainers.admin_url, str(output), json.dumps(PROMPTS)
    )
    calls = reply["calls"]
    assert [call["step"] for call in calls] == [0, 1, 2, 3]
    assert [call["version"] for call in calls] == [before + 1 + step for step in range(4)]
    for call in calls:
        assert (call["prompts"], call["distinct"], len(call["completion_ids"])) == (8, 2, 8)
        assert len(call["now"]) == sum(map(len, call["completion_ids"])) > 8
        assert max(call["now"]) < TOLERANCE
        if call["step"]:
            assert fmean(gap > 1e-2 for gap in call["first"]) > 0.3  # most others are certain
    assert len(reply["losses"]) == 4 and reply["clipped"][-1] < 1
    assert {"trainer", "saved"} == {*reply["left"]}  # no folder of weights
    noted(
        "trl",
        "`GRPOTrainer(rollout_func=…)` with `srm.trl`",
        "the methods of `WeightTransferProtocol`",
    )
    refusals = reply["refusals"]
    assert "tensor input_layer.weight [2048, 256] is missing" in refusals["a tensor is missing"]
    assert "values that are not finite" in refusals["a number is none"]
    assert "another trainer changes" in refusals["weights of somebody else"]
    assert len(reply["again"]) == 3
    for name, gaps in reply["again"].items():
        assert len(gaps) > 8 and max(gaps) < TOLERANCE, name
    # Four rollouts; weights sent as AsyncGRPOTrainer does; three more; two by another trainer.
    assert weights_version(trainers) == before + 4 + 1 + 3 + 2
    # What it goes on with is what the trainer saved.
    ids = calls[-1]["completion_ids"][0]
    body = {"prompt": [0, *ids], "max_tokens": 0, "prompt_logprobs": 0}
    made = trainers.http.post("/v1/completions", json=body).json()["choices"][0]["prompt_logprobs"]
    served = [made[i + 1][str(token)]["logprob"] for i, token in enumerate(ids)]
    row = torch.tensor([[0, *ids]])
    with torch.no_grad():
        saved = load_model(output / "saved")(row)[0, :-1].log_softmax(-1)
    expected = saved.gather(1, row[0, 1:, None])[:, 0].numpy()
    assert np.abs(np.array(served) - expected).max() < TOLERANCE


def weights_version(server: Server) -> int:
    reply: httpx.Response = server.post(max_tokens=1)
    version: int = reply.json()["weights_version"]
    return version
