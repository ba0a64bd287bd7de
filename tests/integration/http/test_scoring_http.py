"""Scores over HTTP: echo, logprobs and prompt_logprobs, as evaluation harnesses read them."""

from __future__ import annotations

import json
import math
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from server.schema.sampling_fields import MAX_SCORES
from tests.engines.numpy_runner import feed, tiny_weights
from tests.serving import SERVER_FLAGS, TEXT_MODEL, Server, choice_of, complete

WEIGHTS = tiny_weights(config=TEXT_MODEL)
"""Those of the numpy engine."""
PROMPT = [0, 5, 90, 91, 92, 33, 33, 7, 280]


def distributions(tokens: list[int], temperature: float = 1.0) -> npt.NDArray[np.float64]:
    """Log-probabilities of every token in the place after each of these, f64[len(tokens), V]."""
    state = np.zeros((TEXT_MODEL.num_layers, TEXT_MODEL.d_model))
    rows = []
    for position, token in enumerate(tokens):
        logits, state = feed(WEIGHTS, token, position, state)
        z = logits / temperature
        rows.append(z - z.max() - math.log(np.exp(z - z.max()).sum()))
    return np.array(rows)


LM_EVAL = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
"""What lm-evaluation-harness sends for loglikelihood requests."""


def parse_as_lm_eval(
    answer: dict[str, Any], context_lengths: list[int]
) -> list[tuple[float, bool]]:
    """(sum of the continuation's log-probabilities, whether it is greedy), as the harness reads."""
    found = []
    choices = sorted(answer["choices"], key=itemgetter("index"))
    for choice, length in zip(choices, context_lengths, strict=True):
        logprobs = choice["logprobs"]["token_logprobs"][length:-1]
        tops = choice["logprobs"]["top_logprobs"][length:-1]
        is_greedy = all(p == max(top.values()) for p, top in zip(logprobs, tops, strict=True))
        found.append((sum(logprobs), is_greedy))
    return found


def test_lm_eval_reads_sums_and_greediness(server: Server) -> None:
    rng = np.random.default_rng(0)
    prompts: list[list[int]] = []
    lengths: list[int] = []
    for i in range(20):
        prompt = rng.integers(0, TEXT_MODEL.vocab_size, rng.integers(2, 60)).tolist()
        length = int(rng.integers(1, len(prompt)))
        if i % 3 == 0:  # a greedy continuation
            prompt = prompt[:length]
            for _ in range(3):
                prompt.append(int(distributions(prompt)[-1].argmax()))
        prompts.append(prompt)
        lengths.append(length)
    answer = complete(server, prompt=prompts, **LM_EVAL)
    found = parse_as_lm_eval(answer, lengths)
    for (total, is_greedy), prompt, length in zip(found, prompts, lengths, strict=True):
        rows = distributions(prompt)[length - 1 : -1]
        assert total == pytest.approx(rows[range(len(rows)), prompt[length:]].sum(), abs=1e-3)
        assert is_greedy == (rows.argmax(1).tolist() == prompt[length:])
    assert sum(is_greedy for _, is_greedy in found) >= 7


def test_arrays_have_one_entry_more_than_the_prompt_also_when_it_stops(server: Server) -> None:
    sampled = choice_of(server, prompt=PROMPT, return_token_ids=True, **LM_EVAL)["token_ids"]
    longest = [5 + i % 200 for i in range(TEXT_MODEL.n_ctx)]
    for prompt, fields, finish in (
        (PROMPT, {}, "length"),
        (PROMPT, {"stop_token_ids": sampled}, "stop"),
        (longest, {}, "length"),
    ):
        choice = choice_of(server, prompt=prompt, **LM_EVAL, **fields)
        assert choice["finish_reason"] == finish
        arrays = choice["logprobs"]
        assert {len(values) for values in arrays.values()} == {len(prompt) + 1}
        assert arrays["token_logprobs"][0] is arrays["top_logprobs"][0] is None
        assert all(isinstance(value, float) for value in arrays["token_logprobs"][1:])


def test_the_end_of_text_is_an_entry_too(server: Server) -> None:
    eos = TEXT_MODEL.eos_token_id
    prompt = next(
        [token] * length
        for token in range(TEXT_MODEL.vocab_size)
        for length, row in enumerate(distributions([token] * 6), 1)
        if row.argmax() == eos
    )
    for skips in (True, False):
        choice = choice_of(
            server, prompt=prompt, skip_special_tokens=skips, return_token_ids=True, **LM_EVAL
        )
        assert (choice["token_ids"], choice["finish_reason"]) == ([eos], "stop")
        arrays = choice["logprobs"]
        assert {len(values) for values in arrays.values()} == {len(prompt) + 1}
        assert arrays["tokens"][-1] == "<|end_of_text|>"
        assert arrays["top_logprobs"][-1] == {"<|end_of_text|>": arrays["token_logprobs"][-1]}


