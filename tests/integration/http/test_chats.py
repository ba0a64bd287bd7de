"""Chats over HTTP: completions of the prompt that the template makes, in the shape of messages."""

from __future__ import annotations

import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving import (
    CHATS,
    ROOT,
    SERVER_FLAGS,
    TEXT_MODEL,
    Server,
    complete,
    error_of,
    events_of,
    parts_of,
)  # fmt: skip

MESSAGES = [
    {"role": "system", "content": "the cat"},
    {"role": "user", "content": "sat on the mat"},
]
PROMPT = "<|begin_of_text|>system: the cat\nuser: sat on the mat\nassistant:"
"""What the test model's template makes of them."""


def post(server: Server, **fields: Any) -> httpx.Response:
    return server.http.post(CHATS, json={"messages": MESSAGES, "max_tokens": 20, **fields})


def ask(server: Server, **fields: Any) -> dict[str, Any]:
    reply = post(server, **fields)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def chunks(server: Server, **fields: Any) -> list[dict[str, Any]]:
    return events_of(server, CHATS, **{"messages": MESSAGES, "max_tokens": 20, **fields})


def plain(server: Server, **fields: Any) -> dict[str, Any]:
    """The completion that the chat is."""
    fields = {"prompt": PROMPT, "max_tokens": 20, **fields}
    return complete(server, add_special_tokens=False, **fields)


def test_a_chat_is_the_completion_of_its_prompt(server: Server) -> None:
    fields = {"seed": 3, "n": 3, "max_tokens": 9, "return_token_ids": True, "stop": ["e"]}
    chat, expected = ask(server, **fields), plain(server, **fields)
    assert chat["prompt_token_ids"] == expected["choices"][0]["prompt_token_ids"]
    assert chat["prompt_token_ids"][0] == 0 != chat["prompt_token_ids"][1]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert chat["usage"][name] == expected["usage"][name]
    for said, choice in zip(chat["choices"], expected["choices"], strict=True):
        assert said["message"] == {
            "role": "assistant", "content": choice["text"], "refusal": None,
        }  # fmt: skip
        for name in ("index", "finish_reason", "stop_reason", "token_ids", "logprobs"):
            assert said[name] == choice[name]
    assert (chat["object"], chat["model"]) == ("chat.completion", "tiny")
    assert chat["id"].startswith("chatcmpl-")
    twice = ask(server, add_special_tokens=True, **fields)["prompt_token_ids"]
    assert twice == [0, *chat["prompt_token_ids"]]


def test_without_a_limit_an_answer_may_fill_the_context(server: Server) -> None:
    reply = server.http.post(CHATS, json={"messages": MESSAGES, "ignore_eos": True}).json()
    assert reply["usage"]["total_tokens"] == TEXT_MODEL.n_ctx + 1
    assert reply["choices"][0]["finish_reason"] == "length"


