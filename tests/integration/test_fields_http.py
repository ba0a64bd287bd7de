"""The less common fields of POST /v1/completions: what each one changes in a reply."""

from __future__ import annotations

import base64
import json
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from server.schema.sampling_fields import MAX_CUT_LENGTH
from tests.serving import TEXT_MODEL, Server, choice_of, complete

EOS_PROMPT = [154] * 4
"""After it the end of text is the likeliest token of the numpy engine's model."""


def events_of(server: Server, **fields: Any) -> list[dict[str, Any]]:
    reply = server.post(stream=True, **fields)
    assert reply.status_code == 200, reply.text
    lines = reply.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def error_of(server: Server, status: int, **fields: Any) -> dict[str, Any]:
    reply = server.post(**fields)
    assert reply.status_code == status, reply.text
    error: dict[str, Any] = reply.json()["error"]
    return error


@pytest.mark.parametrize("logprobs", [None, 1])
def test_best_of_gives_the_likeliest_of_what_n_would_give(
    server: Server, logprobs: int | None
) -> None:
    sampling = {
        **{"prompt": ["the cat", "sat"], "max_tokens": 12, "seed": 3, "return_token_ids": True},
    }
    candidates = complete(server, n=9, logprobs=0, **sampling)
    ranked = complete(server, n=2, best_of=9, logprobs=logprobs, **sampling)
    assert ranked["usage"]["completion_tokens"] == candidates["usage"]["completion_tokens"]
    assert [choice["index"] for choice in ranked["choices"]] == [0, 1, 2, 3]
    for prompt in range(2):
        mine = candidates["choices"][9 * prompt : 9 * prompt + 9]
        mine.sort(key=lambda one: -float(np.mean(one["logprobs"]["token_logprobs"])))
        found = ranked["choices"][2 * prompt : 2 * prompt + 2]
        for one, other in zip(found, mine, strict=False):
            assert one["token_ids"] == other["token_ids"]
            assert one["text"] == other["text"]
            assert one["prompt_token_ids"] == other["prompt_token_ids"]
            assert (one["logprobs"] is None) == (logprobs is None)


def test_more_candidates_than_may_ever_wait_are_not_to_be_retried(server: Server) -> None:
    error = error_of(server, 400, best_of=3_001)
    assert error["param"] == "best_of"
    assert "best_of = 3001 of 1 prompts" in error["message"]


def test_the_stop_string_may_stay(server: Server) -> None:
    fields = {"max_tokens": 60, "seed": 5, "stop": ["e", "at"], "ignore_eos": True, "n": 8}
    for cut, kept in zip(
        complete(server, **fields)["choices"],
        complete(server, include_stop_str_in_output=True, **fields)["choices"],
        strict=True,
    ):
        assert kept["text"] == cut["text"] + (cut["stop_reason"] or "")
        assert kept["finish_reason"] == cut["finish_reason"]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, ""),
        ({"skip_special_tokens": False}, ""),
        ({"include_stop_str_in_output": True}, ""),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "<|end_of_text|>"),
        ({"skip_special_tokens": False, "stop": "end_of", "ignore_eos": True}, "<|"),
    ],
)
def test_special_tokens_are_text_where_they_are_asked_for(
    server: Server, fields: dict[str, Any], text: str
) -> None:
    choice = choice_of(server, prompt=EOS_PROMPT, temperature=0, return_token_ids=True, **fields)
    assert (choice["text"], choice["finish_reason"]) == (text, "stop")
    assert choice["token_ids"] == [TEXT_MODEL.eos_token_id]


def test_an_echoed_prompt_shows_special_tokens_with_offsets_to_match(server: Server) -> None:
    choice = choice_of(server, skip_special_tokens=False, echo=True, logprobs=0, max_tokens=3)
    assert choice["text"].startswith("<|begin_of_text|>the cat")
    assert choice["logprobs"]["text_offset"][:2] == [0, len("<|begin_of_text|>")]


def test_what_the_tokenizer_adds_may_be_left_out(server: Server) -> None:
    plain, bare = (
        choice_of(server, prompt="the cat", return_token_ids=True, add_special_tokens=adds)
        for adds in (True, False)
    )
    assert plain["prompt_token_ids"] == [0, *bare["prompt_token_ids"]]


def test_an_empty_prompt_is_what_the_tokenizer_makes_of_it(server: Server) -> None:
    assert choice_of(server, prompt="", return_token_ids=True)["prompt_token_ids"] == [0]
    error = error_of(server, 400, prompt="", add_special_tokens=False)
    assert (error["param"], "at least one token" in error["message"]) == ("prompt", True)


