"""The server counts the prompts of load tests as the harness does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtest.scenario import Scenario
from loadtest.workload.workload import Workload
from tests.serving import TEXT_MODEL, Server

ROUTES = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@pytest.mark.parametrize(
    ("api", "has_tokenizer"), [("completions", False), ("completions", True), ("chat", True)]
)
def test_usage_is_what_was_asked(
    server: Server, text_model: Path, api: Any, has_tokenizer: bool
) -> None:
    workload = Workload(
        Scenario(
            served_model_name="tiny",
            api=api,
            stream=False,
            tokenizer=text_model if has_tokenizer else None,
            vocab_size=TEXT_MODEL.vocab_size,
            prompt_tokens="uniform:4,40",
            output_tokens="uniform:1,9",
            n="choice:1=1,3=1",
            prefixes=2,
            prefix_tokens=2,
        )
    )
    around = set()
    for index in range(6):
        asked = workload.request(index)
        answer = httpx.post(f"{server.url}{ROUTES[api]}", content=asked.body,
                            headers={"content-type": "application/json"})  # fmt: skip
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        assert usage["completion_tokens"] == asked.n * asked.max_tokens
        around.add(usage["prompt_tokens"] - asked.prompt_tokens)
    assert len(around) == 1, "what a template adds is the same for all"
    assert around == {0} or api == "chat"
