"""LangChain's OpenAI LLM: whole, streamed, batched, in a chain, and several samples."""

from __future__ import annotations

from tests.clients.conftest import Printed
from tests.serving import Server


def test_the_llm(demo: Server, printed: Printed) -> None:
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


def test_the_chat_model(demo: Server, printed: Printed) -> None:
    found = printed("langchain_chat", demo.url)
    assert found["streamed"] == found["whole"]
    assert found["usage"]["total_tokens"] > found["usage"]["input_tokens"] > 0