@pytest.mark.parametrize(
    ("prompt", "last", "expected"),
    [
        ([5, 6, 7, 8], 3, [6, 7, 8]),
        ([5, 6, 7, 8], 4, [5, 6, 7, 8]),
        ([5, 6, 7, 8], 10**9, [5, 6, 7, 8]),
        ([5, 6, 7, 8], -1, [5, 6, 7, 8]),
        (list(range(2, 300)), -1, list(range(300 - TEXT_MODEL.n_ctx, 300))),
    ],
)
def test_a_prompt_may_be_cut_to_its_end(
    server: Server, prompt: list[int], last: int, expected: list[int]
) -> None:
    fields = {"max_tokens": 3, "seed": 1, "return_token_ids": True}
    cut = complete(server, prompt=[prompt, [9]], truncate_prompt_tokens=last, **fields)
    assert cut["choices"] == complete(server, prompt=[expected, [9]], **fields)["choices"]
    assert cut["usage"]["prompt_tokens"] == len(expected) + 1


def test_a_text_may_be_cut_however_long_it_is(server: Server) -> None:
    fields = {"return_token_ids": True, "truncate_prompt_tokens": 5, "max_tokens": 1}
    choice = choice_of(server, prompt="the cat " * 20_000 + "sat on the mat", **fields)
    end = choice_of(server, prompt="the cat sat on the mat", **fields)
    assert choice["prompt_token_ids"] == end["prompt_token_ids"]
    error = error_of(server, 400, prompt="x" * (MAX_CUT_LENGTH + 1), truncate_prompt_tokens=5)
    assert (error["param"], f"it may have {MAX_CUT_LENGTH}" in error["message"]) == ("prompt", True)
    error = error_of(server, 400, prompt="the cat " * 20_000, truncate_prompt_tokens=129)
    assert (error["code"], "129 tokens" in error["message"]) == ("context_length_exceeded", True)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_clients_id_is_the_completions(server: Server, is_stream: bool) -> None:
    fields = {"request_id": "mine:7", "max_tokens": 3}
    replies = events_of(server, **fields) if is_stream else [complete(server, **fields)]
    assert {reply["id"] for reply in replies} == {"mine:7"}


def test_an_id_is_taken_while_its_request_runs(server: Server) -> None:
    long = {"prompt": "the cat", "n": 300, "max_tokens": 120, "ignore_eos": True, "stream": True}
    fields = {"request_id": "twice", "max_tokens": 1}
    with server.http.stream("POST", "/v1/completions", json={**long, "request_id": "twice"}):
        error = error_of(server, 409, **fields)
        assert (error["code"], error["param"]) == ("id_in_use", "request_id")
        assert error_of(server, 409, stream=True, **fields) == error
        assert error_of(server, 409, prompt=["a", "b"], **fields)["type"] == "conflict_error"
    deadline = time.monotonic() + 120
    while server.post(**fields).status_code == 409:
        assert time.monotonic() < deadline, "the id of a request that has ended is still taken"
        time.sleep(0.01)


def test_what_is_only_noted_changes_nothing(server: Server) -> None:
    fields = {"max_tokens": 6, "seed": 2}
    noted = {"user": "someone", "metadata": {"run": "7"}, "priority": -5, "cache_salt": None}
    assert complete(server, **noted, **fields)["choices"] == complete(server, **fields)["choices"]


@pytest.mark.parametrize("interval", [1, 4, 1_000])
def test_a_stream_interval_makes_fewer_and_larger_events(server: Server, interval: int) -> None:
    fields = {"n": 3, "max_tokens": 30, "seed": 4, "ignore_eos": True, "return_token_ids": True}
    events = events_of(server, stream_interval=interval, **fields)
    for choice in complete(server, **fields)["choices"]:
        parts = [c for event in events for c in event["choices"] if c["index"] == choice["index"]]
        sizes = [len(part["token_ids"]) for part in parts]
        assert sum(sizes) == 30
        assert all(size >= interval for size in sizes[1:-1])
        assert len(sizes) <= 2 + 29 // interval
        assert "".join(part["text"] for part in parts) == choice["text"]


@pytest.mark.parametrize("stop", [None, ["e", "at", "é", "<|"]])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("is_raw", [False, True])
def test_random_bytes_read_the_same_streamed_and_whole(
    server: Server, stop: list[str] | None, echo: bool, is_raw: bool
) -> None:
    fields = {
        **{"prompt": [[0, 5, 6], [0, 1, 226, 130]], "n": 30, "max_tokens": 40, "temperature": 100},
        **{"seed": 11, "stop": stop, "echo": echo, "logprobs": 0, "ignore_eos": is_raw},
        **{"skip_special_tokens": not is_raw, "include_stop_str_in_output": is_raw},
    }
    parts: dict[int, list[dict[str, Any]]] = {}
    for event in events_of(server, **fields):
        for part in event["choices"]:
            parts.setdefault(part["index"], []).append(part)
    choices = complete(server, **fields)["choices"]
    for choice in choices:
        mine = parts[choice["index"]]
        assert "".join(part["text"] for part in mine) == choice["text"]
        offsets = [offset for part in mine for offset in part["logprobs"]["text_offset"]]
        assert offsets == choice["logprobs"]["text_offset"]
        assert mine[-1]["stop_reason"] == choice["stop_reason"]
    assert any("\ufffd" in choice["text"] for choice in choices)
    assert sum(map(len, parts.values())) > 5 * len(parts)  # each was cut in many places


