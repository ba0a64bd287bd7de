"""The official OpenAI client against a running server: what it sends and reads is understood."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import openai
import pytest

from tests.serving import Server


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


def test_a_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="the cat", max_tokens=7, seed=1)
    assert answer.object == "text_completion"
    assert answer.model == "tiny"
    assert answer.id.startswith("cmpl-")
    assert answer.created > 0
    (choice,) = answer.choices
    assert choice.finish_reason in {"stop", "length"}
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 7
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_every_optional_parameter_at_its_neutral_value(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny",
        prompt="the cat",
        best_of=1,
        echo=False,
        frequency_penalty=0,
        logit_bias={},
        logprobs=None,
        max_tokens=3,
        n=1,
        presence_penalty=0,
        seed=1,
        stop=None,
        stream=False,
        suffix=None,
        temperature=1,
        top_p=1,
        user="someone",
    )
    assert len(answer.choices) == 1


def test_n_lists_and_tokens(client: openai.OpenAI) -> None:
    for prompt in (["the cat", "sat"], [[0, 5, 6], [0, 7]]):
        answer = client.completions.create(model="tiny", prompt=prompt, n=3, max_tokens=2)
        assert [choice.index for choice in answer.choices] == list(range(6))
    answer = client.completions.create(model="tiny", prompt=[0, 5, 6], max_tokens=2)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 3


def test_best_of(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny",
        prompt="the cat",
        n=2,
        best_of=5,
        max_tokens=4,
        extra_body={"ignore_eos": True},
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 20


def test_an_id_that_is_taken_is_a_conflict(client: openai.OpenAI) -> None:
    fields = {"request_id": "sdk-1", "ignore_eos": True}
    with client.completions.create(
        model="tiny", prompt="x", n=200, max_tokens=100, stream=True, extra_body=fields
    ) as stream:
        assert next(iter(stream)).id == "sdk-1"
        with pytest.raises(openai.ConflictError) as refused:
            client.completions.create(model="tiny", prompt="x", extra_body=fields)
    assert (refused.value.code, refused.value.param) == ("id_in_use", "request_id")


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="the cat", logprobs=0, max_tokens=4)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens
    assert logprobs.token_logprobs
    assert logprobs.text_offset
    assert logprobs.top_logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset)
    assert logprobs.text_offset[0] == 0


def test_echo_with_alternatives(client: openai.OpenAI) -> None:
    (choice,) = client.completions.create(
        model="tiny", prompt="the cat", echo=True, logprobs=5, max_tokens=3
    ).choices
    assert choice.text.startswith("the cat")
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens and logprobs.token_logprobs
    assert logprobs.text_offset and logprobs.top_logprobs
    assert [logprobs.token_logprobs[0], logprobs.top_logprobs[0]] == [None, None]
    for token, logprob, top in list(
        zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True)
    )[1:]:
        assert 5 <= len(top) <= 6
        assert top[token] == logprob
    assert len(logprobs.text_offset) == len(logprobs.tokens)


def test_scoring_only_streamed(client: openai.OpenAI) -> None:
    events = client.completions.create(
        model="tiny",
        prompt=[0, 5, 6],
        echo=True,
        logprobs=1,
        max_tokens=0,
        stream=True,
        extra_body={"prompt_logprobs": 2},
    )
    (choice,) = [choice for event in events for choice in event.choices]
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None and choice.logprobs.tokens
    assert len(choice.logprobs.tokens) == len(choice.model_dump()["prompt_logprobs"]) == 3


def test_a_stream_with_usage(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="tiny", prompt="the cat", max_tokens=20, n=2, seed=4)
    texts = {0: "", 1: ""}
    reasons = {}
    usage = None
    for event in client.completions.create(
        model="tiny",
        prompt="the cat",
        max_tokens=20,
        n=2,
        seed=4,
        stream=True,
        stream_options={"include_usage": True},
    ):
        usage = event.usage
        for choice in event.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    assert list(texts.values()) == [choice.text for choice in whole.choices]
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert usage == whole.usage


async def test_the_async_client(async_client: openai.AsyncOpenAI) -> None:
    whole = await async_client.completions.create(
        model="tiny", prompt="the cat", max_tokens=20, seed=4
    )
    stream = await async_client.completions.create(
        model="tiny", prompt="the cat", max_tokens=20, seed=4, stream=True
    )
    events = [event async for event in stream]
    assert "".join(event.choices[0].text for event in events) == whole.choices[0].text


async def test_leaving_a_stream_leaves_the_server_usable(
    async_client: openai.AsyncOpenAI,
) -> None:
    stream = await async_client.completions.create(
        model="tiny", prompt="the cat", n=100, max_tokens=100, stream=True
    )
    async for _ in stream:
        break
    await stream.close()
    answer = await async_client.completions.create(model="tiny", prompt="the cat", max_tokens=2)
    assert answer.choices


def test_errors_are_the_clients_own_kinds(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="tiny", prompt="x", n=0)
    assert (bad.value.param, bad.value.type) == ("n", "invalid_request_error")
    assert bad.value.code == "invalid_request"
    assert "n must be an integer from 1" in bad.value.message
    assert bad.value.request_id
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="tiny", prompt="x", suffix="y")
    assert bad.value.param == "suffix"
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="tiny", prompt=[5] * 1_000)
    assert bad.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="tiny", prompt="x", extra_body={"nonsense": 1})
    assert bad.value.param == "nonsense"
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-9", prompt="x")
    assert missing.value.code == "model_not_found"


def test_our_extensions_pass_through_the_client(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny",
        prompt="the cat",
        max_tokens=6,
        extra_body={
            "top_k": 5,
            "min_p": 0.1,
            "ignore_eos": True,
            "stop_token_ids": [],
            "return_token_ids": True,
        },
    )
    choice = answer.choices[0].model_dump()
    assert len(choice["token_ids"]) == 6
    assert choice["prompt_token_ids"][0] == 0


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
