"""For any scenario, a request is a function of its index, and as long as it says."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from srm.loadtest.scenario import Scenario
from srm.loadtest.workload.workload import Workload
from tests.kit.serving import ROOT

LENGTHS = st.one_of(
    st.integers(40, 99).map(str),
    st.builds("uniform:{},{}".format, st.integers(40, 60), st.integers(60, 200)),
    st.builds("normal:{},{},min=40".format, st.floats(1, 200), st.floats(0, 100)),
    st.builds("lognormal:{},{},min=40,max=300".format, st.floats(1, 200), st.floats(0, 3)),
    st.just("choice:40=0.5,90=0.5"),
)
PREFIXES: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({}),
    st.fixed_dictionaries(
        {
            "prefixes": st.integers(1, 5),
            "prefix_tokens": st.integers(1, 38),
            "prefix_share": st.floats(0, 1),
        }
    ),
)
SCENARIOS = st.builds(
    lambda given_settings, prefixes, tokenizer, is_chat: Scenario(
        **given_settings,
        **prefixes,
        tokenizer=ROOT / "models/demo" if tokenizer or is_chat else None,
        api="chat" if is_chat else "completions",
    ),
    st.fixed_dictionaries(
        {
            "seed": st.integers(0, 2**64 - 1),
            "prompt_tokens": LENGTHS,
            "output_tokens": LENGTHS,
            "n": st.sampled_from(["1", "64", "choice:1=0.5,1024=0.5"]),
            "vocab_size": st.integers(1, 200_000),
            "stream": st.booleans(),
        }
    ),
    PREFIXES,
    st.booleans(),
    st.booleans(),
)
INDICES = st.lists(st.integers(0, 2**40), min_size=1, max_size=8, unique=True)


@settings(max_examples=25)
@given(scenario=SCENARIOS, indices=INDICES, more=INDICES)
def test_requests_do_not_depend_on_which_others_were_made(
    scenario: Scenario, indices: list[int], more: list[int]
) -> None:
    one, other = Workload(scenario), Workload(scenario)
    for index in more:
        other.request(index)
    made = {index: one.request(index) for index in indices}
    assert {index: other.request(index) for index in sorted(indices)} == made
    shorter = msgspec.structs.replace(scenario, requests=5, duration_s=7.0, workers=3)
    assert Workload(shorter).request(indices[0]) == made[indices[0]]


@settings(max_examples=50)
@given(scenario=SCENARIOS, indices=INDICES)
def test_bodies_say_what_is_said_of_them(scenario: Scenario, indices: list[int]) -> None:
    workload = Workload(scenario)
    for index in indices:
        asked = workload.request(index)
        body: dict[str, Any] = json.loads(asked.body)
        assert (body["n"], body["max_tokens"]) == (asked.n, asked.max_tokens)
        assert body.get("stream", False) == scenario.stream
        if scenario.api == "chat":
            length = workload.count_tokens(body["messages"][0]["content"])
        elif scenario.tokenizer:
            length = (workload.count_tokens(body["prompt"]) or 0) + 1  # the one of its beginning
        else:
            length = len(body["prompt"])
            assert 0 <= min(body["prompt"]) <= max(body["prompt"]) < scenario.vocab_size
        assert length == asked.prompt_tokens >= 40