def ints(packed: str) -> npt.NDArray[np.int32]:
    return np.frombuffer(base64.b64decode(packed), "<i4")


def floats(packed: str) -> npt.NDArray[np.float32]:
    return np.frombuffer(base64.b64decode(packed), "<f4")


PACKED_FIELDS: list[dict[str, Any]] = [
    {},
    {"logprobs": 0, "n": 3},
    {"logprobs": 3, "n": 2, "prompt_logprobs": 2},
    {"logprobs": 1, "n": 2, "best_of": 4},
    {"max_tokens": 0, "prompt_logprobs": 1},
]


@pytest.mark.parametrize("fields", PACKED_FIELDS)
def test_a_packed_reply_says_what_the_other_says(server: Server, fields: dict[str, Any]) -> None:
    fields = {"prompt": ["the cat", "sat on"], "max_tokens": 9, "seed": 6, **fields}
    fields |= {"return_token_ids": True}
    plain = complete(server, return_tokens_as_token_ids=True, **fields)
    found = complete(server, return_packed=True, **fields)
    assert {**plain["usage"], "prompt_tokens_details": 0} == {
        **found["usage"], "prompt_tokens_details": 0
    }  # fmt: skip
    for one, other in zip(found["choices"], plain["choices"], strict=True):
        assert (one["text"], one["logprobs"]) == ("", None)
        assert not {"token_ids", "prompt_token_ids", "prompt_logprobs"} & set(one)
        for name in ("index", "finish_reason", "stop_reason"):
            assert one[name] == other[name]
        packed = one["packed"]
        assert ints(packed["token_ids"]).tolist() == other["token_ids"]
        prompt = one["packed_prompt"]
        assert ints(prompt["token_ids"]).tolist() == other["prompt_token_ids"]
        k = fields.get("logprobs")
        assert ("logprobs" in packed, "top_token_ids" in packed) == (k is not None, bool(k))
        if k is not None:
            assert floats(packed["logprobs"]).tolist() == other["logprobs"]["token_logprobs"]
        if k:
            tops = zip(
                ints(packed["top_token_ids"]).reshape(-1, k),
                floats(packed["top_logprobs"]).reshape(-1, k),
                other["logprobs"]["top_logprobs"],
                strict=True,
            )
            for ids, logprobs, expected in tops:
                named = {f"token_id:{i}": float(p) for i, p in zip(ids, logprobs, strict=True)}
                assert named.items() <= expected.items()
        assert ("logprobs" in prompt) == ("prompt_logprobs" in fields)
        if "logprobs" in prompt:
            rows = zip(
                ints(prompt["token_ids"]), floats(prompt["logprobs"]), ints(prompt["ranks"]),
                other["prompt_logprobs"], strict=True,
            )  # fmt: skip
            (_, logprob, rank, entry), *rest = rows
            assert np.isnan(logprob) and rank == 0 and entry is None
            for token, logprob, rank, entry in rest:
                expected = entry[str(token)]
                assert (float(logprob), rank) == (expected["logprob"], expected["rank"])


@pytest.mark.parametrize("fields", PACKED_FIELDS[:3])
def test_packed_events_add_up(server: Server, fields: dict[str, Any]) -> None:
    fields = {"max_tokens": 20, "seed": 6, "return_packed": True, **fields}
    events = events_of(server, **fields)
    for choice in complete(server, **fields)["choices"]:
        parts = [c for event in events for c in event["choices"] if c["index"] == choice["index"]]
        for name, value in choice["packed"].items():
            joined = b"".join(base64.b64decode(part["packed"][name]) for part in parts)
            assert joined == base64.b64decode(value)
        assert parts[0].get("packed_prompt") == choice.get("packed_prompt")
        assert not any("packed_prompt" in part for part in parts[1:])
        assert parts[-1]["finish_reason"] == choice["finish_reason"]


def test_a_packed_reply_has_no_text_to_stop_at(server: Server) -> None:
    assert error_of(server, 400, return_packed=True, stop="a")["param"] == "stop"
    choice = choice_of(server, prompt=EOS_PROMPT, temperature=0, return_packed=True)
    assert choice["finish_reason"] == "stop"
    assert ints(choice["packed"]["token_ids"]).tolist() == [TEXT_MODEL.eos_token_id]