def test_logprobs_are_those_of_completions(server: Server) -> None:
    fields = {"seed": 5, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
    chat = ask(server, logprobs=True, top_logprobs=3, **fields)["choices"][0]
    expected = plain(server, logprobs=3, **fields)["choices"][0]["logprobs"]
    entries = chat["logprobs"]["content"]
    assert chat["logprobs"]["refusal"] is None
    assert [entry["token"] for entry in entries] == expected["tokens"]
    assert [entry["logprob"] for entry in entries] == expected["token_logprobs"]
    for entry, top in zip(entries, expected["top_logprobs"], strict=True):
        likeliest = {other["token"]: other["logprob"] for other in entry["top_logprobs"]}
        assert len(entry["top_logprobs"]) == 3
        assert likeliest.items() <= top.items()
        assert list(likeliest.values()) == sorted(likeliest.values(), reverse=True)
    spoken = b"".join(bytes(entry["bytes"] or ()) for entry in entries)
    assert spoken.decode(errors="replace") == chat["message"]["content"]
    as_ids = ask(server, logprobs=True, return_tokens_as_token_ids=True, **fields)["choices"][0]
    assert [(entry["token"], entry["top_logprobs"]) for entry in as_ids["logprobs"]["content"]] == [
        (f"token_id:{token}", []) for token in as_ids["token_ids"]
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 4, "return_token_ids": True},
        {"n": 2, "logprobs": True, "top_logprobs": 2},
        {"stop": ["e", "at"], "n": 5, "logprobs": True, "return_token_ids": True},
        {"max_tokens": 1},
        {"n": 2, "max_tokens": 1, "prompt_logprobs": 2},
    ],
)
def test_a_stream_adds_up_to_the_whole(server: Server, fields: dict[str, Any]) -> None:
    fields = {"seed": 7, **fields}
    whole = ask(server, **fields)
    events = chunks(server, stream_options={"include_usage": True}, **fields)
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    assert all(event["usage"] is None for event in events[:-1])
    for name in ("prompt_token_ids", "prompt_logprobs"):
        assert events[0].get(name) == whole.get(name)
        assert not any(name in event for event in events[1:])
    for choice in whole["choices"]:
        first, *middle, last = parts_of(events, choice["index"])
        assert first["delta"] == {"role": "assistant", "content": ""}
        assert all(set(part["delta"]) == {"content"} for part in middle)
        assert "".join(part["delta"]["content"] for part in middle) == choice["message"]["content"]
        assert last["delta"] == {}
        assert last["finish_reason"] == choice["finish_reason"]
        assert last["stop_reason"] == choice["stop_reason"]
        assert {part["finish_reason"] for part in (first, *middle)} == {None}
        if "token_ids" in choice:
            assert list(chain(*(part["token_ids"] for part in middle))) == choice["token_ids"]
        if choice["logprobs"]:
            content = list(chain(*(part["logprobs"]["content"] for part in middle)))
            assert content == choice["logprobs"]["content"]


@pytest.mark.parametrize("n", [1, 16])
def test_usage_grows_from_an_event_of_a_role_alone_where_it_is_asked_for(
    server: Server, n: int
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = chunks(server, n=n, max_tokens=5, ignore_eos=True, stream_options=options)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert events[0]["usage"]["total_tokens"] == events[0]["usage"]["prompt_tokens"] > 0
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert (counts[0], counts[-1]) == (0, 5 * n) and counts == sorted(counts)
    assert all(len(event["choices"]) == 1 for event in events[:-1])
    assert not any("usage" in event for event in chunks(server, n=n))


def test_scores_of_the_prompt_are_those_of_completions(server: Server) -> None:
    fields = {"prompt_logprobs": 2, "max_tokens": 1, "seed": 1}
    expected = plain(server, **fields)["choices"][0]["prompt_logprobs"]
    assert ask(server, **fields)["prompt_logprobs"] == expected
    assert "prompt_logprobs" not in ask(server, max_tokens=1)


def test_the_last_message_is_continued(server: Server) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "the other "}]
    fields = {"seed": 1, "return_token_ids": True}
    found = ask(server, messages=messages, continue_final_message=True, **fields)
    (expected,) = plain(server, prompt=PROMPT + " the other ", **fields)["choices"]
    assert found["prompt_token_ids"] == expected["prompt_token_ids"]
    assert found["choices"][0]["message"]["content"] == expected["text"]


def test_a_template_can_be_given_and_one_that_raises_is_heard(
    text_model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text(
        "{% if messages | length > 1 %}{{ raise_exception('one at a time, please') }}{% endif %}"
        "{{ bos_token }}Q: {{ messages[0].content }}{{ mood }}"
    )
    fields = {"chat_template_kwargs": {"mood": "!"}, "max_tokens": 1, "return_token_ids": True}
    with Server(text_model, *SERVER_FLAGS, f"--chat-template={file}") as server:
        assert error_of(post(server))["message"] == "the chat template: one at a time, please"
        found = ask(server, messages=MESSAGES[:1], **fields)
        text = server.http.post("/detokenize", json={"tokens": found["prompt_token_ids"]}).json()
        assert text == {"prompt": "<|begin_of_text|>Q: the cat!"}


def test_a_template_that_is_none_ends_the_start(text_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ a")
    flags = [f"--model={text_model}", "--port=0", f"--chat-template={file}"]
    command = [sys.executable, "-m", "server", "api", *flags]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert ended.returncode == 3
    assert "the chat template is not one: line 1: " in ended.stderr
    assert "Traceback" not in ended.stderr
