"""The tokenizer over HTTP, used as clients without one use it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import httpx
import jinja2
import msgspec
import pytest
from tokenizers import Tokenizer

from srm.engine.client.client import EngineClient
from srm.server.dialects.chat import tokenize
from srm.server.dialects.chat.request import parse_chat
from srm.server.dialects.messages.request import parse_message
from srm.server.routes.app import create_app
from srm.server.text.chat_template import ChatTemplate
from srm.server.text.text import Text
from srm.server.wiring import ServerWiring
from tests.kit.bodies.refusals import parse_response
from tests.kit.serving import (
    CHAT_TEMPLATE,
    CHATS,
    TEXT_MODEL,
    Server,
    error_of,
    write_text_model,
)  # fmt: skip

MESSAGES = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]
TEXTS = ["the cat", "", "é € 😀", "<|end_of_text|> and on", " two  spaces\n"]


def answer_of(server: Server, path: str = "/tokenize", /, **fields: Any) -> Any:
    reply = server.http.post(path, json=fields)
    assert reply.status_code == 200, reply.text
    return reply.json()


def tokens_of(server: Server, **fields: Any) -> Any:
    return answer_of(server, **fields)["tokens"]


def text_of(server: Server, tokens: list[int]) -> str:
    return str(answer_of(server, "/detokenize", tokens=tokens)["prompt"])


def test_tokens_are_the_librarys_and_read_back(server: Server, text_model: Path) -> None:
    library = Tokenizer.from_file(str(text_model / "tokenizer.json"))
    for text in TEXTS:
        for adds, first in ((True, "<|begin_of_text|>"), (False, "")):
            tokens = tokens_of(server, prompt=text, add_special_tokens=adds)
            assert tokens == library.encode(text, add_special_tokens=adds).ids
            assert text_of(server, tokens) == first + text
    # However long it is.
    assert len(tokens_of(server, prompt="the cat" * 1_000)) > 10 * TEXT_MODEL.n_ctx


def test_a_list_is_answered_in_lists(server: Server) -> None:
    one = answer_of(server, prompt=TEXTS[0], return_token_strs=True)
    strings = ["<|begin_of_text|>", "the", " cat"]
    described = {"count": 3, "max_model_len": TEXT_MODEL.n_ctx, "token_strs": strings}
    assert one == {"tokens": one["tokens"], **described}
    asked: dict[str, Any] = {"return_token_strs": True, "model": "tiny"}
    many = answer_of(server, "/v1/tokenize", prompt=TEXTS, **asked)
    assert many["tokens"] == [tokens_of(server, prompt=text) for text in TEXTS]
    assert many["count"] == list(map(len, many["tokens"]))
    assert many["token_strs"][0] == strings
    nothing = answer_of(server, prompt=[], **asked)
    assert (nothing["tokens"], nothing["count"], nothing["token_strs"]) == ([], [], [])


def test_a_chat_has_the_tokens_that_are_generated_from(server: Server) -> None:
    for fields in ({}, {"continue_final_message": True}, {"add_generation_prompt": False}):
        body = {"messages": MESSAGES, **fields}
        generated = answer_of(server, CHATS, **body, max_tokens=1, return_token_ids=True)
        assert tokens_of(server, **body) == generated["prompt_token_ids"]
    assert text_of(server, tokens_of(server, messages=MESSAGES, continue_final_message=True)) == (
        "<|begin_of_text|>user: the cat\nassistant: sat"
    )


def test_a_client_without_a_tokenizer_has_all_it_needs(server: Server) -> None:
    """As evaluation harnesses do it, with a Jinja that has nothing of ours."""
    info = server.get("/tokenizer_info").json()
    assert info["chat_template"] == CHAT_TEMPLATE
    assert (info["vocab_size"], info["model_max_length"]) == (320, 128)
    assert (info["unk_token"], info["pad_token"]) == (None, None)
    for name, expected in (("bos_token", 0), ("eos_token", 1)):
        assert tokens_of(server, prompt=info[name], add_special_tokens=False) == [expected]
    plain = jinja2.Environment(trim_blocks=True, undefined=jinja2.StrictUndefined)
    prompt = plain.from_string(info["chat_template"]).render(
        messages=MESSAGES, add_generation_prompt=True
    )
    expected = tokens_of(server, messages=MESSAGES)
    assert tokens_of(server, prompt=prompt, add_special_tokens=False) == expected


@asynccontextmanager
async def without_engine(
    model: Path, template: ChatTemplate | None = None
) -> AsyncIterator[httpx.AsyncClient]:
    """The routes of a server of this model."""
    app = create_app(ServerWiring(), EngineClient("tcp://127.0.0.1:1"), Text(model), template)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


async def test_refuses_too_much_text(text_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize, "MAX_CHARACTERS", 10)
    async with without_engine(text_model) as client:
        monkeypatch.setattr(tokenize, "AT_ONCE", 5)
        for prompt, status in (("x" * 10, 200), ("x" * 11, 400), (["x" * 6] * 2, 400)):
            reply = await client.post("/tokenize", json={"prompt": prompt})
            assert reply.status_code == status
        assert "12 characters; at most 10" in error_of(reply)["message"]


async def test_a_template_gets_the_chat_and_may_raise(text_model: Path) -> None:
    source = (
        "{% if messages | length > 1 %}{{ raise_exception('one at a time, please') }}{% endif %}"
        "{{ bos_token }}Q: {{ messages[0].content }}{{ mood }}"
    )
    with closing(ChatTemplate(source, Text(text_model).special_tokens)) as template:
        async with without_engine(text_model, template) as client:
            for path in (CHATS, "/tokenize"):
                error = error_of(await client.post(path, json={"messages": MESSAGES}))
                assert error["message"] == "the chat template: one at a time, please"
            body = {"messages": MESSAGES[:1], "chat_template_kwargs": {"mood": "!"}}
            tokens = (await client.post("/tokenize", json=body)).json()["tokens"]
            read = await client.post("/detokenize", json={"tokens": tokens})
            assert read.json() == {"prompt": "<|begin_of_text|>Q: the cat!"}


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
HINTS = (
    "{% for message in messages %}{{ message.role }}{{ message.reasoning_content }}"
    "{{ message.content }}\n{% endfor %}{{ reasoning_effort }}{{ mood }}"
    "{% if tools %}{{ tools[0].function.name }}{% endif %}"
)
THOUGHTS = [MESSAGES[0], {"role": "assistant", "content": "no", "reasoning_content": "hm"}]


@pytest.mark.parametrize("source", [HINTS, HINTS.partition("{% if tools")[0]])
@pytest.mark.parametrize("choice", ["auto", "none", "required"])
async def test_tokenizes_chats_with_tools(text_model: Path, source: str, choice: str) -> None:
    chat = {"messages": THOUGHTS, "tools": TOOLS, "tool_choice": choice}
    with closing(ChatTemplate(source, Text(text_model).special_tokens)) as template:
        async with without_engine(text_model, template) as client:
            tokens = (await client.post("/tokenize", json=chat)).json()["tokens"]
            text = (await client.post("/detokenize", json={"tokens": tokens})).json()["prompt"]
            is_shown = choice == "auto" or (choice == "required" and source == HINTS)
            assert ("add" in text) == is_shown
            asked = parse_chat(msgspec.json.encode(chat)).conversation
            assert text == await template.render(asked)


@pytest.mark.parametrize(
    ("parse", "fields"),
    [
        (parse_chat, {"messages": THOUGHTS, "reasoning_effort": "high"}),
        (parse_chat, {"messages": THOUGHTS, "chat_template_kwargs": {"reasoning_effort": "high"}}),
        (parse_message, {"messages": THOUGHTS[:1], "output_config": {"effort": "high"},
                         "max_tokens": 1}),
        (lambda body: parse_response(body)[1],
         {"input": "x", "reasoning": {"effort": "high", "summary": "auto"}}),
        (lambda body: parse_response(body)[1],
         {"input": "x", "chat_template_kwargs": {"mood": "high"}}),
    ],
)  # fmt: skip
async def test_a_template_may_read_hints(
    text_model: Path, parse: Callable[[bytes], Any], fields: dict[str, Any]
) -> None:
    asked = parse(json.dumps(fields).encode()).conversation
    with closing(ChatTemplate(HINTS, Text(text_model).special_tokens)) as template:
        text = await template.render(asked)
        assert str(text).endswith("high")
        assert ("hm" in str(text)) == (len(fields.get("messages", ())) == 2)


async def test_a_model_without_a_tokenizer_or_a_template_says_so(tmp_path: Path) -> None:
    write_text_model(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    async with without_engine(tmp_path) as client:
        for path in (CHATS, "/tokenize"):
            error = error_of(await client.post(path, json={"messages": MESSAGES}))
            assert error["param"] == "messages"
            for named in ("chat_template.jinja", "tokenizer_config.json", "--chat-template"):
                assert named in error["message"]
        assert (await client.get("/tokenizer_info")).json()["chat_template"] is None
    (tmp_path / "tokenizer.json").unlink()
    async with without_engine(tmp_path) as client:
        error = error_of(await client.post("/tokenize", json={"prompt": "x"}))
        assert error["param"] == "prompt" and "no tokenizer" in error["message"]
        assert (await client.get("/tokenizer_info")).status_code == 404
        reply = await client.post("/detokenize", json={"tokens": [5, 17]})
        assert reply.json() == {"prompt": "token_id:5token_id:17"}
