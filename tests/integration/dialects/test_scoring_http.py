"""Scores over HTTP: echo, logprobs and prompt_logprobs, as evaluation harnesses read them."""

from __future__ import annotations

import base64
import json
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kit.engines.likelihoods import distributions, greedy_after
from tests.kit.engines.numpy_runner import TINY
from tests.kit.engines.served_app import Visit, application
from tests.kit.engines.served_engine import Serve
from tests.kit.serving import (
    EOS_PROMPT,
    TEXT_MODEL,
    Server,
    choice_of,
    complete,
    events_of,
    unpacked,
)

PROMPT = [0, 5, 90, 91, 92, 33, 33, 7, 280]
LM_EVAL = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
"""What lm-evaluation-harness sends for loglikelihood requests."""


def test_lm_eval_reads_sums_and_greediness(server: Server) -> None:
    rng = np.random.default_rng(0)
    pairs: list[tuple[list[int], list[int]]] = []
    for i in range(20):
        tokens = rng.integers(0, TEXT_MODEL.vocab_size, rng.integers(2, 60)).tolist()
        length = int(rng.integers(1, len(tokens)))
        context = tokens[:length]
        pairs.append((context, tokens[length:] if i % 3 else greedy_after(context, 3)))
    answer = complete(server, prompt=[item + more for item, more in pairs], **LM_EVAL)
    num_greedy = 0
    choices = sorted(answer["choices"], key=itemgetter("index"))
    for choice, (context, continuation) in zip(choices, pairs, strict=True):
        message = slice(len(context), -1)  # what the harness reads, and how
        logprobs = choice["logprobs"]["token_logprobs"][message]
        tops = choice["logprobs"]["top_logprobs"][message]
        is_greedy = all(p == max(top.values()) for p, top in zip(logprobs, tops, strict=True))
        num_greedy += is_greedy
        rows = distributions(context + continuation)[len(context) - 1 : -1]
        expected = rows[range(len(rows)), continuation].sum()
        assert sum(logprobs) == pytest.approx(expected, abs=1e-3)
        assert is_greedy == (rows.argmax(1).tolist() == continuation)
    assert num_greedy >= 7


def test_arrays_have_an_entry_more_than_the_prompt(server: Server) -> None:
    sampled = choice_of(server, prompt=PROMPT, return_token_ids=True, **LM_EVAL)["token_ids"]
    longest = [5 + i % 200 for i in range(TEXT_MODEL.n_ctx)]
    for prompt, fields, finish in (
        (PROMPT, {}, "length"),
        (PROMPT, {"stop_token_ids": sampled}, "stop"),
        (longest, {}, "length"),
        (EOS_PROMPT, {}, "stop"),
        (EOS_PROMPT, {"skip_special_tokens": False}, "stop"),
    ):
        choice = choice_of(server, prompt=prompt, **LM_EVAL, **fields)
        assert choice["finish_reason"] == finish
        arrays = choice["logprobs"]
        assert {len(values) for values in arrays.values()} == {len(prompt) + 1}
        assert arrays["token_logprobs"][0] is arrays["top_logprobs"][0] is None
        assert all(isinstance(value, float) for value in arrays["token_logprobs"][1:])
        if prompt is EOS_PROMPT:  # the end of text is an entry too
            assert arrays["tokens"][-1] == "<|end_of_text|>"
            assert arrays["top_logprobs"][-1] == {"<|end_of_text|>": arrays["token_logprobs"][-1]}


@pytest.mark.parametrize("temperature", [0, 0.5, 1])
@pytest.mark.parametrize("alternatives", [0, 1, 5, 20])
def test_logprobs_are_the_models_own(server: Server, alternatives: int, temperature: float) -> None:
    """And a token is the likeliest where the numbers are equal to the last bit."""
    fields = {"max_tokens": 6, "temperature": temperature, "ignore_eos": True, "seed": 3}
    names_ids = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    choice = choice_of(
        server, prompt=PROMPT, echo=True, logprobs=alternatives, **fields, **names_ids
    )
    tokens = PROMPT + choice["token_ids"]
    arrays = choice["logprobs"]
    assert arrays["tokens"] == [f"token_id:{token}" for token in tokens]
    expected = distributions(tokens[:-1], temperature or 1)
    expected[: len(PROMPT) - 1] = distributions(PROMPT[:-1])  # of the prompt: temperature 1
    for row, token, logprob, top in zip(
        expected, tokens[1:], arrays["token_logprobs"][1:], arrays["top_logprobs"][1:], strict=True
    ):
        assert logprob == pytest.approx(row[token], abs=1e-4)
        assert top[f"token_id:{token}"] == logprob
        likeliest = np.argsort(-row, kind="stable")[:alternatives].tolist()
        assert set(top) == {f"token_id:{item}" for item in [*likeliest, token]}
        assert not alternatives or (logprob == max(top.values())) == (row.argmax() == token)
        for name, value in top.items():
            assert value == pytest.approx(row[int(name.removeprefix("token_id:"))], abs=1e-4)


