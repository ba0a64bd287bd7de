"""The engine under any order of add, abort and both ways to step holds its invariants.

1. Every accepted request gets exactly one terminal Output per sample, or row of Columns, unless it
   was aborted or the sample stopped; of what was, nothing more is heard.
2. free + owned = num_slots, free + kept + pinned = prefix_slots, and a slot has one owner at most.
3. A token depends on weights, prompt, params, seed and position only: each sample equals that of an
   engine which runs this request alone, one plain step after the other.
4. `step` and `step_overlapped` give the same tokens: both are mixed here, only one is used there.
5. The scheduler is deterministic: the same calls give the same batches; a twin follows along.
6. Scores do not depend on chunks and company either, every prompt token but the first is scored
   once and in order before any sample speaks, and scoring changes no sample.
7. A kept state changes no bit: many prompts here begin alike, and the engine of 3 keeps nothing.
8. All of this with biases, penalties and bans; what they are is in `test_edited_samples.py`.
9. All of this whoever is parked for whom: by priority, by share, or for no reason at all.
10. A durable request that is sent again is answered in full, whatever its sender knows already; and
   so it is by another engine, which goes on from where this one was. The weight last sent is kept.
11. Weights that are loaded again change no token.

That no row touches what another row of its batch writes is asserted by the numpy runner.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import astuple
from itertools import chain
from typing import ClassVar, Literal

import msgspec
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.config import EngineConfig
from engine.errors import InvalidRequest, Overloaded
from engine.messages import PROMPT, REASONS, Columns, Output, Request, Running, SamplingParams, join
from engine.process.engine import Engine
from engine.scheduler.outputs import NOT_FINITE
from engine.scheduler.parking import parkable
from engine.state.parked import Parked, merged
from engine.state.prefixes import NO_SLOT, Prefix
from engine.state.sequence import STREAMS
from engine.state.slots import FREE
from engine.steps.batch import Batch
from tests.bodies.edit_strategies import wanted
from tests.engines.numpy_runner import TINY, NumpyLaunched, NumpyRunner, tiny_weights
from tests.engines.run_engine import alone

WEIGHTS = tiny_weights()
WEIGHTS.embedding[31] = np.nan  # so that "error" endings occur too

MAX_N = 9
tokens = st.integers(0, TINY.vocab_size - 1)
params = st.builds(
    lambda edits, **others: SamplingParams(**others, **edits),
    edits=wanted(TINY.vocab_size),
    max_tokens=st.integers(0, 12),
    n=st.integers(1, MAX_N),
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 1, 4]),
    top_p=st.sampled_from([0.5, 1.0]),
    min_p=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 5),
    stop_token_ids=st.lists(tokens, max_size=6).map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, None, 0, 1, 20]),
    prompt_logprobs=st.sampled_from([None, None, 0, 3]),
)
HEADERS = np.random.default_rng(1).integers(0, 31, (2, TINY.n_ctx)).tolist()
HEADERS[1][:20] = HEADERS[0][:20]
alike = st.builds(
    lambda header, length, rest: header[:length] + rest,
    st.sampled_from(HEADERS),
    st.sampled_from([3, 18, 21, 40, 60]),
    st.lists(st.integers(0, 1), max_size=3),
)
prompts = st.one_of(
    st.lists(tokens, min_size=1, max_size=12),
    st.lists(tokens, min_size=58, max_size=TINY.n_ctx),
    alike,
)

WEIGHTS_OF = {"": 1.0, "heavy": 1e3, "light": 0.1}
Emit = Literal["final", "delta", "columns"]
EMITS: tuple[Emit, ...] = ("final", "delta", "columns")
Said = tuple[list[Output], list[tuple[int, Columns]]]


class RecordingRunner(NumpyRunner):
    """Keeps what was launched."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(WEIGHTS, config.num_slots, config.prefix_slots)
        self.batches: list[Batch] = []

    def launch(self, batch: Batch) -> NumpyLaunched:
        self.batches.append(batch)
        return super().launch(batch)


