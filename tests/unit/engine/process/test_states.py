"""States of prompts: what goes on from one is what the whole prompt gives, and feeds less."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from srm.engine.config import EngineConfig
from srm.engine.messages import PROMPT, Output, Request, SamplingParams
from srm.engine.process.engine import Engine
from srm.errors import InvalidRequest
from tests.kit.engines.making import sample_value
from tests.kit.engines.numpy_runner import NumpyRunner, tiny_weights

WEIGHTS, OTHER = tiny_weights(), tiny_weights(seed=1)
MODEL = WEIGHTS.config


def make(**settings: Any) -> Engine:
    config = EngineConfig(num_slots=8, max_step_rows=4, max_step_tokens=8, **settings)
    return Engine(MODEL, NumpyRunner(WEIGHTS, 8, config.prefix_slots), config, WEIGHTS.fingerprint)


def asked(id: str, prompt: list[int], **fields: Any) -> Request:
    params = SamplingParams(**{"n": 2, "max_tokens": 5, "seed": 3, **fields.pop("params", {})})
    ids = np.array(prompt, "<i4").tobytes()
    return Request(id, ids, params, **fields)


def state_of(engine: Engine, prompt: list[int], **fields: Any) -> bytes:
    alone = {"n": 1, "max_tokens": 0}
    engine.add(asked("state", prompt, params=alone, returns_state=True, **fields))
    outputs = run(engine)
    assert [output.index for output in outputs] == [PROMPT, 0]
    assert (outputs[1].finish_reason, outputs[1].token_ids) == ("length", b"")
    return outputs[0].state


def run(engine: Engine) -> list[Output]:
    outputs = []
    while engine.has_work:
        outputs += engine.step_overlapped()
    return outputs


def tokens(outputs: list[Output]) -> list[tuple[int, bytes]]:
    return sorted((output.index, output.token_ids) for output in outputs)


TOKEN = st.integers(0, MODEL.vocab_size - 1)


@given(
    prompt=st.lists(TOKEN, min_size=2, max_size=30),
    cut=st.integers(1, 29),
    n=st.integers(1, 6),
    before=st.lists(st.lists(TOKEN, min_size=1, max_size=30), max_size=3),
    prefix_slots=st.integers(1, 4),
    keeps=st.booleans(),
)
def test_a_prompt_from_a_state_gives_what_it_gives_whole(
    prompt: list[int], cut: int, n: int, before: list[list[int]], prefix_slots: int, keeps: bool
) -> None:
    cut = min(cut, len(prompt) - 1)
    params = {"n": n}
    expected = run_alone(asked("a", prompt, params=params))
    state = state_of(make(), prompt[: cut + 1])
    engine = make(prefix_slots=prefix_slots, prefix_cache=keeps)
    for number, other in enumerate(before):
        engine.add(asked(f"b{number}", other))
    engine.add(asked("a", prompt, params=params, state=state, state_length=cut, state_of="tiny-0"))
    outputs = [output for output in run(engine) if output.id == "a"]
    assert tokens(outputs) == expected
    assert not engine.scheduler.prefixes.num_pinned
    if not before and prefix_slots > 1:
        assert {output.cached_tokens for output in outputs} == {cut}
    made, whole = (np.frombuffer(state_of(each, prompt), "<f4") for each in (engine, make()))
    np.testing.assert_allclose(made, whole, rtol=1e-5, atol=1e-6)  # this runner keeps float64


def run_alone(request: Request) -> list[tuple[int, bytes]]:
    engine = make()
    engine.add(request)
    return tokens(run(engine))


def test_scores_of_a_prompt_are_the_same_from_a_state() -> None:
    prompt = [1, 2, 3, 4, 5, 6, 7]
    params = {"prompt_logprobs": 0, "prompt_logprobs_start": 5, "max_tokens": 0, "n": 1}
    plain, given_state = make(), make()
    plain.add(asked("a", prompt, params=params))
    for length in (2, 6):  # what is scored is fed, so the second is of no use
        state = state_of(make(), prompt[: length + 1])
        fields = {"state": state, "state_length": length, "state_of": "tiny-0"}
        given_state.add(asked(f"a{length}", prompt, params=params, **fields))
    (scores, *_), outputs = run(plain), run(given_state)
    assert {o.logprobs for o in outputs if o.index == PROMPT} == {scores.logprobs}


def test_the_state_of_one_token_is_empty_and_that_of_more_a_row() -> None:
    engine, counted = make(), sample_value("srm_engine_request_params_n_count")
    assert state_of(engine, [3]) == b""
    assert len(state_of(engine, [3, 4])) == 4 * MODEL.state_width
    # There may be no further step to publish them.
    assert sample_value("srm_engine_request_params_n_count") == counted + 2


def test_a_state_of_other_weights_is_not_used() -> None:
    prompt, state = [1, 2, 3, 4], bytes(4 * MODEL.state_width)
    request = asked("a", prompt, state=state, state_length=3, state_of="others")
    assert run_alone(request) == run_alone(asked("a", prompt))
    engine = make()
    request = msgspec.structs.replace(request, state_of="tiny-0")
    engine.add(request)
    engine.load_weights(OTHER)  # before it has begun
    other = Engine(MODEL, NumpyRunner(OTHER, 8), EngineConfig(num_slots=8), "tiny-1")
    other.add(asked("a", prompt))
    assert tokens(run(engine)) == tokens(run(other))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"state_length": 3, "state": b""}, "state"),
        ({"state_length": 3, "state": b"1234"}, "state"),
        ({"state": b"1234"}, "state"),
        ({"state_length": 4}, "state_length"),
        ({"state_length": -1}, "state_length"),
        ({"returns_state": True}, "returns_state"),
        ({"returns_state": True, "params": {"n": 1}}, "returns_state"),
        ({"returns_state": True, "params": {"max_tokens": 0}}, "returns_state"),
    ],
)
def test_a_wrong_field_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{named} must") as refused:
        make().add(asked("a", [1, 2, 3, 4], state_of="tiny-0", **fields))
    assert refused.value.param == named


def test_an_aborted_request_for_a_state_leaves_nothing() -> None:
    engine = make(prefix_slots=1)
    prompt = list(range(30))
    engine.add(asked("a", prompt, params={"n": 1, "max_tokens": 0}, returns_state=True))
    engine.step_overlapped()
    engine.abort("a")
    assert not run(engine) and not engine.scheduler.prefixes.num_pinned
    assert len(state_of(engine, prompt)) == 4 * MODEL.state_width


def test_weights_that_change_meanwhile_make_the_whole_state() -> None:
    prompt = list(range(30))
    engine = make()
    engine.add(asked("a", prompt, params={"n": 1, "max_tokens": 0}, returns_state=True))
    engine.step()  # some of it is fed
    engine.load_weights(OTHER)
    state = next(output.state for output in run(engine) if output.index == PROMPT)
    other = Engine(MODEL, NumpyRunner(OTHER, 8), EngineConfig(num_slots=8), "tiny-1")
    assert state == state_of(other, prompt)
