"""Chats over HTTP: completions of the prompt that the template makes, in the shape of messages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.client.client import EngineClient
from server.config import ServerConfig
from server.routes.app import create_app
from server.text.text import Text
from tests.integration.test_http import flat, values
from tests.serving import MAX_WAITING, ROOT, SERVER_FLAGS, TEXT_MODEL, Server, write_text_model

PATH = "/v1/chat/completions"
MESSAGES = [
    {"role": "system", "content": "the cat"},
    {"role": "user", "content": "sat on the mat"},
]
PROMPT = "<|begin_of_text|>system: the cat\nuser: sat on the mat\nassistant:"
"""What the test model's template makes of them."""


def post(server: Server, **fields: Any) -> httpx.Response:
    return server.http.post(PATH, json={"messages": MESSAGES, "max_tokens": 20, **fields})


def ask(server: Server, **fields: Any) -> dict[str, Any]:
    reply = post(server, **fields)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def chunks(server: Server, **fields: Any) -> list[dict[str, Any]]:
    """The events, without the closing [DONE], which must be there."""
    reply = post(server, stream=True, **fields)
    assert reply.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = reply.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_a_chat_is_the_completion_of_its_prompt(server: Server) -> None:
    fields = {"seed": 3, "n": 3, "max_tokens": 9, "return_token_ids": True, "stop": ["e"]}
    chat = ask(server, **fields)
    plain = server.post(prompt=PROMPT, add_special_tokens=False, **fields).json()
    assert chat["prompt_token_ids"] == plain["choices"][0]["prompt_token_ids"]
    assert chat["usage"].pop("prompt_tokens_details") and plain["usage"].pop(
        "prompt_tokens_details"
    )
    assert chat["usage"] == plain["usage"]
    for said, expected in zip(chat["choices"], plain["choices"], strict=True):
        assert said["message"] == {
            "role": "assistant", "content": expected["text"], "refusal": None,
        }  # fmt: skip
        for name in ("index", "finish_reason", "stop_reason", "token_ids", "logprobs"):
            assert said[name] == expected[name]
    assert chat["object"] == "chat.completion"
    assert chat["id"].startswith("chatcmpl-")
    assert chat["model"] == "tiny"


def test_without_a_limit_an_answer_may_fill_the_context(server: Server) -> None:
    reply = server.http.post(PATH, json={"messages": MESSAGES, "ignore_eos": True}).json()
    assert reply["usage"]["total_tokens"] == TEXT_MODEL.n_ctx + 1
    assert reply["choices"][0]["finish_reason"] == "length"


def test_logprobs_are_those_of_completions(server: Server) -> None:
    fields = {"seed": 5, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
    chat = ask(server, logprobs=True, top_logprobs=3, **fields)["choices"][0]
    plain = server.post(prompt=PROMPT, add_special_tokens=False, logprobs=3, **fields).json()
    expected = plain["choices"][0]["logprobs"]
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
    assert [entry["token"] for entry in as_ids["logprobs"]["content"]] == [
        f"token_id:{token}" for token in as_ids["token_ids"]
    ]
    assert all(entry["top_logprobs"] == [] for entry in as_ids["logprobs"]["content"])


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 4, "return_token_ids": True},
        {"n": 2, "logprobs": True, "top_logprobs": 2},
        {"stop": ["e", "at"], "n": 5, "logprobs": True, "return_token_ids": True},
        {"max_tokens": 1},
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
    assert events[0].get("prompt_token_ids") == whole.get("prompt_token_ids")
    assert not any("prompt_token_ids" in event for event in events[1:])
    for choice in whole["choices"]:
        parts = [c for event in events for c in event["choices"] if c["index"] == choice["index"]]
        first, *middle, last = parts
        assert first["delta"] == {"role": "assistant", "content": ""}
        assert all(set(part["delta"]) == {"content"} for part in middle)
        assert "".join(part["delta"]["content"] for part in middle) == choice["message"]["content"]
        assert last["delta"] == {}
        assert last["finish_reason"] == choice["finish_reason"]
        assert last["stop_reason"] == choice["stop_reason"]
        assert {part["finish_reason"] for part in (first, *middle)} == {None}
        if "token_ids" in choice:
            assert flat(part["token_ids"] for part in middle) == choice["token_ids"]
        if choice["logprobs"]:
            content = flat(part["logprobs"]["content"] for part in middle)
            assert content == choice["logprobs"]["content"]


def test_usage_is_absent_unless_asked_for_and_grows_where_it_is(server: Server) -> None:
    assert not any("usage" in event for event in chunks(server))
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = chunks(server, ignore_eos=True, max_tokens=5, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 5


@pytest.mark.parametrize("n", [1, 16])
def test_an_event_of_a_role_alone_tells_no_tokens_and_no_other_choice(
    server: Server, n: int
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = chunks(server, n=n, max_tokens=5, ignore_eos=True, stream_options=options)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert events[0]["usage"]["completion_tokens"] == 0
    assert events[0]["usage"]["total_tokens"] == events[0]["usage"]["prompt_tokens"] > 0
    assert events[-1]["usage"]["completion_tokens"] == 5 * n
    assert all(len(event["choices"]) == 1 for event in events[:-1])


def test_scores_of_the_prompt_are_those_of_completions(server: Server) -> None:
    fields = {"prompt_logprobs": 2, "max_tokens": 1, "seed": 1}
    plain = server.post(prompt=PROMPT, add_special_tokens=False, **fields).json()["choices"][0]
    assert ask(server, **fields)["prompt_logprobs"] == plain["prompt_logprobs"]
    first, *others = chunks(server, n=2, **fields)
    assert first["prompt_logprobs"] == plain["prompt_logprobs"]
    assert not any("prompt_logprobs" in event for event in others)
    assert "prompt_logprobs" not in ask(server, max_tokens=1)


def test_the_last_message_is_continued(server: Server) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "the other "}]
    fields = {"messages": messages, "continue_final_message": True, "return_token_ids": True}
    found = ask(server, seed=1, **fields)
    open_prompt = PROMPT + " the other "
    plain = server.post(
        prompt=open_prompt, add_special_tokens=False, max_tokens=20, seed=1, return_token_ids=True
    ).json()["choices"][0]
    assert found["prompt_token_ids"] == plain["prompt_token_ids"]
    assert found["choices"][0]["message"]["content"] == plain["text"]


