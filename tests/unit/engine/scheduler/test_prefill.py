"""What a prompt begins from, waits for and leaves behind."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from srm.engine.messages import PROMPT, Output, Request
from srm.engine.process.engine import Engine
from srm.engine.scheduler.prefill import MIN_SPLIT
from srm.engine.steps.batch import Batch
from tests.kit.engines.making import engine_of, request_of
from tests.kit.engines.numpy_runner import NumpyLaunched, NumpyRunner, tiny_weights
from tests.kit.processes.run_engine import run as run_all

HEADER = [2 + i % 29 for i in range(30)]


def run(engine: Engine, *requests: Request) -> dict[str, list[Output]]:
    """Add requests, all at once; what each gets, sample by sample."""
    entries: defaultdict[str, list[Output]] = defaultdict(list)
    for request in requests:
        engine.add(request)
    for output in sorted(run_all(engine), key=lambda output: output.index):
        entries[output.id].append(output)
    return entries


def cached(outputs: list[Output]) -> set[int]:
    return {output.cached_tokens for output in outputs}


@pytest.fixture
def prefilled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of prefill rows, batch by batch."""
    counts: list[int] = []
    launch = NumpyRunner.launch

    def counting(runner: NumpyRunner, batch: Batch) -> NumpyLaunched:
        counts.append(batch.num_tokens - batch.num_decode)
        return launch(runner, batch)

    monkeypatch.setattr(NumpyRunner, "launch", counting)
    return counts


Round = tuple[list[list[int]], int, list[int], int]
"""Prompts that come together, samples of each; what each begins from, tokens that are fed."""


@pytest.mark.parametrize(
    "rounds",
    [
        [([HEADER], 1, [0], 29), ([HEADER], 1, [29], 0)],
        [([HEADER], 3, [0], 29), ([HEADER], 40, [29], 0)],
        [([HEADER] * 20, 2, [0] + [29] * 19, 29)],
        [  # what two share is made with the second, and used by the third
            ([[*HEADER, 3, 4, 5]], 1, [0], 32),
            ([[*HEADER, 6, 7, 8]], 1, [0], 32),
            ([[*HEADER, 9, 10, 11]], 1, [30], 2),
            ([[*HEADER, 6, 7, 12]], 1, [32], 0),
            ([[*HEADER, 6, 7, 8, 9, 10]], 1, [32], 2),
        ],
        [([[*HEADER, i, 3, 4] for i in range(2, 20)], 1, [0] * 2 + [30] * 16, 2 * 30 + 18 * 2)],
    ],
    ids=["again", "again with more samples", "many equal", "a common header", "many of one header"],
)
def test_what_was_prefilled_is_not_prefilled_again(
    prefilled: list[int], rounds: list[Round]
) -> None:
    engine = engine_of(num_slots=40, max_step_rows=40, max_step_tokens=99, prefix_slots=30)
    for prompts, n, begun_from, fed in rounds:
        prefilled.clear()
        requests = [request_of(str(i), prompt, n=n) for i, prompt in enumerate(prompts)]
        ran = run(engine, *requests)
        assert [cached(ran[request.id]) for request in requests] == [
            {count} for count in begun_from
        ]
        assert [len(ran[request.id]) for request in requests] == [n] * len(prompts)
        assert sum(prefilled) == fed


def test_little_in_common_is_no_reason_to_split() -> None:
    engine, common = engine_of(), HEADER[: MIN_SPLIT - 1]
    for name in "ab":
        engine.add(request_of(name, [*common, ord(name) % 32, 9], max_tokens=1))
        while engine.has_work:
            engine.step()
    assert engine.num_steps == 4
    assert engine.scheduler.prefixes.find(np.array(common, np.int32)).ready is None


def test_a_scored_prompt_is_fed_whole_and_kept(prefilled: list[int]) -> None:
    engine = engine_of()
    plain = run(engine, request_of(prompt=HEADER))["a"]
    prompt, scored = run(engine, request_of(prompt=HEADER, prompt_logprobs=0))["a"]
    assert (sum(prefilled), prompt.index, cached([scored])) == (58, PROMPT, {0})
    assert len(prompt.logprobs) == 4 * 29 and scored.token_ids == plain[0].token_ids
    other = [*HEADER, 5, 6]
    run(engine, request_of(prompt=other, prompt_logprobs=0, max_tokens=0))
    assert cached(run(engine, request_of(prompt=other))["a"]) == {31}


