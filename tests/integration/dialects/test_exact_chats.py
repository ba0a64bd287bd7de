"""Conversations whose earlier turns are sent as the token ids they were made of.

The test model's weights are random, so what it says is seldom how its tokenizer would spell it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tests.kit.bodies.refused import PREFIX, with_ids
from tests.kit.serving import (
    CHATS,
    SERVER_FLAGS,
    TEXT_MODEL,
    Server,
    error_of,
    events_of,
    write_text_model,
)

USER = {"role": "user", "content": "the cat"}
EOS = 1
ASKED: dict[str, Any] = {"max_tokens": 4, "seed": 5, "return_token_ids": True}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


def ask(server: Server, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    reply = server.http.post(CHATS, json={**ASKED, "messages": messages, **fields})
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def answered(reply: dict[str, Any], index: int = 0) -> dict[str, Any]:
    """The reply's message with its ids, as trainers send it back."""
    choice = reply["choices"][index]
    return {
        **choice["message"],
        "prompt_token_ids": reply["prompt_token_ids"],
        "generation_token_ids": choice["token_ids"],
        "generation_log_probs": [-0.5] * len(choice["token_ids"]),
    }


def tokens_of(server: Server, text: str) -> list[int]:
    body = {"prompt": text, "add_special_tokens": False}
    tokens: list[int] = server.http.post("/tokenize", json=body).json()["tokens"]
    return tokens


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose context has room for twenty turns."""
    folder = tmp_path_factory.mktemp("models") / "long"
    write_text_model(folder, msgspec.structs.replace(TEXT_MODEL, n_ctx=1024))
    with Server(folder, *SERVER_FLAGS) as running:
        yield running


def fed(reply: dict[str, Any]) -> int:
    """How many tokens of the prompt the engine was given."""
    usage = reply["usage"]
    return int(usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"])


def test_of_twenty_turns_each_tokenizes_and_feeds_what_is_new(long: Server) -> None:
    behind = tokens_of(long, "<|end_of_text|>\nuser: the cat\nassistant:")
    name = "srm_tokenized_tokens_total"
    messages, texts = [USER], [USER]
    reply = ask(long, messages)
    for _ in range(20):
        before, ids = reply["prompt_token_ids"], reply["choices"][0]["token_ids"]
        messages = [*messages, answered(reply), USER]
        texts = [*texts, reply["choices"][0]["message"], USER]
        counted = long.metric(name)
        reply = ask(long, messages)
        new = behind[1:] if ids[-1] == EOS else behind
        assert reply["prompt_token_ids"] == [*before, *ids, *new]
        # What ends a turn is tokenized before it is known to be in the ids.
        assert long.metric(name) - counted == len(behind)
        assert fed(reply) <= len(ids) + len(new) + 1
        body = {"messages": messages}
        assert long.http.post("/tokenize", json=body).json()["tokens"] == reply["prompt_token_ids"]
    # Without ids all of it is tokenized again.
    counted = long.metric(name)
    as_text = ask(long, texts)
    assert long.metric(name) - counted == as_text["usage"]["prompt_tokens"] > 20 * len(behind)


def test_ids_count_and_not_the_text(server: Server) -> None:
    """Whatever they are: half a character, another model's, of messages that stand elsewhere."""
    first, half = [0, 9, 21], tokens_of(server, "é")[:1]
    rest = "\nuser: the cat\nassistant:"
    end = "<|end_of_text|>"
    for ids in ([5], half, [7, EOS], [EOS, 8], [310], [0]):
        chat = [USER, with_ids(ids, first), USER]
        expected = [*first, *ids, *tokens_of(server, rest if ids[-1] == EOS else end + rest)]
        assert ask(server, chat)["prompt_token_ids"] == expected
        by_prefix = {PREFIX: [*first, *ids]}
        plain = [USER, {"role": "assistant", "content": "sat"}, USER]
        assert ask(server, plain, **by_prefix)["prompt_token_ids"] == expected
        assert ask(server, chat, **by_prefix)["prompt_token_ids"] == expected
    # Of several messages with ids the last one has all that was before it.
    chat = [with_ids([5], first), USER, with_ids([6], [0]), USER]
    assert ask(server, chat)["prompt_token_ids"][:2] == [0, 6]
    # An answer behind it that has none is text.
    later = [USER, with_ids([5], first), USER, {"role": "assistant", "content": "hat"}, USER]
    expected = [*first, 5, *tokens_of(server, f"{end}\nuser: the cat\nassistant: hat{end}{rest}")]
    assert ask(server, later)["prompt_token_ids"] == expected


def test_a_message_may_be_continued_from_its_ids(server: Server) -> None:
    chat = [USER, with_ids([5, 6], [0, 9])]
    fields = {"continue_final_message": True}
    assert ask(server, chat, **fields)["prompt_token_ids"] == [0, 9, 5, 6]
    closed = ask(server, chat, add_generation_prompt=False)["prompt_token_ids"]
    assert closed == [0, 9, 5, 6, *tokens_of(server, "<|end_of_text|>\n")]
    ended = [USER, with_ids([5, EOS], [0, 9])]
    body = {**ASKED, "messages": ended, **fields}
    error = error_of(server.http.post(CHATS, json=body))
    assert error["param"] == "messages" and "nothing to continue" in error["message"]


