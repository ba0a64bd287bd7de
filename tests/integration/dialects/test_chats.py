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
    error_of,
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


BATCH = f"{CHATS}/batch"


def test_several_chats_are_answered_each_by_itself(server: Server) -> None:
    chats = [MESSAGES, MESSAGES[1:], [{"role": "user", "content": "cat"}]]
    fields = {"n": 2, "seed": 3, "max_tokens": 9, "logprobs": True, "return_token_ids": True}
    rules = [{"match": "a"}, {"match": "e"}, {"not": {"match": "a"}}]
    body = {"messages": chats, "verify": rules, **fields}
    reply = server.http.post(BATCH, json=body).json()
    assert [choice["index"] for choice in reply["choices"]] == [*range(6)]
    for i, (chat, rule) in enumerate(zip(chats, rules, strict=True)):
        alone = ask(server, **{**fields, "messages": chat, "verify": rule})
        for choice, expected in zip(reply["choices"][2 * i :], alone["choices"], strict=False):
            assert choice | {"index": 0} == expected | {"index": 0}
        assert reply["samples"][i] == alone["samples"][0]
    assert reply["object"] == "chat.completion" and reply["prompt_token_ids"] is None


def test_several_chats_are_refused_with_the_one_at_fault(server: Server) -> None:
    faults: list[tuple[dict[str, Any], str, str]] = [
        ({"messages": MESSAGES}, "messages", "messages[0] must be a list of 1 to"),
        ({"messages": []}, "messages", "messages must be a list of 1 to 4096 lists of messages"),
        ({"messages": [MESSAGES, [{"role": "user"}]]}, "messages", "messages[1][0] must be"),
        ({"messages": [MESSAGES], "stream": True}, "stream", "several chats in one request"),
        ({"messages": [MESSAGES], "echo": True}, "echo", "several chats"),
        ({"messages": [MESSAGES], "prompt_logprobs": 0}, "prompt_logprobs", "several chats"),
        ({"messages": [MESSAGES] * 2, "n": 1_501}, "n", "1501 of 2 prompts"),
        ({"messages": [MESSAGES], "max_tokens": 0}, "max_tokens", "at least 1"),
    ]
    for body, param, message in faults:
        error = error_of(server.http.post(BATCH, json=body))
        assert error["param"] == param
        assert message in error["message"]


def test_without_a_limit_an_answer_may_fill_the_context(server: Server) -> None:
    reply = ask(server, ignore_eos=True)
    assert reply["usage"]["total_tokens"] == TEXT_MODEL.n_ctx + 1
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["prompt_logprobs"] is None


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


def test_a_template_that_is_none_ends_the_start(text_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ a")
    flags = [f"--model={text_model}", "--port=0", f"--chat-template={file}"]
    command = [sys.executable, "-m", "srm.server", "api", *flags]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 3
    assert "the chat template is not one: line 1: " in ended.stderr
    assert "Traceback" not in ended.stderr
