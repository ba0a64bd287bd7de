"""The official OpenAI client against a running server: what it sends and reads is understood."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessageParam

from tests.kit.serving import Server

MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "the cat"},
    {"role": "user", "content": "sat on the mat"},
]
BOTH: dict[str, Any] = {
    "frequency_penalty": 0,
    "logit_bias": {},
    "max_tokens": 3,
    "n": 1,
    "presence_penalty": 0,
    "seed": 1,
    "stop": None,
    "stream": False,
    "temperature": 1,
    "top_p": 1,
    "user": "someone",
}
"""Optional parameters at their neutral values."""
COMPLETION: dict[str, Any] = {"best_of": 1, "echo": False, "logprobs": None, "suffix": None}
CHAT: dict[str, Any] = {
    "function_call": "none",
    "functions": [],
    "logprobs": False,
    "metadata": {},
    "modalities": ["text"],
    "parallel_tool_calls": True,
    "prompt_cache_key": "a",
    "response_format": {"type": "text"},
    "safety_identifier": "b",
    "service_tier": "auto",
    "store": False,
    "tool_choice": "none",
    "tools": [],
    "top_logprobs": None,
}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as one:
        yield one


@pytest.fixture
async def async_client(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0
    ) as one:
        yield one


def chat(client: openai.OpenAI, **fields: Any) -> ChatCompletion:
    """A chat's reply, which is of the client's own types throughout."""
    given = {"model": "tiny", "messages": MESSAGES, **fields}
    answer: ChatCompletion = client.chat.completions.create(**given)
    ChatCompletion.model_validate(answer.model_dump(), strict=True)
    return answer


def test_every_optional_parameter_at_its_neutral_value(client: openai.OpenAI) -> None:
    complete = client.completions.create(model="tiny", prompt="the cat", **BOTH, **COMPLETION)
    assert len(complete.choices) == len(chat(client, **BOTH, **CHAT).choices) == 1


def test_a_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="the cat", max_tokens=7, seed=1)
    assert (answer.object, answer.model) == ("text_completion", "tiny")
    assert answer.id.startswith("cmpl-") and answer.created > 0
    check_end(answer, 7)


def check_end(answer: Any, most: int) -> None:
    """One choice that has ended, and tokens that add up."""
    (choice,), usage = answer.choices, answer.usage
    assert choice.finish_reason in {"stop", "length"}
    assert usage.completion_tokens <= most
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_a_chat_and_what_was_answered_sent_back(client: openai.OpenAI) -> None:
    answer = chat(client, max_completion_tokens=9, seed=1)
    check_end(answer, 9)
    message = answer.choices[0].message
    assert (message.role, message.refusal) == ("assistant", None) and message.content
    results = [*MESSAGES, message.to_dict(), {"role": "user", "content": "the mat"}]
    again = chat(client, messages=results, max_completion_tokens=5)
    assert again.usage is not None and answer.usage is not None
    assert again.usage.prompt_tokens > answer.usage.prompt_tokens


def test_n_lists_tokens_and_best_of(client: openai.OpenAI) -> None:
    for prompt in (["the cat", "sat"], [[0, 5, 6], [0, 7]]):
        answer = client.completions.create(model="tiny", prompt=prompt, n=3, max_tokens=2)
        assert [choice.index for choice in answer.choices] == list(range(6))
    extra = {"top_k": 5, "min_p": 0.1, "ignore_eos": True, "return_token_ids": True}
    answer = client.completions.create(
        model="tiny", prompt=[0, 5, 6], n=2, best_of=5, max_tokens=4,
        extra_body={"stop_token_ids": [], **extra},
    )  # fmt: skip
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 20)
    choice = answer.choices[0].model_dump()
    assert (len(choice["token_ids"]), choice["prompt_token_ids"]) == (4, [0, 5, 6])


class Order(pydantic.BaseModel):
    item: Literal["pen", "box"]
    count: Literal[1, 2, 3]
    note: Literal["a"] | None


def test_a_class_is_parsed_from_whole_replies_and_streams(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "response_format": Order}
    parsed = client.chat.completions.parse(n=5, **asked)
    assert all(isinstance(choice.message.parsed, Order) for choice in parsed.choices)
    with client.chat.completions.stream(seed=1, **asked) as stream:
        last = stream.get_final_completion().choices[0].message.parsed
    assert isinstance(last, Order)


class Note(pydantic.BaseModel):
    title: str
    others: dict[str, str]


class Digits(pydantic.BaseModel):
    digits: int


@pytest.mark.parametrize("kind", [Note, Digits], ids=["masks", "table"])
def test_a_class_that_max_tokens_ends_is_parsed(
    client: openai.OpenAI, kind: type[pydantic.BaseModel]
) -> None:
    """The SDK raises LengthFinishReasonError where a choice says `length`."""
    parsed = client.chat.completions.parse(
        model="tiny", messages=MESSAGES, response_format=kind, n=20, max_completion_tokens=40
    )
    assert all(isinstance(choice.message.parsed, kind) for choice in parsed.choices)
    with client.chat.completions.stream(
        model="tiny", messages=MESSAGES, response_format=kind, n=20, max_completion_tokens=40
    ) as stream:
        whole = stream.get_final_completion()
    assert all(isinstance(choice.message.parsed, kind) for choice in whole.choices)


def test_an_id_that_is_taken_is_a_conflict(client: openai.OpenAI) -> None:
    fields = {"request_id": "sdk-1", "ignore_eos": True}
    with client.completions.create(
        model="tiny", prompt="x", n=200, max_tokens=100, stream=True, extra_body=fields
    ) as stream:
        assert next(iter(stream)).id == "sdk-1"
        with pytest.raises(openai.ConflictError) as refused:
            client.completions.create(model="tiny", prompt="x", extra_body=fields)
    assert (refused.value.code, refused.value.param) == ("id_in_use", "request_id")


def test_echo_with_alternatives(client: openai.OpenAI) -> None:
    (choice,) = client.completions.create(
        model="tiny", prompt="the cat", echo=True, logprobs=5, max_tokens=3
    ).choices
    assert choice.text.startswith("the cat")
    logprobs: Any = choice.logprobs
    assert (
        logprobs.token_logprobs[0] is logprobs.top_logprobs[0] is None
        and logprobs.text_offset[0] == 0
    )
    assert len(logprobs.text_offset) == len(logprobs.tokens)
    every = zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True)
    for token, logprob, top in list(every)[1:]:
        assert 5 <= len(top) <= 6
        assert top[token] == logprob


def test_scoring_only_streamed(client: openai.OpenAI) -> None:
    events = client.completions.create(
        model="tiny", prompt=[0, 5, 6], echo=True, logprobs=1, max_tokens=0, stream=True,
        extra_body={"prompt_logprobs": 2},
    )  # fmt: skip
    (choice,) = [choice for event in events for choice in event.choices]
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None and choice.logprobs.tokens
    assert len(choice.logprobs.tokens) == len(choice.model_dump()["prompt_logprobs"]) == 3


def test_n_logprobs_and_parts_of_a_chat(client: openai.OpenAI) -> None:
    answer = chat(
        client,
        messages=[{"role": "user", "content": [{"type": "text", "text": "the cat"}]}],
        n=3,
        max_completion_tokens=4,
        logprobs=True,
        top_logprobs=2,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.model_dump()["prompt_token_ids"][0] == 0
    for choice in answer.choices:
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert len(choice.logprobs.content) == len(choice.model_dump()["token_ids"]) == 4
        for token in choice.logprobs.content:
            assert token.logprob <= 0
            assert [type(other.token) for other in token.top_logprobs] == [str, str]


@pytest.mark.parametrize("is_chat", [False, True])
def test_a_stream_with_usage_is_the_whole(client: openai.OpenAI, is_chat: bool) -> None:
    of: Any = client.chat.completions if is_chat else client.completions
    asked = {"messages": MESSAGES} if is_chat else {"prompt": "the cat"}
    fields = {"model": "tiny", "max_tokens": 20, "n": 2, "seed": 4, **asked}
    whole = of.create(**fields)
    texts, reasons, roles = {0: "", 1: ""}, {}, {}
    for event in of.create(**fields, stream=True, stream_options={"include_usage": True}):
        if is_chat:
            ChatCompletionChunk.model_validate(event.model_dump(), strict=True)
        for choice in event.choices:
            texts[choice.index] += (choice.delta.content or "") if is_chat else choice.text
            if is_chat and choice.delta.role:
                roles[choice.index] = choice.delta.role
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    choices = [choice.message.content if is_chat else choice.text for choice in whole.choices]
    assert list(texts.values()) == choices
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert roles == ({0: "assistant", 1: "assistant"} if is_chat else {})
    assert event.usage.total_tokens == whole.usage.total_tokens
    # How many are cached depends on who asked before.
    assert is_chat or event.usage.completion_tokens == whole.usage.completion_tokens


def test_the_clients_own_gathering_of_a_stream(client: openai.OpenAI) -> None:
    stops = {"stop_token_ids": list(range(100, 228))}  # or it raises that the answer is cut off
    fields: dict[str, Any] = {
        "model": "tiny", "messages": MESSAGES, "seed": 4, "logprobs": True, "extra_body": stops,
    }  # fmt: skip
    (whole,) = client.chat.completions.create(**fields).choices
    with client.chat.completions.stream(**fields) as stream:
        for _ in stream:
            pass
        (gathered,) = stream.get_final_completion().choices
    assert gathered.message.content == whole.message.content
    assert (gathered.finish_reason, gathered.logprobs) == (whole.finish_reason, whole.logprobs)


async def test_the_async_client_reads_a_stream_and_leaves_one(
    async_client: openai.AsyncOpenAI,
) -> None:
    fields: dict[str, Any] = {"model": "tiny", "prompt": "the cat", "max_tokens": 20, "seed": 4}
    stream = await async_client.completions.create(**fields, n=100, stream=True)
    async for _ in stream:
        break
    await stream.close()
    whole = await async_client.completions.create(**fields)
    stream = await async_client.completions.create(**fields, stream=True)
    events = [event async for event in stream]
    assert "".join(event.choices[0].text for event in events) == whole.choices[0].text


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"prompt": "x", "n": 0}, "n", "invalid_request"),
        ({"prompt": "x", "suffix": "y"}, "suffix", None),
        ({"prompt": [5] * 1_000}, None, "context_length_exceeded"),
        ({"prompt": "x", "extra_body": {"nonsense": 1}}, "nonsense", None),
        ({"prompt": "x", "model": "gpt-9"}, None, "model_not_found"),
        ({"messages": []}, "messages", "invalid_request"),
        ({"messages": MESSAGES, "tool_choice": "required"}, "tool_choice", None),
        ({"messages": MESSAGES * 20}, "messages", "context_length_exceeded"),
        ({"messages": MESSAGES, "model": "gpt-9"}, None, "model_not_found"),
    ],
)
def test_errors_are_the_clients_own_kinds(
    client: openai.OpenAI, fields: dict[str, Any], param: str | None, code: str | None
) -> None:
    of: Any = client.chat.completions if "messages" in fields else client.completions
    kind = openai.NotFoundError if "model" in fields else openai.BadRequestError
    with pytest.raises(kind) as refused:
        of.create(**{"model": "tiny", **fields})
    assert refused.value.request_id
    assert "model" in fields or refused.value.type == "invalid_request_error"
    assert param is None or refused.value.param == param
    assert code is None or refused.value.code == code


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_what_clients_of_vllm_read_unasked_is_null(client: openai.OpenAI) -> None:
    """Attributes that OpenAI's types do not have: an AttributeError where the key is absent."""
    completion: Any = client.completions.create(model="tiny", prompt="the cat", max_tokens=2)
    reply: Any = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=2)
    choice, answer = completion.choices[0], reply.choices[0]
    assert choice.logprobs is choice.stop_reason is choice.token_ids is None
    assert choice.prompt_token_ids is choice.prompt_logprobs is None
    assert answer.logprobs is answer.stop_reason is answer.token_ids is answer.message.refusal
    assert reply.prompt_token_ids is reply.prompt_logprobs is answer.message.refusal is None


def test_events_leave_out_what_is_not_asked_for(client: openai.OpenAI) -> None:
    """They are many; what is in them is what OpenAI has in its own, and why a choice ended."""
    events = client.completions.create(model="tiny", prompt="the cat", max_tokens=4, stream=True)
    keys = {*(frozenset(choice.to_dict()) for event in events for choice in event.choices)}
    assert keys == {frozenset({"index", "text", "logprobs", "finish_reason", "stop_reason"})}


def test_scores_by_a_rule_come_with_the_sdk(client: openai.OpenAI) -> None:
    body = {"verify": {"match": "[aeiou]"}}
    fields: dict[str, Any] = {"n": 20, "max_tokens": 4, "seed": 1}
    completion = client.completions.create(
        model="tiny", prompt="the cat", extra_body=body, **fields
    )
    scores = [choice.score for choice in completion.choices]
    assert scores == [float(bool(set("aeiou") & set(choice.text))) for choice in completion.choices]
    chat = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        extra_body={**body, "return": "counts", "count_by": "score"},
        **fields,
    )
    (samples,) = chat.samples
    assert sum(entry["count"] for entry in samples["counts"]) == 20
