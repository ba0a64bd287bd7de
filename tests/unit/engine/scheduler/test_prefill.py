"""What a prompt begins from, waits for and leaves behind."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from engine.messages import PROMPT, Output, Request
from engine.process.engine import Engine
from engine.scheduler.prefill import MIN_SPLIT
from engine.steps.batch import Batch
from tests.conftest import MakeEngine, MakeRequest
from tests.engines.numpy_runner import NumpyLaunched, NumpyRunner, tiny_weights

HEADER = [2 + i % 29 for i in range(30)]


def run(engine: Engine, *requests: Request) -> dict[str, list[Output]]:
    """Add requests, all at once; what each gets, sample by sample."""
    said: defaultdict[str, list[Output]] = defaultdict(list)
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step_overlapped():
            said[output.id].append(output)
    return {
        name: sorted(outputs, key=lambda output: output.index) for name, outputs in said.items()
    }


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


@pytest.mark.parametrize("n", [1, 3])
def test_a_prompt_that_comes_again_is_not_prefilled_again(
    make_engine: MakeEngine, make_request: MakeRequest, prefilled: list[int], n: int
) -> None:
    engine = make_engine()
    first = run(engine, make_request(prompt=HEADER, n=n))["a"]
    assert (sum(prefilled), cached(first)) == (29, {0})
    again = run(engine, make_request(prompt=HEADER, n=n))["a"]
    assert (sum(prefilled), cached(again)) == (29, {29})
    assert [one.token_ids for one in again] == [one.token_ids for one in first]


def test_equal_prompts_that_come_together_are_prefilled_once(
    make_engine: MakeEngine, make_request: MakeRequest, prefilled: list[int]
) -> None:
    engine = make_engine(num_slots=30, max_step_rows=30)
    requests = [make_request(str(i), prompt=HEADER, seed=i, n=1 + i % 2) for i in range(20)]
    said = run(engine, *requests)
    assert sum(prefilled) == 29
    assert [cached(said[str(i)]) for i in range(20)] == [{0}] + [{29}] * 19


def test_what_two_prompts_share_is_made_with_the_second_and_used_by_the_third(
    make_engine: MakeEngine, make_request: MakeRequest, prefilled: list[int]
) -> None:
    engine = make_engine()
    for name, tail, expected, fed in (
        ("a", [3, 4, 5], 0, 32),
        ("b", [6, 7, 8], 0, 32),
        ("c", [9, 10, 11], 30, 2),
        ("d", [6, 7, 12], 32, 0),
        ("e", [6, 7, 8, 9, 10], 32, 2),
    ):
        prefilled.clear()
        said = run(engine, make_request(name, prompt=HEADER + tail))[name]
        assert (cached(said), sum(prefilled)) == ({expected}, fed), name


def test_prompts_of_one_header_that_come_together_feed_it_twice(
    make_engine: MakeEngine, make_request: MakeRequest, prefilled: list[int]
) -> None:
    engine = make_engine(num_slots=20, max_step_rows=20, prefix_slots=30)
    said = run(engine, *(make_request(str(i), prompt=[*HEADER, i, 3, 4]) for i in range(2, 20)))
    assert [cached(outputs) for outputs in said.values()] == [{0}] * 2 + [{30}] * 16
    assert sum(prefilled) == 2 * 30 + 18 * 2


def test_little_in_common_is_no_reason_to_split(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    engine = make_engine()
    common = HEADER[: MIN_SPLIT - 1]
    for name in "ab":
        engine.add(make_request(name, prompt=[*common, ord(name) % 32, 9], max_tokens=1))
        while engine.has_work:
            engine.step()
    assert engine.num_steps == 4
    assert engine.scheduler.prefixes.find(np.array(common, np.int32)).ready is None


def test_a_scored_prompt_is_fed_whole_and_kept(
    make_engine: MakeEngine, make_request: MakeRequest, prefilled: list[int]
) -> None:
    engine = make_engine()
    plain = run(engine, make_request(prompt=HEADER))["a"]
    prompt, scored = run(engine, make_request(prompt=HEADER, prompt_logprobs=0))["a"]
    assert (sum(prefilled), prompt.index, cached([scored])) == (58, PROMPT, {0})
    assert len(prompt.logprobs) == 4 * 29 and scored.token_ids == plain[0].token_ids
    other = [*HEADER, 5, 6]
    run(engine, make_request(prompt=other, prompt_logprobs=0, max_tokens=0))
    assert cached(run(engine, make_request(prompt=other))["a"]) == {31}


def test_who_waits_for_an_aborted_request_goes_on_without_it(
    make_engine: MakeEngine, make_request: MakeRequest, prefilled: list[int]
) -> None:
    engine = make_engine(max_step_rows=4, max_step_tokens=5)
    alone = run(make_engine(), make_request("b", prompt=HEADER))["b"]
    prefilled.clear()
    for name in "abc":
        engine.add(make_request(name, prompt=HEADER))
    engine.step()
    engine.abort("b")
    engine.abort("a")
    (output,) = run(engine, make_request("d", prompt=HEADER, max_tokens=1))["d"]
    assert sum(prefilled) == 5 + 29
    assert output.cached_tokens == 29
    assert output.token_ids == alone[0].token_ids[:4]
    assert engine.scheduler.prefixes.num_pinned == 0


def test_nobody_waits_for_what_is_served_later(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    engine = make_engine(max_step_rows=4, max_step_tokens=10)
    engine.add(make_request("low", prompt=HEADER))
    engine.step()
    said = run(engine, make_request("high", prompt=HEADER, priority=1, max_tokens=1),
               make_request("other", prompt=[7] * 30, priority=1, max_tokens=1))  # fmt: skip
    assert cached(said["high"]) == {0}


def test_a_pool_of_prefixes_in_use_keeps_nothing_and_holds_nobody_up(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    engine = make_engine(num_slots=20, max_step_rows=20, max_step_tokens=600, prefix_slots=1)
    said = run(engine, *(make_request(str(i), prompt=[i] * 20, max_tokens=1) for i in range(2, 22)))
    assert all(len(outputs) == 1 for outputs in said.values())
    assert engine.num_steps == 2
    assert engine.scheduler.prefixes.num_used == 1


def test_the_only_prefix_slot_may_hold_what_several_samples_would_begin_from(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    engine, other = make_engine(prefix_slots=1), make_engine(prefix_slots=1)
    run(engine, make_request(prompt=HEADER[:20]))
    said = run(engine, make_request(prompt=HEADER, n=3))["a"]
    assert cached(said) == {0}
    assert said == run(other, make_request(prompt=HEADER, n=3))["a"]


def test_new_weights_begin_from_nothing_kept(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    engine, new = make_engine(), tiny_weights(seed=1)
    run(engine, make_request(prompt=HEADER))
    engine.load_weights(new)
    assert run(engine, make_request(prompt=HEADER)) == run(
        make_engine(model=new), make_request(prompt=HEADER)
    )


def test_with_the_cache_off_only_several_samples_need_a_prefix(
    make_engine: MakeEngine, make_request: MakeRequest, prefilled: list[int]
) -> None:
    engine = make_engine(prefix_cache=False)
    for n, pinned in ((1, 0), (3, 1), (1, 0)):
        engine.add(make_request(prompt=HEADER, n=n))
        engine.step()
        assert engine.scheduler.prefixes.num_used == pinned
        assert cached(run(engine)["a"]) == {0}
        assert engine.scheduler.prefixes.num_used == 0
    assert sum(prefilled) == 3 * 29
