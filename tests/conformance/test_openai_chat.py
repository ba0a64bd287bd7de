"""The official OpenAI client's chat against a running server."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from engine.config import DEMO_MODEL
from tests.serving import SERVER_FLAGS, Server, write_text_model

HELLO: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "the cat"},
    {"role": "user", "content": "sat on the mat"},
]


@pytest.fixture(scope="module")
def chat_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("models") / "tiny"
    write_text_model(folder)
    shutil.copy(DEMO_MODEL / "chat_template.jinja", folder)
    with Server(folder, *SERVER_FLAGS) as running:
        if running.http.post("/v1/chat/completions", json={}).status_code == 404:
            pytest.skip("there is no /v1/chat/completions")
        yield running


@pytest.fixture
def client(chat_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{chat_server.url}/v1", api_key="none", max_retries=0) as one:
        yield one


def test_a_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, max_completion_tokens=7, seed=1, n=3
    )
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert choice.message.role == "assistant"
        assert isinstance(choice.message.content, str)
        assert choice.finish_reason in {"stop", "length"}
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 21
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_adds_up_to_the_whole(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=20, n=2, seed=4, temperature=0.9, top_p=0.95
    )
    texts = {0: "", 1: ""}
    roles = {}
    reasons = {}
    usage = None
    for event in client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        max_tokens=20,
        n=2,
        seed=4,
        temperature=0.9,
        top_p=0.95,
        stream=True,
        stream_options={"include_usage": True},
    ):
        assert event.object == "chat.completion.chunk"
        usage = event.usage
        for choice in event.choices:
            if choice.index not in roles:
                roles[choice.index] = choice.delta.role
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason
    assert roles == {0: "assistant", 1: "assistant"}
    assert list(texts.values()) == [choice.message.content for choice in whole.choices]
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert usage is not None and whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_logprobs(client: openai.OpenAI) -> None:
    (choice,) = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=5, logprobs=True, top_logprobs=3
    ).choices
    assert choice.logprobs is not None and choice.logprobs.content
    for token in choice.logprobs.content:
        assert token.logprob <= 0
        assert 3 <= len(token.top_logprobs) <= 4
        assert token.bytes is None or bytes(token.bytes).decode(errors="replace")


def test_a_chat_is_its_template_completed(chat_server: Server, client: openai.OpenAI) -> None:
    """Chat is completions of what the template makes of the messages."""
    reply = client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        max_tokens=12,
        seed=2,
        extra_body={"return_token_ids": True},
    )
    said = reply.model_dump()
    again = chat_server.post(prompt=said["prompt_token_ids"], max_tokens=12, seed=2).json()
    assert again["choices"][0]["text"] == said["choices"][0]["message"]["content"]


def test_errors_name_the_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="tiny", messages=[])
    assert refused.value.param == "messages"
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model="tiny",
            messages=HELLO,
            tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}],
        )
    assert refused.value.param == "tools"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-9", messages=HELLO)
    assert missing.value.code == "model_not_found"
