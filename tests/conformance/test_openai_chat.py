"""The official OpenAI client in conversation with a running server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessageParam

from tests.serving import Server

MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "the cat"},
    {"role": "user", "content": "sat on the mat"},
]


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as one:
        yield one


@pytest.fixture
async def async_client(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0
    ) as one:
        yield one


def test_a_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=9, seed=1
    )
    ChatCompletion.model_validate(answer.model_dump(), strict=True)
    assert answer.object == "chat.completion"
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.message.refusal is None
    assert choice.finish_reason in {"stop", "length"}
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 9
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_what_was_answered_can_be_sent_back(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=5, seed=1
    )
    said = answer.choices[0].message.to_dict()
    again = client.chat.completions.create(
        model="tiny",
        messages=[*MESSAGES, said, {"role": "user", "content": "the mat"}],  # type: ignore[list-item]  # as people do it
        max_completion_tokens=5,
    )
    assert again.usage is not None and answer.usage is not None
    assert again.usage.prompt_tokens > answer.usage.prompt_tokens


def test_every_optional_parameter_at_its_neutral_value(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        frequency_penalty=0,
        function_call="none",
        functions=[],
        logit_bias={},
        logprobs=False,
        max_tokens=3,
        metadata={},
        modalities=["text"],
        n=1,
        parallel_tool_calls=True,
        presence_penalty=0,
        prompt_cache_key="a",
        response_format={"type": "text"},
        safety_identifier="b",
        seed=1,
        service_tier="auto",
        stop=None,
        store=False,
        stream=False,
        temperature=1,
        tool_choice="none",
        tools=[],
        top_logprobs=None,
        top_p=1,
        user="someone",
    )
    assert len(answer.choices) == 1


def test_n_logprobs_and_parts(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": [{"type": "text", "text": "the cat"}]}],
        n=3,
        max_completion_tokens=4,
        logprobs=True,
        top_logprobs=2,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    ChatCompletion.model_validate(answer.model_dump(), strict=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.model_dump()["prompt_token_ids"][0] == 0
    for choice in answer.choices:
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert len(choice.logprobs.content) == len(choice.model_dump()["token_ids"]) == 4
        for token in choice.logprobs.content:
            assert token.logprob <= 0
            assert [type(other.token) for other in token.top_logprobs] == [str, str]


def test_a_stream_is_the_whole(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=20, n=2, seed=4
    )
    stream = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_completion_tokens=20,
        n=2,
        seed=4,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts, reasons, roles = {0: "", 1: ""}, {}, {}
    for event in stream:
        ChatCompletionChunk.model_validate(event.model_dump(), strict=True)
        for choice in event.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.delta.role:
                roles[choice.index] = choice.delta.role
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert roles == {0: "assistant", 1: "assistant"}
    assert event.usage is not None and whole.usage is not None
    assert event.usage.total_tokens == whole.usage.total_tokens


def test_the_clients_own_gathering_of_a_stream(client: openai.OpenAI) -> None:
    stops = {"stop_token_ids": list(range(100, 228))}  # or it raises that the answer is cut off
    whole = client.chat.completions.create(
        model="tiny", messages=MESSAGES, seed=4, logprobs=True, extra_body=stops
    )
    with client.chat.completions.stream(
        model="tiny", messages=MESSAGES, seed=4, logprobs=True, extra_body=stops
    ) as stream:
        for _ in stream:
            pass
        gathered = stream.get_final_completion()
    assert gathered.choices[0].message.content == whole.choices[0].message.content
    assert gathered.choices[0].finish_reason == whole.choices[0].finish_reason
    assert gathered.choices[0].logprobs == whole.choices[0].logprobs


async def test_leaving_a_stream_leaves_the_server_usable(
    async_client: openai.AsyncOpenAI,
) -> None:
    stream = await async_client.chat.completions.create(
        model="tiny", messages=MESSAGES, n=100, stream=True
    )
    async for _ in stream:
        break
    await stream.close()
    answer = await async_client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=2
    )
    assert answer.choices


def test_errors_are_the_clients_own_kinds(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="tiny", messages=[])
    assert (bad.value.param, bad.value.code) == ("messages", "invalid_request")
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            tools=[{"type": "function", "function": {"name": "f"}}],
        )
    assert bad.value.param == "tools"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="tiny", messages=MESSAGES * 20)
    assert (bad.value.param, bad.value.code) == ("messages", "context_length_exceeded")
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