def test_special_tokens_may_be_added_and_are_not_otherwise(server: Server) -> None:
    fields = {"max_tokens": 1, "return_token_ids": True}
    without = ask(server, **fields)["prompt_token_ids"]
    assert without[0] == 0 != without[1]
    assert ask(server, add_special_tokens=True, **fields)["prompt_token_ids"] == [0, *without]


@pytest.mark.parametrize(
    ("fields", "status", "param", "code"),
    [
        ({"messages": None}, 400, "messages", "invalid_request"),
        ({"messages": [{"role": "user"}]}, 400, "messages", "invalid_request"),
        ({"messages": MESSAGES * 10}, 400, "messages", "context_length_exceeded"),
        ({"model": "other"}, 404, "model", "model_not_found"),
        ({"n": MAX_WAITING + 1}, 400, "n", "invalid_request"),
        ({"tools": [{}]}, 400, "tools", "invalid_request"),
        ({"stop_token_ids": [1_000]}, 400, "stop_token_ids", "invalid_request"),
        ({"n": 2_900, "logprobs": True, "top_logprobs": 20, "max_tokens": 100}, 400, "logprobs",
         "invalid_request"),
        ({"unknown": 1}, 400, "unknown", "invalid_request"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_stream", [False, True])
def test_an_error_names_the_field(
    server: Server, fields: dict[str, Any], status: int, param: str, code: str, is_stream: bool
) -> None:
    reply = post(server, stream=is_stream, **fields)
    assert reply.status_code == status
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert reply.headers["x-should-retry"] == "false"


async def test_a_model_without_a_template_says_what_is_missing(tmp_path: Path) -> None:
    write_text_model(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    app = create_app(ServerConfig(), EngineClient("tcp://127.0.0.1:1"), Text(tmp_path))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for path in (PATH, "/tokenize"):
            reply = await client.post(path, json={"messages": MESSAGES})
            assert reply.status_code == 400
            error = reply.json()["error"]
            assert error["param"] == "messages"
            for named in ("chat_template.jinja", "tokenizer_config.json", "--chat-template"):
                assert named in error["message"]
        assert (await client.get("/tokenizer_info")).json()["chat_template"] is None


def test_a_template_can_be_given_and_one_that_raises_is_heard(
    text_model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text(
        "{% if messages | length > 1 %}{{ raise_exception('one at a time, please') }}{% endif %}"
        "{{ bos_token }}Q: {{ messages[0].content }}{{ mood }}"
    )
    with Server(text_model, *SERVER_FLAGS, f"--chat-template={file}") as server:
        reply = post(server)
        assert reply.status_code == 400
        assert reply.json()["error"]["message"] == "the chat template: one at a time, please"
        found = ask(
            server,
            messages=MESSAGES[:1],
            chat_template_kwargs={"mood": "!"},
            max_tokens=1,
            return_token_ids=True,
        )
        text = server.http.post("/detokenize", json={"tokens": found["prompt_token_ids"]}).json()
        assert text == {"prompt": "<|begin_of_text|>Q: the cat!"}


@pytest.mark.parametrize(
    ("source", "code", "why"),
    [("{{ a", 3, "the chat template is not one: line 1: "), (None, 2, "cannot read ")],
)
def test_a_template_that_is_none_ends_the_start(
    text_model: Path, tmp_path: Path, source: str | None, code: int, why: str
) -> None:
    file = tmp_path / "mine.jinja"
    if source is not None:
        file.write_text(source)
    flags = [f"--model={text_model}", "--port=0", f"--chat-template={file}"]
    command = [sys.executable, "-m", "server", "api", *flags]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert ended.returncode == code
    assert why in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_client_that_leaves_a_chat_frees_its_slots(server: Server) -> None:
    body = {"messages": MESSAGES, "n": 200, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", PATH, json=body) as reply:
        assert next(reply.iter_lines())
    server.wait_until_idle()


FIELDS = [
    "messages", "model", "n", "max_completion_tokens", "logprobs", "top_logprobs", "stream",
    "tools", "stream_options", "add_generation_prompt", "continue_final_message",
    "chat_template_kwargs", "response_format", "stop", "seed", "nonsense",
]  # fmt: skip
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool", "robot"]), "content": values}
    )
    | values,
    max_size=3,
)
bodies = st.dictionaries(st.sampled_from(FIELDS), values | messages).map(
    lambda body: json.dumps({"messages": MESSAGES, "max_tokens": 2, **body}).encode()
)


@settings(max_examples=150, deadline=None)
@given(bodies)
def test_no_body_is_a_fault_of_the_server(server: Server, body: bytes) -> None:
    reply = server.http.post(PATH, content=body)
    assert reply.status_code in {200, 400, 404}, reply.text
    if reply.status_code != 200:
        assert reply.json()["error"]["message"]


def test_after_all_this_it_still_chats(server: Server) -> None:
    server.wait_until_idle()
    assert ask(server, max_tokens=3, ignore_eos=True)["usage"]["completion_tokens"] == 3