def test_a_token_is_the_likeliest_where_the_numbers_are_equal_to_the_last_bit(
    server: Server,
) -> None:
    for k in (1, 5, 20):
        fields = {**LM_EVAL, "logprobs": k}
        arrays = choice_of(server, prompt=PROMPT, **fields)["logprobs"]
        rows = distributions(PROMPT)[:-1]
        for token, row, p, top in zip(
            PROMPT[1:], rows, arrays["token_logprobs"][1:-1], arrays["top_logprobs"][1:-1],
            strict=True,
        ):  # fmt: skip
            assert p in top.values()
            assert (p == max(top.values())) == (row.argmax() == token)
            assert len(top) in (k, k + 1)
        assert arrays["token_logprobs"][-1] == max(arrays["top_logprobs"][-1].values())


@pytest.mark.parametrize("temperature", [0, 0.5, 1])
@pytest.mark.parametrize("alternatives", [0, 1, 20])
def test_logprobs_are_the_models_own(server: Server, alternatives: int, temperature: float) -> None:
    choice = choice_of(
        server,
        prompt=PROMPT,
        max_tokens=6,
        temperature=temperature,
        ignore_eos=True,
        seed=3,
        echo=True,
        logprobs=alternatives,
        return_token_ids=True,
        return_tokens_as_token_ids=True,
    )
    tokens = PROMPT + choice["token_ids"]
    arrays = choice["logprobs"]
    assert arrays["tokens"] == [f"token_id:{token}" for token in tokens]
    expected = np.concatenate(
        [
            distributions(tokens[:-1])[: len(PROMPT) - 1],  # of the prompt: temperature 1, always
            distributions(tokens[:-1], temperature or 1)[len(PROMPT) - 1 :],
        ]
    )
    for row, token, logprob, top in zip(
        expected, tokens[1:], arrays["token_logprobs"][1:], arrays["top_logprobs"][1:], strict=True
    ):
        assert logprob == pytest.approx(row[token], abs=1e-4)
        assert top[f"token_id:{token}"] == logprob
        likeliest = np.argsort(-row, kind="stable")[:alternatives].tolist()
        assert set(top) == {f"token_id:{one}" for one in [*likeliest, token]}
        for name, value in top.items():
            assert value == pytest.approx(row[int(name.removeprefix("token_id:"))], abs=1e-4)


