"""The tokenizer over HTTP, used as clients without one use it; and what else they ask for first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import jinja2
import pytest
from tokenizers import Tokenizer

from engine.client.client import EngineClient
from server.config import ServerConfig
from server.routes import tokenize
from server.routes.app import create_app
from server.routes.service import VERSION
from server.text.text import Text
from tests.serving import CHAT_TEMPLATE, MAX_BODY_BYTES, TEXT_MODEL, Server, write_text_model

MESSAGES = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]
TEXTS = ["the cat", "", "é € 😀", "<|end_of_text|> and on", " two  spaces\n"]


def tokens_of(server: Server, **fields: Any) -> Any:
    reply = server.http.post("/tokenize", json=fields)
    assert reply.status_code == 200, reply.text
    return reply.json()["tokens"]


def text_of(server: Server, tokens: list[int]) -> str:
    text: str = server.http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    return text


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("adds_special", [True, False])
def test_tokens_are_the_librarys_and_read_back_as_the_text(
    server: Server, text_model: Path, text: str, adds_special: bool
) -> None:
    library = Tokenizer.from_file(str(text_model / "tokenizer.json"))
    tokens = tokens_of(server, prompt=text, add_special_tokens=adds_special)
    assert tokens == library.encode(text, add_special_tokens=adds_special).ids
    assert text_of(server, tokens) == ("<|begin_of_text|>" if adds_special else "") + text


def test_a_list_is_answered_in_lists(server: Server) -> None:
    one = server.http.post("/tokenize", json={"prompt": TEXTS[0], "return_token_strs": True}).json()
    assert one == {
        "tokens": one["tokens"],
        "count": 3,
        "max_model_len": TEXT_MODEL.n_ctx,
        "token_strs": ["<|begin_of_text|>", "the", " cat"],
    }
    all_of_them = server.http.post(
        "/v1/tokenize", json={"prompt": TEXTS, "return_token_strs": True, "model": "tiny"}
    ).json()
    assert all_of_them["tokens"] == [tokens_of(server, prompt=text) for text in TEXTS]
    assert all_of_them["count"] == list(map(len, all_of_them["tokens"]))
    assert all_of_them["token_strs"][0] == one["token_strs"]
    nothing = server.http.post("/tokenize", json={"prompt": [], "return_token_strs": True}).json()
    assert (nothing["tokens"], nothing["count"], nothing["token_strs"]) == ([], [], [])


def test_a_chat_has_the_tokens_that_are_generated_from(server: Server) -> None:
    for fields in ({}, {"continue_final_message": True}, {"add_generation_prompt": False}):
        body = {"messages": MESSAGES, **fields}
        generated = server.http.post(
            "/v1/chat/completions", json={**body, "max_tokens": 1, "return_token_ids": True}
        ).json()
        assert tokens_of(server, **body) == generated["prompt_token_ids"]
    assert text_of(server, tokens_of(server, messages=MESSAGES, continue_final_message=True)) == (
        "<|begin_of_text|>user: the cat\nassistant: sat"
    )


def test_text_beyond_the_context_is_tokenized_all_the_same(server: Server) -> None:
    assert len(tokens_of(server, prompt="the cat" * 1_000)) > 10 * TEXT_MODEL.n_ctx


def test_a_client_without_a_tokenizer_has_all_it_needs(server: Server) -> None:
    """As evaluation harnesses do it, with a Jinja that has nothing of ours."""
    info = server.get("/tokenizer_info").json()
    assert info == server.get("/v1/tokenizer_info").json()
    assert info["chat_template"] == CHAT_TEMPLATE
    assert (info["vocab_size"], info["model_max_length"]) == (320, 128)
    assert (info["unk_token"], info["pad_token"]) == (None, None)
    for name, expected in (("bos_token", 0), ("eos_token", 1)):
        assert tokens_of(server, prompt=info[name], add_special_tokens=False) == [expected]
    plain = jinja2.Environment(trim_blocks=True, undefined=jinja2.StrictUndefined)
    prompt = plain.from_string(info["chat_template"]).render(
        messages=MESSAGES, add_generation_prompt=True
    )
    assert tokens_of(server, prompt=prompt, add_special_tokens=False) == tokens_of(
        server, messages=MESSAGES
    )


@pytest.mark.parametrize(
    ("path", "fields", "param", "why"),
    [
        ("tokenize", {}, "prompt", "either prompt or messages"),
        ("tokenize", {"prompt": "x", "messages": MESSAGES}, "prompt", "either"),
        ("tokenize", {"prompt": 5}, "prompt", "prompt must be a string or a list of strings"),
        ("tokenize", {"prompt": [5]}, "prompt", "got [5]"),
        ("tokenize", {"messages": []}, "messages", "a list of 1 to 4096"),
        ("tokenize", {"prompt": "x", "add_special_tokens": 1}, "add_special_tokens", "true or"),
        ("tokenize", {"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt",
         "only with messages"),
        ("tokenize", {"prompt": "x", "nothing": 1}, "nothing", "not a field"),
        ("tokenize", {"prompt": "xy" * (MAX_BODY_BYTES // 2)}, None, "body is larger"),
        ("detokenize", {}, "tokens", "tokens is required"),
        ("detokenize", {"tokens": "x"}, "tokens", "a list of at most 4194304 token ids"),
        ("detokenize", {"tokens": [[5]]}, "tokens", "token ids"),
        ("detokenize", {"tokens": [-1]}, "tokens", "token ids"),
        ("detokenize", {"tokens": [5, 320]}, "tokens", "token id 320; ids go from 0 to 319"),
        ("detokenize", {"tokens": [5], "n": 1}, "n", "not a field"),
    ],
)  # fmt: skip
def test_an_error_names_the_field(
    server: Server, path: str, fields: dict[str, Any], param: str | None, why: str
) -> None:
    for prefix in ("/", "/v1/"):
        reply = server.http.post(prefix + path, json=fields)
        assert reply.status_code == (413 if param is None else 400)
        assert reply.json()["error"]["param"] == param
        assert why in reply.json()["error"]["message"]


def test_another_model_is_not_found(server: Server) -> None:
    for path, fields in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": []})):
        reply = server.http.post(path, json={"model": "other", **fields})
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")


async def test_more_text_than_fits_is_refused(
    text_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenize, "MAX_CHARACTERS", 10)
    app = create_app(ServerConfig(), EngineClient("tcp://127.0.0.1:1"), Text(text_model))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://localhost"
    ) as client:
        monkeypatch.setattr(tokenize, "AT_ONCE", 5)
        for prompt, status in (("x" * 10, 200), ("x" * 11, 400), (["x" * 6] * 2, 400)):
            reply = await client.post("/tokenize", json={"prompt": prompt})
            assert reply.status_code == status
        assert "12 characters; at most 10" in reply.json()["error"]["message"]


async def test_a_model_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    write_text_model(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    app = create_app(ServerConfig(), EngineClient("tcp://127.0.0.1:1"), Text(tmp_path))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://localhost"
    ) as client:
        reply = await client.post("/tokenize", json={"prompt": "x"})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt")
        assert "no tokenizer" in reply.json()["error"]["message"]
        assert (await client.get("/tokenizer_info")).status_code == 404
        reply = await client.post("/detokenize", json={"tokens": [5, 17]})
        assert reply.json() == {"prompt": "token_id:5token_id:17"}


def test_what_clients_ask_before_they_send_work(server: Server) -> None:
    assert server.get("/version").json() == {"version": VERSION}
    assert server.get("/ping").status_code == server.http.post("/ping").status_code == 200
    assert server.get("/get_world_size").json() == {"world_size": 1}
    for path in ("/init_weight_transfer_engine", "/update_weights"):
        assert server.http.post(path, json={}).status_code == 404
    (card,) = server.get("/v1/models").json()["data"]
    assert (card["root"], card["parent"], card["owned_by"]) == ("tiny", None, "srm")