def test_calls_are_their_ids_too(server: Server) -> None:
    result = {"role": "tool", "tool_call_id": "1", "content": "2"}
    for ids in ([5], [5, EOS]):
        call = with_ids(ids, [0, 9], content=None, tool_calls=[CALL])
        rest = tokens_of(server, "<|end_of_text|>\nuser: Result of f: 2\nassistant:")
        reply = ask(server, [USER, call, result])
        assert reply["prompt_token_ids"] == [0, 9, 5, *rest]


def test_all_ways_of_a_chat_begin_with_ids(server: Server) -> None:
    chat = [USER, with_ids([5], [0, 9]), USER]
    whole = ask(server, chat, n=3)
    assert len({tuple(choice["token_ids"]) for choice in whole["choices"]}) > 1
    events = events_of(server, CHATS, **ASKED, messages=chat, n=3)
    assert events[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    for choice in whole["choices"]:
        streamed = [
            token
            for event in events
            for part in event["choices"]
            if part["index"] == choice["index"]
            for token in part.get("token_ids") or ()
        ]
        assert streamed == choice["token_ids"]
    body = {**ASKED, "messages": [chat, [USER]]}
    reply = server.http.post(f"{CHATS}/batch", json=body)
    assert reply.status_code == 200, reply.text
    of_both = [choice["token_ids"] for choice in reply.json()["choices"]]
    assert of_both == [
        ask(server, messages)["choices"][0]["token_ids"] for messages in (chat, [USER])
    ]


def test_ids_fill_the_context_as_text_does(server: Server) -> None:
    body = {"messages": [USER, with_ids([5] * 128, [0]), USER]}
    error = error_of(server.http.post(CHATS, json=body))
    assert error["param"] == "messages" and "128" in error["message"]


def test_a_required_prefix_is_of_the_last_answer(server: Server) -> None:
    earlier = [USER, with_ids([5], [0, 9]), USER]
    chat = [*earlier, {"role": "assistant", "content": "sat"}, USER]
    ids = ask(server, chat, **{PREFIX: [0, 9, 5, 6]})["prompt_token_ids"]
    assert ids[:4] == [0, 9, 5, 6]
    assert ids == ask(server, [USER, with_ids([6], [0, 9, 5]), USER])["prompt_token_ids"]


GENERATE, RENDER = "/inference/v1/generate", "/render"
SAMPLED: dict[str, Any] = {"max_tokens": 6, "seed": 5, "n": 2}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.5, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "min_tokens": 2},
        {"logit_bias": {"9": 3}, "presence_penalty": 1, "repetition_penalty": 1.5},
        {"stop": ["a"], "bad_words": ["the"], "stop_token_ids": [7], "ignore_eos": True},
        {"structured_outputs": {"choice": ["sat", "on"]}},
        {"response_format": {"type": "json_object"}, "max_tokens": 20},
        {"response_format": {"type": "text"}, "structured_outputs": {"regex": "(sat|on)"}},
        {"truncate_prompt_tokens": 5, "cache_salt": "7", "priority": 1, "request_id": "r"},
        {"stop": "e", "user": "u", "metadata": {"a": "b"}, "return_token_ids": True},
    ],
)
def test_rendered_requests_sample_the_same(server: Server, fields: dict[str, Any]) -> None:
    chat = [USER, with_ids([5], [0, 9]), USER]
    bodies: list[tuple[str, dict[str, Any]]] = [
        (CHATS, {"messages": chat}),
        ("/v1/completions", {"prompt": ["the cat", "on"]}),
    ]
    for path, asked in bodies:
        body = {**asked, **SAMPLED, **fields}
        reply = server.http.post(path, json={**body, "return_token_ids": True})
        assert reply.status_code == 200, reply.text
        expected = [choice["token_ids"] for choice in reply.json()["choices"]]
        answer = server.http.post(path + RENDER, json=body)
        assert answer.status_code == 200, answer.text
        rendered = [answer.json()] if path == CHATS else answer.json()
        sampled = []
        for body in rendered:
            made = server.http.post(GENERATE, json=body)
            assert made.status_code == 200, made.text
            sampled += [choice["token_ids"] for choice in made.json()["choices"]]
        assert sampled == expected
        if path == CHATS and "truncate_prompt_tokens" not in fields:
            assert rendered[0]["token_ids"] == reply.json()["prompt_token_ids"]
        assert [body["request_id"].startswith("r") for body in rendered] == [
            "request_id" in fields for _ in rendered
        ]


def test_a_rendered_chat_has_its_tools_in_its_tokens(server: Server) -> None:
    chat: dict[str, Any] = {"messages": [USER]}
    tools = {**chat, "tools": [{"type": "function", "function": {"name": "f"}}]}
    replies = [server.http.post(CHATS + RENDER, json=body) for body in (tools, chat)]
    with_tools, without = (len(reply.json()["token_ids"]) for reply in replies)
    assert with_tools > without
    other = server.http.post(CHATS + RENDER, json={**chat, "model": "other"})
    assert error_of(other, 404)["param"] == "model"
