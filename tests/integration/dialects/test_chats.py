"""Chats over HTTP: completions of the prompt that the template makes, in the shape of messages.

That their streams add up, tests/integration/http/test_streams.py says.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.kit.serving import (
    CHATS,
    ROOT,
    TEXT_MODEL,
    Server,
    complete,
    events_of,
    parts_of,
)

MESSAGES = [
    {"role": "system", "content": "the cat"},
    {"role": "user", "content": "sat on the mat"},
]
PROMPT = "<|begin_of_text|>system: the cat\nuser: sat on the mat\nassistant:"
"""What the test model's template makes of them."""


def ask(server: Server, **fields: Any) -> dict[str, Any]:
    reply = server.http.post(CHATS, json={"messages": MESSAGES, **fields})
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def plain(server: Server, **fields: Any) -> dict[str, Any]:
    """The completion that the chat is."""
    return complete(server, prompt=PROMPT, add_special_tokens=False, **fields)


def test_a_chat_is_the_completion_of_its_prompt(server: Server) -> None:
    fields = {"seed": 3, "n": 3, "max_tokens": 9, "return_token_ids": True, "stop": ["e"]}
    fields |= {"prompt_logprobs": 2}
    chat, expected = ask(server, **fields), plain(server, **fields)
    for name in ("prompt_token_ids", "prompt_logprobs"):
        assert chat[name] == expected["choices"][0][name]
    assert chat["prompt_token_ids"][0] == 0 != chat["prompt_token_ids"][1]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert chat["usage"][name] == expected["usage"][name]
    for message, choice in zip(chat["choices"], expected["choices"], strict=True):
        assert message["message"] == {
            "role": "assistant", "content": choice["text"], "refusal": None,
        }  # fmt: skip
        for name in ("index", "finish_reason", "stop_reason", "token_ids", "logprobs"):
            assert message[name] == choice[name]
    assert (chat["object"], chat["model"]) == ("chat.completion", "tiny")
    assert chat["id"].startswith("chatcmpl-")
    asked_twice = ask(server, add_special_tokens=True, **fields)
    assert asked_twice["prompt_token_ids"] == chat["prompt_token_ids"], "which has a begin token"


def test_an_answer_may_begin_with_the_last_message(server: Server) -> None:
    last = {"role": "assistant", "content": [{"type": "text", "text": part} for part in "ab"]}
    fields = {"messages": [*MESSAGES, last], "continue_final_message": True, "seed": 3, "n": 2}
    bare, echoed = (ask(server, max_tokens=5, echo=echo, **fields) for echo in (False, True))
    for choice, other in zip(bare["choices"], echoed["choices"], strict=True):
        assert "a\nb" + choice["message"]["content"] == other["message"]["content"]
        assert choice["token_ids"] == other["token_ids"]
    for whole in ({}, {"stream_whole": True}):
        events = events_of(server, CHATS, max_tokens=5, echo=True, **fields, **whole)
        for choice in echoed["choices"]:
            parts = parts_of(events, choice["index"])
            text = "".join(part["delta"].get("content", "") for part in parts)
            assert text == choice["message"]["content"]
    of_the_user = ask(server, echo=True, seed=3, max_tokens=5)
    assert of_the_user["choices"] == ask(server, seed=3, max_tokens=5)["choices"]


def test_several_chats_are_answered_each_by_itself(server: Server) -> None:
    chats = [MESSAGES, MESSAGES[1:], [{"role": "user", "content": "cat"}]]
    fields = {"n": 2, "seed": 3, "max_tokens": 9, "logprobs": True, "return_token_ids": True}
    rules = [{"match": "a"}, {"match": "e"}, {"not": {"match": "a"}}]
    body = {"messages": chats, "verify": rules, **fields}
    reply = server.http.post(f"{CHATS}/batch", json=body).json()
    assert [choice["index"] for choice in reply["choices"]] == [*range(6)]
    for i, (chat, rule) in enumerate(zip(chats, rules, strict=True)):
        alone = ask(server, **{**fields, "messages": chat, "verify": rule})
        for choice, expected in zip(reply["choices"][2 * i :], alone["choices"], strict=False):
            assert choice | {"index": 0} == expected | {"index": 0}
        assert reply["samples"][i] == alone["samples"][0]
    assert reply["object"] == "chat.completion" and reply["prompt_token_ids"] is None


def test_without_a_limit_an_answer_may_fill_the_context(server: Server) -> None:
    reply = ask(server, ignore_eos=True)
    assert reply["usage"]["total_tokens"] == TEXT_MODEL.n_ctx + 1
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["prompt_logprobs"] is None


def test_a_template_that_is_none_ends_the_start(text_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ a")
    flags = [f"--model={text_model}", "--port=0", f"--chat-template={file}"]
    command = [sys.executable, "-m", "srm.server", "api", *flags]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 3
    assert "the chat template is not one: line 1: " in ended.stderr
    assert "Traceback" not in ended.stderr
