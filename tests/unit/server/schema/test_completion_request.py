"""What a completion request may say, and what it is told when it says something else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.errors import InvalidRequest
from server.schema.completion_request import ABOUT_TEXT, CompletionRequest, parse_completion
from server.schema.sampling_fields import StreamOptions
from server.schema.until import MAX_CHOICES


def parse(**fields: Any) -> CompletionRequest:
    return parse_completion(json.dumps({"prompt": "x", **fields}).encode())


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        ("", [""]),
        (["a", "b"], ["a", "b"]),
        ([5, 6], [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
def test_every_form_of_prompt_is_a_list_of_prompts(prompt: Any, expected: Any) -> None:
    assert parse(prompt=prompt).prompt == expected


@pytest.mark.parametrize(
    "prompt",
    [[], [[]], [[5], []], 5, True, {}, ["a", 5], [5, "a"], [[5], "a"], [-1], [2**31], [1.5]],
)
def test_other_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequest, match="prompt must be a string, a list") as refused:
        parse(prompt=prompt)
    assert refused.value.param == "prompt"


def test_null_is_absent_and_defaults_are_openais() -> None:
    nulls = dict.fromkeys(CompletionRequest.__struct_fields__, None)
    assert parse(**{**nulls, "prompt": "x", "best_of": None, "echo": None}) == CompletionRequest(
        prompt=["x"], n=1, max_tokens=16, temperature=1.0, top_p=1.0
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", 5),
        ("n", 0),
        ("n", MAX_CHOICES + 1),
        ("n", "2"),
        ("n", 2.5),
        ("n", True),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("echo", 1),
        ("logprobs", 21),
        ("logprobs", -1),
        ("prompt_logprobs", 21),
        ("prompt_logprobs", True),
        ("temperature", -0.1),
        ("temperature", 101),
        ("temperature", "hot"),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("min_p", 2),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        ("seed", 1.5),
        ("stop", 5),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", ["a"] * 129),
        ("stop", "a" * 257),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", 5),
        ("ignore_eos", 1),
        ("stream", "true"),
        ("stream_options", {"include_usage": 1}),
        ("stream_options", {"other": True}),
        ("best_of", 0),
        ("best_of", 1.5),
        ("max_completion_tokens", 0),
        ("include_stop_str_in_output", 1),
        ("skip_special_tokens", "no"),
        ("add_special_tokens", 0),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("truncate_prompt_tokens", 1.5),
        ("priority", 2**31),
        ("priority", 0.5),
        ("request_id", ""),
        ("request_id", "a b"),
        ("request_id", "a\n"),
        ("request_id", "x" * 129),
        ("request_id", 5),
        ("metadata", {"a": 1}),
        ("metadata", {"a" * 65: "b"}),
        ("metadata", {"a": "b" * 513}),
        ("metadata", {str(i): "" for i in range(17)}),
        ("metadata", []),
        ("return_packed", "yes"),
        ("logprobs", True),
        ("return_token_ids", 0),
        ("user", 7),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field} must be .+; got ") as refused:
        parse(**{field: value})
    assert refused.value.param == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", MAX_CHOICES),
        ("max_tokens", 10**12),
        ("temperature", 0),
        ("temperature", 100),
        ("top_p", 0),
        ("top_p", 1),
        ("top_k", -1),
        ("seed", 2**64 - 1),
        ("seed", -(2**63)),
        ("stop", ["a"] * 128),
        ("stop", "é" * 256),
        ("logprobs", 0),
        ("user", "someone"),
        ("best_of", MAX_CHOICES),
        ("truncate_prompt_tokens", -1),
        ("truncate_prompt_tokens", 1),
        ("priority", -(2**31) + 1),
        ("request_id", "aZ09._:-" * 16),
        ("metadata", {f"{i:064}": "b" * 512 for i in range(16)}),
        ("include_stop_str_in_output", True),
        ("skip_special_tokens", False),
        ("add_special_tokens", False),
    ],
)
def test_values_at_the_limits_are_taken(field: str, value: Any) -> None:
    assert getattr(parse(**{field: value}), field) == value


@pytest.mark.parametrize(
    ("field", "neutral", "asking"),
    [
        ("suffix", "", "end"),
        ("length_penalty", 1.0, 1.1),
        ("length_penalty", 1, True),
        ("spaces_between_special_tokens", False, 1),
        ("cache_salt", None, "mine"),
        ("structured_outputs", None, {"regex": "a"}),
        ("use_beam_search", False, True),
    ],
)
def test_what_is_not_honoured_may_be_neutral_and_nothing_else(
    field: str, neutral: Any, asking: Any
) -> None:
    assert parse(**{field: neutral}) == parse()
    with pytest.raises(InvalidRequest, match=f"^{field} = .* is not supported") as refused:
        parse(**{field: asking})
    assert refused.value.param == field


@pytest.mark.parametrize("scoring", [{"echo": True}, {"prompt_logprobs": 0}])
def test_no_tokens_may_be_asked_for_where_the_prompt_is(scoring: dict[str, Any]) -> None:
    assert parse(max_tokens=0, **scoring).max_tokens == 0


@pytest.mark.parametrize("best_of", [None, 3, 7])
def test_best_of_is_how_many_are_sampled(best_of: int | None) -> None:
    request = parse(n=3, best_of=best_of)
    assert (request.n, request.num_samples) == (3, best_of or 3)


@pytest.mark.parametrize("fields", [{"n": 3, "best_of": 2}, {"best_of": 2, "stream": True}])
def test_best_of_that_cannot_be_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="best_of must be an integer from n") as refused:
        parse(**fields)
    assert refused.value.param == "best_of"


def test_candidates_are_limited_as_choices_are() -> None:
    assert parse(n=1, best_of=1, stream=True).num_samples == 1
    with pytest.raises(InvalidRequest, match="best_of = 500001 of 2 prompts") as refused:
        parse(prompt=["a", "b"], best_of=MAX_CHOICES // 2 + 1)
    assert refused.value.param == "best_of"


def test_max_completion_tokens_is_max_tokens() -> None:
    assert parse(max_completion_tokens=7).max_tokens == 7
    assert parse(max_completion_tokens=7, max_tokens=7).max_tokens == 7
    assert parse(max_completion_tokens=None, max_tokens=7).max_tokens == 7
    assert parse(max_completion_tokens=16).max_tokens == 16
    with pytest.raises(InvalidRequest, match="max_tokens if both") as refused:
        parse(max_completion_tokens=7, max_tokens=16)
    assert refused.value.param == "max_completion_tokens"


@pytest.mark.parametrize("name", ABOUT_TEXT)
def test_what_is_about_text_is_refused_where_there_is_none(name: str) -> None:
    default = getattr(parse(), name)
    assert parse(return_packed=True, **{name: default}).return_packed
    with pytest.raises(InvalidRequest, match=f"^{name} = .* is about text") as refused:
        parse(return_packed=True, **{name: "x" if name == "stop" else not default})
    assert refused.value.param == name


CLIENTS: dict[str, dict[str, Any]] = {
    "openai": {
        **{"model": "m", "best_of": 1, "echo": False, "frequency_penalty": 0, "logit_bias": {}},
        **{"logprobs": None, "max_tokens": 16, "n": 1, "presence_penalty": 0, "seed": 1},
        **{"stop": None, "stream": True, "stream_options": {"include_obfuscation": False}},
        **{"suffix": None, "temperature": 1, "top_p": 1, "user": "someone"},
    },
    "lm-eval loglikelihood": {
        **{"model": "m", "prompt": [[5, 6], [7]], "temperature": 0, "max_tokens": 1},
        **{"logprobs": 1, "seed": 1234, "echo": True},
    },
    "lm-eval generate": {
        **{"model": "m", "max_tokens": 256, "temperature": 0, "stop": ["a"] * 9, "seed": 1234},
    },
    "TRL": {
        **{"model": "m", "prompt": [[5, 6]], "n": 8, "temperature": 1.0, "top_p": 1.0, "top_k": 0},
        **{"min_p": 0.0, "repetition_penalty": 1.0, "max_tokens": 16, "logprobs": 0},
        **{"return_token_ids": True, "return_tokens_as_token_ids": True},
        **{"structured_outputs": None, "prompt_logprobs": None},
    },
    "guidellm": {
        **{"model": "m", "stream": True, "max_tokens": 9, "max_completion_tokens": 9},
        **{"stop": None, "ignore_eos": True},
        **{"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    },
    "vllm bench": {
        **{"model": "m", "temperature": 0.0, "repetition_penalty": 1.0, "max_tokens": 128},
        **{"logprobs": None, "stream": True, "stream_options": {"include_usage": True}},
        **{"ignore_eos": True, "best_of": 1},
    },
    "LangChain": {
        **{"model": "m", "prompt": ["a"], "temperature": 0.7, "top_p": 1, "n": 1},
        **{"frequency_penalty": 0, "presence_penalty": 0, "max_tokens": 256, "seed": None},
        **{"logprobs": None, "logit_bias": None, "best_of": 1},
    },
}


@pytest.mark.parametrize("client", CLIENTS)
def test_what_clients_send_is_taken(client: str) -> None:
    assert parse(**CLIENTS[client]).model == "m"


@pytest.mark.parametrize(
    "name", ["suffix", "tools", "response_format", "structured_outputs", "guided_json", "audio"]
)
def test_what_is_not_done_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidRequest, match=name) as refused:
        parse(**{name: "x"})
    assert refused.value.param == name


def test_an_unknown_field_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="'max_token' is not a field") as refused:
        parse(max_token=5)
    assert refused.value.param == "max_token"


def test_a_stream_interval_needs_a_stream() -> None:
    assert parse(stream=True, stream_interval=5).stream_interval == 5
    with pytest.raises(InvalidRequest, match="only with stream") as refused:
        parse(stream_interval=5)
    assert refused.value.param == "stream_interval"


def test_stream_options_need_a_stream() -> None:
    options = {"include_usage": True}
    request = parse(stream=True, stream_options=options)
    assert request.stream_options == StreamOptions(include_usage=True)
    with pytest.raises(InvalidRequest, match="only with stream"):
        parse(stream_options=options)


def test_prompts_times_n_is_limited() -> None:
    with pytest.raises(InvalidRequest, match="n = 500001 of 2 prompts"):
        parse(prompt=["a", "b"], n=MAX_CHOICES // 2 + 1)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"  \n",
        b"{",
        b"[]",
        b"5",
        b"null",
        b'"prompt"',
        b"{} {}",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": NaN}',
        b'{"prompt": 1e999}',
        b"[" * 100_000,
        b"\xef\xbb\xbf{}",
    ],
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="body"):
        parse_completion(body)


def test_a_missing_prompt_is_named() -> None:
    with pytest.raises(InvalidRequest, match="prompt is required") as refused:
        parse_completion(b'{"model": "tiny"}')
    assert refused.value.param == "prompt"


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse(n="x" * 10_000)
    assert len(refused.value.message) < 200


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
@pytest.mark.parametrize("field", ["prompt", "n", "suffix", "nonsense"])
def test_what_can_be_read_and_not_be_shown_is_refused(
    field: str, opening: str, closing: str
) -> None:
    """Nested nearly too deep to read: deep enough that the message could not quote it."""
    for depth in range(800, 1_010):
        nested = f"{opening * depth}1{closing * depth}"
        with pytest.raises(InvalidRequest):
            parse_completion(f'{{"prompt": "x", "{field}": {nested}}}'.encode())


@pytest.mark.parametrize(
    ("name", "given", "taken"),
    [("n", 16.0, 16), ("prompt", [5.0, 6], [[5, 6]]), ("stop_token_ids", [3.0], [3])],
)
def test_an_integer_may_be_written_as_a_float(name: str, given: Any, taken: Any) -> None:
    assert getattr(parse(**{name: given}), name) == taken


@pytest.mark.parametrize("given", [{"n": 16.5}, {"n": 1e300}, {"prompt": [5.5]}])
def test_what_is_no_integer_is_not_made_one(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        parse(**given)
