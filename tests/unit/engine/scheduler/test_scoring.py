"""Scores of prompts and alternatives: which tokens a step scores, and what callers are told."""

from __future__ import annotations

import numpy as np
import pytest

from srm.engine.messages import MAX_LOGPROBS, PROMPT, Output
from srm.engine.scheduler.scheduler import Scheduler
from srm.engine.state.sequence import STREAMS
from srm.engine.steps.batch import SAMPLED, Batch, Scores, StepResult
from tests.kit.engines.making import floats, ints, request_of, rows, scheduled, scheduler_of


def complete(scheduler: Scheduler, batch: Batch, broken: int | None = None) -> list[Output]:
    """Score row q has log-probability -q, rank q + 1 and alternatives 100 * q and on."""
    places = np.arange(len(batch.score_rows), dtype=np.int32)
    logprobs = -places.astype(np.float32)
    if broken is not None:
        logprobs[broken] = np.nan
    top_ids = (100 * places[:, None] + np.arange(MAX_LOGPROBS)).astype(np.int32)
    scores = Scores(logprobs, places + 1, top_ids, -top_ids.astype(np.float32))
    tokens = np.full(batch.num_decode, 9, np.int32)
    sampled = np.full(batch.num_decode, -0.5, np.float32)
    return scheduler.complete(batch, StepResult(tokens, sampled, scores))


def test_scored_prompts_come_before_the_others_and_after_decode_rows() -> None:
    scheduler = scheduler_of()
    scheduler.add(request_of("decoding", [4]))
    complete(scheduler, scheduled(scheduler))
    scheduler.add(request_of("quiet", [5, 6, 7]))
    scheduler.add(request_of("aborted", [8, 9], prompt_logprobs=0))
    scheduler.add(request_of("asks", [11, 12, 13, 14], prompt_logprobs=2))
    scheduler.add(request_of("also", [21, 22], prompt_logprobs=0))
    batch = scheduled(scheduler)
    assert batch.token_ids[1:].tolist() == [8, 21, 11, 12, 13, 5, 6]
    assert batch.targets.tolist() == [SAMPLED, 9, 22, 12, 13, 14]
    assert batch.score_rows.tolist() == [1, 2, 3, 4, 5]
    assert batch.num_top.tolist() == [0, 0, 2, 2, 2]
    scheduler.abort("aborted")
    also, asks = complete(scheduler, batch)
    assert (asks.id, asks.index, asks.finish_reason) == ("asks", PROMPT, None)
    assert ints(asks.token_ids) == [12, 13, 14]
    assert (floats(asks.logprobs), ints(asks.ranks)) == ([-2, -3, -4], [3, 4, 5])
    assert ints(asks.top_ids) == [200, 201, 300, 301, 400, 401]
    assert floats(asks.top_logprobs) == [-200, -201, -300, -301, -400, -401]
    assert (ints(also.token_ids), floats(also.logprobs)) == ([22], [-1])
    assert also.top_ids == also.top_logprobs == b""


@pytest.mark.parametrize("n", [1, 3])
def test_scoring_alone_ends_with_the_prompt_and_samples_nothing(n: int) -> None:
    scheduler = scheduler_of()
    scheduler.add(request_of(n=n, max_tokens=0, prompt_logprobs=1))
    batch = scheduled(scheduler)
    assert (batch.num_decode, rows(batch)) == (0, [[5, 6]])
    assert scheduler.schedule() is None
    prompt, *samples = complete(scheduler, batch)
    assert ints(prompt.token_ids) == [6, 7]
    assert [(sample.index, sample.finish_reason, sample.token_ids) for sample in samples] == [
        (index, "length", b"") for index in range(n)
    ]
    assert (scheduler.num_requests, scheduler.num_waiting, scheduler.table.num_free) == (0, 0, 8)
    # Its prefix is kept for others.
    assert (scheduler.prefixes.num_used, scheduler.prefixes.num_pinned) == (1, 0)


