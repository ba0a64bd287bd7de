"""What counts as an answer of another server to a line."""

from __future__ import annotations

import json
from typing import Any

import pytest

from srm.server.batch.worker_answers import Expected

TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def answer(message: dict[str, Any], finish_reason: str) -> bytes:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "refusal": None, **message},
        "logprobs": None,
        "finish_reason": finish_reason,
        "stop_reason": None,
        "token_ids": None,
    }
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    return json.dumps(
        {
            "id": "a",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [choice],
            "usage": usage,
            "system_fingerprint": None,
            "weights_version": 1,
        }
    ).encode()


def expected(**fields: Any) -> Expected:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    return Expected("/v1/chat/completions", json.dumps(body).encode(), "a", 1, "m", 64)


def test_a_reply_may_be_larger_the_more_scores_it_may_have() -> None:
    sizes = [
        expected(logprobs=True, **asked).max_bytes
        for asked in ({}, {"logprob_token_ids": [5, 6]}, {"top_logprobs": 3}, {"top_logprobs": -1})
    ]
    assert sizes == sorted({*sizes})


def response(**fields: Any) -> bytes:
    same = dict.fromkeys(("instructions", "user", "safety_identifier", "prompt_cache_key"))
    usage = {"input_tokens": 3, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": 2}
    reply = {
        **same,
        **{"id": "a", "created_at": 1, "model": "m", "status": "completed", "output": []},
        **{"parallel_tool_calls": False, "temperature": 1, "top_p": 1, "top_logprobs": 0},
        **{"text": {}, "tool_choice": "auto", "tools": [], "metadata": {}},
        **{"max_output_tokens": None, "usage": {**usage, "total_tokens": 5}},
        **fields,
    }
    return json.dumps(reply).encode()


def test_a_reply_of_a_worker_to_a_response_is_checked() -> None:
    asked = Expected("/v1/responses", b'{"input": "x"}', "a", 1, "m", 64)
    text = {"type": "output_text", "text": "y", "annotations": [], "logprobs": []}
    message = {"type": "message", "id": "msg_1", "status": "completed", "content": [text]}
    call = {"type": "function_call", "id": "1", "call_id": "1", "name": "f", "arguments": "{}"}
    asked.check(response(output=[message]))
    asked.check(response(status="incomplete"))
    for fields in (
        *({"id": "b"}, {"created_at": 2}, {"model": "n"}, {"status": "failed"}, {"usage": None}),
        {"output": [{**call, "status": "completed"}]},
        {"output": [message, message]},
        {"output": [{"type": "message"}]},
        {"usage": {"input_tokens": 65, "input_tokens_details": {"cached_tokens": 0},
                   "output_tokens": 0, "total_tokens": 65}},
    ):  # fmt: skip
        with pytest.raises(ValueError):
            asked.check(response(**fields))
    tool = b'{"type": "function", "name": "f"}'
    body = b'{"input": "x", "tools": [%b]}' % tool
    calling = Expected("/v1/responses", body, "a", 1, "m", 64)
    calling.check(response(output=[{**call, "status": "completed"}]))


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_a_call_ends_an_answer_where_tools_may_be_called(choice: str) -> None:
    called = answer({"content": None, "tool_calls": [CALL]}, "tool_calls")
    expected(tools=[TOOL], tool_choice=choice).check(called)
    expected(tools=[TOOL], tool_choice=choice).check(answer({"content": "no"}, "stop"))
    for fields in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        with pytest.raises(ValueError, match=r"finish_reason of a choice is none of stop, length$"):
            expected(**fields).check(called)
