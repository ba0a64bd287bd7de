"""`until`, `return` and `verify` over HTTP: slots are freed, and nothing else changes.

That the reply is right whatever samples end in whatever order, tests/property/test_until.py holds;
what a rule gives a text, tests/unit/server/generation/test_verification.py.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import re2

from srm.engine.early_stop import AHEAD, FIRST_WAVE
from tests.kit.serving import (
    CHATS,
    SERVER_FLAGS,
    Server,
    complete,
    connect,
    read_all,
    wait_until,
)

N = 200
SAMPLING: dict[str, Any] = {"prompt": "the cat", "n": N, "max_tokens": 8, "seed": 5}
VOWEL = "[aeiou]"
RULE: dict[str, Any] = {"sum": [{"match": VOWEL, "weight": 0.5}, {"match": "t"}]}


def enough_of(texts: list[str], count: int) -> list[str]:
    """Texts of the first choices, up to the one at which so many have a vowel."""
    ends = [end for end, text in enumerate(texts, 1) if re.search(VOWEL, text)]
    return texts[: ends[count - 1]]


def test_the_reply_is_the_first_of_all_samples_up_to_enough(server: Server) -> None:
    prompts = {**SAMPLING, "prompt": ["the cat", "on the mat"], "stop": ["e", "tt"]}
    full = complete(server, **prompts)
    reply = complete(server, until={"match": VOWEL, "count": 7}, **prompts)
    texts = [choice["text"] for choice in full["choices"]]
    expected = [enough_of(texts[:N], 7), enough_of(texts[N:], 7)]
    assert [choice["text"] for choice in reply["choices"]] == expected[0] + expected[1]
    for number, samples in enumerate(reply["samples"]):
        own = [choice for choice in reply["choices"] if choice["index"] // N == number]
        assert [solution["index"] % N for solution in own] == list(range(len(expected[number])))
        assert (samples["requested"], samples["drawn"]) == (N, len(own))
        assert samples["matched"] == sum(solution["matched"] for solution in own) == 7
        assert samples["reached"] and len(own) < N
        assert samples["finished_by"] == Counter(solution["finish_reason"] for solution in own)
    left_out = full["usage"]["completion_tokens"] - reply["usage"]["completion_tokens"]
    assert reply["usage"]["discarded_tokens"] <= left_out
    server.wait_until_idle()


def test_samples_that_are_not_needed_lose_their_slots(server: Server) -> None:
    before = server.metric("srm_engine_decode_tokens_total")
    endless = {"max_tokens": 60, "min_tokens": 50, "prompt": [5], "n": 1_000, "seed": 1}
    reply = complete(server, until={"match": "(?s).*", "count": 1}, **endless)
    server.wait_until_idle()
    assert [choice["index"] for choice in reply["choices"]] == [0]
    drawn = server.metric("srm_engine_decode_tokens_total") - before
    assert drawn <= 60 * 64 * 2  # of 1,000 x 50


@pytest.mark.parametrize("engines", [1, 2])
def test_samples_start_in_waves_where_there_is_room(text_model: Path, engines: int) -> None:
    """The reply is the beginning of what all samples at once are, bit for bit."""
    n = 500
    flags = (*SERVER_FLAGS, f"--num-slots={n}", f"--max-step-rows={n}", f"--engines={engines}")
    with Server(text_model, *flags) as wide:
        sampling: dict[str, Any] = {"prompt": [5], "n": n, "seed": 1, "logprobs": 0}
        sampling |= {"max_tokens": 20, "min_tokens": 16}
        whole = complete(wide, **sampling)
        whole_tokens = whole["usage"]["completion_tokens"]
        assert wide.metric("srm_engine_decode_tokens_total") == whole_tokens
        for end in (1, 100):
            text = re.escape(whole["choices"][end - 1]["text"])
            before = wide.metric("srm_engine_decode_tokens_total")
            reply = complete(wide, until={"match": f"^{text}$", "count": 1}, **sampling)
            wide.wait_until_idle()
            assert reply["samples"][0]["drawn"] == end
            assert all(
                choice.pop("matched") == (choice["index"] == end - 1) for choice in reply["choices"]
            )
            assert reply["choices"] == whole["choices"][:end]
            computed = wide.metric("srm_engine_decode_tokens_total") - before
            # Where all start at once nearly all is computed, since lengths hardly differ; the
            # server has two waves' time to say that no more is needed.
            assert end > FIRST_WAVE or computed < whole_tokens / 2
            usage = reply["usage"]
            assert usage["completion_tokens"] + usage["discarded_tokens"] <= computed


def test_prompts_share_a_budget_and_no_more_is_computed(server: Server) -> None:
    """Those that match leave their tokens to the one that never does."""
    prompts = {**SAMPLING, "prompt": [[5], [6], [7]], "n": 900, "ignore_eos": True}
    before = server.metric("srm_engine_decode_tokens_total")
    never = {"match": "zzz"}
    rules = [{"not": never}, {"not": never}, never]
    until = {"score": 1, "count": 1, "budget": 4_000}
    reply = complete(server, verify=rules, until=until, **prompts)
    server.wait_until_idle()
    drawn = [samples["drawn"] for samples in reply["samples"]]
    assert drawn[:2] == [1, 1] and drawn[2] == 4_000 // 8 - 2
    assert [samples["reached"] for samples in reply["samples"]] == [True, True, False]
    assert reply["usage"]["completion_tokens"] == 4_000
    computed = server.metric("srm_engine_decode_tokens_total") - before
    assert computed <= 4_000 + 2 * 8 * AHEAD  # not 3 x 900 x 8
    assert complete(server, verify=rules, until=until, **prompts)["choices"] == reply["choices"]


def test_an_unread_stream_stops_its_samples(server: Server) -> None:
    stopped = server.metric("srm_engine_sequences_total", "stop")
    fields = {"prompt": [5] * 99, "prompt_logprobs": 20, "n": 900, "max_tokens": 8}
    fields |= {"ignore_eos": True, "stream_whole": True}  # far more than the connection holds
    with connect(server, until={"match": "(?s).*", "count": 150}, **fields) as connection:
        wait_until(lambda: server.metric("srm_engine_sequences_total", "stop") > stopped)
        server.wait_until_idle()
        assert b'"samples":[{"requested":900,"drawn":150,' in read_all(connection)


def score_of(text: str) -> float:
    return 0.5 * bool(re.search(VOWEL, text)) + ("t" in text)


def test_each_choice_says_its_score_and_all_their_mean(server: Server) -> None:
    plain = complete(server, **SAMPLING)
    reply = complete(server, **SAMPLING, verify=RULE)
    texts = [choice["text"] for choice in plain["choices"]]
    assert [choice["text"] for choice in reply["choices"]] == texts
    scores = [score_of(text) for text in texts]
    packed = complete(server, **SAMPLING, verify=RULE, return_packed=True)
    for answer in (reply, packed):
        assert [choice["score"] for choice in answer["choices"]] == scores
    assert len(set(scores)) > 2
    (samples,) = reply["samples"]
    assert samples["mean_score"] == sum(scores) / N
    assert samples["drawn"] == N and "matched" not in samples
    assert not any("score" in choice for choice in plain["choices"])
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "the cat"}], "n": 60}
    chat |= {"max_completion_tokens": 6, "seed": 3, "verify": [RULE]}
    for choice in server.http.post(CHATS, json=chat).json()["choices"]:
        assert choice["score"] == score_of(choice["message"]["content"])


def test_until_a_sample_is_a_right_regex(server: Server) -> None:
    texts = [choice["text"] for choice in complete(server, **SAMPLING)["choices"]]
    rule = {"rejects": [texts[0].strip(), texts[3].strip()], "accepts": [texts[2].strip()]}

    def score(text: str) -> float:
        try:
            match = re2.compile(text.strip().encode()).fullmatch
        except re2.error:
            return 0.0
        right, wrong = ([text.encode() for text in rule[name]] for name in ("accepts", "rejects"))
        return float(all(map(match, right)) and not any(map(match, wrong)))

    scores = [score(text) for text in texts]
    reply = complete(server, **SAMPLING, verify=rule)
    assert [choice["score"] for choice in reply["choices"]] == scores
    assert scores[0] == scores[1] == 0 and scores[2] == 1
    reply = complete(server, **SAMPLING, verify=rule, until={"score": 1, "count": 1})
    assert [choice["text"] for choice in reply["choices"]] == texts[:3]
    assert reply["samples"][0]["reached"]


def test_counts_are_by_score_or_say_the_score(server: Server) -> None:
    texts = [choice["text"] for choice in complete(server, **SAMPLING)["choices"]]
    counts = {"verify": RULE, "return": "counts"}
    (by_text,) = complete(server, **SAMPLING, **counts)["samples"]
    entries = {entry["text"]: (entry["count"], entry["score"]) for entry in by_text["counts"]}
    assert entries == {text: (count, score_of(text)) for text, count in Counter(texts).items()}
    (by_score,) = complete(server, **SAMPLING, **counts, count_by="score")["samples"]
    scores = Counter(map(score_of, texts))
    assert {entry["score"]: entry["count"] for entry in by_score["counts"]} == scores
    assert all(entry["text"] is None for entry in by_score["counts"])
    assert by_score["distinct"] == len(scores)
    unique = complete(server, **SAMPLING, verify=RULE, count_by="score", **{"return": "unique"})
    firsts = {score_of(text): index for index, text in reversed([*enumerate(texts)])}
    assert {entry["score"]: entry["index"] for entry in unique["choices"]} == firsts


def test_until_a_score_is_reached(server: Server) -> None:
    texts = [choice["text"] for choice in complete(server, **SAMPLING)["choices"]]
    for until, enough in (({"score": 1}, 1), ({"score": 0.5, "match": "t"}, 0.5)):
        right = [score_of(text) >= enough and ("t" in text or enough == 1) for text in texts]
        end = [index for index, is_right in enumerate(right) if is_right][4] + 1
        reply = complete(server, **SAMPLING, verify=RULE, until={**until, "count": 5})
        assert [choice["text"] for choice in reply["choices"]] == texts[:end]
        assert [choice["matched"] for choice in reply["choices"]] == right[:end]
        assert reply["samples"][0]["reached"]