@pytest.mark.parametrize(("max_tokens", "n"), [(0, 1), (5, 3)])
def test_a_prompt_whose_scores_are_not_finite_ends_in_errors(max_tokens: int, n: int) -> None:
    scheduler = scheduler_of(max_step_rows=4, max_step_tokens=6)
    scheduler.add(request_of(prompt=[5] * 9, n=n, max_tokens=max_tokens, prompt_logprobs=0))
    first, second = scheduled(scheduler), scheduled(scheduler)
    outputs = complete(scheduler, first, broken=2)
    assert [
        (output.index, output.finish_reason, "finite" in (output.error or "")) for output in outputs
    ] == [(index, "error", True) for index in range(n)]
    assert (scheduler.num_requests, scheduler.num_waiting, scheduler.table.num_free) == (0, 0, 8)
    assert complete(scheduler, second) == []


@pytest.mark.parametrize("most", [1, 2])
def test_alternatives_come_with_each_token_to_those_who_asked(most: int) -> None:
    scheduler = scheduler_of()
    scheduler.add(request_of("not", [5], emit="delta"))
    scheduler.add(request_of("asks", [5], emit="delta", logprobs=most, max_tokens=2))
    scheduler.add(request_of("chosen", [5], emit="delta", logprobs=0))
    for _ in range(2):
        batch = scheduled(scheduler)
        (row,) = batch.score_rows.tolist()
        assert (batch.num_top.tolist(), batch.sequence_ids[row]) == ([most], 1)
        outputs = {output.id: output for output in complete(scheduler, batch)}
        asks = outputs["asks"]
        assert ints(asks.top_ids) == [0, 1][:most]
        assert floats(asks.top_logprobs) == [-0.0, -1][:most]
        assert (floats(asks.logprobs), ints(asks.ranks)) == ([0], [1])
        assert outputs["not"].logprobs == outputs["not"].top_ids == b""
        assert (floats(outputs["chosen"].logprobs), outputs["chosen"].top_ids) == ([-0.5], b"")
    assert asks.finish_reason == "length"
    assert (len(scheduled(scheduler).score_rows), scheduler.table.num_asking) == (0, 0)


def test_named_tokens_are_lists_that_equal_requests_share() -> None:
    scheduler = scheduler_of(max_step_tokens=64)
    for name, ids in (("a", (7, 3)), ("b", (7, 3)), ("c", (9,))):
        scheduler.add(
            request_of(name, [5], emit="delta", logprobs=len(ids), logprob_token_ids=ids, n=2)
        )
    scheduler.add(request_of("likeliest", [5], emit="delta", logprobs=2))
    scheduler.add(request_of("prompt", [5, 6, 7], prompt_logprobs=1, prompt_logprob_token_ids=(9,)))
    batch = scheduled(scheduler)
    asked = [(2, 7, 3)] * 4 + [(1, 9)] * 2 + [None] + [(1, 9)] * 2
    named, wanted = batch.named.tolist(), batch.num_top.tolist()
    assert [None if at >= 0 else tuple(named[~at : ~at + 1 + named[~at]]) for at in wanted] == asked
    assert (wanted[6], len(named)) == (2, 3 + 2)
    complete(scheduler, batch)
    assert len(scheduler.table.named) == 3
    for name in ("a", "b", "c"):
        scheduler.abort(name)
    assert not scheduler.table.named
    assert scheduled(scheduler).named.tolist() == []


def test_alternatives_in_tokens_are_those_of_the_first_rows() -> None:
    scheduler = scheduler_of()
    for stream, most in enumerate((None, 1, 0, 2)):
        owner = STREAMS * (stream == 3)
        scheduler.add(
            request_of(f"{most}", [5], emit="tokens", stream=owner + stream, logprobs=most)
        )
    complete(scheduler, scheduled(scheduler))
    (step,) = scheduler.take_tokens()
    split = dict(step.split(STREAMS.bit_length() - 1))
    tokens = [split[owner].tokens for owner in (0, 1)]
    assert [token.owners.tolist() for token in tokens] == [[1, 0, 2], [3]]
    assert [token.logprobs.tolist() for token in tokens] == [[0, -0.5, -0.5], [-1]]
    assert [token.top_ids.tolist() for token in tokens] == [[[0, 1]], [[100, 101]]]
    assert tokens[1].top_logprobs.tolist() == [[-100, -101]]
