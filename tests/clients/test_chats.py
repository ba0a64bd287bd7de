"""LangChain's LLM in all its ways; chats and responses of two turns: replies are sent back."""

from __future__ import annotations

import pytest

from tests.clients.conftest import Noted, Printed
from tests.kit.serving import Server

OVERFLOW = "This model's maximum context length is 512 tokens. However, your prompt has "


def test_langchains_llm(demo: Server, printed: Printed, noted: Noted) -> None:
    result = printed("langchain_llm", demo.url)
    whole = result["whole"]
    assert whole.endswith("#### 21")
    assert result["streamed"] == result["streamed_async"] == whole
    assert result["batch"] == [whole] * 3
    assert result["chain"] == whole.split("\n####")[0]
    first, second = result["several"]
    assert len(set(first)) > 1
    assert first == second  # the same seed, and LangChain sends both in one request
    usage = result["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    noted("langchain-openai", "`OpenAI(…)` with `invoke`, `stream`, `astream`, `batch`, `generate`")


@pytest.mark.parametrize(
    ("client", "package", "called"),
    [
        ("openai_chat", "openai", "`chat.completions.create`"),
        ("langchain_chat", "langchain-openai", "`ChatOpenAI(…)` with `invoke`, `stream`"),
        ("litellm_chat", "litellm", "`completion`"),
    ],
)
def test_the_second_turn_is_answered(
    demo: Server, printed: Printed, noted: Noted, client: str, package: str, called: str
) -> None:
    result = printed(client, demo.url)
    assert all(result["answers"]) and len(result["answers"]) == 2
    if "error" in result:  # that of a prompt beyond the context, as the client's own kind
        assert OVERFLOW in result["error"]
    if "streamed" in result:
        assert result["streamed"] == result["answers"][0]
        assert result["usage"]["total_tokens"] > result["usage"]["input_tokens"] > 0
    noted(package, f"{called}, two turns")


def test_openais_responses(demo: Server, printed: Printed, noted: Noted) -> None:
    result = printed("openai_responses", demo.url)
    assert result["stored"] is True and result["after"] == result["second"]
    assert result["whole"] == result["streamed"] and result["whole"].endswith("#### 42")
    assert result["kinds"][-1] == "response.completed" and result["second"]
    for made in (result["parsed"], result["called"]):
        assert set(made) == {"first", "second"} and all(0 <= made[name] <= 99 for name in made)
    assert result["refusals"] == ["background"]
    noted("openai", "`responses.create`", "`responses.stream`")
    noted("openai", "`responses.parse(text_format=…)`", "`responses.parse(tools=…)`")
    noted("openai", "`responses.create(previous_response_id=…)`")
    noted("openai", "`responses.retrieve`", "`responses.delete`")
    assert result["background"] == ["in_progress", "completed", result["whole"]]
    noted("openai", "`responses.create(background=True)`", "`responses.cancel`")
