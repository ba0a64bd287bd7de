"""The last states of samples, kept: what goes on from one feeds one token, and is the same."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from srm.engine.messages import Output
from tests.unit.engine.process.test_states import (
    MODEL,
    OTHER,
    TOKEN,
    asked,
    make,
    run,
    run_alone,
    tokens,
)

PROMPT = [1, 2, 3]
STOPS = tuple(range(0, MODEL.vocab_size, 3))


def ids(output: Output) -> list[int]:
    return [*np.frombuffer(output.token_ids, "<i4").tolist()]


@given(
    prompt=st.lists(TOKEN, min_size=1, max_size=12),
    n=st.integers(1, 6),
    max_tokens=st.integers(1, 6),
    stops=st.sampled_from([(), STOPS]),
    steps=st.booleans(),
)
def test_what_goes_on_from_a_sample_is_the_same(
    prompt: list[int], n: int, max_tokens: int, stops: tuple[int, ...], steps: bool
) -> None:
    engine = make()
    params = {"n": n, "max_tokens": max_tokens, "stop_token_ids": stops, "ignore_eos": True}
    engine.add(asked("a", prompt, params=params, keeps_ends=True))
    samples = []
    while engine.has_work:
        samples += engine.step() if steps else engine.step_overlapped()
    for sample in samples:
        longer = prompt + ids(sample)
        engine.add(asked("b", longer))
        outputs = run(engine)
        assert tokens(outputs) == run_alone(asked("b", longer))
        assert {output.cached_tokens for output in outputs} == {len(longer) - 1}
    assert not engine.scheduler.prefixes.num_pinned
    assert engine.scheduler.table.num_free == 8
    table = engine.scheduler.table
    assert not (table.num_keeping or table.num_in_wait)


def test_where_all_prompts_are_in_use_no_state_is_kept() -> None:
    engine = make(prefix_slots=1)
    engine.add(asked("a", PROMPT, params={"n": 6, "max_tokens": 2}, keeps_ends=True))
    engine.add(asked("long", PROMPT[::-1], params={"n": 8, "max_tokens": 9}))
    samples = [output for output in run(engine) if output.id == "a"]
    longer = PROMPT + ids(samples[0])
    engine.add(asked("b", longer))
    assert tokens(run(engine)) == run_alone(asked("b", longer))


def test_no_state_is_kept_without_kept_prompts() -> None:
    engine = make(prefix_cache=False)
    engine.add(asked("a", PROMPT, params={"ignore_eos": True}, keeps_ends=True))
    longer = PROMPT + ids(run(engine)[0])
    engine.add(asked("b", longer))
    assert {output.cached_tokens for output in run(engine)} == {0}


def test_a_state_of_several_weights_is_not_kept() -> None:
    engine = make()
    engine.add(asked("a", PROMPT, params={"n": 1, "ignore_eos": True}, keeps_ends=True))
    for _ in range(4):
        engine.step()
    engine.load_weights(OTHER)  # the sample goes on from the state of the weights before
    longer = PROMPT + ids(run(engine)[0])
    engine.add(asked("b", longer))
    outputs = run(engine)
    assert outputs[0].cached_tokens < len(longer) - 1
    fresh = make()
    fresh.load_weights(OTHER)
    fresh.add(asked("b", longer))
    assert tokens(outputs) == tokens(run(fresh))
