"""POST /v1/completions through both processes: what comes back, and what each field changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from srm.server.routes.health import VERSION
from tests.kit.serving import (
    EOS_PROMPT,
    TEXT_MODEL,
    Server,
    choice_of,
    complete,
    error_of,
    events_of,
    wait_until,
)


def ids_of(answer: dict[str, Any]) -> list[list[int]]:
    return [choice["token_ids"] for choice in answer["choices"]]


def test_choices_are_in_the_order_of_prompts_and_samples(server: Server) -> None:
    fields = {"n": 3, "max_tokens": 5, "seed": 3, "return_token_ids": True}
    choices = complete(server, prompt=["the cat", "sat"], **fields)["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    for prompt, mine in (("the cat", choices[:3]), ("sat", choices[3:])):
        alone = complete(server, prompt=prompt, **fields)
        assert ids_of({"choices": mine}) == ids_of(alone)
        for choice in mine:
            assert choice["prompt_token_ids"] == alone["choices"][0]["prompt_token_ids"]
    assert len({tuple(choice["token_ids"]) for choice in choices}) == 6
    by_ids = complete(server, prompt=choices[0]["prompt_token_ids"], **fields)
    assert by_ids["choices"] == choices[:3], "a prompt of tokens is that of its text"
    for temperature in (1, 0, 1e-9):  # equal prompts differ unless the likeliest token is taken
        equal = complete(server, prompt=["the cat"] * 3, temperature=temperature)["choices"]
        assert (len({choice["text"] for choice in equal}) == 1) == (temperature < 1)


def test_usage_counts_prompts_once_and_all_choices(server: Server) -> None:
    answer = complete(server, prompt=[[7, 5], [7, 5, 6]], n=4, max_tokens=7, ignore_eos=True)
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 56,
        "total_tokens": 61,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    many = complete(server, n=2_000, max_tokens=2, ignore_eos=True)
    assert [choice["index"] for choice in many["choices"]] == list(range(2_000))
    assert many["usage"]["completion_tokens"] == 4_000
    longest = complete(server, prompt=[5] * TEXT_MODEL.n_ctx, max_tokens=10, ignore_eos=True)
    assert longest["usage"]["completion_tokens"] == 1


def test_feeds_a_known_beginning_once(server: Server) -> None:
    names = ("cached_tokens", "prefix_hits", "prefill_tokens")
    before = {name: server.metric(f"srm_engine_{name}_total") for name in names}
    header = [8, *range(2, 22)]
    sampling = {"n": 3, "max_tokens": 5, "ignore_eos": True, "seed": 2, "return_token_ids": True}
    prompts = [[*header, 5, 6], [*header, 5, 6], [*header, 9, 9], [*header, 6, 5, 4]]
    answers = [complete(server, prompt=prompt, **sampling) for prompt in prompts]
    answers.append(complete(server, prompt=prompts[0], echo=True, logprobs=0, **sampling))
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert cached == [0, 22, 0, 21, 0]
    samples = [ids_of(answer) for answer in answers]
    assert samples[0] == samples[1] == samples[4] != samples[2]
    grown = {name: server.metric(f"srm_engine_{name}_total") - before[name] for name in names}
    assert grown == {"cached_tokens": 43, "prefix_hits": 2, "prefill_tokens": 22 + 22 + 2 + 22}
    assert server.metric("srm_engine_prefixes") >= 4


def test_what_clients_ask_before_they_send_work(server: Server) -> None:
    (card,) = server.get("/v1/models").json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("tiny", "model", 128)
    assert (card["root"], card["parent"], card["owned_by"]) == ("tiny", None, "srm")
    assert server.get("/v1/models/tiny").json() == card
    assert complete(server, model="tiny", max_tokens=1)["model"] == "tiny"
    assert server.get("/version").json() == {"version": VERSION}
    assert server.get("/get_world_size").json() == {"world_size": 1}


def test_best_of_gives_the_likeliest_of_what_n_would_give(server: Server) -> None:
    sampling = {"prompt": ["the cat", "sat"], "max_tokens": 12, "seed": 3}
    candidates = complete(server, n=9, logprobs=0, **sampling)
    plain, scored = (complete(server, n=2, best_of=9, logprobs=k, **sampling) for k in (None, 0))
    assert plain["usage"]["completion_tokens"] == candidates["usage"]["completion_tokens"]
    expected = []
    for own in (candidates["choices"][:9], candidates["choices"][9:]):
        own.sort(key=lambda one: -float(np.mean(one["logprobs"]["token_logprobs"])))
        expected += own[:2]
    for index, likely in enumerate(expected):
        assert scored["choices"][index] == {**likely, "index": index}
        assert plain["choices"][index] == {**likely, "index": index, "logprobs": None}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, ""),
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


def test_what_the_tokenizer_adds_may_be_left_out(server: Server) -> None:
    plain, bare = (
        choice_of(server, return_token_ids=True, add_special_tokens=adds)["prompt_token_ids"]
        for adds in (True, False)
    )
    assert plain == [0, *bare]
    assert choice_of(server, prompt="", return_token_ids=True)["prompt_token_ids"] == [0]


@pytest.mark.parametrize(
    ("prompt", "last", "expected"),
    [
        ([5, 6, 7, 8], 3, [6, 7, 8]),
        ([5, 6, 7, 8], 4, [5, 6, 7, 8]),
        ([5, 6, 7, 8], 10**9, [5, 6, 7, 8]),
        ([5, 6, 7, 8], -1, [5, 6, 7, 8]),
        (list(range(2, 300)), -1, list(range(300 - TEXT_MODEL.n_ctx, 300))),
        ("the cat " * 20_000 + "sat on the mat", 5, "the cat sat on the mat"),
    ],
    ids=["cut", "whole", "more than it has", "to the context", "too long", "a long text"],
)
def test_a_prompt_may_be_cut_to_its_end(
    server: Server, prompt: str | list[int], last: int, expected: str | list[int]
) -> None:
    fields = {"max_tokens": 3, "seed": 1, "return_token_ids": True}
    if isinstance(expected, str):
        fields["truncate_prompt_tokens"] = last
    others = ["a"] if isinstance(prompt, str) else [[9]]
    cut = complete(server, **{**fields, "truncate_prompt_tokens": last}, prompt=[prompt, *others])
    assert cut["choices"] == complete(server, prompt=[expected, *others], **fields)["choices"]


def test_a_prompt_may_be_cut_to_its_beginning(server: Server) -> None:
    fields = {"max_tokens": 3, "seed": 1, "return_token_ids": True}
    whole = list(range(2, 300))
    for length, expected in ((3, whole[:3]), (-1, whole[: TEXT_MODEL.n_ctx])):
        cut = {"truncate_prompt_tokens": length, "truncation_side": "right"}
        reply = complete(server, prompt=whole, **cut, **fields)
        assert reply["choices"] == complete(server, prompt=expected, **fields)["choices"]
    long = {"prompt": "the cat " * 9, "truncation_side": "right", **fields}
    ids = complete(server, **long)["choices"][0]["prompt_token_ids"]  # nothing says to cut it
    (choice,) = complete(server, **long, truncate_prompt_tokens=4)["choices"]
    assert choice["prompt_token_ids"] == ids[:4]


def test_a_clients_id_is_the_completions_and_taken_while_it_runs(server: Server) -> None:
    fields = {"request_id": "mine:7", "max_tokens": 3}
    replies = [*events_of(server, **fields), complete(server, **fields)]
    assert {reply["id"] for reply in replies} == {"mine:7"}
    long = {"prompt": "the cat", "n": 300, "max_tokens": 120, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", "/v1/completions", json={**long, "request_id": "mine:7"}):
        for more in ({}, {"stream": True}, {"prompt": ["a", "b"]}):
            error = error_of(server.post(**fields, **more), 409)
            assert (error["code"], error["param"]) == ("id_in_use", "request_id")
            assert error["type"] == "conflict_error"
    wait_until(lambda: server.post(**fields).status_code != 409)  # when it has ended


def test_what_is_only_noted_changes_nothing(server: Server) -> None:
    fields = {"max_tokens": 6, "seed": 2}
    noted = {"user": "someone", "metadata": {"run": "7"}, "priority": -5, "cache_salt": None}
    assert complete(server, **noted, **fields)["choices"] == complete(server, **fields)["choices"]


def test_a_bias_is_added_and_the_scores_say_so(server: Server) -> None:
    wants = {"prompt": [5, 6, 7], "max_tokens": 1, "logprobs": 20, "temperature": 1, "seed": 3}
    wants |= {"prompt_logprobs": 0, "return_tokens_as_token_ids": True}
    without, biased = (choice_of(server, **wants, logit_bias=bias) for bias in ({}, {"77": 60}))
    assert biased["logprobs"]["tokens"] == ["token_id:77"]
    assert biased["logprobs"]["token_logprobs"][0] > -0.01
    assert without["prompt_logprobs"] == biased["prompt_logprobs"]
