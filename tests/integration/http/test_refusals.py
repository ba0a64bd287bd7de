"""Refusals by an engine or by the server's state, over HTTP: status, code, field.

What is refused before an engine is asked: tests/kit/bodies/refused.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from srm.engine.messages import NAMED
from tests.kit.bodies.refusals import USER
from tests.kit.bodies.refused import (
    DETOKENIZE,
    GENERATE,
    RESPONSES,
    SEVERAL,
    TOKENIZE,
    TOKENS,
    Fields,
    Row,
    body_of,
    sampled,
)
from tests.kit.serving import (
    CHATS,
    COMPLETIONS,
    MAX_BODY_BYTES,
    MAX_WAITING,
    TEXT_MODEL,
    Server,
    error_of,
)

EOS = TEXT_MODEL.eos_token_id
IS_WHOLE = {"best_of"}
"""Fields that are refused for something else where `stream` is true."""
TOO_MANY = f"max_waiting = {MAX_WAITING}"
MOST = "0 … 20, the setting max_logprobs (-1 is the vocabulary, 320 tokens), got"
TWICE = "5 more than once"
LONG_FORM = {"format": {"type": "json_schema", "name": "a", "schema": {"enum": ["the cat sat"]}}}
MANY_IDS = "at most 20 token ids, the setting max_logprobs, got 21"
OF_CHATS: Fields = {"logprobs": True}
OF_RESPONSES: Fields = {"include": ["message.output_text.logprobs"]}
OF_TRAINERS: Fields = {"text": "x", "return_logprob": True}
REFUSED: list[Row] = [
    (COMPLETIONS, {"n": MAX_WAITING + 1}, "n", TOO_MANY),
    (COMPLETIONS, {"prompt": ["x"] * 2, "n": 2_000}, "n", TOO_MANY),
    (COMPLETIONS, {"best_of": 3_001}, "best_of", "best_of = 3001 of 1 prompts"),
    (CHATS, {"n": MAX_WAITING + 1}, "n", TOO_MANY),
    (SEVERAL, {"messages": [[USER]] * 2, "n": 1_501}, "n", "1501 of 2 prompts"),
    *((COMPLETIONS, {name: most}, name, MOST) for name in NAMED for most in (21, 100_000)),
    *((COMPLETIONS, {name: -1}, name, f"{MOST} 320") for name in NAMED),
    *((COMPLETIONS, {name: 0, ids: [*range(21)]}, ids, MANY_IDS) for name, ids in NAMED.items()),
    *((COMPLETIONS, {name: 0, ids: [5, 6, 5]}, ids, TWICE) for name, ids in NAMED.items()),
    *((COMPLETIONS, {name: 0, ids: [320]}, ids, "holds 320; ids are 0 … 319")
      for name, ids in NAMED.items()),
    (CHATS, {**OF_CHATS, "logprob_token_ids": [5, 5]}, "logprob_token_ids", TWICE),
    (*sampled(TOKENS, logprob_token_ids=[5, 5]), "logprob_token_ids", TWICE),
    (GENERATE, {**OF_TRAINERS, "token_ids_logprob": [5, 5]}, "token_ids_logprob",
     "token_ids_logprob holds 5 more than once"),
    (GENERATE, {**OF_TRAINERS, "token_ids_logprob": [320], "logprob_start_len": 0},
     "token_ids_logprob", "token_ids_logprob holds 320"),
    (CHATS, {**OF_CHATS, "top_logprobs": 21}, "top_logprobs", MOST),
    (CHATS, {**OF_CHATS, "top_logprobs": -1}, "top_logprobs", f"{MOST} 320"),
    (CHATS, {"prompt_logprobs": 21}, "prompt_logprobs", MOST),
    (RESPONSES, {**OF_RESPONSES, "top_logprobs": 21}, "top_logprobs", MOST),
    (GENERATE, {**OF_TRAINERS, "top_logprobs_num": 21}, "top_logprobs_num", MOST),
    (*sampled(TOKENS, logprobs=21), "logprobs", MOST),
    (*sampled(TOKENS, logprobs=-1), "logprobs", f"{MOST} 320"),
    (COMPLETIONS, {"allowed_token_ids": [EOS], "min_tokens": 1}, "allowed_token_ids", ""),
    (COMPLETIONS, {"prompt": [5, 6], "max_tokens": 0, "prompt_logprobs": 0,
                   "prompt_logprobs_start": 2}, "max_tokens", "not the first"),
    (RESPONSES, {"max_output_tokens": 1, "text": LONG_FORM}, "max_output_tokens",
     "max_output_tokens = 1 tokens; the shortest completion"),
]  # fmt: skip
"""The engine's words, or a part of them."""


@pytest.mark.parametrize(("path", "fields", "param", "words"), REFUSED)
def test_what_the_engine_refuses_names_the_field(
    server: Server, path: str, fields: Fields, param: str, words: str
) -> None:
    may_stream = path in (COMPLETIONS, CHATS) and not IS_WHOLE & set(fields)
    for stream in ({}, {"stream": True})[: 1 + may_stream]:
        error = error_of(server.http.post(path, json=body_of(path, fields) | stream))
        assert (error["param"], error["code"]) == (param, "invalid_request")
        assert words in error["message"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": [5] * 129}, "129 tokens"),
        ({"prompt": [[5], [5] * 200]}, "200 tokens"),
        ({"prompt": "the cat " * 20_000, "truncate_prompt_tokens": 129}, "129 tokens"),
    ],
)
def test_says_how_long_a_prompt_is(server: Server, fields: dict[str, Any], message: str) -> None:
    for is_stream in (False, True):
        error = error_of(server.post(**fields, stream=is_stream))
        assert error["code"] == "context_length_exceeded"
        assert message in error["message"] and "128" in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "body", "code"),
    [
        ("POST", TOKENIZE, {"model": "other", "prompt": "x"}, "model_not_found"),
        ("POST", DETOKENIZE, {"model": "other", "tokens": []}, "model_not_found"),
        ("POST", COMPLETIONS, {"model": "other", "prompt": "x"}, "model_not_found"),
        ("POST", CHATS, {"model": "other", "messages": [USER]}, "model_not_found"),
        ("GET", "/v1/models/else/where", None, "model_not_found"),
        ("POST", "/init_weight_transfer_engine", None, "not_found"),
    ],
)
def test_what_is_not_there(server: Server, method: str, path: str, body: Any, code: str) -> None:
    assert error_of(server.http.request(method, path, json=body), 404)["code"] == code


def test_a_body_too_large_is_refused_while_it_is_read(server: Server) -> None:
    half = b" " * (MAX_BODY_BYTES // 2)
    for path, content in (
        (COMPLETIONS, half * 2 + b" "),
        (COMPLETIONS, iter([half] * 3)),  # of a length that is not told
        ("/v1/tokenize", half * 2 + b" "),
    ):
        error = error_of(server.http.post(path, content=content), 413)
        assert (error["code"], error["param"]) == ("body_too_large", None)
    error_of(server.http.post(COMPLETIONS, content=half * 2))


def test_overload_is_503_with_retry_after_before_any_body(server: Server) -> None:
    many = {"prompt": "x", "n": 2_500, "max_tokens": 100, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", COMPLETIONS, json=many) as busy:
        assert busy.status_code == 200
        for is_stream in (False, True):
            reply = server.post(n=2_500, stream=is_stream)
            error = error_of(reply, 503)
            assert (error["code"], error["type"]) == ("overloaded", "server_overloaded")
            assert 1 <= int(reply.headers["retry-after"]) <= 120
    server.wait_until_idle()
