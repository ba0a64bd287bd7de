"""The engine under any order of add, abort and both ways to step holds its invariants.

1. Every accepted request gets exactly one terminal Output per sample, or row of Tokens, unless it
   was aborted or the sample stopped; of what was, nothing more is heard.
2. Slots, queues, shares and prefixes add up: see `tests/kit/engines/invariants.py`.
3. Each sample equals that of an engine which runs this request alone, by `step`, and keeps no
   prefix; here many prompts begin alike, and `step` and `step_overlapped` are mixed.
4. The scheduler is deterministic: a twin that is called alike launches the same batches.
5. Every prompt token but the first is scored once and in order before any sample speaks, whatever
   its chunks and company, and scoring changes no sample.
6. All of this with biases, penalties and bans; what they are is in `test_edited_samples.py`.
7. All of this whoever is parked for whom: by priority, by share, or for no reason at all.
8. A durable request that is sent again is answered in full, whatever its sender knows already; and
   so it is by another engine, which goes on from where this one was. The weight last sent is kept.
9. Weights that are loaded again change no token, whether or not what runs is fed again.
10. All of this where a grammar says what may be sampled, and where samples wait to be let start.
11. All of this where requests bring states of their prompts' beginnings, and ask for states.
12. A sample that runs, waits or is parked says all of its tokens, and what goes on from them, its
    state being kept, is what their whole prompt gives; one that has ended is refused.
13. The device samples each row as the record says that the scheduler had of it, whoever had the
    row's slot before.

That no row touches what another row of its batch writes is asserted by the numpy runner.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import astuple
from itertools import chain
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from srm.engine.config import EngineConfig
from srm.engine.messages import (
    NAMED,
    PROMPT,
    REASONS,
    Output,
    ReadSample,
    Request,
    Running,
    SamplingParams,
    join,
)
from srm.engine.process.engine import Engine
from srm.engine.scheduler.completion import NOT_ALLOWED, NOT_FINITE
from srm.engine.scheduler.parking import parkable
from srm.engine.state.parked import Parked, merged
from srm.engine.state.sequence import STREAMS, SequenceGroup
from srm.engine.state.slots import SlotTable
from srm.engine.steps.batch import I32, I64, Batch, SlotStates, StepResult
from srm.engine.steps.tokens import from_wire
from srm.errors import InvalidRequest, NotFound, Overloaded
from tests.kit.engines.invariants import prefixes_add_up, queues_add_up, slots_add_up
from tests.kit.engines.numpy_runner import TINY, NumpyLaunched, NumpyRunner, ints, tiny_weights
from tests.kit.engines.strategies import EMITS, MAX_N, alike, configs, requests, tokens
from tests.kit.processes.run_engine import alone

WEIGHTS = tiny_weights()
WEIGHTS.embedding[31] = np.nan  # so that "error" endings occur too

Part = tuple[int, list[bytes], list[tuple[int, int]]]
"""A client's number, its Tokens as a message carries them, and what was cached."""
StepOutput = tuple[list[Output], list[Part]]


