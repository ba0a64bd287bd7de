"""What is refused over HTTP: with which status and code, and which field is named.

What a field may be at all is tested where it is read, in tests/unit/server/schema.
"""

from __future__ import annotations

from typing import Any

import pytest

from server.schema.sampling_fields import MAX_CUT_LENGTH, MAX_SCORES
from tests.serving import (
    CHATS,
    COMPLETIONS,
    MAX_BODY_BYTES,
    MAX_WAITING,
    TEXT_MODEL,
    Server,
    error_of,
)  # fmt: skip

EOS = TEXT_MODEL.eos_token_id
MESSAGES = [{"role": "user", "content": "the cat"}]
OVERFLOW = "context_length_exceeded"
LONG = "the cat " * 20_000

ONLY_WHOLE = {"best_of", "return", "returns", "stream_whole", "until"}
"""Fields that are refused for something else, or not at all, where `stream` is true."""
COMPLETION_FIELDS: list[tuple[str, str, dict[str, Any]]] = [
    # What the model or the engine cannot do.
    ("prompt", "at least one token", {"prompt": "", "add_special_tokens": False}),
    ("prompt", f"it may have {MAX_CUT_LENGTH}",
     {"prompt": "x" * (MAX_CUT_LENGTH + 1), "truncate_prompt_tokens": 5}),
    ("n", f"max_waiting = {MAX_WAITING}", {"n": MAX_WAITING + 1}),
    ("n", f"max_waiting = {MAX_WAITING}", {"prompt": ["x"] * 2, "n": 2_000}),
    ("best_of", "best_of = 3001 of 1 prompts", {"best_of": 3_001}),
    ("logprobs", f"a reply may have {MAX_SCORES}",
     {"n": 2_000, "max_tokens": 120, "logprobs": 20}),
    ("logprobs", f"a reply may have {MAX_SCORES}",
     {"n": 3_000, "prompt": [5] * 108, "echo": True, "logprobs": 20}),
    ("prompt_logprobs", f"a reply may have {MAX_SCORES}",
     {"n": 3_000, "prompt": [5] * 108, "prompt_logprobs": 20}),
    ("stop", "stop", {"return_packed": True, "stop": "a"}),
    # Edits of logits.
    ("logit_bias", "logit_bias", {"logit_bias": {"320": 1}}),
    ("allowed_token_ids", "allowed_token_ids", {"allowed_token_ids": [320]}),
    ("allowed_token_ids", "allowed_token_ids", {"allowed_token_ids": [EOS], "min_tokens": 1}),
    ("allowed_token_ids", "allowed_token_ids",
     {"min_tokens": 1, "stop_token_ids": [0], "allowed_token_ids": [0, EOS]}),
    ("bad_words", "bad_words", {"bad_words": [" "]}),
    ("min_tokens", "min_tokens", {"min_tokens": 17}),
    # Samples that are not all wanted.
    ("until", "", {"until": {"match": "("}}),
    ("until", "", {"until": {"match": ""}}),
    ("until", "", {"until": {"match": "a" * 1_001}}),
    ("until", "", {"until": {"match": "a", "most": 1}}),
    ("until", "", {"until": {"match": "a", "count": 0}}),
    ("until", "", {"until": {"match": "a", "count": 3}, "n": 2}),
    ("until", "", {"until": {"match": "a"}, "stream": True}),
    ("return", "", {"return": "all"}),
    ("return", "", {"return": "counts", "stream": True, "stream_whole": True}),
    ("returns", "", {"returns": "counts"}),
    ("count_by", "", {"count_by": "group", "return": "counts"}),
    ("count_by", "", {"count_by": "group", "until": {"match": "(a)"}}),
    ("count_by", "", {"count_by": "group", "until": {"match": "a"}, "return": "counts"}),
    ("stream_whole", "", {"stream_whole": True}),
    ("stream_interval", "", {"stream": True, "stream_whole": True, "stream_interval": 2}),
    ("best_of", "", {"until": {"match": "a"}, "best_of": 2}),
    ("best_of", "", {"return": "unique", "best_of": 2}),
    ("echo", "", {"until": {"match": "a"}, "echo": True}),
    ("return_packed", "", {"return": "counts", "return_packed": True}),
    ("max_tokens", "", {"until": {"match": "a"}, "max_tokens": 0, "prompt_logprobs": 1}),
    ("logprobs", "", {"return": "counts", "logprobs": 0}),
    ("prompt_logprobs", "", {"return": "counts", "prompt_logprobs": 0}),
    ("return_token_ids", "", {"return": "counts", "return_token_ids": True}),
]  # fmt: skip
CHAT_FIELDS: list[tuple[str, dict[str, Any]]] = [
    ("messages", {"messages": [{"role": "user"}]}),
    ("n", {"n": MAX_WAITING + 1}),
    ("tools", {"tools": [{}]}),
    ("stop_token_ids", {"stop_token_ids": [1_000]}),
    ("logprobs", {"n": 2_900, "logprobs": True, "top_logprobs": 20, "max_tokens": 100}),
    ("logprobs", {"return": "counts", "logprobs": True, "stream": False}),
    ("unknown", {"unknown": 1}),
]
TOKENIZER_FIELDS: list[tuple[str, str, str, dict[str, Any]]] = [
    ("tokenize", "prompt", "either prompt or messages", {}),
    ("tokenize", "prompt", "either", {"prompt": "x", "messages": MESSAGES}),
    ("tokenize", "prompt", "prompt must be a string or a list of strings", {"prompt": 5}),
    ("tokenize", "prompt", "got [5]", {"prompt": [5]}),
    ("tokenize", "messages", "a list of 1 to 4096", {"messages": []}),
    ("tokenize", "add_special_tokens", "true or", {"prompt": "x", "add_special_tokens": 1}),
    ("tokenize", "add_generation_prompt", "only with messages",
     {"prompt": "x", "add_generation_prompt": True}),
    ("tokenize", "nothing", "not a field", {"prompt": "x", "nothing": 1}),
    ("detokenize", "tokens", "tokens is required", {}),
    ("detokenize", "tokens", "a list of at most 4194304 token ids", {"tokens": "x"}),
    ("detokenize", "tokens", "token ids", {"tokens": [[5]]}),
    ("detokenize", "tokens", "token ids", {"tokens": [-1]}),
    ("detokenize", "tokens", "token id 320; ids go from 0 to 319", {"tokens": [5, 320]}),
    ("detokenize", "n", "not a field", {"tokens": [5], "n": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("param", "why", "fields"), COMPLETION_FIELDS)
def test_a_refused_completion_names_the_field(
    server: Server, param: str, why: str, fields: dict[str, Any]
) -> None:
    for is_stream in (False, True)[: 1 if ONLY_WHOLE & set(fields) else 2]:
        error = error_of(server.post(**{"stream": is_stream, **fields}))
        assert (error["param"], error["code"]) == (param, "invalid_request")
        assert why in error["message"]


@pytest.mark.parametrize(("param", "fields"), CHAT_FIELDS)
def test_a_refused_chat_names_the_field(server: Server, param: str, fields: dict[str, Any]) -> None:
    for is_stream in (False, True):
        body = {"messages": MESSAGES, "stream": is_stream, **fields}
        error = error_of(server.http.post(CHATS, json=body))
        assert (error["param"], error["code"]) == (param, "invalid_request")


@pytest.mark.parametrize(("path", "param", "why", "fields"), TOKENIZER_FIELDS)
def test_what_is_refused_of_the_tokenizer_names_the_field(
    server: Server, path: str, param: str, why: str, fields: dict[str, Any]
) -> None:
    for prefix in ("/", "/v1/"):
        error = error_of(server.http.post(prefix + path, json=fields))
        assert error["param"] == param and why in error["message"]


@pytest.mark.parametrize(
    ("path", "fields", "said"),
    [
        (COMPLETIONS, {"prompt": [5] * 129}, "129 tokens"),
        (COMPLETIONS, {"prompt": [[5], [5] * 200]}, "200 tokens"),
        (COMPLETIONS, {"prompt": LONG}, "at least"),
        (COMPLETIONS, {"prompt": LONG, "truncate_prompt_tokens": 129}, "129 tokens"),
        (CHATS, {"messages": MESSAGES * 20}, "tokens"),
    ],
)
def test_a_prompt_that_is_too_long_is_told_the_numbers(
    server: Server, path: str, fields: dict[str, Any], said: str
) -> None:
    for is_stream in (False, True):
        error = error_of(server.http.post(path, json={**fields, "stream": is_stream}))
        assert error["code"] == OVERFLOW
        assert said in error["message"] and "128" in error["message"]


def test_another_model_is_not_found(server: Server) -> None:
    for path, fields in (
        (COMPLETIONS, {"prompt": "x"}),
        (CHATS, {"messages": MESSAGES}),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": []}),
    ):
        error = error_of(server.http.post(path, json={"model": "other", **fields}), 404)
        assert error["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "not_found"),
        ("GET", COMPLETIONS, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/models/else/where", 404, "model_not_found"),
        ("POST", "/init_weight_transfer_engine", 404, "not_found"),
        ("POST", "/update_weights", 404, "not_found"),
    ],
)
def test_routes_that_are_not_there(
    server: Server, method: str, path: str, status: int, code: str
) -> None:
    assert error_of(server.http.request(method, path), status)["code"] == code


def test_a_body_too_large_is_refused_while_it_is_read(server: Server) -> None:
    half = b" " * (MAX_BODY_BYTES // 2)
    for path, content in (
        (COMPLETIONS, half * 2 + b" "),
        (COMPLETIONS, iter([half] * 3)),  # of a length that is not told
        ("/v1/tokenize", half * 2 + b" "),
    ):
        error = error_of(server.http.post(path, content=content), 413)
        assert (error["code"], error["param"]) == ("body_too_large", None)
        assert "body is larger" in error["message"]
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
