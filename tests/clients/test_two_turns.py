"""Chats of two turns: each client sends the reply's message back as it has it."""

from __future__ import annotations

import json

import pytest

from tests.clients.conftest import PROGRAMS, Run
from tests.serving import Server

OVERFLOW = "This model's maximum context length is 512 tokens. However, your prompt has "


@pytest.mark.parametrize("client", ["openai_chat", "langchain_turns", "litellm_chat"])
def test_the_second_turn_is_answered(demo: Server, run: Run, client: str) -> None:
    printed = run("python", str(PROGRAMS / f"{client}.py"), demo.url, "demo")
    found = json.loads(printed.splitlines()[-1])
    assert all(found["answers"]) and len(found["answers"]) == 2
    if "error" in found:  # that of a prompt beyond the context, as the client's own kind
        assert OVERFLOW in found["error"]
