"""The engine under any order of add, abort and both ways to step holds its invariants.

1. Every accepted request gets exactly one terminal Output per sample, unless it was aborted.
2. free + prefix + owned = num_slots, and a slot has at most one owner.
3. A token depends on weights, prompt, params, seed and position only: each sample equals that of an
   engine which runs this request alone, one plain step after the other.
4. `step` and `step_overlapped` give the same tokens: both are mixed here, only one is used there.
5. The scheduler is deterministic: the same calls give the same batches; a twin follows along.

That no row touches what another row of its batch writes is asserted by the numpy runner.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import msgspec
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from engine.batch import Batch
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import InvalidRequest, Overloaded
from engine.messages import Output, Request, SamplingParams
from engine.slots import FREE, PREFIX
from tests.numpy_runner import TINY, NumpyLaunched, NumpyRunner, tiny_weights

WEIGHTS = tiny_weights()
WEIGHTS.embedding[31] = np.nan  # so that "error" endings occur too

tokens = st.integers(0, TINY.vocab_size - 1)
params = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 12),
    n=st.integers(1, 9),
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 1, 4]),
    top_p=st.sampled_from([0.5, 1.0]),
    min_p=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 5),
    stop_token_ids=st.lists(tokens, max_size=6).map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.booleans(),
)
prompts = st.one_of(
    st.lists(tokens, min_size=1, max_size=12), st.lists(tokens, min_size=58, max_size=TINY.n_ctx)
)


class RecordingRunner(NumpyRunner):
    """Keeps what was launched."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(WEIGHTS, num_slots)
        self.batches: list[Batch] = []

    def launch(self, batch: Batch) -> NumpyLaunched:
        self.batches.append(batch)
        return super().launch(batch)


def alone(request: Request) -> dict[int, Output]:
    """The request's final Outputs from an engine that does nothing else."""
    num_slots = request.params.n + 1
    config = EngineConfig(num_slots=num_slots, max_step_rows=64, max_step_tokens=128)
    engine = Engine(TINY, NumpyRunner(WEIGHTS, num_slots), config)
    engine.add(msgspec.structs.replace(request, emit="final"))
    outputs: list[Output] = []
    while engine.has_work:
        outputs += engine.step()
    return {output.index: output for output in outputs}


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        num_slots=st.integers(1, 6),
        max_step_rows=st.integers(1, 5),
        spare_tokens=st.integers(1, 12),
        max_waiting=st.integers(6, 30),
    )
    def start(
        self, num_slots: int, max_step_rows: int, spare_tokens: int, max_waiting: int
    ) -> None:
        config = EngineConfig(
            num_slots=num_slots,
            max_step_rows=max_step_rows,
            max_step_tokens=max_step_rows + spare_tokens,
            max_waiting=max_waiting,
        )
        self.config = config
        self.runner, self.twin_runner = RecordingRunner(num_slots), RecordingRunner(num_slots)
        self.engine = Engine(TINY, self.runner, config)
        self.twin = Engine(TINY, self.twin_runner, config)
        self.requests: dict[str, Request] = {}
        self.aborted: set[str] = set()
        self.received: defaultdict[tuple[str, int], list[Output]] = defaultdict(list)
        self.count = 0

    @rule(
        prompt=prompts,
        params=params,
        priority=st.integers(-1, 1),
        emit=st.sampled_from(["final", "delta"]),
    )
    def add(self, prompt: list[int], params: SamplingParams, priority: int, emit: str) -> None:
        self.count += 1
        request = Request(
            id=str(self.count),
            prompt_token_ids=np.array(prompt, "<i4").tobytes(),
            params=params,
            priority=priority,
            emit="delta" if emit == "delta" else "final",
        )
        waiting = self.engine.status().waiting
        try:
            self.engine.add(request)
        except Overloaded:
            assert waiting + params.n > self.config.max_waiting
        except InvalidRequest as error:
            assert error.param == "n"
            assert params.n > self.config.max_waiting or self.config.num_slots == 1
        else:
            self.twin.add(request)
            self.requests[request.id] = request

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        if self.engine.has_request(request_id):
            self.aborted.add(request_id)
        self.engine.abort(request_id)
        self.twin.abort(request_id)
        assert not self.engine.has_request(request_id)

    @rule(times=st.integers(1, 8))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.receive(self.engine.step(), self.twin.step())

    @rule(times=st.integers(1, 8))
    def step_overlapped(self, times: int) -> None:
        for _ in range(times):
            self.receive(self.engine.step_overlapped(), self.twin.step_overlapped())

    def receive(self, outputs: list[Output], twins: list[Output]) -> None:
        assert outputs == twins
        for output in outputs:
            assert output.id not in self.aborted, "an aborted request spoke"
            earlier = self.received[output.id, output.index]
            assert all(one.finish_reason is None for one in earlier), "spoke after its end"
            assert output.finish_reason is not None or self.requests[output.id].emit == "delta"
            earlier.append(output)

    @invariant()
    def slots_add_up(self) -> None:
        table = self.engine.scheduler.table
        assert table.num_free + table.num_prefix + table.num_owned == table.num_slots
        assert table.num_free == np.count_nonzero(table.sequence_id == FREE)
        assert table.num_prefix == np.count_nonzero(table.sequence_id == PREFIX)
        owners = table.sequence_id[table.sequence_id >= 0]
        assert len(owners) == len(set(owners.tolist())) == table.num_owned
        assert not table.is_running[table.sequence_id < 0].any()
        free = table._free[: table.num_free]
        assert sorted(free.tolist()) == np.flatnonzero(table.sequence_id == FREE).tolist()

    @invariant()
    def scheduling_is_deterministic(self) -> None:
        assert len(self.runner.batches) == len(self.twin_runner.batches)
        for batch, twin in zip(self.runner.batches, self.twin_runner.batches, strict=True):
            for name in Batch.__dataclass_fields__:
                assert np.array_equal(getattr(batch, name), getattr(twin, name))
        self.runner.batches.clear()
        self.twin_runner.batches.clear()

    def teardown(self) -> None:
        steps = 0
        while self.engine.has_work:
            self.receive(self.engine.step_overlapped(), self.twin.step_overlapped())
            steps += 1
            assert steps < 10_000, "the engine does not come to an end"
        status = self.engine.status()
        assert (status.running, status.waiting) == (0, 0)
        table = self.engine.scheduler.table
        assert table.num_free == table.num_slots
        for request in self.requests.values():
            if request.id not in self.aborted:
                self.compare(request)

    def compare(self, request: Request) -> None:
        expected = alone(request)
        ended = Counter(index for name, index in self.received if name == request.id)
        assert ended == Counter(range(request.params.n))
        for index in range(request.params.n):
            outputs = self.received[request.id, index]
            assert outputs[-1].finish_reason == expected[index].finish_reason
            joined = b"".join(output.token_ids for output in outputs)
            assert joined == expected[index].token_ids
            logprobs = np.frombuffer(b"".join(output.logprobs for output in outputs), "<f4")
            assert np.allclose(logprobs, np.frombuffer(expected[index].logprobs, "<f4"))
            assert bool(len(logprobs)) == (request.params.logprobs and bool(joined))


EngineMachine.TestCase.settings = settings(
    max_examples=200,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestEngineMachine = EngineMachine.TestCase
