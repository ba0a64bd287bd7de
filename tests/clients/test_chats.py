"""LangChain's LLM in all its ways, and chats of two turns: the reply is sent back as it came."""

from __future__ import annotations

import pytest

from tests.clients.conftest import Printed
from tests.serving import Server

OVERFLOW = "This model's maximum context length is 512 tokens. However, your prompt has "


def test_langchains_llm(demo: Server, printed: Printed) -> None:
    found = printed("langchain_llm", demo.url)
    whole = found["whole"]
    assert whole.endswith("#### 21")
    assert found["streamed"] == found["streamed_async"] == whole
    assert found["batch"] == [whole] * 3
    assert found["chain"] == whole.split("\n####")[0]
    first, second = found["several"]
    assert len(set(first)) > 1
    assert first == second  # the same seed, and LangChain sends both in one request
    usage = found["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


@pytest.mark.parametrize("client", ["openai_chat", "langchain_chat", "litellm_chat"])
def test_the_second_turn_is_answered(demo: Server, printed: Printed, client: str) -> None:
    found = printed(client, demo.url)
    assert all(found["answers"]) and len(found["answers"]) == 2
    if "error" in found:  # that of a prompt beyond the context, as the client's own kind
        assert OVERFLOW in found["error"]
    if "streamed" in found:
        assert found["streamed"] == found["answers"][0]
        assert found["usage"]["total_tokens"] > found["usage"]["input_tokens"] > 0