def test_echo_puts_the_prompt_before_the_text(server: Server) -> None:
    prompts = ["the cat", "sat é"]
    fields: dict[str, Any] = {"prompt": prompts, "n": 2, "max_tokens": 5, "seed": 1}
    plain, echoed, scored = (
        complete(server, **fields, **own)
        for own in ({}, {"echo": True}, {"echo": True, "logprobs": 20, "prompt_logprobs": 20})
    )
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert echoed["usage"][name] == plain["usage"][name] == scored["usage"][name]
    for index, (choice, other, third) in enumerate(
        zip(plain["choices"], echoed["choices"], scored["choices"], strict=True)
    ):
        assert other["text"] == third["text"] == prompts[index // 2] + choice["text"]
        assert other["logprobs"] is None
        tokens, offsets = third["logprobs"]["tokens"], third["logprobs"]["text_offset"]
        assert tokens[0] == "<|begin_of_text|>" and offsets[:2] == [0, 0]  # it is no text
        spelled = [third["text"][begin:end] for begin, end in pairwise(offsets)]
        assert spelled[1:3] == tokens[1:3]


def test_samples_share_the_scores_of_their_prompt(server: Server) -> None:
    before = server.metric("srm_engine_scored_tokens_total")
    choices = complete(server, prompt=PROMPT, n=5, max_tokens=2, echo=True, logprobs=2)["choices"]
    assert server.metric("srm_engine_scored_tokens_total") - before == len(PROMPT) - 1
    heads = [choice["logprobs"]["top_logprobs"][: len(PROMPT)] for choice in choices]
    assert all(head == heads[0] for head in heads)


def test_no_tokens_is_scoring_only(server: Server) -> None:
    before = server.metric("srm_engine_decode_tokens_total")
    fields: dict[str, Any] = {"prompt": [PROMPT, [5, 6]], "n": 3}
    answer = complete(server, max_tokens=0, echo=True, logprobs=1, **fields)
    choice = choice_of(server, max_tokens=0, echo=True, prompt=[7], logprobs=3)
    assert choice["logprobs"]["token_logprobs"] == [None]
    assert choice["text"] == choice["logprobs"]["tokens"][0]
    choice = choice_of(server, max_tokens=0, echo=True, prompt="the cat")
    assert (choice["logprobs"], choice["text"]) == (None, "the cat")
    assert server.metric("srm_engine_decode_tokens_total") == before
    assert answer["usage"]["completion_tokens"] == 0
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    one_more = complete(server, **fields, **LM_EVAL)
    for scored, choice in zip(answer["choices"], one_more["choices"], strict=True):
        for name, values in scored["logprobs"].items():
            assert values == choice["logprobs"][name][:-1]


def test_prompt_logprobs_have_rank_and_text(server: Server) -> None:
    """And as many alternatives as asked, whatever `logprobs` asks for beside them."""
    fields = {"prompt": PROMPT, "max_tokens": 0, "prompt_logprobs": 3}
    alone = choice_of(server, **fields)
    assert (alone["logprobs"], alone["text"]) == (None, "")
    both = choice_of(server, echo=True, logprobs=4, **fields)
    assert {len(top) for top in both["logprobs"]["top_logprobs"][1:]} <= {4, 5}
    sampled = complete(server, **{**fields, "n": 2, "max_tokens": 1})["choices"]
    for choice in (alone, both, *sampled):
        first, *rest = choice["prompt_logprobs"]
        assert first is None
        for row, token, entry in zip(distributions(PROMPT[:-1]), PROMPT[1:], rest, strict=True):
            order = np.argsort(-row, kind="stable").tolist()
            assert set(entry) == {str(item) for item in [*order[:3], token]}
            for name, value in entry.items():
                assert value["rank"] == order.index(int(name)) + 1
                assert value["logprob"] == pytest.approx(row[int(name)], abs=1e-4)
                assert isinstance(value["decoded_token"], str)


NAMED = [7, 280, 5]


@pytest.mark.parametrize(
    "edits",
    [
        {"temperature": 0},
        {"temperature": 0.5, "n": 2, "top_k": 3},
        {"logit_bias": {"280": 3}, "frequency_penalty": 1, "repetition_penalty": 1.5},
        {"allowed_token_ids": [5, 7, 9]},
    ],
)
def test_named_tokens_are_scored_beside_samples(server: Server, edits: dict[str, Any]) -> None:
    """As the likeliest would be: the same numbers, in whole replies, streams and arrays."""
    fields = {"prompt": PROMPT, "max_tokens": 6, "seed": 3, "ignore_eos": True, **edits}
    shown = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    named = {"logprobs": 0, "logprob_token_ids": NAMED}
    choices = complete(server, **fields, **shown, **named)["choices"]
    likeliest = complete(server, **fields, **shown, logprobs=20)["choices"]
    events = events_of(server, **fields, **shown, **named)
    packed = complete(server, **fields, return_packed=True, **named)["choices"]
    for choice, plain, compact in zip(choices, likeliest, packed, strict=True):
        assert choice["token_ids"] == plain["token_ids"]
        arrays, more = choice["logprobs"], plain["logprobs"]
        assert arrays["token_logprobs"] == more["token_logprobs"]
        for token, top, other in zip(
            choice["token_ids"], arrays["top_logprobs"], more["top_logprobs"], strict=True
        ):
            assert set(top) == {f"token_id:{item}" for item in [*NAMED, token]}
            common = top.keys() & other.keys()
            assert f"token_id:{token}" in common
            assert {name: top[name] for name in common} == {name: other[name] for name in common}
        own = [c for event in events for c in event["choices"] if c["index"] == choice["index"]]
        streamed = [top for part in own for top in part["logprobs"]["top_logprobs"]]
        assert streamed == arrays["top_logprobs"]
        ids, numbers = (
            np.frombuffer(unpacked(compact)["packed"][name], dtype).reshape(-1, len(NAMED))
            for name, dtype in (("top_token_ids", "<i4"), ("top_logprobs", "<f4"))
        )
        assert ids.tolist() == [NAMED] * len(choice["token_ids"])
        expected = [[top[f"token_id:{item}"] for item in NAMED] for top in arrays["top_logprobs"]]
        assert np.maximum(numbers, -9999).tolist() == pytest.approx(np.array(expected))
    if edits == {"temperature": 0}:
        rows = distributions([*PROMPT, *choices[0]["token_ids"]][:-1])[len(PROMPT) - 1 :]
        assert np.array(expected) == pytest.approx(rows[:, NAMED], abs=1e-4)


def test_named_tokens_are_scored_beside_a_prompts(server: Server) -> None:
    fields = {"prompt": PROMPT, "max_tokens": 0, "prompt_logprobs": 0}
    named = {"prompt_logprob_token_ids": NAMED}
    first, *rest = choice_of(server, **fields, **named)["prompt_logprobs"]
    assert first is None
    for row, token, entry in zip(distributions(PROMPT[:-1]), PROMPT[1:], rest, strict=True):
        assert set(entry) == {str(item) for item in [*NAMED, token]}
        for name, value in entry.items():
            assert value["logprob"] == pytest.approx(row[int(name)], abs=1e-4)
            rank = int((row > row[token]).sum()) + 1 if name == str(token) else None
            assert value["rank"] == rank
    packed = unpacked(choice_of(server, **fields, **named, return_packed=True,
                                return_token_ids=True))["packed_prompt"]  # fmt: skip
    ids = np.frombuffer(base64.b64decode(packed["top_token_ids"]), "<i4").reshape(-1, len(NAMED))
    assert ids.tolist() == [[-1] * 3] + [NAMED] * (len(PROMPT) - 1)


async def test_minus_one_is_all_tokens(serve: Serve, endpoint: str, tiny_folder: Path) -> None:
    """Where the setting reaches so far, which is -1 too; names may be as many."""
    serve(max_logprobs=-1)
    vocab = TINY.vocab_size
    fields = {"prompt": [5, 6, 7], "max_tokens": 3, "return_tokens_as_token_ids": True}
    every = [*range(vocab)]
    async with application(endpoint, tiny_folder) as (app, _):
        replies = []
        for asked in (
            {"logprobs": -1, "prompt_logprobs": -1},
            {"logprobs": vocab, "prompt_logprobs": vocab},
            {"logprobs": 0, "logprob_token_ids": every[::-1]}
            | {"prompt_logprobs": 5, "prompt_logprob_token_ids": every},
        ):
            status, reply = await Visit(app, fields | asked, []).reply()
            assert status == 200, reply
            replies.append(json.loads(reply)["choices"])
        ((choice,), again, ((named),)) = replies
        assert again == [choice]
        assert named["logprobs"]["top_logprobs"] == choice["logprobs"]["top_logprobs"]
        for top in choice["logprobs"]["top_logprobs"]:
            assert len(top) == vocab and np.exp([*top.values()]).sum() == pytest.approx(1)
        for entry, other in zip(
            choice["prompt_logprobs"][1:], named["prompt_logprobs"][1:], strict=True
        ):
            assert len(entry) == vocab
            assert {name: value["logprob"] for name, value in entry.items()} == {
                name: value["logprob"] for name, value in other.items()
            }
        status, reply = await Visit(app, fields | {"logprobs": vocab + 1}, []).reply()
        assert status == 400 and f"{vocab} tokens), got {vocab + 1}" in str(reply)


def test_the_last_tokens_of_a_prompt_are_scored_alone(server: Server) -> None:
    """From a kept state, with the same numbers; nothing stands for the tokens before them."""
    rng = np.random.default_rng(7)
    prompt = rng.integers(5, TEXT_MODEL.vocab_size, 60).tolist()
    fields: dict[str, Any] = {"max_tokens": 0, "prompt_logprobs": 2}
    whole = choice_of(server, prompt=prompt, **fields)["prompt_logprobs"]
    complete(server, prompt=prompt[:50], max_tokens=1)
    for start in (50, -10):
        answer = complete(server, prompt=prompt, prompt_logprobs_start=start, **fields)
        assert answer["choices"][0]["prompt_logprobs"] == [None] * 50 + whole[50:]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 49
    far = choice_of(server, prompt=prompt, prompt_logprobs_start=-500, **fields)
    assert far["prompt_logprobs"] == whole
    none = {"prompt_logprobs": 0, "prompt_logprobs_start": 60}
    few = choice_of(server, prompt=prompt, max_tokens=2, logprobs=1, seed=1, **none)
    assert few["prompt_logprobs"] == [None] * 60
    fields |= {"prompt_logprobs_start": 58, "return_packed": True, "return_token_ids": True}
    packed = unpacked(choice_of(server, prompt=prompt, **fields))["packed_prompt"]
    arrays = {name: base64.b64decode(packed[name]) for name in ("logprobs", "ranks")}
    logprobs = np.frombuffer(arrays["logprobs"], "<f4")
    assert np.isnan(logprobs[:58]).all() and len(logprobs) == 60
    assert logprobs[58:].tolist() == [
        pytest.approx(whole[at][str(prompt[at])]["logprob"]) for at in (58, 59)
    ]
    assert np.frombuffer(arrays["ranks"], "<i4")[:58].tolist() == [0] * 58
    assert len(base64.b64decode(packed["top_token_ids"])) == 60 * 2 * 4


async def test_takes_ids_without_a_tokenizer(
    serve: Serve, endpoint: str, tiny_folder: Path
) -> None:
    serve()
    fields = {"prompt": [5, 6, 7], "max_tokens": 5, "logprobs": 2, "return_token_ids": True}
    async with application(endpoint, tiny_folder) as (app, _):
        status, reply = await Visit(app, {**fields, "echo": True}, []).reply()
        assert status == 200
        (choice,) = json.loads(reply)["choices"]
        names = [f"token_id:{token}" for token in [5, 6, 7, *choice["token_ids"]]]
        assert choice["text"] == "".join(names)
        assert choice["logprobs"]["tokens"] == names
        offsets = [len("".join(names[:i])) for i in range(len(names))]
        assert choice["logprobs"]["text_offset"] == offsets
        whole: list[tuple[str, dict[str, Any]]] = [
            *(("prompt", {"prompt": prompt}) for prompt in ("the cat", ["a", "b"])),
            *((name, {"prompt": [5], name: ["x"]}) for name in ("stop", "bad_words")),
        ]
        for param, refused in whole:
            status, reply = await Visit(app, refused, []).reply()
            error = json.loads(reply)["error"]
            assert (status, error["param"]) == (400, param)
            assert "no tokenizer" in error["message"]
