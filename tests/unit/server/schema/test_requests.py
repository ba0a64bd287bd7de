"""What requests for completions and chats may say, and what others are told."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import pytest

from srm.server.dialects.chat.request import ChatRequest, parse_chat
from srm.server.schema.completion_request import ABOUT_TEXT, CompletionRequest, parse_completion
from srm.server.schema.conversation import MAX_MESSAGES
from srm.server.schema.sampling_fields import StreamOptions
from srm.server.schema.until import MAX_CHOICES
from tests.kit.bodies.refusals import USER, chat, completion, refusal, response

USAGE = {"include_usage": True}
Parse = Callable[..., Any]

VALUES: dict[Parse, dict[str, tuple[list[Any], list[Any]]]] = {
    completion: {
        "prompt": (
            [["a", "b"]],
            [[], [[]], [[5], []], 5, True, {}, ["a", 5], [5, "a"], [[5], "a"], [-1], [2**31],
             [5.5]],
        ),
        "model": (["m"], [5]),
        "n": ([MAX_CHOICES], [0, MAX_CHOICES + 1, "2", 2.5, True, 16.5, 1e300, "x" * 10_000]),
        "max_tokens": ([10**12], [0, -1]),
        "echo": ([True], [1]),
        "logprobs": ([-1, 0, 20, 2**31 - 1], [2**31, -2, True]),
        "prompt_logprobs": ([-1, 20, 100], [-2, 2**31, True]),
        "logprob_token_ids": ([[]], [[-1], [1.5], ["a"], 5, {}, [2**31]]),
        "prompt_logprob_token_ids": ([[]], [[-1], [1.5], ["a"], 5, {}, [2**31]]),
        "temperature": ([0, 100], [-0.1, 101, "hot"]),
        "top_p": ([0, 1], [-0.1, 1.1]),
        "top_k": ([-1], [-2, 1.5]),
        "min_p": ([0, 1], [-0.1, 2]),
        "seed": ([2**64 - 1, -(2**63)], [2**64, -(2**63) - 1, 1.5]),
        "stop": ([["a"] * 128, "é" * 256], [5, "", ["a", ""], ["a"] * 129, "a" * 257]),
        "stop_token_ids": ([[3]], [[-1], 5]),
        "ignore_eos": ([True], [1]),
        "stream": ([True], ["true"]),
        "stream_options": ([], [{"include_usage": 1}, {"other": True}]),
        "best_of": ([MAX_CHOICES], [0, 1.5]),
        "max_completion_tokens": ([1], [0]),
        "include_stop_str_in_output": ([True], [1]),
        "skip_special_tokens": ([False], ["no"]),
        "add_special_tokens": ([False], [0]),
        "truncate_prompt_tokens": ([-1, 1], [0, -2, 1.5]),
        "truncation_side": (["left", "right"], ["both", 1]),
        "priority": ([-1000, 1000], [-1001, 1001, -(2**31) + 1, 0.5]),
        "request_id": (["aZ09._:-" * 16], ["", "a b", "a\n", "x" * 129, 5]),
        "metadata": (
            [{f"{i:064}": "b" * 512 for i in range(16)}],
            [{"a": 1}, {"a" * 65: ""}, {"a": "b" * 513}, {str(i): "" for i in range(17)}, []],
        ),
        "return_packed": ([True], ["yes"]),
        "return_token_ids": ([True], [0]),
        "user": (["someone"], [7]),
        "presence_penalty": ([2, -2], [2.01, -3, "1"]),
        "frequency_penalty": ([2, -2], [2.01, -3, True]),
        "repetition_penalty": ([100], [0, -1, 101, True, [1]]),
        "logit_bias": (
            [],
            [[], *({name: 1} for name in ("a", "-1", "1.5", "", str(2**31))),
             *({"5": bias} for bias in (101, -101, "1", None, True)),
             {str(token): 1 for token in range(1025)}],
        ),
        "allowed_token_ids": ([[0]], [[], [-1], [1.5], ["a"], 5, {}]),
        "bad_words": ([["a"] * 128], ["a", [""], ["a", "   "], ["x" * 257], [5], ["a"] * 129]),
        "min_tokens": ([1], [-1, 1.5, True, "1"]),
    },
    chat: {
        "messages": ([], [[], {}, "hi", 5, [USER] * (MAX_MESSAGES + 1)]),
        "max_tokens": ([1], [0]),
        "max_completion_tokens": ([1], [0, "5"]),
        "logprobs": ([True], [1]),
        "top_logprobs": ([0], [2**31, -2, True]),
        "add_generation_prompt": ([True], ["yes"]),
        "continue_final_message": ([True], [1]),
        "echo": ([True], [1, "a"]),
        "chat_template_kwargs": ([{"mood": 1}], [[], "x"]),
        "n": ([1], [0]),
        "safety_identifier": (["me"], [5]),
    },
    response: {
        "input": ([], [[], {}, 5, [USER] * (MAX_MESSAGES + 1)]),
        "instructions": (["be"], [5, ["be"]]),
        "max_output_tokens": ([1], [0, "5"]),
        "top_logprobs": ([0], [2**31, True]),
        "include": ([["message.output_text.logprobs"]], [["logprobs"], "x", 5]),
        "text": ([], [{"format": "json"}, {"verbosity": "low"}, {"format": {"type": "xml"}}]),
        "tools": ([], [{}, [{"type": "web_search"}], [{"type": "function"}]]),
        "tool_choice": (["auto", "none"], ["any", {"type": "function"}, {"type": "mcp"}]),
        "parallel_tool_calls": ([True, False], [1]),
        "stream_options": ([], [{"include_usage": 1}, {"other": True}]),
        "temperature": ([0, 100], [-0.1, 101, "hot"]),
        "metadata": ([{"a": "b"}], [{"a": 1}, []]),
    },
}  # fmt: skip
"""Values of a field that are taken, at the limits, and those that are refused."""


@pytest.mark.parametrize(
    ("parse", "field"), [(parse, field) for parse, fields in VALUES.items() for field in fields]
)
def test_a_wrong_value_is_named_with_what_is_allowed(parse: Parse, field: str) -> None:
    taken, wrong = VALUES[parse][field]
    for value in taken:
        assert getattr(parse(**{field: value}), field) == value
    for value in wrong:
        error = refusal(parse, **{field: value})
        assert error.param == field
        assert error.message.startswith(f"{field} must be ") and "; got " in error.message
        assert len(error.message) < 400  # a long value is cut


def test_what_scores_need_text_for_goes_with_packed_replies() -> None:
    rule = {"verify": {"match": "a"}}
    assert completion(return_packed=True, stop=["x"], skip_special_tokens=False, **rule).makes_text
    assert not completion(return_packed=True).makes_text
    assert refusal(completion, return_packed=True, stop=["x"]).param == "stop"
    assert refusal(completion, return_packed=True, echo=True, **rule).param == "echo"


def test_takes_one_prompt_and_integers_as_floats() -> None:
    for prompt, expected in (("a", ["a"]), ("", [""])):
        assert completion(prompt=prompt).prompt == expected
    lists: list[list[Any]] = [[5, 6], [5.0, 6], [[5, 6], [7]]]
    for given, ids in zip(lists, ([[5, 6]], [[5, 6]], [[5, 6], [7]]), strict=True):
        assert completion(prompt=given).prompt == [array("i", own_id).tobytes() for own_id in ids]
    request = completion(n=16.0, stop_token_ids=[3.0])
    assert (request.n, request.stop_token_ids) == (16, [3])


def test_null_is_absent_and_defaults_are_openais() -> None:
    nulls = dict.fromkeys(CompletionRequest.__struct_fields__, None)
    assert completion(**{**nulls, "prompt": "x"}) == CompletionRequest(
        prompt=["x"], n=1, max_tokens=16, temperature=1.0, top_p=1.0
    )
    nulls = dict.fromkeys(ChatRequest.__struct_fields__, None)
    assert chat(**{**nulls, "messages": [USER]}) == chat()
    assert chat().as_completion("a prompt", 99) == CompletionRequest(
        prompt=["a prompt"], max_tokens=99, add_special_tokens=False
    )


STREAM = {"stream": True}
TOGETHER: list[tuple[dict[str, Any], str, Any]] = [
    ({"max_tokens": 0, "echo": True}, "max_tokens", 0),
    ({"max_tokens": 0, "prompt_logprobs": 0}, "max_tokens", 0),
    *(({"n": 3, "best_of": best_of}, "num_samples", best_of or 3) for best_of in (None, 3, 7)),
    ({"n": 3, "best_of": 7}, "n", 3),
    ({"n": 1, "best_of": 1, **STREAM}, "num_samples", 1),
    ({"max_completion_tokens": 7}, "max_tokens", 7),
    ({"max_completion_tokens": 7, "max_tokens": 7}, "max_tokens", 7),
    ({"max_completion_tokens": 7, "max_tokens": None}, "max_tokens", 7),
    ({"max_completion_tokens": 16}, "max_tokens", 16),
    ({**STREAM, "stream_interval": 5}, "stream_interval", 5),
    ({**STREAM, "stream_options": USAGE}, "stream_options", StreamOptions(include_usage=True)),
]


@pytest.mark.parametrize(("fields", "name", "value"), TOGETHER)
def test_fields_that_go_together(fields: dict[str, Any], name: str, value: Any) -> None:
    assert getattr(completion(**fields), name) == value


@pytest.mark.parametrize("name", ABOUT_TEXT)
def test_what_is_about_text_is_refused_where_there_is_none(name: str) -> None:
    default = getattr(completion(), name)
    assert completion(return_packed=True, **{name: default}).return_packed
    other = {name: "x" if name == "stop" else not default}
    error = refusal(completion, return_packed=True, **other)
    assert error.param == name and "is about text" in error.message


CLIENTS: dict[str, dict[str, Any]] = {
    "openai, LangChain": {
        **{"prompt": ["a"], "best_of": 1, "echo": False, "frequency_penalty": 0, "logit_bias": {}},
        **{"logprobs": None, "max_tokens": 16, "n": 1, "presence_penalty": 0, "seed": None},
        **{"stop": None, "stream": True, "stream_options": {"include_obfuscation": False}},
        **{"suffix": None, "temperature": 0.7, "top_p": 1, "user": "someone"},
    },
    "lm-eval": {
        **{"prompt": [[5, 6], [7]], "temperature": 0, "max_tokens": 1, "stop": ["a"] * 9},
        **{"logprobs": 1, "seed": 1234, "echo": True},
    },
    "TRL": {
        **{"prompt": [[5, 6]], "n": 8, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0},
        **{"repetition_penalty": 1.0, "max_tokens": 16, "logprobs": 0, "return_token_ids": True},
        **{"return_tokens_as_token_ids": True, "structured_outputs": None, "prompt_logprobs": None},
    },
    "guidellm, vllm bench": {
        **{"stream": True, "max_tokens": 9, "max_completion_tokens": 9, "ignore_eos": True},
        **{"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        **{"repetition_penalty": 1.0, "temperature": 0.0, "logprobs": None, "best_of": 1},
    },
}
ROUTER = {
    **{"no_stop_trim": False, "ignore_eos": False, "skip_special_tokens": True},
    **{"return_hidden_states": False, "echo": False, "stream": False},
}
"""What sglang-router 0.3.2 adds to completions."""
CHAT_ROUTER = {
    **{"logprobs": False, "separate_reasoning": True, "stream_reasoning": True},
    **{"include_reasoning": True, "continue_final_message": False},
}
"""And to chats, vllm-router 0.1.17 among them."""


def test_takes_what_clients_send_and_routers_add() -> None:
    for fields in CLIENTS.values():
        assert completion(model="m", **fields).model == "m"
    assert completion(**ROUTER) == completion()
    assert chat(**ROUTER, **CHAT_ROUTER) == chat()


BODIES = (
    *(b"", b"  \n", b"{", b"[]", b"5", b"null", b'"prompt"', b"{} {}", b'{"prompt": "\xff"}'),
    *(b'{"prompt": "\xed\xa0\x80"}', b'{"prompt": "\\ud800"}', b'{"prompt": NaN}'),
    *(b"[" * 100_000, b"\xef\xbb\xbf[]"),
)


def test_a_body_that_is_no_json_object_is_refused() -> None:
    for body in BODIES:
        for parse in (parse_completion, parse_chat):
            assert "body" in refusal(parse, body).message
    assert "got 1e999" in refusal(parse_completion, b'{"prompt": 1e999}').message
    error = refusal(parse_completion, b'{"model": "tiny"}')
    assert (error.param, error.message[:18]) == ("prompt", "prompt is required")


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
@pytest.mark.parametrize("field", ["prompt", "n", "suffix", "nonsense"])
def test_refuses_what_it_cannot_quote(field: str, opening: str, closing: str) -> None:
    """Nested nearly too deep to read: deep enough that the message could not quote it."""
    for depth in range(800, 1_010):
        nested = f"{opening * depth}1{closing * depth}"
        refusal(parse_completion, f'{{"prompt": "x", "{field}": {nested}}}'.encode())


SAME: tuple[dict[str, Any], ...] = (
    {"max_tokens": 7},
    {"n": 3, "temperature": 0.5, "top_k": 4, "seed": 5, "stop": ["x"]},
    {"stream": True, "stream_options": USAGE, "return_token_ids": True},
)
AS_COMPLETION: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *zip(SAME, SAME, strict=True),
    ({"max_completion_tokens": 8}, {"max_tokens": 8}),
    ({"max_tokens": 7, "max_completion_tokens": 7}, {"max_tokens": 7}),
    ({"logprobs": False, "top_logprobs": 0}, {"logprobs": None}),
    *(({"logprobs": True, "top_logprobs": k}, {"logprobs": k or 0}) for k in (None, 0, 20)),
]


@pytest.mark.parametrize(("asked", "expected"), AS_COMPLETION)
def test_a_chat_is_a_completion(asked: dict[str, Any], expected: dict[str, Any]) -> None:
    whole = {"prompt": "a prompt", "max_tokens": 99, "add_special_tokens": False, **expected}
    assert chat(**asked).as_completion("a prompt", 99) == completion(**whole)