def test_scoring_the_new_part_of_a_prompt_feeds_only_that(prefilled: list[int]) -> None:
    engine, longer = engine_of(), [*HEADER, 5, 6, 7, 8]
    whole, _ = run(engine_of(), request_of(prompt=longer, prompt_logprobs=2))["a"]
    run(engine, request_of(prompt=HEADER))
    for start in (30, -4):
        prefilled.clear()
        request = request_of(prompt=longer, prompt_logprobs=2, prompt_logprobs_start=start)
        part, sample = run(engine, request)["a"]
        assert (cached([part, sample]), sum(prefilled)) == ({29}, 4)
        assert part.token_ids == np.array([5, 6, 7, 8], "<i4").tobytes()
        for name in ("logprobs", "ranks", "top_ids", "top_logprobs"):
            assert getattr(part, name) == getattr(whole, name)[-len(getattr(part, name)) :]
            assert len(getattr(part, name)) == len(getattr(whole, name)) // 33 * 4


def test_many_scored_tails_of_one_prompt_feed_it_once(prefilled: list[int]) -> None:
    engine = engine_of(num_slots=40, max_step_rows=40, max_step_tokens=99, prefix_slots=30)
    tails = [[i, 3, 4] for i in range(2, 12)]
    scored: dict[str, int] = {"prompt_logprobs": 0, "prompt_logprobs_start": 30, "max_tokens": 0}
    ran = run(engine, *(request_of(f"{t}", HEADER + t, **scored) for t in tails))
    assert sum(prefilled) == 29 + 3 * len(tails)
    for tail in tails:
        whole = request_of("a", HEADER + tail, prompt_logprobs=0, max_tokens=0)
        expected = run(engine_of(), whole)["a"][0].logprobs
        assert ran[f"{tail}"][0].logprobs == expected[-12:]


def test_who_waits_for_an_aborted_request_goes_on_without_it(prefilled: list[int]) -> None:
    engine = engine_of(max_step_rows=4, max_step_tokens=5)
    alone = run(engine_of(), request_of("b", HEADER))["b"]
    prefilled.clear()
    for name in "abc":
        engine.add(request_of(name, HEADER))
    engine.step()
    engine.abort("b")
    engine.abort("a")
    (output,) = run(engine, request_of("d", HEADER, max_tokens=1))["d"]
    assert (sum(prefilled), output.cached_tokens) == (5 + 29, 29)
    assert output.token_ids == alone[0].token_ids[:4]
    assert engine.scheduler.prefixes.num_pinned == 0


def test_nobody_waits_for_what_is_served_later() -> None:
    engine = engine_of(max_step_rows=4, max_step_tokens=10)
    engine.add(request_of("low", HEADER))
    engine.step()
    high = request_of("high", HEADER, priority=1, max_tokens=1)
    ran = run(engine, high, request_of("other", [7] * 30, priority=1, max_tokens=1))
    assert cached(ran["high"]) == {0}


def test_a_pool_of_prefixes_in_use_keeps_nothing_and_holds_nobody_up() -> None:
    engine = engine_of(num_slots=20, max_step_rows=20, max_step_tokens=600, prefix_slots=1)
    ran = run(engine, *(request_of(str(i), [i] * 20, max_tokens=1) for i in range(2, 22)))
    assert [len(outputs) for outputs in ran.values()] == [1] * 20
    assert (engine.num_steps, engine.scheduler.prefixes.num_used) == (2, 1)


def test_with_the_cache_off_only_several_samples_need_a_prefix(prefilled: list[int]) -> None:
    engine = engine_of(prefix_cache=False)
    for n, pinned in ((1, 0), (3, 1), (1, 0)):
        engine.add(request_of(prompt=HEADER, n=n))
        engine.step()
        assert engine.scheduler.prefixes.num_used == pinned
        assert cached(run(engine)["a"]) == {0}
        assert engine.scheduler.prefixes.num_used == 0
    assert sum(prefilled) == 3 * 29


def test_a_sample_that_is_fed_again_without_tokens_is_of_the_new_weights() -> None:
    engine = engine_of(max_step_rows=8, prefill_step_tokens=4)
    engine.add(request_of(prompt=HEADER))
    for _ in range(3):
        assert not engine.step()
    engine.load_weights(tiny_weights(1), refeeds=True)
    assert {(output.first_version, output.versions) for output in run_all(engine)} == {(0, b"")}
