"""verifiers' clients: that of training renders chats itself and takes token ids, as prime-rl does;
that of evaluation passes chats on."""

from __future__ import annotations

from pathlib import Path

import pytest

from srm.engine.config import DEMO_MODEL
from srm.engine.weights.convert import convert
from tests.clients.conftest import Noted, Printed
from tests.clients.expected import TOLERANCE, scores, tokenizer
from tests.kit.serving import Server


def test_two_turns_of_token_ids_and_of_chats(
    demo: Server, printed: Printed, noted: Noted, tmp_path: Path
) -> None:
    folder = tmp_path / "demo"
    convert(DEMO_MODEL, None, folder, form="transformers")
    result = printed("verifiers_rollouts", demo.url, str(folder))
    trained, evaluated = result["train"], result["eval"]
    for turn in trained:
        prompt, completion = turn["prompt_ids"], turn["completion_ids"]
        expected, _ = scores(prompt, completion, temperature=0.9)
        assert turn["logprobs"] == pytest.approx(expected, abs=TOLERANCE)
        assert turn["usage"] == [len(prompt), len(completion)]
        assert tokenizer().decode(completion) == turn["content"]
        assert turn["finish_reason"] == ("stop" if completion[-1] == 1 else "length")
    whole = trained[0]["prompt_ids"] + trained[0]["completion_ids"]
    assert trained[1]["prompt_ids"][: len(whole)] == whole
    noted("verifiers", "`TrainClient`, two turns, `cache_salt`")
    # The same seed, whether the ids are made here or there.
    answers = [[turn["content"], turn["finish_reason"]] for turn in trained]
    assert [[turn["content"], turn["finish_reason"]] for turn in evaluated] == answers
    noted("verifiers", "`EvalClient`, two turns")
    assert "ProviderError: Prompt length" in result["error"] and "(512)" in result["error"]
    noted("verifiers", "`TrainClient`, a prompt beyond the context", result="its `ProviderError`")
