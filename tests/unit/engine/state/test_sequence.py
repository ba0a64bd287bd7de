"""Requests are checked once, at the door; a sample's random stream is its own."""

from __future__ import annotations

import numpy as np
import pytest

from engine.errors import ContextTooLong, InvalidRequest
from engine.messages import Request, SamplingParams
from engine.scheduler.accept import accept
from engine.scheduler.wait_queues import Line
from engine.state.sequence import SequenceGroup, sample_seeds
from tests.conftest import MakeRequest
from tests.engines.numpy_runner import TINY


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("n", 0),
        ("n", -3),
        ("temperature", -0.1),
        ("temperature", 101),
        ("temperature", 1e39),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_k", 2**31),
        ("top_p", -0.1),
        ("top_p", 1.01),
        ("top_p", float("nan")),
        ("min_p", -0.01),
        ("min_p", 1.5),
        ("seed", -1),
        ("seed", 2**64),
        ("logprobs", -1),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", 21),
        ("stop_token_ids", (3, 32)),
        ("stop_token_ids", (-1,)),
    ],
)
def test_a_parameter_out_of_range_is_named(
    make_request: MakeRequest, field: str, value: object
) -> None:
    with pytest.raises(InvalidRequest) as error:
        accept(make_request(**{field: value}), TINY, 0)
    assert error.value.param == field
    assert field in error.value.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0),
        ("temperature", 1e-9),
        ("temperature", 100),
        ("top_k", 2**31 - 1),
        ("top_p", 0),
        ("min_p", 1.0),
        ("seed", 2**64 - 1),
        ("max_tokens", 2**62),
        ("logprobs", 0),
        ("prompt_logprobs", 20),
        ("stop_token_ids", tuple(range(32)) * 3),
    ],
)
def test_the_ends_of_a_range_are_in_it(
    make_request: MakeRequest, field: str, value: object
) -> None:
    accept(make_request(**{field: value}), TINY, 0)


@pytest.mark.parametrize("data", [b"", b"\1\0\0", b"\1\0\0\0\0"])
def test_a_prompt_that_is_no_array_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="int32"):
        accept(Request(id="a", prompt_token_ids=data, params=SamplingParams()), TINY, 0)


@pytest.mark.parametrize("token", [-1, 32, 2**31 - 1])
def test_a_prompt_token_outside_the_vocabulary_is_refused(
    make_request: MakeRequest, token: int
) -> None:
    with pytest.raises(InvalidRequest, match=f"holds {token}; ids are 0 … 31") as error:
        accept(make_request(prompt=[1, token, 2]), TINY, 0)
    assert error.value.param == "prompt_token_ids"


def test_a_prompt_beyond_the_context_is_refused_with_both_lengths(
    make_request: MakeRequest,
) -> None:
    with pytest.raises(ContextTooLong, match=r"64 tokens.*65 tokens"):
        accept(make_request(prompt=[3] * 65), TINY, 0)


@pytest.mark.parametrize(
    ("length", "max_tokens", "expected"), [(64, 9, 1), (63, 9, 2), (1, 100, 64), (10, 9, 9)]
)
def test_outputs_are_cut_to_what_the_context_has_left(
    make_request: MakeRequest, length: int, max_tokens: int, expected: int
) -> None:
    group = accept(make_request(prompt=[3] * length, max_tokens=max_tokens), TINY, 0)
    assert group.max_outputs == expected


def test_end_of_text_is_a_stop_token_unless_ignored(make_request: MakeRequest) -> None:
    def stop_ids(ignore_eos: bool) -> frozenset[int]:
        request = make_request(stop_token_ids=(4, 5), ignore_eos=ignore_eos)
        return accept(request, TINY, 0).stop_ids

    assert stop_ids(ignore_eos=False) == {1, 4, 5}
    assert stop_ids(ignore_eos=True) == {4, 5}


def test_seeds_are_those_of_splitmix64() -> None:
    first = sample_seeds(1234567, np.arange(3, dtype=np.int64)).tolist()
    assert first == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_a_samples_seed_does_not_depend_on_who_starts_with_it() -> None:
    together = sample_seeds(2**64 - 1, np.arange(100, dtype=np.int64))
    alone = [sample_seeds(2**64 - 1, np.array([i], np.int64))[0] for i in range(100)]
    assert together.tolist() == alone
    assert len(set(alone)) == 100


def test_a_line_serves_by_priority_and_then_by_arrival(make_request: MakeRequest) -> None:
    line = Line()
    priorities = [0, 5, 0, -1, 5]
    groups = [
        accept(make_request(str(i), priority=priority), TINY, i)
        for i, priority in enumerate(priorities)
    ]
    for group in groups:
        line.push(group)
    assert [group.request.id for group in line] == ["1", "4", "0", "2", "3"]
    line.discard(groups[2])
    line.discard(groups[2])
    line.discard(groups[3])
    assert line.peek() is groups[1]
    assert drained(line) == ["1", "4", "0"]
    assert line.peek() is None
    line.discard(groups[0])


def drained(line: Line) -> list[str]:
    groups: list[SequenceGroup] = []
    while line.peek() is not None:
        groups.append(line.pop())
    return [group.request.id for group in groups]
