"""What the scheduler decides, batch by batch, on tokens that the test makes up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.errors import InvalidRequest, Overloaded
from engine.messages import Output
from engine.scheduler.scheduler import Scheduler
from engine.steps.batch import FROM_DEVICE, Batch, StepResult
from tests.conftest import MakeRequest
from tests.engines.numpy_runner import TINY, check_batch


def make_scheduler(
    num_slots: int = 8,
    max_step_rows: int = 8,
    max_step_tokens: int = 64,
    max_waiting: int = 100,
    prefix_slots: int = 4,
) -> Scheduler:
    return Scheduler(
        TINY,
        EngineConfig(
            num_slots=num_slots,
            max_step_rows=max_step_rows,
            max_step_tokens=max_step_tokens,
            max_waiting=max_waiting,
            prefix_slots=prefix_slots,
        ),
    )


def scheduled(scheduler: Scheduler) -> Batch:
    batch = scheduler.schedule()
    assert batch is not None
    check_batch(batch, TINY, scheduler.table.num_slots + scheduler.prefixes.num_slots)
    return batch


def complete(scheduler: Scheduler, batch: Batch, tokens: Sequence[int] | int = 9) -> list[Output]:
    ids = np.broadcast_to(np.array(tokens, np.int32), batch.num_decode)
    return scheduler.complete(batch, StepResult(ids, np.full(len(ids), -0.5, np.float32)))


def step(scheduler: Scheduler, tokens: Sequence[int] | int = 9) -> list[Output]:
    return complete(scheduler, scheduled(scheduler), tokens)


def rows(batch: Batch) -> list[list[int]]:
    offsets = batch.row_offsets.tolist()
    return [batch.token_ids[start:stop].tolist() for start, stop in pairwise(offsets)]


def tokens_of(output: Output) -> list[int]:
    return [int(token) for token in np.frombuffer(output.token_ids, "<i4")]


def test_a_prompt_is_prefilled_up_to_its_last_token(make_request: MakeRequest) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(prompt=[5, 6, 7, 8], max_tokens=2))
    prefill = scheduled(scheduler)
    assert (prefill.num_decode, rows(prefill), prefill.positions.tolist()) == (0, [[5, 6, 7]], [0])
    assert complete(scheduler, prefill) == []
    first = scheduled(scheduler)
    assert (rows(first), first.positions.tolist(), first.ends.tolist()) == ([[8]], [3], [False])
    assert complete(scheduler, first) == []
    second = scheduled(scheduler)
    assert (rows(second), second.positions.tolist()) == ([[FROM_DEVICE]], [4])
    assert second.ends.tolist() == [True]
    (output,) = complete(scheduler, second, 11)
    assert tokens_of(output) == [9, 11]
    assert output.finish_reason == "length"
    assert scheduler.schedule() is None
    assert scheduler.num_requests == scheduler.num_waiting == 0


def test_who_left_the_queue_is_counted(make_request: MakeRequest) -> None:
    scheduler = make_scheduler(num_slots=2)
    counts = [scheduler.num_left]
    for _ in range(2):
        scheduler.add(make_request(prompt=[5], n=3))
        counts.append(scheduler.num_left)
        scheduled(scheduler)
        counts.append(scheduler.num_left)
        scheduler.abort("a")
    assert [*counts, scheduler.num_left] == [0, 0, 2, 3, 5, 6]


def test_a_prompt_of_one_token_has_nothing_to_prefill(make_request: MakeRequest) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(prompt=[5], n=3, max_tokens=1))
    batch = scheduled(scheduler)
    assert (batch.num_decode, rows(batch)) == (3, [[5]] * 3)
    assert batch.positions.tolist() == [0, 0, 0]
    assert scheduler.prefixes.num_used == 0
    assert sorted(output.index for output in complete(scheduler, batch)) == [0, 1, 2]


def test_samples_fork_from_one_prefix_until_the_last_one_has(
    make_request: MakeRequest,
) -> None:
    scheduler = make_scheduler(num_slots=3)
    scheduler.add(make_request(n=5, max_tokens=2))
    prefix = int(scheduled(scheduler).write_slots[0])
    assert (scheduler.prefixes.num_pinned, scheduler.num_waiting) == (1, 5)
    forks = scheduled(scheduler)
    assert forks.read_slots.tolist() == [prefix] * 3
    assert len({prefix, *forks.write_slots.tolist()}) == 4
    assert scheduler.num_waiting == 2
    complete(scheduler, forks)
    assert len(step(scheduler)) == 3
    last = scheduled(scheduler)
    assert last.read_slots.tolist() == [prefix] * 2
    assert scheduler.prefixes.num_pinned == 0  # nobody is still to read it
    complete(scheduler, last)
    assert [output.index for output in sorted(step(scheduler), key=lambda o: o.index)] == [3, 4]
    assert scheduler.table.num_free == 3


def test_n_may_be_far_larger_than_the_pool(make_request: MakeRequest) -> None:
    scheduler = make_scheduler(num_slots=4, max_step_rows=2)
    scheduler.add(make_request(prompt=[3] * 30, n=50, max_tokens=2))
    prefilled, ended = 0, Counter[int]()
    while (batch := scheduler.schedule()) is not None:
        check_batch(batch, TINY, 8)
        prefilled += batch.num_tokens - batch.num_decode
        ended.update(output.index for output in complete(scheduler, batch))
    assert prefilled == 29
    assert ended == Counter(range(50))


def test_long_prompts_are_fed_in_chunks_behind_the_decode_rows(make_request: MakeRequest) -> None:
    scheduler = make_scheduler(max_step_rows=2, max_step_tokens=5)
    scheduler.add(make_request("decoding", prompt=[4], max_tokens=20))
    step(scheduler)
    scheduler.add(make_request("long", prompt=list(range(2, 13))))
    scheduler.add(make_request("next", prompt=[20, 21, 22]))
    chunks = []
    for _ in range(4):
        batch = scheduled(scheduler)
        assert batch.num_tokens <= 5
        chunks.append(rows(batch))
        complete(scheduler, batch)
    assert chunks == [
        [[FROM_DEVICE], [2, 3, 4, 5]],
        [[FROM_DEVICE], [6, 7, 8, 9]],
        [[FROM_DEVICE], [10, 11], [20, 21]],
        [[FROM_DEVICE], [12]],
    ]


def test_a_slot_is_not_taken_long_before_it_can_be_prefilled(make_request: MakeRequest) -> None:
    scheduler = make_scheduler(max_step_rows=2, max_step_tokens=5)
    for name in "abcd":
        scheduler.add(make_request(name, prompt=[3] * 20))
    scheduled(scheduler)
    assert scheduler.table.num_owned == 1


def test_more_sequences_than_rows_are_served_in_turn(make_request: MakeRequest) -> None:
    scheduler = make_scheduler(num_slots=7, max_step_rows=3)
    scheduler.add(make_request(prompt=[5], n=7, max_tokens=60))
    served = Counter[int]()
    for turn in range(1, 15):
        batch = scheduled(scheduler)
        assert batch.num_decode == 3
        served.update(batch.sequence_ids.tolist())
        complete(scheduler, batch)
        counts = [served[i] for i in range(7)]
        assert max(counts) - min(counts) <= 1, f"unfair after {turn} steps"


def test_priority_comes_before_arrival(make_request: MakeRequest) -> None:
    scheduler = make_scheduler(num_slots=1)
    for name, priority in (("a", 0), ("b", 0), ("c", 2), ("d", -1)):
        scheduler.add(make_request(name, prompt=[5], priority=priority, max_tokens=1))
    assert [step(scheduler)[0].id for _ in range(4)] == ["c", "a", "b", "d"]


def test_priority_comes_before_samples_of_requests_under_way(make_request: MakeRequest) -> None:
    scheduler = make_scheduler(num_slots=2)
    scheduler.add(make_request("many", prompt=[5], n=10, max_tokens=1))
    step(scheduler)
    scheduler.add(make_request("urgent", prompt=[5], priority=1, max_tokens=1))
    assert {output.id for output in step(scheduler)} == {"many", "urgent"}
    scheduler.add(make_request("later", prompt=[5], max_tokens=1))
    assert {output.id for output in step(scheduler)} == {"many"}


def test_prompts_of_several_samples_wait_for_prefix_slots(make_request: MakeRequest) -> None:
    scheduler = make_scheduler(num_slots=4, prefix_slots=2)
    for token, name in enumerate("abcd", 5):
        scheduler.add(make_request(name, prompt=[token, 4], n=3, max_tokens=2))
    assert scheduled(scheduler).num_rows == 2
    assert scheduler.prefixes.num_pinned == 2
    ended = Counter[str]()
    while (batch := scheduler.schedule()) is not None:
        check_batch(batch, TINY, 6)
        ended.update(output.id for output in complete(scheduler, batch))
    assert ended == Counter(dict.fromkeys("abcd", 3))


def test_a_blocked_prefix_does_not_hold_up_forks_behind_it(make_request: MakeRequest) -> None:
    scheduler = make_scheduler(num_slots=1, prefix_slots=1)
    scheduler.add(make_request("low", n=3, max_tokens=2))
    scheduled(scheduler)
    scheduler.add(make_request("high", prompt=[8, 9], n=3, max_tokens=2, priority=9))
    ended = [output.id for _ in range(20) if (batch := scheduler.schedule()) is not None
             for output in complete(scheduler, batch)]  # fmt: skip
    assert ended == ["low"] * 3 + ["high"] * 3


@pytest.mark.parametrize(
    ("token", "params", "reason"),
    [
        (1, {"ignore_eos": False}, "stop"),
        (1, {}, None),
        (4, {"stop_token_ids": (3, 4)}, "stop"),
        (-1, {}, "error"),
        (-1, {"max_tokens": 1}, "error"),
        (4, {"stop_token_ids": (4,), "max_tokens": 1}, "stop"),
        (9, {"max_tokens": 1}, "length"),
        (-1, {"stop_token_ids": tuple(range(32))}, "error"),
    ],
)
def test_why_a_sequence_ends(
    make_request: MakeRequest, token: int, params: dict[str, object], reason: str | None
) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(prompt=[5], **params))
    outputs = step(scheduler, token)
    if reason is None:
        assert outputs == []
        return
    (output,) = outputs
    assert output.finish_reason == reason
    assert tokens_of(output) == ([] if reason == "error" else [token])
    assert (output.error is not None) == (reason == "error")
    assert scheduler.table.num_free == 8


def test_a_stream_says_each_token_once(make_request: MakeRequest) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(prompt=[5], emit="delta", max_tokens=9, logprobs=0))
    outputs = [output for token in (7, 8, -1) for output in step(scheduler, token)]
    assert [tokens_of(output) for output in outputs] == [[7], [8], []]
    assert [len(output.logprobs) for output in outputs] == [4, 4, 0]
    assert [output.finish_reason for output in outputs] == [None, None, "error"]


def test_logprobs_come_only_to_those_who_asked(make_request: MakeRequest) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("asks", prompt=[5], max_tokens=2, logprobs=0))
    scheduler.add(make_request("not", prompt=[5], max_tokens=2))
    step(scheduler)
    logprobs = {output.id: output.logprobs for output in step(scheduler)}
    assert np.frombuffer(logprobs["asks"], "<f4").tolist() == [-0.5, -0.5]
    assert logprobs["not"] == b""


def test_rows_of_a_sequence_that_has_ended_are_dropped(make_request: MakeRequest) -> None:
    scheduler = make_scheduler(num_slots=1)
    scheduler.add(make_request("a", prompt=[5], stop_token_ids=(4,), max_tokens=9))
    scheduler.add(make_request("b", prompt=[6], max_tokens=9))
    first, second = scheduled(scheduler), scheduled(scheduler)
    (output,) = complete(scheduler, first, 4)
    assert (output.id, output.finish_reason) == ("a", "stop")
    third = scheduled(scheduler)  # b in the slot that the second step still writes for a
    assert rows(third) == [[6]]
    assert complete(scheduler, second, 4) == []
    assert complete(scheduler, third) == []
    assert scheduler.num_requests == 1


def test_the_last_token_is_told_from_the_batch_not_the_table(make_request: MakeRequest) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(prompt=[5], max_tokens=2))
    first, second = scheduled(scheduler), scheduled(scheduler)
    assert scheduler.schedule() is None  # two tokens are under way: no third row
    assert complete(scheduler, first, 7) == []
    (output,) = complete(scheduler, second, 8)
    assert tokens_of(output) == [7, 8]


def test_abort_frees_everything_at_once_wherever_the_request_is(make_request: MakeRequest) -> None:
    scheduler = make_scheduler(num_slots=3, max_step_rows=4, max_step_tokens=5)
    scheduler.add(make_request("forking", n=9, prompt=[3, 4]))
    step(scheduler)
    step(scheduler)
    scheduler.add(make_request("waiting", n=2))
    assert scheduler.abort("forking")
    assert (scheduler.table.num_free, scheduler.num_waiting) == (3, 2)
    assert scheduler.abort("waiting")
    for n in (1, 2):
        scheduler.add(make_request("prefilling", n=n, prompt=[8] * 30))
        step(scheduler)
        assert (scheduler.table.num_owned, scheduler.prefixes.num_pinned) == (n == 1, 1)
        assert scheduler.abort("prefilling")
        assert (scheduler.table.num_owned, scheduler.prefixes.num_pinned) == (0, 0)
        assert scheduler.num_waiting == 0
    assert not scheduler.abort("prefilling")
    assert scheduler.schedule() is None
    assert scheduler.request_ids() == []


def test_abort_frees_no_slot_of_another_request(make_request: MakeRequest) -> None:
    """Also where both were given the same slots, one after the other, and one of them twice."""
    scheduler = make_scheduler(num_slots=4, max_step_rows=4)
    scheduler.add(make_request("many", prompt=[5], n=9, max_tokens=1))
    step(scheduler)
    scheduled(scheduler)  # the same slots again; their last tokens are under way
    scheduler.add(make_request("other", prompt=[6], n=2, priority=1))
    assert scheduler.abort("many")
    assert scheduler.table.num_free == 4
    scheduler.add(make_request("many", prompt=[5], n=1))
    others = scheduled(scheduler)
    assert scheduler.table.num_owned == 3
    assert scheduler.abort("many")
    assert scheduler.table.num_owned == 2
    complete(scheduler, others)
    assert scheduler.abort("other")
    assert scheduler.table.num_free == 4


def test_turns_go_round_where_few_slots_run(make_request: MakeRequest) -> None:
    """Running slots lie far apart: the search for them must neither miss nor repeat one."""
    scheduler = make_scheduler(num_slots=500, max_step_rows=7, max_waiting=500)
    for i in range(50):  # every tenth sequence is long
        scheduler.add(make_request(f"long {i}", prompt=[5], max_tokens=60))
        scheduler.add(make_request(f"short {i}", prompt=[5], n=9, max_tokens=1))
    while scheduler.table.num_owned != 50:
        step(scheduler)
    served = Counter[int]()
    for _ in range(100):
        batch = scheduled(scheduler)
        assert batch.num_decode == 7
        served.update(batch.sequence_ids.tolist())
        complete(scheduler, batch)
    assert len(served) == 50
    assert max(served.values()) - min(served.values()) <= 1


def test_an_aborted_request_says_nothing_more(make_request: MakeRequest) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", prompt=[5], emit="delta"))
    scheduler.add(make_request("b", prompt=[6], emit="delta"))
    batch = scheduled(scheduler)
    scheduler.abort("a")
    assert [output.id for output in complete(scheduler, batch)] == ["b"]


def test_equal_ids_are_refused_while_the_first_runs(make_request: MakeRequest) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(prompt=[5], max_tokens=1))
    assert scheduler.has_request("a")
    with pytest.raises(InvalidRequest, match="in use") as error:
        scheduler.add(make_request())
    assert error.value.param == "id"
    step(scheduler)
    scheduler.add(make_request())


def test_n_beyond_the_queue_is_refused_for_good(make_request: MakeRequest) -> None:
    scheduler = make_scheduler(max_waiting=10)
    with pytest.raises(InvalidRequest, match="at most max_waiting = 10, got 11") as error:
        scheduler.add(make_request(n=11))
    assert error.value.param == "n"
    scheduler.add(make_request(n=10))


def test_a_full_queue_is_refused_for_now(make_request: MakeRequest) -> None:
    scheduler = make_scheduler(num_slots=4, max_waiting=10)
    scheduler.add(make_request("a", n=8, prompt=[5], max_tokens=1))
    with pytest.raises(Overloaded, match="8 of at most 10") as error:
        scheduler.add(make_request("b", n=3, prompt=[5]))
    assert error.value.retry_after_s >= 1
    step(scheduler)
    scheduler.add(make_request("b", n=3, prompt=[5]))


def test_one_slot_serves_any_n(make_request: MakeRequest) -> None:
    scheduler = make_scheduler(num_slots=1, prefix_slots=1)
    scheduler.add(make_request("a", n=3, max_tokens=1))
    scheduler.add(make_request("b", n=2, prompt=[5], max_tokens=1))
    # The slot would stand idle while the prompt of a is prefilled.
    assert [output.id for _ in range(5) for output in step(scheduler)] == [*"baaab"]


def test_nothing_to_do_is_no_batch() -> None:
    assert make_scheduler().schedule() is None


def test_a_batch_line_that_fills_the_queue_leaves_it_to_people(make_request: MakeRequest) -> None:
    scheduler = make_scheduler(max_waiting=100)
    scheduler.add(make_request("line", n=99, priority=-1000))
    with pytest.raises(Overloaded, match="99 of at most 100"):
        scheduler.add(make_request("other line", n=2, priority=-1000))
    scheduler.add(make_request("a person", n=98))
    with pytest.raises(Overloaded, match="98 of at most 100") as error:
        scheduler.add(make_request("another", n=4))
    assert error.value.excess == 2
    with pytest.raises(Overloaded, match="197 of at most 100"):
        scheduler.add(make_request("other line", n=2, priority=-1000))
    for name in ("line", "a person"):
        scheduler.abort(name)
    scheduler.add(make_request("other line", n=100, priority=-1000))


def test_who_was_abandoned_gives_way_to_those_who_wait(make_request: MakeRequest) -> None:
    scheduler = make_scheduler(num_slots=4)
    for name in "abc":
        scheduler.add(make_request(name, prompt=[5], n=1 + (name == "a")))
    step(scheduler)
    for name in ("b", "a", "c", "a"):
        scheduler.abandon(name, is_alone=True)
    assert scheduler.in_the_way() == []  # nobody waits
    scheduler.add(make_request("line", n=9, prompt=[5], priority=-1000))
    scheduler.add(make_request("gone", n=9, prompt=[5]))
    scheduler.abandon("gone", is_alone=True)
    assert scheduler.in_the_way() == []  # nobody whom they may let wait
    scheduler.add(make_request("one", prompt=[5]))
    assert scheduler.in_the_way() == ["b"]
    scheduler.add(make_request("two", prompt=[5], priority=3))
    assert scheduler.in_the_way() == ["b", "c"]
    scheduler.abandon("c", is_alone=False)
    assert scheduler.in_the_way() == ["b", "a"]
    for name in ("b", "a"):
        scheduler.abort(name)
    assert scheduler.in_the_way() == []
    scheduler.abandon("nothing", is_alone=True)
    assert scheduler.in_the_way() == []