class RecordingRunner(NumpyRunner):
    """Keeps what was launched, and asserts that it knows how each row is to be sampled."""

    table: SlotTable
    writes = "began from a given state"
    """What it is if states of prompts are written."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(WEIGHTS, config.num_slots, config.prefix_slots)
        self.batches: list[Batch] = []
        self._parse_range: deque[I32] = deque()

    def launch(self, batch: Batch) -> NumpyLaunched:
        self.batches.append(batch)
        self._parse_range.append(ints(self.table.sampling[batch.slots]))
        return super().launch(batch)

    def write_slots(self, slots: I64, states: SlotStates) -> None:
        if slots.max() >= self.num_slots:
            EngineMachine.reached[self.writes] += 1
        super().write_slots(slots, states)

    def copy_slots(self, read: I64, write: I64) -> None:
        EngineMachine.reached["kept the end of a sample"] += 1
        super().copy_slots(read, write)

    def run_batch(self, batch: Batch) -> StepResult:
        result = super().run_batch(batch)
        # All but the state of an automaton, which the device moves.
        sampling = self._sampling[batch.slots, :-1]
        np.testing.assert_array_equal(sampling, self._parse_range.popleft()[:, :-1])
        return result


def error_of(request: Request) -> str:
    return NOT_ALLOWED if request.params.constraint else NOT_FINITE


def expected_of(request: Request) -> dict[int, Output]:
    emit: Literal["final", "delta"] = "delta" if request.params.logprobs else "final"
    return alone(replace(request, emit=emit, first_wave=None, **NO_STATE), WEIGHTS)


rarely = st.integers(0, 9).map(lambda number: number == 9)
PLAIN: dict[str, Any] = {"ignore_eos": True, "constraint": "", "logprobs": None, "min_tokens": 0}
PLAIN |= {"stop_token_ids": (), "allowed_token_ids": (), "bad_words": ()}
NO_STATE: dict[str, Any] = {"state": b"", "state_length": 0}


def state_of(prompt: bytes, length: int) -> bytes:
    """The state after so many tokens of a prompt, as an engine alone has it."""
    params = SamplingParams(max_tokens=0)
    asked = Request("", prompt[: 4 * (length + 1)], params, returns_state=True)
    return alone(asked, WEIGHTS)[PROMPT].state


def first_scored(request: Request) -> int:
    """The first token whose score is wanted, of a prompt that is scored."""
    start = request.params.prompt_logprobs_start
    return max(1, start if start >= 0 else len(request.prompt_token_ids) // 4 + start)


def scored_ids(request: Request) -> bytes:
    return request.prompt_token_ids[4 * first_scored(request) :]


def of_prompt(like: Request, prompt: list[int], **params: Any) -> Request:
    ids = np.array(prompt, "<i4").tobytes()
    unscored = {name: () for count, name in NAMED.items() if params.get(count, ()) is None}
    params = {"prompt_logprobs_start": 0, **unscored, **params}
    return replace(like, prompt_token_ids=ids, params=replace(like.params, **params))


class EngineMachine(RuleBasedStateMachine):
    reached: ClassVar[Counter[str]] = Counter()  # in all examples

    @initialize(config=configs(6))
    def start(self, config: EngineConfig) -> None:
        self.config, self.count = config, 0
        self.open()
        self.requests: dict[str, Request] = {}
        self.aborted: set[str] = set()
        self.longer: set[str] = set()  # requests that go on from samples of others
        self.stopped: set[tuple[str, int]] = set()
        self.cached: dict[int, int] = {}
        self.received: defaultdict[tuple[str, int], list[Output]] = defaultdict(list)

    @rule(
        request=requests,
        given_tokens=st.just(0) | st.integers(1, 60),
        wants_state=rarely,
        keeps_ends=st.booleans(),
    )
    def add(
        self,
        request: Request,
        given_tokens: int = 0,
        wants_state: bool = False,
        keeps_ends: bool = False,
    ) -> None:
        self.count += 1
        request = replace(request, keeps_ends=keeps_ends)
        if wants_state:
            params = SamplingParams(max_tokens=0)
            request = Request("", request.prompt_token_ids, params, returns_state=True)
        prompt = request.prompt_token_ids
        if length := min(given_tokens, len(prompt) // 4 - 1):
            request = replace(request, state=state_of(prompt, length), state_length=length)
        request = replace(
            request,
            id=str(self.count),
            stream=MAX_N * self.count,
            durable=request.durable and request.emit != "tokens",
        )
        params, waiting = request.params, self.engine.status().waiting
        try:
            self.engine.add(request)
        except Overloaded:
            assert waiting + params.n > self.config.max_waiting
        except InvalidRequest as error:
            none_left = "must leave a token" in error.message
            reasons = {
                "n": params.n > self.config.max_waiting,
                "prompt_token_ids": "leaves room" in error.message,
                "max_tokens": "shortest completion" in error.message
                or params.prompt_logprobs is None
                or first_scored(request) * 4 >= len(request.prompt_token_ids),
                "prompt_logprobs_start": params.prompt_logprobs_start * 4
                > len(request.prompt_token_ids),
                "min_tokens": params.min_tokens > params.max_tokens,
                "logprobs": params.logprobs and request.emit == "final",
                "ignore_eos": params.constraint and params.ignore_eos,
            }
            assert reasons.get(error.param or "", none_left)
        else:
            self.twin.add(request)
            self.requests[request.id] = request

    @rule(some=st.lists(alike, min_size=2, max_size=5), like=requests, data=st.data())
    def add_alike(self, some: list[list[int]], like: Request, data: st.DataObject) -> None:
        for prompt in some:
            n, priority = data.draw(st.integers(1, 3)), data.draw(st.integers(-1, 1))
            emit = data.draw(st.sampled_from(EMITS[1:]))
            few = of_prompt(like, prompt, max_tokens=4, n=n, prompt_logprobs=None)
            self.add(replace(few, priority=priority, emit=emit))

    @rule(prompt=st.lists(tokens, min_size=1, max_size=6), like=requests, more=requests)
    def go_on(self, prompt: list[int], like: Request, more: Request) -> None:
        """Another request begins with what a sample of one has, which keeps its end."""
        plain: dict[str, Any] = {"ignore_eos": True, "constraint": "", "logprobs": None}
        plain |= {"allowed_token_ids": (), "bad_words": (), "min_tokens": 0}
        few = of_prompt(like, prompt, n=2, max_tokens=3, prompt_logprobs=None, **plain)
        self.add(replace(few, emit="final", first_wave=None), keeps_ends=True)
        name = str(self.count)
        self.step(8)
        outputs = self.received.get((name, 0))
        if outputs and outputs[-1].finish_reason in ("stop", "length"):
            longer = [*prompt, *np.frombuffer(outputs[-1].token_ids, "<i4").tolist()]
            self.longer.add(str(self.count + 1))
            again = replace(of_prompt(more, longer, prompt_logprobs=None), salt=like.salt)
            self.add(again, keeps_ends=True)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        if self.engine.has_request(request_id):
            self.aborted.add(request_id)
        for engine in self.both:
            engine.abort(request_id)
        assert not self.engine.has_request(request_id)

    @precondition(lambda self: self.requests)
    @rule(
        data=st.data(),
        indices=st.sets(st.integers(-1, MAX_N)),
        cut=st.one_of(st.none(), st.none(), st.integers(-1, MAX_N)),
    )
    def stop(self, data: st.DataObject, indices: set[int], cut: int | None) -> None:
        self.stop_these(data.draw(st.sampled_from(sorted(self.requests))), indices, cut)

    def stop_these(self, request_id: str, indices: set[int], cut: int | None) -> None:
        scheduler, stopped = self.engine.scheduler, set[int]()
        group = scheduler.registry.by_id.get(request_id)
        if group is not None:
            begun = {*self.with_a_slot(group), *scheduler.parking.indices(group).tolist()}
            stopped = begun & indices
            if cut is not None:
                to_start = group.next_fresh(group.unstarted).tolist()
                stopped |= {i for i in [*begun, *to_start] if i >= cut}
            own = [item.indices.tolist() for of, item in scheduler.parking.records() if of is group]
            for at, parked in enumerate(own):
                ended = stopped.intersection(parked)
                self.reached["stopped where it was parked"] += bool(ended & indices)
                self.reached["cut where it was parked"] += bool(ended - indices)
                is_behind = bool(ended) and any(len(item) > 1 for item in own[:at])
                self.reached["stopped behind others that were parked"] += is_behind
        self.stopped |= {(request_id, index) for index in stopped}
        for engine in self.both:
            engine.stop(request_id, np.array(sorted(indices), np.int32), cut)
        assert group is None or stopped.isdisjoint(self.with_a_slot(group))

    @rule(
        prompt=st.lists(tokens, min_size=1, max_size=3),
        like=requests,
        steps=st.integers(0, 6),
        parks=st.booleans(),
        index=st.integers(0, 3),
        more=st.lists(tokens, max_size=3),
    )
    def fork(
        self, prompt: list[int], like: Request, steps: int, parks: bool, index: int, more: list[int]
    ) -> None:
        of = of_prompt(like, prompt, n=3, max_tokens=12, **PLAIN)
        self.add(replace(of, first_wave=None))
        id, scheduler = str(self.count), self.engine.scheduler
        self.step(steps)
        self.settle()
        group = scheduler.registry.by_id.get(id)
        if group is not None and parks:
            slots = parkable(scheduler.table)
            self.park_these(slots[scheduler.table.first_id[slots] == group.first_id].tolist())
        parked = scheduler.parking.indices(group).tolist() if group else []
        runs = [*self.with_a_slot(group), *parked] if group else []
        is_waiting = group is not None and index in group.next_fresh(group.unstarted)
        asked = ReadSample("r", id, index, of.share)
        self.runner.writes = self.twin_runner.writes = "forked one that {}".format(
            "is parked" if index in parked else "runs"
        )
        try:
            done, twin = (engine.read_sample(asked) for engine in self.both)
        except NotFound:
            assert index not in runs and not is_waiting
            return
        finally:
            self.runner.writes = self.twin_runner.writes = RecordingRunner.writes
        assert done == twin and (index in runs or is_waiting)
        sampled = done.token_ids.removeprefix(of.prompt_token_ids)
        assert index in runs or not sampled
        if of.emit != "final":
            earlier = self.received.get((id, index), [])
            assert b"".join(output.token_ids for output in earlier) == sampled
        ids = np.frombuffer(done.token_ids, "<i4").tolist() + more
        self.add(of_prompt(like, ids, n=2, prompt_logprobs=None))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), below=st.integers(0, MAX_N))
    def start_below(self, data: st.DataObject, below: int) -> None:
        self.start_these(data.draw(st.sampled_from(sorted(self.requests))), below)

    def start_these(self, request_id: str, below: int) -> None:
        for engine in self.both:
            engine.start_below(request_id, below)

    def with_a_slot(self, group: SequenceGroup) -> list[int]:
        """The indices of its samples that have one."""
        table = self.engine.scheduler.table
        owners = table.sequence_id[table.first_id == group.first_id]
        return [owner - group.first_id for owner in owners.tolist()]

    @rule(data=st.data())
    def park(self, data: st.DataObject) -> None:
        """Some or all of those that can be, for no reason at all."""
        self.settle()
        slots = parkable(self.engine.scheduler.table).tolist()
        if slots:
            few = st.lists(st.sampled_from(slots), min_size=1, unique=True)
            self.park_these(data.draw(st.one_of(st.just(slots), few)))

    def park_these(self, slots: list[int]) -> None:
        some = np.array(sorted(slots), np.int64)
        for engine in self.both if slots else ():
            engine.scheduler.park(some, engine.runner.read_slots(some))

    @rule(
        prompt=st.lists(tokens, min_size=1, max_size=3),
        like=requests,
        at=st.sampled_from([3, 2, 4, 1, 5]),
        indices=st.sets(st.integers(0, 5), min_size=1),
        cut=st.one_of(st.none(), st.integers(0, 5)),
    )
    def park_apart_and_stop(
        self, prompt: list[int], like: Request, at: int, indices: set[int], cut: int | None
    ) -> None:
        """Many samples of one request are parked one after the other, as in a preemption, and
        stopped or cut before they get slots again."""
        many = of_prompt(like, prompt, n=6, max_tokens=12, **PLAIN)
        self.add(replace(many, emit="final", first_wave=None))
        self.step(4)
        self.settle()
        group = self.engine.scheduler.registry.by_id.get(str(self.count))
        if group is not None:
            table = self.engine.scheduler.table
            slots = parkable(table)
            own = slots[table.first_id[slots] == group.first_id].tolist()
            self.park_these(own[:at])
            self.park_these(own[at:])
        self.stop_these(str(self.count), indices, cut)

    @precondition(lambda self: any(request.durable for request in self.requests.values()))
    @rule(data=st.data(), weight=st.sampled_from([0.25, 1.0, 4.0]))
    def send_again(self, data: st.DataObject, weight: float) -> None:
        durable = sorted(request.id for request in self.requests.values() if request.durable)
        name = data.draw(st.sampled_from(durable))
        if self.engine.has_request(name) or name in self.aborted:  # or it was answered
            self.add_again(replace(self.requests[name], weight=weight))

    def add_again(self, request: Request) -> None:
        """Its sender knows nothing of it any more."""
        self.aborted.discard(request.id)
        self.stopped = {(name, index) for name, index in self.stopped if name != request.id}
        for key in [key for key in self.received if key[0] == request.id]:
            del self.received[key]
        self.cached.pop(request.stream, None)
        self.requests[request.id] = request
        for engine in self.both:
            try:
                engine.add(request)
            except Overloaded:
                self.aborted.add(request.id)

    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        """Everything durable goes on in another engine; what else there is ends."""
        self.settle()
        entries: defaultdict[str, list[Parked]] = defaultdict(list)
        for request, parked in self.engine.parked_of_all():
            assert request == self.requests[request.id] and request.durable
            entries[request.id].append(parked)
        running = sorted(self.engine.scheduler.request_ids())
        self.aborted.update(running)
        again = data.draw(st.permutations([n for n in running if self.requests[n].durable]))
        self.open()
        for engine in self.both:
            engine.progress = lambda one: merged(entries[one.id]) if one.id in entries else None
        for name in again:
            self.add_again(self.requests[name])

    @rule(running=st.sampled_from(["finish", "drop", "continue", "refeed"]))
    def load_weights(self, running: Running) -> None:
        """The same ones again, as the engine process does: no token may change."""
        for engine in self.both:
            engine.scheduler.is_held = running == "finish"
        while running == "finish" and not self.engine.scheduler.is_quiet:
            self.step()
        self.settle()
        dropped = self.engine.scheduler.request_ids() if running == "drop" else []
        self.aborted.update(dropped)
        for engine in self.both:
            for name in dropped:
                engine.abort(name)
            engine.load_weights(WEIGHTS, refeeds=running == "refeed")
            engine.scheduler.is_held = False

    def open(self) -> None:
        self.runner, self.twin_runner = RecordingRunner(self.config), RecordingRunner(self.config)
        self.engine = Engine(TINY, self.runner, self.config)
        self.twin = Engine(TINY, self.twin_runner, self.config)
        self.both = self.engine, self.twin
        self.runner.table, self.twin_runner.table = (item.scheduler.table for item in self.both)

    @rule(times=st.integers(1, 12), is_overlapped=st.booleans())
    def step(self, times: int = 1, is_overlapped: bool = True) -> None:
        for _ in range(times):
            self.compare_step(Engine.step_overlapped if is_overlapped else Engine.step)

    def settle(self) -> None:
        self.compare_step(Engine.settle)

    def compare_step(self, step: Callable[[Engine], list[Output]]) -> None:
        changes, twin = (read_step(engine, step(engine)) for engine in self.both)
        assert changes == twin
        for output in [*changes[0], *self.outputs_of(changes[1])]:
            assert output.id not in self.aborted, "an aborted request spoke"
            assert (output.id, output.index) not in self.stopped, "a stopped sample spoke"
            earlier = self.received[output.id, output.index]
            assert all(number.finish_reason is None for number in earlier), "spoke after its end"
            if output.index == PROMPT:
                others = {index for name, index in self.received if name == output.id}
                assert others == {PROMPT}, "the prompt's scores come first"
            elif self.requests[output.id].emit == "final":
                assert output.finish_reason is not None
            earlier.append(output)

    def outputs_of(self, steps: list[Part]) -> Iterator[Output]:
        """What steps' tokens say, a row each, as Outputs."""
        for number, wire, cached in steps:
            assert number == 0
            self.cached |= dict(cached)
            step = from_wire(wire)
            top_ids, top_logprobs, token_ids = step.top_ids, step.top_logprobs, step.token_ids
            logprobs = step.logprobs if len(step.logprobs) else np.zeros(len(step), np.float32)
            rows = zip(step.owners.tolist(), token_ids, logprobs, step.reasons, strict=True)
            for row, (stream, token, logprob, reason) in enumerate(rows):
                request = self.requests[str(stream // MAX_N)]
                is_error = REASONS[reason] == "error"
                assert is_error == (token < 0)
                has_logprobs = request.params.logprobs is not None and not is_error
                num_top = 0 if is_error else request.params.logprobs or 0
                assert bool(request.params.logprobs) == (row < len(top_ids))
                assert (top_ids[row : row + 1, request.params.logprobs or 0 :] == -1).all()
                yield Output(
                    id=request.id,
                    index=stream % MAX_N,
                    token_ids=b"" if is_error else token.tobytes(),
                    logprobs=logprob.tobytes() if has_logprobs else b"",
                    top_ids=top_ids[row : row + 1, :num_top].tobytes(),
                    top_logprobs=top_logprobs[row : row + 1, :num_top].tobytes(),
                    finish_reason=REASONS[reason],
                    error=error_of(request) if is_error else None,
                    cached_tokens=self.cached.get(request.stream, 0),
                )

    @invariant()
    def all_adds_up(self) -> None:
        for adds_up in (slots_add_up, queues_add_up, prefixes_add_up):
            adds_up(self.engine.scheduler)
        self.reached["was held back"] += bool(self.engine.scheduler.admission.paced)

    @invariant()
    def scheduling_is_deterministic(self) -> None:
        assert len(self.runner.batches) == len(self.twin_runner.batches)
        for batch, twin in zip(self.runner.batches, self.twin_runner.batches, strict=True):
            for name in set(Batch.__slots__) - {"edits", "tables"}:
                assert np.array_equal(getattr(batch, name), getattr(twin, name)), name
            for (start, table), (at, other) in zip(batch.tables, twin.tables, strict=True):
                assert start == at and np.array_equal(table, other)
            assert all(map(np.array_equal, astuple(batch.edits), astuple(twin.edits)))
        self.runner.batches.clear()
        self.twin_runner.batches.clear()

    def teardown(self) -> None:
        for below in range(MAX_N + 1):
            for name in self.requests:
                self.start_these(name, below)
            left = 1_000
            while self.engine.has_work and (left := left - 1):
                self.step()
            assert left, "something waits for what never comes"
        scheduler, parking = self.engine.scheduler, self.engine.scheduler.parking
        assert (self.engine.status().running, self.engine.status().waiting) == (0, 0)
        assert scheduler.table.num_free == scheduler.table.num_slots
        assert (parking.num_parked, parking.num_bytes, scheduler.prefixes.num_pinned) == (0, 0, 0)
        assert not scheduler.admission.prefill.awaiting
        assert not scheduler.admission.shares.tiers
        assert not scheduler.stop_sets.users
        for request in self.requests.values():
            if request.id not in self.aborted:
                self.compare(request)

    def compare(self, request: Request) -> None:
        expected = expected_of(request)
        entries = {i: join(all_) for (name, i), all_ in self.received.items() if name == request.id}
        if (
            PROMPT in entries and PROMPT not in expected
        ):  # broken behind what is its first chunk here
            assert scored_ids(request).startswith(entries.pop(PROMPT).token_ids)
            assert {entry.finish_reason for entry in entries.values()} == {"error"}
        for index in [index for name, index in self.stopped if name == request.id]:
            so_far = entries.pop(index, Output(request.id, index))
            assert so_far.finish_reason is None
            assert expected.pop(index).token_ids.startswith(so_far.token_ids)
        if expected.keys() == {PROMPT}:  # all were stopped, maybe before it was scored
            expected = {PROMPT: entries[PROMPT]} if PROMPT in entries else {}
        assert entries.keys() == expected.keys()
        for index, output in expected.items():
            if request.emit == "tokens" and index != PROMPT:  # which have no ranks
                output = replace(output, ranks=b"")  # noqa: PLW2901
            assert len(entries[index].versions) in {0, len(entries[index].token_ids)}
            whose = {"cached_tokens": 0, "first_version": 0, "versions": b""}
            assert replace(entries[index], **whose) == output
            num_left = len(request.prompt_token_ids) // 4 - entries[index].cached_tokens
            assert num_left > 0 or index < 0
            is_fed_alone = num_left == 1 and request.id in self.longer
            self.reached["went on from the end of a sample"] += is_fed_alone
            if request.params.prompt_logprobs is not None:
                assert entries[index].cached_tokens < first_scored(request)
        if PROMPT in entries and len(entries) > 1 and not request.returns_state:
            assert entries[PROMPT].token_ids == scored_ids(request)
        if request.params.max_tokens and request.params.prompt_logprobs is not None:
            none = dict.fromkeys(NAMED) | dict.fromkeys(NAMED.values(), ())
            params = replace(request.params, prompt_logprobs_start=0, **none)
            unscored = expected_of(replace(request, params=params))
            for index in unscored.keys() & entries.keys():
                is_broken = entries[index].finish_reason == "error"  # maybe only a prompt's score
                assert is_broken or unscored[index].token_ids == entries[index].token_ids


def read_step(engine: Engine, outputs: list[Output]) -> StepOutput:
    """All of what steps said that returned these Outputs."""
    steps = (step.split(STREAMS.bit_length() - 1) for step in engine.take_tokens())
    parts = chain.from_iterable(steps)
    return outputs, [(number, own.tokens.to_wire(), own.cached) for number, own in parts]


class TestEngineMachine(EngineMachine.TestCase):  # type: ignore[misc, valid-type]
    settings = settings(
        max_examples=140,
        stateful_step_count=25,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )

    def runTest(self) -> None:
        super().runTest()
        assert set(EngineMachine.reached.elements()) == {
            "stopped where it was parked",
            "cut where it was parked",
            "stopped behind others that were parked",
            "was held back",
            "began from a given state",
            "kept the end of a sample",
            "went on from the end of a sample",
            "forked one that runs",
            "forked one that is parked",
        }


@pytest.mark.slow
class TestEngineMachineForLonger(TestEngineMachine):
    settings = settings(TestEngineMachine.settings, max_examples=200)
