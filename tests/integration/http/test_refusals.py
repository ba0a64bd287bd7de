"""What is refused over HTTP: with which status and code, and which field is named.

What a field may be at all is tested where it is read, in tests/unit/server/schema.
"""

from __future__ import annotations

from typing import Any

import pytest

from srm.engine.messages import NAMED
from srm.server.schema.sampling_fields import MAX_CUT_LENGTH, MAX_SCORES
from tests.kit.serving import (
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
TOKENIZE, DETOKENIZE = "/tokenize", "/v1/detokenize"
PROMPTS: dict[str, dict[str, Any]] = {COMPLETIONS: {"prompt": "x"}, CHATS: {"messages": MESSAGES}}
ONLY_WHOLE = {"best_of", "return", "until", "verify"}
"""Fields that are refused for something else, or not at all, where `stream` is true."""
TOO_MANY = f"max_waiting = {MAX_WAITING}"
RESPONSES, GENERATE, TOKENS = "/v1/responses", "/generate", "/inference/v1/generate"
MOST = "0 … 20, the setting max_logprobs (-1 is the vocabulary, 320 tokens), got"
MANY_SCORES = f"log-probabilities, and may have {MAX_SCORES}"
REFUSED: list[tuple[str, str, str, dict[str, Any]]] = [
    # What the model or the engine cannot do.
    (COMPLETIONS, "prompt", "at least one token", {"prompt": "", "add_special_tokens": False}),
    (COMPLETIONS, "prompt", f"it may have {MAX_CUT_LENGTH}",
     {"prompt": "x" * (MAX_CUT_LENGTH + 1), "truncate_prompt_tokens": 5}),
    (COMPLETIONS, "n", TOO_MANY, {"n": MAX_WAITING + 1}),
    (COMPLETIONS, "n", TOO_MANY, {"prompt": ["x"] * 2, "n": 2_000}),
    (COMPLETIONS, "best_of", "best_of = 3001 of 1 prompts", {"best_of": 3_001}),
    (COMPLETIONS, "logprobs", MANY_SCORES, {"n": 2_000, "max_tokens": 120, "logprobs": 20}),
    (COMPLETIONS, "logprobs", MANY_SCORES,
     {"n": 3_000, "prompt": [5] * 108, "echo": True, "logprobs": 20}),
    (COMPLETIONS, "prompt_logprobs", MANY_SCORES,
     {"n": 3_000, "prompt": [5] * 108, "prompt_logprobs": 20}),
    (COMPLETIONS, "logprobs", MOST, {"logprobs": 21}),
    (COMPLETIONS, "prompt_logprobs", MOST, {"prompt_logprobs": 100}),
    (COMPLETIONS, "logprobs", MOST, {"logprobs": 100_000}),
    (CHATS, "top_logprobs", MOST, {"logprobs": True, "top_logprobs": 21}),
    (CHATS, "prompt_logprobs", MOST, {"prompt_logprobs": 21}),
    (RESPONSES, "top_logprobs", MOST,
     {"input": "x", "top_logprobs": 21, "include": ["message.output_text.logprobs"]}),
    (GENERATE, "top_logprobs_num", MOST,
     {"text": "x", "return_logprob": True, "top_logprobs_num": 21}),
    (TOKENS, "logprobs", MOST, {"token_ids": [5], "sampling_params": {"logprobs": 21}}),
    (COMPLETIONS, "prompt_logprobs_start", "only with", {"prompt_logprobs_start": 1}),
    (COMPLETIONS, "prompt_logprobs_start", "lies after the last of the prompt's 3 tokens",
     {"prompt": [5, 6, 7], "prompt_logprobs": 0, "prompt_logprobs_start": 4}),
    (COMPLETIONS, "max_tokens", "not the first",
     {"prompt": [5, 6], "max_tokens": 0, "prompt_logprobs": 0, "prompt_logprobs_start": 2}),
    (COMPLETIONS, "echo", "prompt_logprobs_start",
     {"echo": True, "logprobs": 0, "prompt_logprobs": 0, "prompt_logprobs_start": -1}),
    (CHATS, "prompt_logprobs_start", "only with", {"prompt_logprobs_start": -1}),
    (GENERATE, "text", "none empty; got []", {"text": []}),
    (GENERATE, "input_ids", "none empty; got []", {"input_ids": []}),
    (GENERATE, "logprob_start_len", "only with return_logprob",
     {"text": "x", "logprob_start_len": 1}),
    (GENERATE, "logprob_start_len", "lies after the last of the prompt's 2 tokens",
     {"input_ids": [5, 6], "return_logprob": True, "logprob_start_len": 2}),
    *((COMPLETIONS, name, f"{MOST} 320", {name: -1}) for name in NAMED),
    (CHATS, "top_logprobs", f"{MOST} 320", {"logprobs": True, "top_logprobs": -1}),
    (TOKENS, "logprobs", f"{MOST} 320", {"token_ids": [5], "sampling_params": {"logprobs": -1}}),
    (GENERATE, "top_logprobs_num", "got -1",
     {"text": "x", "return_logprob": True, "top_logprobs_num": -1}),
    *((COMPLETIONS, ids, f"only with {name}", {ids: [5]}) for name, ids in NAMED.items()),
    *((COMPLETIONS, ids, "5 more than once", {name: 0, ids: [5, 6, 5]})
      for name, ids in NAMED.items()),
    *((COMPLETIONS, ids, "holds 320; ids are 0 … 319", {name: 0, ids: [320]})
      for name, ids in NAMED.items()),
    *((COMPLETIONS, ids, "at most 20 token ids, the setting max_logprobs, got 21",
       {name: 0, ids: [*range(21)]}) for name, ids in NAMED.items()),
    *((COMPLETIONS, "echo", ids, {"echo": True, name: 0, ids: [5]})
      for name, ids in NAMED.items()),
    (CHATS, "logprob_token_ids", "only with logprobs", {"logprob_token_ids": [5]}),
    (CHATS, "logprob_token_ids", "5 more than once",
     {"logprobs": True, "logprob_token_ids": [5, 5]}),
    (TOKENS, "logprob_token_ids", "5 more than once",
     {"token_ids": [5], "sampling_params": {"logprob_token_ids": [5, 5]}}),
    (GENERATE, "token_ids_logprob", "only with return_logprob",
     {"input_ids": [5, 6], "token_ids_logprob": [5]}),
    (GENERATE, "token_ids_logprob", "top_logprobs_num",
     {"input_ids": [5, 6], "return_logprob": True, "token_ids_logprob": [5],
      "top_logprobs_num": 1}),
    (GENERATE, "token_ids_logprob", "token_ids_logprob holds 5 more than once",
     {"input_ids": [5, 6], "return_logprob": True, "token_ids_logprob": [5, 5]}),
    (GENERATE, "token_ids_logprob", "token_ids_logprob holds 320",
     {"input_ids": [5, 6], "return_logprob": True, "token_ids_logprob": [320],
      "logprob_start_len": 0}),
    (RESPONSES, "logprob_token_ids", "POST /v1/chat/completions has it",
     {"input": "x", "logprob_token_ids": [5]}),
    (CHATS, "n", TOO_MANY, {"n": MAX_WAITING + 1}),
    (CHATS, "stop_token_ids", "", {"stop_token_ids": [1_000]}),
    (CHATS, "logprobs", MANY_SCORES,
     {"n": 2_900, "logprobs": True, "top_logprobs": 20, "max_tokens": 100}),
    # Edits of logits.
    (COMPLETIONS, "logit_bias", "logit_bias", {"logit_bias": {"320": 1}}),
    (COMPLETIONS, "allowed_token_ids", "", {"allowed_token_ids": [EOS], "min_tokens": 1}),
    (COMPLETIONS, "bad_words", "bad_words", {"bad_words": [" "]}),
    (COMPLETIONS, "min_tokens", "min_tokens", {"min_tokens": 17}),
    # Samples that are not all wanted.
    (COMPLETIONS, "until", "", {"until": {"match": "("}}),
    (COMPLETIONS, "until", "", {"until": {"match": ""}}),
    (COMPLETIONS, "until", "", {"until": {"match": "a" * 1_001}}),
    (COMPLETIONS, "until", "", {"until": {"match": "a", "most": 1}}),
    (COMPLETIONS, "until", "", {"until": {"match": "a", "count": 0}}),
    (COMPLETIONS, "verify", "verify.not.match = '('", {"verify": {"not": {"match": "("}}}),
    (COMPLETIONS, "verify", "2 rules and the request 1 prompts", {"verify": [{"match": "a"}] * 2}),
    (CHATS, "verify", "verify.any[0].macth is not a field", {"verify": {"any": [{"macth": "a"}]}}),
    (COMPLETIONS, "return", "", {"return": "all"}),
    (COMPLETIONS, "count_by", "", {"count_by": "group", "return": "counts"}),
    (COMPLETIONS, "best_of", "", {"return": "unique", "best_of": 2}),
    (COMPLETIONS, "echo", "", {"until": {"match": "a"}, "echo": True}),
    (COMPLETIONS, "return_packed", "", {"return": "counts", "return_packed": True}),
    (COMPLETIONS, "max_tokens", "",
     {"until": {"match": "a"}, "max_tokens": 0, "prompt_logprobs": 1}),
    (COMPLETIONS, "prompt_logprobs", "", {"return": "counts", "prompt_logprobs": 0}),
    (COMPLETIONS, "return_token_ids", "", {"return": "counts", "return_token_ids": True}),
    (CHATS, "logprobs", "", {"return": "counts", "logprobs": True}),
    # Of the tokenizer.
    (TOKENIZE, "prompt", "either prompt or messages", {}),
    (TOKENIZE, "prompt", "either", {"prompt": "x", "messages": MESSAGES}),
    (TOKENIZE, "prompt", "prompt must be a string or a list of at most", {"prompt": 5}),
    (TOKENIZE, "prompt", "got [5]", {"prompt": [5]}),
    (TOKENIZE, "messages", "a list of 1 to 4096", {"messages": []}),
    (TOKENIZE, "add_special_tokens", "true or", {"prompt": "x", "add_special_tokens": 1}),
    (TOKENIZE, "add_generation_prompt", "only with messages",
     {"prompt": "x", "add_generation_prompt": True}),
    (TOKENIZE, "nothing", "not a field", {"prompt": "x", "nothing": 1}),
    (DETOKENIZE, "tokens", "tokens is required", {}),
    (DETOKENIZE, "tokens", "a list of at most 4194304 token ids", {"tokens": "x"}),
    (DETOKENIZE, "tokens", "token ids", {"tokens": [[5]]}),
    (DETOKENIZE, "tokens", "token ids", {"tokens": [-1]}),
    (DETOKENIZE, "tokens", "token id 320; ids go from 0 to 319", {"tokens": [5, 320]}),
    (DETOKENIZE, "n", "leave it out or send 1", {"tokens": [5], "n": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "param", "why", "fields"), REFUSED)
def test_what_is_refused_names_the_field(
    server: Server, path: str, param: str, why: str, fields: dict[str, Any]
) -> None:
    body = {**PROMPTS.get(path, {}), **fields}
    may_stream = path in PROMPTS and not ONLY_WHOLE & set(fields)
    for stream in ({}, {"stream": True})[: 1 + may_stream]:
        error = error_of(server.http.post(path, json=body | stream))
        assert (error["param"], error["code"]) == (param, "invalid_request")
        assert why in error["message"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": [5] * 129}, "129 tokens"),
        ({"prompt": [[5], [5] * 200]}, "200 tokens"),
        ({"prompt": "the cat " * 20_000, "truncate_prompt_tokens": 129}, "129 tokens"),
    ],
)
def test_a_prompt_that_is_too_long_is_told_the_numbers(
    server: Server, fields: dict[str, Any], message: str
) -> None:
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
        ("POST", CHATS, {"model": "other", "messages": MESSAGES}, "model_not_found"),
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