def expected_of(request: Request) -> dict[int, Output]:
    emit: Literal["final", "delta"] = "delta" if request.params.logprobs else "final"
    return alone(msgspec.structs.replace(request, emit=emit), WEIGHTS)


class EngineMachine(RuleBasedStateMachine):
    reached: ClassVar[Counter[str]] = Counter()  # in all examples

    @initialize(
        num_slots=st.integers(1, 6),
        max_step_rows=st.integers(1, 5),
        spare_tokens=st.integers(1, 12),
        max_waiting=st.integers(6, 30),
        prefix_slots=st.integers(1, 5),
        max_parked_bytes=st.sampled_from([0, 2_000, 2**32, 2**32]),
    )
    def start(
        self,
        num_slots: int,
        max_step_rows: int,
        spare_tokens: int,
        max_waiting: int,
        prefix_slots: int,
        max_parked_bytes: int,
    ) -> None:
        config = EngineConfig(
            num_slots=num_slots,
            max_step_rows=max_step_rows,
            max_step_tokens=max_step_rows + spare_tokens,
            max_waiting=max_waiting,
            prefix_slots=prefix_slots,
            max_parked_bytes=max_parked_bytes,
        )
        self.config = config
        self.open()
        self.requests: dict[str, Request] = {}
        self.aborted: set[str] = set()
        self.stopped: set[tuple[str, int]] = set()
        self.cached: dict[int, int] = {}
        self.received: defaultdict[tuple[str, int], list[Output]] = defaultdict(list)
        self.count = 0

    @rule(
        prompt=prompts,
        params=params,
        priority=st.integers(-1, 1),
        emit=st.sampled_from(EMITS),
        share=st.sampled_from(sorted(WEIGHTS_OF)),
        durable=st.booleans(),
    )
    def add(
        self,
        prompt: list[int],
        params: SamplingParams,
        priority: int,
        emit: Emit,
        share: str = "",
        durable: bool = False,
    ) -> None:
        self.count += 1
        request = Request(
            id=str(self.count),
            prompt_token_ids=np.array(prompt, "<i4").tobytes(),
            params=params,
            priority=priority,
            emit=emit,
            stream=MAX_N * self.count,
            share=share,
            weight=WEIGHTS_OF[share],
            durable=durable and emit != "columns",
        )
        waiting = self.engine.status().waiting
        try:
            self.engine.add(request)
        except Overloaded:
            assert waiting + params.n > self.config.max_waiting
        except InvalidRequest as error:
            if error.param == "n":
                assert params.n > self.config.max_waiting
            elif error.param == "max_tokens":
                assert params.prompt_logprobs is None or len(prompt) == 1
            elif error.param == "min_tokens":
                assert params.min_tokens > params.max_tokens
            elif error.param in {"allowed_token_ids", "bad_words"}:
                assert "must leave a token" in error.message
            else:
                assert (error.param, emit != "delta") == ("logprobs", True) and params.logprobs
        else:
            self.twin.add(request)
            self.requests[request.id] = request

    @rule(some=st.lists(alike, min_size=2, max_size=5), params=params, data=st.data())
    def add_alike(self, some: list[list[int]], params: SamplingParams, data: st.DataObject) -> None:
        for prompt in some:
            priority, n = data.draw(st.integers(-1, 1)), data.draw(st.integers(1, 3))
            few = msgspec.structs.replace(params, max_tokens=4, n=n, prompt_logprobs=None)
            self.add(prompt, few, priority, data.draw(st.sampled_from(EMITS[1:])))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        if self.engine.has_request(request_id):
            self.aborted.add(request_id)
        self.engine.abort(request_id)
        self.twin.abort(request_id)
        assert not self.engine.has_request(request_id)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        indices = data.draw(st.sets(st.integers(-1, MAX_N)))
        cut = data.draw(st.one_of(st.none(), st.none(), st.integers(-1, MAX_N)))
        self.stop_these(request_id, indices, cut)

    def stop_these(self, request_id: str, indices: set[int], cut: int | None) -> None:
        group = self.engine.scheduler._roster.by_id.get(request_id)
        owners = self.engine.scheduler.table.sequence_id
        of = {} if group is None else {group.first_id + i: i for i in range(group.request.params.n)}
        begun = {of[owner] for owner in owners.tolist() if owner in of}
        if group is not None:
            begun |= set(self.engine.scheduler.parking.indices(group).tolist())
        stopped = begun & indices
        if group is not None and cut is not None:
            stopped |= {i for i in begun if i >= cut}
            to_start = group.next_fresh(group.unstarted).tolist()
            stopped |= {i for i in to_start if i >= cut}
        self.stopped |= {(request_id, index) for index in stopped}
        self.count_reached(request_id, stopped, indices)
        for engine in self.both():
            engine.stop(request_id, np.array(sorted(indices), np.int32), cut)
        assert not {of[owner] for owner in owners.tolist() if owner in of} & stopped

    def count_reached(self, request_id: str, stopped: set[int], named: set[int]) -> None:
        """What of a request's parked samples is to be stopped."""
        is_before = False  # several samples were parked together before these
        for group, parked in self.engine.scheduler.parking.records():
            if group.request.id == request_id:
                ended = stopped & set(parked.indices.tolist())
                self.reached["stopped where it was parked"] += bool(ended & named)
                self.reached["cut where it was parked"] += bool(ended - named)
                self.reached["stopped behind others that were parked"] += is_before and bool(ended)
                is_before = is_before or len(parked) > 1

    @rule(data=st.data())
    def park(self, data: st.DataObject) -> None:
        """Some or all of those that can be, for no reason at all."""
        self.settle()
        slots = parkable(self.engine.scheduler.table).tolist()
        if slots:
            few = st.lists(st.sampled_from(slots), min_size=1, unique=True)
            self.park_these(data.draw(st.one_of(st.just(slots), few)))

    def park_these(self, slots: list[int]) -> None:
        for engine, runner in ((self.engine, self.runner), (self.twin, self.twin_runner)):
            some = np.array(sorted(slots), np.int64)
            engine.scheduler.park(some, runner.read_slots(some))

    @rule(
        prompt=st.lists(tokens, min_size=1, max_size=3),
        params=params,
        priority=st.integers(-1, 1),
        at=st.integers(1, 5),
        indices=st.sets(st.integers(0, 5)),
        cut=st.one_of(st.none(), st.integers(0, 5)),
    )
    def park_apart_and_stop(
        self,
        prompt: list[int],
        params: SamplingParams,
        priority: int,
        at: int,
        indices: set[int],
        cut: int | None,
    ) -> None:
        """Many samples of one request are parked one after the other, as victims are, and stopped
        or cut before they get slots again."""
        many = msgspec.structs.replace(params, n=6, max_tokens=12, ignore_eos=True)
        self.add(prompt, many, priority, "final")
        for _ in range(4):
            self.step_both()
        self.settle()
        table = self.engine.scheduler.table
        slots = [one for one in parkable(table).tolist() if self.request_of(one) == str(self.count)]
        for some in (slots[:at], slots[at:]):
            if some:
                self.park_these(some)
        self.stop_these(str(self.count), indices, cut)

    def request_of(self, slot: int) -> str:
        scheduler = self.engine.scheduler
        return scheduler._roster.by_first_id[int(scheduler.table.first_id[slot])].request.id

    @precondition(lambda self: any(one.durable for one in self.requests.values()))
    @rule(data=st.data(), weight=st.sampled_from([0.25, 1.0, 4.0]))
    def send_again(self, data: st.DataObject, weight: float) -> None:
        durable = sorted(one.id for one in self.requests.values() if one.durable)
        request_id = data.draw(st.sampled_from(durable))
        request = msgspec.structs.replace(self.requests[request_id], weight=weight)
        if not self.engine.has_request(request_id) and request_id not in self.aborted:
            return  # it was answered
        self.add_again(request)

    def add_again(self, request: Request) -> None:
        """Its sender knows nothing of it any more."""
        self.aborted.discard(request.id)
        self.stopped = {(name, index) for name, index in self.stopped if name != request.id}
        for key in [key for key in self.received if key[0] == request.id]:
            del self.received[key]
        self.cached.pop(request.stream, None)
        self.requests[request.id] = request
        for engine in self.both():
            try:
                engine.add(request)
            except Overloaded:
                self.aborted.add(request.id)

    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        """Everything durable goes on in another engine; what else there is ends."""
        self.settle()
        kept: defaultdict[str, list[Parked]] = defaultdict(list)
        for request, parked in self.engine.parked_of_all():
            assert request == self.requests[request.id]
            kept[request.id].append(parked)
        for name in self.requests:
            if self.engine.has_request(name):
                self.aborted.add(name)
        running = [self.requests[name] for name in sorted(self.engine.scheduler.request_ids())]
        again = data.draw(st.permutations([one.id for one in running if one.durable]))
        self.open()
        for engine in self.both():
            engine.progress = lambda one: merged(kept[one.id]) if one.id in kept else None
        for name in again:
            self.add_again(self.requests[name])

    @rule(running=st.sampled_from(["finish", "drop", "continue"]))
    def load_weights(self, running: Running) -> None:
        """The same ones again, as the engine process does: no token may change."""
        for engine in self.both():
            engine.scheduler.is_held = running == "finish"
        while running == "finish" and not self.engine.scheduler.is_quiet:
            self.step_both()
        self.settle()
        if running == "drop":
            self.aborted |= set(self.engine.scheduler.request_ids())
        for engine in self.both():
            for name in engine.scheduler.request_ids() if running == "drop" else ():
                engine.abort(name)
            engine.load_weights(WEIGHTS)
            engine.scheduler.is_held = False

    def open(self) -> None:
        config = self.config
        self.runner, self.twin_runner = RecordingRunner(config), RecordingRunner(config)
        self.engine = Engine(TINY, self.runner, config)
        self.twin = Engine(TINY, self.twin_runner, config)

    def both(self) -> tuple[Engine, Engine]:
        return self.engine, self.twin

    def settle(self) -> None:
        self.receive(*(said(engine, engine.settle()) for engine in self.both()))

    @rule(times=st.integers(1, 8))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.receive(*(said(engine, engine.step()) for engine in self.both()))

    @rule(times=st.integers(1, 8))
    def step_overlapped(self, times: int) -> None:
        for _ in range(times):
            self.step_both()

    def step_both(self) -> None:
        self.receive(*(said(engine, engine.step_overlapped()) for engine in self.both()))

    def receive(self, news: Said, twin: Said) -> None:
        assert news == twin
        for output in [*news[0], *self.outputs_of(news[1])]:
            assert output.id not in self.aborted, "an aborted request spoke"
            assert (output.id, output.index) not in self.stopped, "a stopped sample spoke"
            earlier = self.received[output.id, output.index]
            assert all(one.finish_reason is None for one in earlier), "spoke after its end"
            if output.index == PROMPT:
                others = (index for name, index in self.received if name == output.id)
                assert set(others) <= {PROMPT}, "the prompt's scores come first"
            else:
                is_stream = self.requests[output.id].emit != "final"
                assert output.finish_reason is not None or is_stream
            earlier.append(output)

    def outputs_of(self, steps: list[tuple[int, Columns]]) -> Iterator[Output]:
        """What columns say, a row each, as Outputs."""
        for number, columns in steps:
            assert number == 0
            cached = dict(columns.cached)
            rows = zip(
                np.frombuffer(columns.streams, "<i8").tolist(),
                np.frombuffer(columns.token_ids, "<i4"),
                np.frombuffer(columns.logprobs or bytes(len(columns.token_ids)), "<f4"),
                columns.reasons,
                strict=True,
            )
            for stream, token, logprob, reason in rows:
                request = self.requests[str(stream // MAX_N)]
                is_error = REASONS[reason] == "error"
                assert is_error == (token < 0)
                has_logprobs = request.params.logprobs is not None and not is_error
                self.cached |= {name: cached[name] for name in cached.keys() & {request.stream}}
                yield Output(
                    id=request.id,
                    index=stream % MAX_N,
                    token_ids=b"" if is_error else token.tobytes(),
                    logprobs=logprob.tobytes() if has_logprobs else b"",
                    finish_reason=REASONS[reason],
                    error=NOT_FINITE if is_error else None,
                    cached_tokens=self.cached.get(request.stream, 0),
                )

    @invariant()
    def slots_add_up(self) -> None:
        table = self.engine.scheduler.table
        assert table.num_free + table.num_owned == table.num_slots
        assert table.num_free == np.count_nonzero(table.sequence_id == FREE)
        owners = table.sequence_id[table.sequence_id >= 0]
        assert len(owners) == len(set(owners.tolist())) == table.num_owned
        assert not table.is_running[table.sequence_id < 0].any()
        free = table._free[: table.num_free]
        assert sorted(free.tolist()) == np.flatnonzero(table.sequence_id == FREE).tolist()

    @invariant()
    def the_queue_adds_up(self) -> None:
        scheduler = self.engine.scheduler
        groups = list(scheduler._roster.by_id.values())
        waiting = [group for group in groups if group.unstarted]
        assert scheduler.num_waiting == sum(group.unstarted for group in waiting)
        for priority in {group.request.priority for group in groups}:
            ahead = [group for group in waiting if group.request.priority >= priority]
            counted = scheduler._admission.waiting_before(priority)
            assert counted == sum(group.unstarted for group in ahead)
        assert scheduler.waiting_bytes == sum(group.num_bytes for group in waiting)
        parking, table = scheduler.parking, scheduler.table
        records = [record for _, record in parking.records()]
        assert parking.num_parked == sum(map(len, records))
        assert (parking.num_bytes > 0) == (parking.num_parked > 0)
        for group in groups:
            parked = parking.indices(group).tolist()
            owned = table.sequence_id[table.first_id == group.first_id] - group.first_id
            to_start = group.next_fresh(group.unstarted).tolist()
            alive = [*parked, *owned.tolist(), *to_start]
            assert len(alive) == len(set(alive)) == group.unfinished, "lost, or in two places"
        tiers = scheduler._admission.shares.tiers.values()
        shares = [share for tier in tiers for share in tier.members.values()]
        assert {share.number for share in shares} == {group.share.number for group in groups}
        for share in shares:
            own = [group for group in groups if group.share is share]
            assert share.num_groups == len(own)
            ids = [group.first_id for group in own]
            assert share.owned == np.count_nonzero(np.isin(table.first_id, ids))
            assert share.parked == sum(len(parking.indices(group)) for group in own)
        for tier in tiers:
            assert tier.owned == sum(share.owned for share in tier.members.values())
            total = sum(share.weight for share in tier.members.values())
            assert tier.weight == total

    @invariant()
    def prefixes_add_up(self) -> None:
        scheduler = self.engine.scheduler
        prefixes = scheduler.prefixes
        pins = Counter(chain(*(group.pinned for group in scheduler._roster.by_id.values())))
        assert all(prefix.pins == count for prefix, count in pins.items())
        assert len(pins) == prefixes.num_pinned
        held = [prefix.slot for prefix in chain(pins, prefixes._idle)]
        first = self.config.num_slots
        assert sorted(held + prefixes._free) == list(range(first, first + self.config.prefix_slots))
        listed = set(below(prefixes._root))
        assert all(prefix in listed and prefix.is_ready for prefix in prefixes._idle)
        for prefix in listed:
            assert prefix.slot == NO_SLOT or prefix in pins or prefix in prefixes._idle
            assert prefix.slot != NO_SLOT or (len(prefix.children) > 1 and not prefix.is_ready)

    @invariant()
    def scheduling_is_deterministic(self) -> None:
        assert len(self.runner.batches) == len(self.twin_runner.batches)
        for batch, twin in zip(self.runner.batches, self.twin_runner.batches, strict=True):
            for name in Batch.__slots__:
                found, expected = getattr(batch, name), getattr(twin, name)
                if name == "edits":
                    assert all(map(np.array_equal, astuple(found), astuple(expected)))
                else:
                    assert np.array_equal(found, expected)
        self.runner.batches.clear()
        self.twin_runner.batches.clear()

    def teardown(self) -> None:
        steps = 0
        while self.engine.has_work:
            self.step_both()
            steps += 1
            assert steps < 10_000, "the engine does not come to an end"
        status = self.engine.status()
        assert (status.running, status.waiting) == (0, 0)
        table = self.engine.scheduler.table
        assert table.num_free == table.num_slots
        assert self.engine.scheduler.prefixes.num_pinned == 0
        assert not self.engine.scheduler._admission.prefill._awaiting
        parking = self.engine.scheduler.parking
        assert (parking.num_parked, parking.num_bytes) == (0, 0)
        assert not self.engine.scheduler._admission.shares.tiers
        assert not self.engine.scheduler.stop_sets._users
        for request in self.requests.values():
            if request.id not in self.aborted:
                self.compare(request)

    def compare(self, request: Request) -> None:
        expected = expected_of(request)
        said: dict[int, Output] = {
            index: join(outputs)
            for (name, index), outputs in self.received.items()
            if name == request.id
        }
        if PROMPT in said and PROMPT not in expected:  # broken behind what is its first chunk here
            assert request.prompt_token_ids[4:].startswith(said.pop(PROMPT).token_ids)
            assert {one.finish_reason for one in said.values()} == {"error"}
        for index in [index for name, index in self.stopped if name == request.id]:
            so_far = said.pop(index, Output(request.id, index))
            assert so_far.finish_reason is None
            assert expected.pop(index).token_ids.startswith(so_far.token_ids)
        if expected.keys() == {PROMPT}:  # all were stopped, maybe before it was scored
            expected = {PROMPT: said[PROMPT]} if PROMPT in said else {}
        assert said.keys() == expected.keys()
        for index, one in expected.items():
            assert msgspec.structs.replace(said[index], cached_tokens=0, first_version=0) == one
            assert said[index].cached_tokens < len(request.prompt_token_ids) // 4
            assert not said[index].cached_tokens or request.params.prompt_logprobs is None
        if PROMPT in said and len(said) > 1:
            assert said[PROMPT].token_ids == request.prompt_token_ids[4:]
        for index in said.keys() - {PROMPT}:
            has_logprobs = request.params.logprobs is not None and bool(said[index].token_ids)
            assert bool(said[index].logprobs) == has_logprobs
        if request.params.max_tokens and request.params.prompt_logprobs is not None:
            params = msgspec.structs.replace(request.params, logprobs=None, prompt_logprobs=None)
            unscored = expected_of(msgspec.structs.replace(request, params=params))
            for index, one in ((i, one) for i, one in unscored.items() if i in said):
                is_broken = said[index].finish_reason == "error"  # maybe only a prompt's score
                assert is_broken or one.token_ids == said[index].token_ids


def said(engine: Engine, outputs: list[Output]) -> Said:
    """All of what steps said that returned these Outputs."""
    steps = (columns.split(STREAMS.bit_length() - 1) for columns in engine.take_columns())
    return outputs, list(chain.from_iterable(steps))


def below(prefix: Prefix) -> Iterator[Prefix]:
    """All nodes of a tree but its root; checks that each is where its tokens say."""
    for token, child in prefix.children.items():
        assert child.parent is prefix and child.tokens[prefix.length] == token
        assert np.array_equal(child.tokens[: prefix.length], prefix.tokens)
        yield child
        yield from below(child)


EngineMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


class TestEngineMachine(EngineMachine.TestCase):  # type: ignore[misc, valid-type]
    def runTest(self) -> None:
        super().runTest()
        assert set(EngineMachine.reached.elements()) == {
            "stopped where it was parked",
            "cut where it was parked",
            "stopped behind others that were parked",
        }