def test_echo_puts_the_prompt_before_the_text_and_scores_change_no_sample(server: Server) -> None:
    fields: dict[str, Any] = {"prompt": ["the cat", "sat é"], "n": 2, "max_tokens": 5, "seed": 1}
    plain = complete(server, **fields)
    echoed = complete(server, echo=True, **fields)
    scored = complete(server, logprobs=20, prompt_logprobs=20, **fields)["choices"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert echoed["usage"][name] == plain["usage"][name]
    for prompt, one, other, third in zip(
        ["the cat"] * 2 + ["sat é"] * 2, plain["choices"], echoed["choices"], scored, strict=True
    ):
        assert other["text"] == prompt + one["text"] == prompt + third["text"]
        assert other["logprobs"] is None


def test_offsets_count_from_the_start_of_the_text(server: Server) -> None:
    prompt = "the other cat sat on é"
    choice = choice_of(server, prompt=prompt, max_tokens=0, echo=True, logprobs=0)
    arrays = choice["logprobs"]
    ends = [*arrays["text_offset"][1:], len(choice["text"])]
    spelled = [
        choice["text"][begin:end] for begin, end in zip(arrays["text_offset"], ends, strict=True)
    ]
    assert arrays["tokens"][0] == "<|begin_of_text|>"  # a special token is no text
    assert spelled[0] == ""
    assert "".join(spelled) == prompt
    assert len(spelled) >= 6
    assert spelled[1:-2] == arrays["tokens"][1:-2]
    assert arrays["tokens"][-2:] == ["bytes:\\xc3", "bytes:\\xa9"]


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
        assert choice["text"].startswith(scored["text"])


def test_prompt_logprobs_have_rank_and_text(server: Server) -> None:
    for n in (1, 2):
        choices = complete(server, prompt=PROMPT, n=n, max_tokens=1, prompt_logprobs=3)["choices"]
        for choice in choices:
            first, *rest = choice["prompt_logprobs"]
            assert first is None and choice["logprobs"] is None
            for row, token, entry in zip(distributions(PROMPT), PROMPT[1:], rest, strict=False):
                order = np.argsort(-row, kind="stable").tolist()
                assert set(entry) == {str(one) for one in [*order[:3], token]}
                for name, value in entry.items():
                    assert value["rank"] == order.index(int(name)) + 1
                    assert value["logprob"] == pytest.approx(row[int(name)], abs=1e-4)
                    assert isinstance(value["decoded_token"], str)
    assert len(rest) == len(PROMPT) - 1


def test_both_kinds_of_scores_at_once_have_as_many_alternatives_as_asked(server: Server) -> None:
    choice = choice_of(
        server, prompt=PROMPT, max_tokens=0, prompt_logprobs=1, echo=True, logprobs=4
    )
    assert {len(entry) for entry in choice["prompt_logprobs"][1:]} <= {1, 2}
    assert {len(top) for top in choice["logprobs"]["top_logprobs"][1:]} <= {4, 5}
    alone = choice_of(server, prompt=PROMPT, max_tokens=0, prompt_logprobs=1)
    assert alone["prompt_logprobs"] == choice["prompt_logprobs"]
    assert (alone["logprobs"], alone["text"]) == (None, "")


def test_a_stream_has_the_prompt_in_a_choices_first_event(server: Server) -> None:
    fields = {
        **{"prompt": [PROMPT, PROMPT[:3]], "n": 2, "max_tokens": 9, "seed": 4, "ignore_eos": True},
        **{"echo": True, "logprobs": 2, "prompt_logprobs": 1},
    }
    whole = complete(server, **fields)["choices"]
    reply = server.post(stream=True, **fields)
    events = [
        json.loads(line.removeprefix("data: "))
        for line in reply.text.split("\n\n")
        if line.startswith("data: {")
    ]
    for choice in whole:
        parts = [c for event in events for c in event["choices"] if c["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        for name, values in choice["logprobs"].items():
            assert [value for part in parts for value in part["logprobs"][name]] == values
        assert parts[0]["prompt_logprobs"] == choice["prompt_logprobs"]
        assert not any("prompt_logprobs" in part for part in parts[1:])


def test_scoring_a_sample_gives_what_sampling_it_gave(server: Server) -> None:
    sampled = choice_of(
        server, prompt=PROMPT, max_tokens=20, logprobs=3, ignore_eos=True, return_token_ids=True
    )
    text = PROMPT + sampled["token_ids"]
    scored = choice_of(server, prompt=text, max_tokens=0, logprobs=3, echo=True)
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        assert scored["logprobs"][name][len(PROMPT) :] == sampled["logprobs"][name]


def test_more_scores_than_a_reply_may_have_are_refused(server: Server) -> None:
    scoring: list[tuple[dict[str, Any], str]] = [
        ({"n": 2_000, "max_tokens": 120, "logprobs": 20}, "logprobs"),
        ({"n": 3_000, "prompt": PROMPT * 12, "echo": True, "logprobs": 20}, "logprobs"),
        ({"n": 3_000, "prompt": PROMPT * 12, "prompt_logprobs": 20}, "prompt_logprobs"),
    ]
    for fields, name in scoring:
        reply = server.post(**fields)
        assert reply.status_code == 400, fields
        error = reply.json()["error"]
        assert error["param"] == name
        assert f"a reply may have {MAX_SCORES}" in error["message"]


def test_without_a_tokenizer_token_ids_come_and_go(server: Server, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(TEXT_MODEL))
    fields = {"prompt": PROMPT, "max_tokens": 5, "seed": 2, "ignore_eos": True, "logprobs": 2}
    with Server(tmp_path, *SERVER_FLAGS) as nameless:
        choice = choice_of(nameless, echo=True, return_token_ids=True, **fields)
        for param, refused in (
            ("prompt", {}),
            ("prompt", {"prompt": ["a", "b"]}),
            ("stop", {"prompt": PROMPT, "stop": "x"}),
            ("bad_words", {"prompt": PROMPT, "bad_words": ["x"]}),
        ):
            reply = nameless.post(**refused)
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
            assert "no tokenizer" in reply.json()["error"]["message"]
        (example,) = [line for line in nameless.lines if line.startswith("  curl ")]
        assert '"prompt": [0]' in example
    names = [f"token_id:{token}" for token in PROMPT + choice["token_ids"]]
    assert choice["text"] == "".join(names)
    assert choice["logprobs"]["tokens"] == names
    assert choice["logprobs"]["text_offset"] == [len("".join(names[:i])) for i in range(len(names))]
    other = choice_of(server, return_token_ids=True, **fields)
    assert other["token_ids"] == choice["token_ids"]
    with_names = choice_of(server, return_tokens_as_token_ids=True, **fields)["logprobs"]
    assert with_names["top_logprobs"] == choice["logprobs"]["top_logprobs"][len(PROMPT) :]
