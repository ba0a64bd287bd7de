"""Chats of two turns: each client sends the reply's message back as it has it."""

from __future__ import annotations

import pytest

from tests.clients.conftest import Printed
from tests.serving import Server

OVERFLOW = "This model's maximum context length is 512 tokens. However, your prompt has "


@pytest.mark.parametrize("client", ["openai_chat", "langchain_turns", "litellm_chat"])
def test_the_second_turn_is_answered(demo: Server, printed: Printed, client: str) -> None:
    found = printed(client, demo.url, "demo")
    assert all(found["answers"]) and len(found["answers"]) == 2
    if "error" in found:  # that of a prompt beyond the context, as the client's own kind
        assert OVERFLOW in found["error"]
