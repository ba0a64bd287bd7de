"""Which engine is to have what."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from srm.engine.client.spread import PART_SAMPLES, PREFIX_BYTES, Part, Spread
from srm.engine.messages import Request
from tests.kit.engines.making import IDLE, request_of


def spread_of(count: int, *busy: int) -> Spread:
    """Engines of 8 slots, which run so many sequences of others."""
    spread = Spread(count)
    for engine in range(count):
        running = busy[engine] if engine < len(busy) else 0
        spread.note_status(engine, msgspec.structs.replace(IDLE, running=running))
    return spread


@given(st.integers(1, 64), st.integers(1, 1_000), st.booleans(), st.sampled_from([None, 0]))
def test_each_sample_is_in_one_part_and_no_engine_has_two(
    count: int, n: int, durable: bool, prompt_logprobs: int | None
) -> None:
    request = request_of("a", n=n, durable=durable, prompt_logprobs=prompt_logprobs, first_wave=64)
    parts = spread_of(count).parts(request, 3)
    if len(parts) == 1:
        assert parts[0].request == request
    else:
        assert np.array_equal(np.sort(np.concatenate([own(part) for part in parts])), range(n))
        assert min(part.request.params.n for part in parts) >= PART_SAMPLES
        assert prompt_logprobs is None
        waves = [own(part)[: part.request.first_wave] for part in parts]
        assert sorted(np.concatenate(waves)) == [*range(min(n, 64))], "it is all engines' together"
    assert len({part.engine for part in parts}) == len({part.request.id for part in parts})
    for part in parts:
        assert part.place == 3 and part.request.params.n == len(own(part, n))
        samples = own(part, n)
        assert part.local(samples).tolist() == list(range(len(samples)))
        for cut in (0, n // 2, n):
            assert part.first_from(cut) == np.count_nonzero(samples < cut)


def own(part: Part, n: int = 0) -> Any:
    """The samples that its engine is told it has."""
    sent = np.frombuffer(part.request.samples, "<i4")
    return sent if len(sent) else np.arange(n)


def engine_of(spread: Spread, request: Request) -> int:
    (part,) = spread.parts(request, 0)
    spread.given[part.engine] += part.request.params.n
    return part.engine


def test_the_engine_with_the_least_to_do_is_next() -> None:
    spread = spread_of(3, 2, 0, 1)
    results = [engine_of(spread, request_of(f"{number}")) for number in range(6)]
    assert results == [1, 1, 2, 0, 1, 2]
    spread.note_status(1, None)
    assert engine_of(spread, request_of("b")) != 1
    draining = msgspec.structs.replace(IDLE, state="draining")
    spread.note_status(0, draining)
    assert {engine_of(spread, request_of(f"c{number}")) for number in range(9)} == {2}


def test_sequences_of_this_process_are_not_counted_twice() -> None:
    spread = spread_of(2)
    assert [engine_of(spread, request_of(f"{number}")) for number in range(4)] == [0, 1, 0, 1]
    spread.note_status(0, msgspec.structs.replace(IDLE, running=2))
    assert engine_of(spread, request_of("a")) == 0


def test_each_process_begins_with_another_of_idle_engines() -> None:
    """A few long streams of each of many processes would else be the first engines' alone."""
    firsts = []
    for first in range(4):
        spread = spread_of(4)
        spread.share(first, 4)
        firsts.append([engine_of(spread, request_of(f"{number}")) for number in range(4)])
    assert firsts == [[0, 1, 2, 3], [1, 2, 3, 0], [2, 3, 0, 1], [3, 0, 1, 2]]


@pytest.mark.parametrize("own", [1, 3])
def test_what_batches_have_waiting_is_no_work_of_other_processes(own: int) -> None:
    """Of one API process: what it gives an idle engine is not multiplied by their thousands."""
    spread = spread_of(2)
    spread.share(0, 1)
    spread.given = [own, 0]
    waiting = msgspec.structs.replace(IDLE, running=200, waiting=4000)
    for engine, status in enumerate((waiting, IDLE)):
        spread.note_status(engine, status)
    assert {engine_of(spread, request_of(f"{number}")) for number in range(100)} == {1}


STATUS_STEPS = 125
"""Steps of 8 ms in the second between two statuses."""


