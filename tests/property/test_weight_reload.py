"""Requests among changes of weights: none is lost, and each sample is of the weights it names.

1. Every request that is not dropped gets exactly one terminal Output per sample, and each score of
   its prompt once.
2. The version of what is said never falls.
3. Where what runs is waited for or dropped, a sample is what an engine that never had other weights
   than those of the sample's version makes of it.
4. Where it is fed again, each token is what such an engine makes of all tokens before it.
5. Afterwards no slot is owned and no prefix pinned.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from srm.engine.config import EngineConfig
from srm.engine.messages import PROMPT, Output, Request, Running, join
from srm.engine.process.engine import Engine
from tests.kit.engines.invariants import prefixes_add_up, queues_add_up, slots_add_up
from tests.kit.engines.making import floats, ints, request_of
from tests.kit.engines.numpy_runner import TINY, NumpyRunner, tiny_weights
from tests.kit.engines.strategies import configs
from tests.kit.processes.run_engine import alone

VERSIONS = [tiny_weights(seed) for seed in range(3)]
HEADER = np.random.default_rng(3).integers(0, 31, 40).tolist()

NAMED = (30, 3)
"""Tokens whose scores are sent in the place of each one sampled."""

prompts = st.one_of(
    st.lists(st.integers(0, 31), min_size=1, max_size=8),
    st.sampled_from([HEADER[:18], HEADER[:30], HEADER, [*HEADER[:30], 1, 2]]),
)
added = st.builds(
    request_of,
    st.just(""),
    prompts,
    emit=st.just("delta"),
    priority=st.integers(0, 1),
    max_tokens=st.integers(1, 7),
    n=st.integers(1, 6),
    seed=st.integers(0, 3),
    temperature=st.sampled_from([0.0, 1.0]),
    ignore_eos=st.booleans(),
    prompt_logprobs=st.sampled_from([None, None, 1]),
    logprobs=st.just(len(NAMED)),
    logprob_token_ids=st.just(NAMED),
)
reloaded = st.sampled_from(["finish", "drop", "continue"])
histories = st.lists(st.one_of(added, added, st.integers(1, 6), reloaded), max_size=25)
refed = st.one_of(added, added, st.integers(1, 6), st.just("refeed"))


class History:
    """An engine, what was asked of it and what it said."""

    def __init__(self, config: EngineConfig) -> None:
        runner = NumpyRunner(VERSIONS[0], config.num_slots, config.prefix_slots)
        self.engine = Engine(TINY, runner, config)
        self.requests: dict[str, Request] = {}
        self.dropped: set[str] = set()
        self.outputs: defaultdict[tuple[str, int], list[tuple[int, Output]]] = defaultdict(list)

    def add(self, request: Request) -> None:
        request = msgspec.structs.replace(request, id=str(len(self.requests)))
        self.requests[request.id] = request
        self.engine.add(request)

    def record(self, outputs: list[Output]) -> None:
        for output in outputs:
            self.outputs[output.id, output.index].append((self.engine.weights_version, output))

    def step(self, count: int) -> None:
        for _ in range(count):
            self.record(self.engine.step_overlapped())

    def reload(self, running: Running) -> None:
        """As the engine process does."""
        scheduler = self.engine.scheduler
        scheduler.is_held = running == "finish"
        while scheduler.is_held and not scheduler.is_quiet:
            self.step(1)
        self.record(self.engine.settle())
        if running == "drop":
            self.dropped.update(scheduler.request_ids())
            for request_id in scheduler.request_ids():
                self.engine.abort(request_id)
        weights = VERSIONS[self.engine.weights_version % len(VERSIONS)]
        self.engine.load_weights(weights, refeeds=running == "refeed")
        scheduler.is_held = False


@cache
def expected(encoded: bytes, version: int) -> dict[int, Output]:
    """What an engine says that has only this request, and never had other weights."""
    weights = VERSIONS[(version - 1) % len(VERSIONS)]
    return alone(msgspec.msgpack.decode(encoded, type=Request), weights)


def assert_is_of_all_before(
    request: Request, index: int, messages: list[tuple[int, Output]]
) -> None:
    """Each run of tokens of one version is what an engine with these weights alone samples behind
    the tokens before it."""
    sampled: list[int] = []
    versions: list[int] = []
    scores: list[float] = []
    for version, output in messages:
        sampled += ints(output.token_ids)
        scores += floats(output.top_logprobs)
        assert ints(output.top_ids) == list(NAMED) * (len(output.token_ids) // 4)
        versions += ints(output.versions) or [version] * (len(output.token_ids) // 4)
    begins = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist()]
    for begin, end in zip(begins, [*begins[1:], len(sampled)], strict=True):
        params = msgspec.structs.replace(
            request.params, max_tokens=request.params.max_tokens - begin, prompt_logprobs=None
        )
        prompt = request.prompt_token_ids + np.array(sampled[:begin], "<i4").tobytes()
        again = msgspec.structs.replace(request, prompt_token_ids=prompt, params=params)
        exact = expected(msgspec.msgpack.encode(again), versions[begin])[index]
        assert sampled[begin:end] == ints(exact.token_ids)[: end - begin]
        own = slice(len(NAMED) * begin, len(NAMED) * end)
        assert scores[own] == floats(exact.top_logprobs)[: len(NAMED) * (end - begin)]


@settings(max_examples=100)
@given(st.lists(refed, max_size=25), configs(min_waiting=200))
def test_what_is_fed_again_is_of_the_new_weights_alone(
    history: list[Request | int | Running], config: EngineConfig
) -> None:
    ran = run_through(history, config)
    for request in ran.requests.values():
        for index in range(request.params.n):
            messages = ran.outputs[request.id, index]
            assert sum(output.finish_reason is not None for _, output in messages) == 1
            assert_is_of_all_before(request, index, messages)
        scores = b"".join(output.token_ids for _, output in ran.outputs[request.id, PROMPT])
        if request.params.prompt_logprobs is not None:
            assert scores == request.prompt_token_ids[4:]
    assert ran.engine.scheduler.table.num_owned == 0
    assert ran.engine.scheduler.prefixes.num_pinned == 0


def run_through(history: list[Request | int | Running], config: EngineConfig) -> History:
    ran = History(config)
    for event in history:
        if isinstance(event, Request):
            ran.add(event)
        elif isinstance(event, int):
            ran.step(event)
        else:
            ran.reload(event)
        for holds in (slots_add_up, queues_add_up, prefixes_add_up):
            holds(ran.engine.scheduler)
    while ran.engine.has_work:
        ran.step(1)
    return ran


@settings(max_examples=100)
@given(histories, configs(min_waiting=200))
def test_no_request_is_lost_and_each_sample_is_of_its_weights(
    history: list[Request | int | Running], config: EngineConfig
) -> None:
    ran = run_through(history, config)
    is_pure = "continue" not in history
    for request in ran.requests.values():
        is_whole = request.id not in ran.dropped
        for index in range(request.params.n):
            message = ran.outputs[request.id, index]
            ends = sum(output.finish_reason is not None for _, output in message)
            assert ends == 1 or (ends == 0 and not is_whole)
            versions = [version for version, _ in message]
            assert versions == sorted(versions)
            if is_pure and ends:
                assert len(set(versions)) == 1
                exact = expected(msgspec.msgpack.encode(request), versions[0])[index]
                assert join([output for _, output in message]).token_ids == exact.token_ids
        scores = b"".join(output.token_ids for _, output in ran.outputs[request.id, PROMPT])
        if request.params.prompt_logprobs is not None and is_whole:
            assert scores == request.prompt_token_ids[4:]
    assert ran.engine.scheduler.table.num_owned == 0
    assert ran.engine.scheduler.prefixes.num_pinned == 0