def loads_by_step(processes: int, engines: int, rows: int, num_steps: int, lost: int) -> Any:
    """i64[step, engine] sequences of engines, which so many processes give sequences of 32 to 256
    steps at random times, `rows` to an engine on average. Engine 0 is lost from step `lost` on for
    as long as two statuses take."""
    rng = np.random.default_rng(1)
    spreads = [Spread(engines) for _ in range(processes)]
    ends: list[list[tuple[int, int]]] = [[] for _ in range(num_steps + 257)]
    loads, total = [], np.zeros(engines, np.int64)
    request = request_of("a")

    def start(step: int, process: int) -> None:
        (part,) = spreads[process].parts(request, 0)
        spreads[process].given[part.engine] += 1
        total[part.engine] += 1
        ends[step + int(rng.integers(32, 257))].append((process, part.engine))

    def end(process: int, engine: int) -> None:
        spreads[process].given[engine] -= 1
        total[engine] -= 1

    for number, spread in enumerate(spreads):
        spread.share(number, processes)
    for step in range(num_steps):
        is_lost = lost <= step < lost + 2 * STATUS_STEPS
        if step == lost:
            for spread in spreads:
                spread.note_status(0, None)
            for due in ends[step:]:
                again = [process for process, engine in due if engine == 0]
                due[:] = [item for item in due if item[1] > 0]
                for process in again:
                    end(process, 0)
                    start(step, process)
        for number, spread in enumerate(spreads):
            if step % STATUS_STEPS == number * STATUS_STEPS // processes:
                for engine in range(is_lost, engines):
                    busy = msgspec.structs.replace(
                        IDLE, num_slots=2 * rows, running=int(total[engine])
                    )
                    spread.note_status(engine, busy)
        for process, engine in ends[step]:
            end(process, engine)
        for _ in range(rng.poisson(rows * engines / 144.5)):
            start(step, int(rng.integers(processes)))
        loads.append(total.copy())
    return np.array(loads)


def test_processes_do_not_all_fill_the_gap_of_an_old_status() -> None:
    """Where each of 24 filled the gap that it had heard of, an engine had 1.6 times the mean."""
    lost, back = 500, 500 + 2 * STATUS_STEPS
    loads = loads_by_step(processes=24, engines=4, rows=64, num_steps=1_250, lost=lost)
    assert loads[back - 1, 0] == 0 and loads[back - 1].sum() > 200, "the others had all"
    settled = np.concatenate([loads[2 * STATUS_STEPS : lost], loads[back + 2 * STATUS_STEPS :]])
    assert (settled / settled.mean(axis=1, keepdims=True)).max() < 1.2
    assert np.abs(settled.mean(axis=0) / settled.mean() - 1).max() < 0.05


def test_prompts_that_begin_alike_meet_unless_that_costs_balance() -> None:
    spread = spread_of(4)
    for engine in range(4):
        spread.note_status(engine, msgspec.structs.replace(IDLE, num_slots=160))
    header = [7] * (PREFIX_BYTES // 4)
    results = [engine_of(spread, request_of(f"{index}", [*header, index])) for index in range(22)]
    assert len(set(results[:11])) == 1, "1/16 of 160 slots more than another, and the next one"
    assert len(set(results)) == 4 or len(set(results)) == 3
    assert len({engine_of(spread_of(4), request_of("a", [index])) for index in range(9)}) == 1


def test_a_durable_request_has_the_same_engines_each_time() -> None:
    quiet, busy = spread_of(3), spread_of(3, 9, 9)
    busy.note_status(2, None)
    request = request_of("line 7", n=30, durable=True)
    assert [part.engine for part in quiet.parts(request, 0)] == [
        part.engine for part in busy.parts(request, 0)
    ]
    single = {engine_of(quiet, request_of(f"{index}", durable=True)) for index in range(50)}
    assert single == {0, 1, 2}


def test_what_is_left_of_a_part_has_an_id_of_its_own() -> None:
    (part, _) = spread_of(2).parts(request_of("a~b", n=20), 0)
    again = part.again(np.array([2, 6]), 1, 5)
    third = again.again(np.array([6]), 0, None)
    assert [item.request.first_wave for item in (part, again, third)] == [None, 1, None]
    assert [item.request.id for item in (part, again, third)] == ["a~b", "a~b~2", "a~b~3"]
    assert (third.runs, third.engine, third.request.params.n) == (3, 0, 1)
    assert own(third).tolist() == [6] and third.sample(0) == 6
