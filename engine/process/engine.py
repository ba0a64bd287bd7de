"""Engine: a scheduler and a runner, stepped by whoever owns it; the in-process API.

`step` is the specification; `step_overlapped` gives the same tokens and keeps the device busy while
the host thinks.
"""

from __future__ import annotations

import collections
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import numpy as np
from prometheus_client import Counter, Gauge

from srm.engine import metrics
from srm.engine.config import EngineConfig, ModelConfig
from srm.engine.constraints.grammars import Grammars
from srm.engine.messages import (
    REASONS,
    Done,
    Output,
    ReadSample,
    Request,
    SamplingParams,
    Status,
    join,
)
from srm.engine.scheduler.completion import StepTokens
from srm.engine.scheduler.parking import merge_writes, parkable
from srm.engine.scheduler.running_samples import find_sample
from srm.engine.scheduler.scheduler import Scheduler
from srm.engine.scheduler.wait_queues import QueueRate
from srm.engine.state.parked import Parked, in_parts
from srm.engine.state.prefixes import NO_SLOT
from srm.engine.steps.batch import I32, Batch, Launched, Runner
from srm.engine.weights.weights import Weights
from srm.errors import NotFound, Overloaded, RequestError, SRMError

READ_SLOTS = 4_096  # slots whose states are copied from or to the device at once, about


class BoundWeights(NamedTuple):
    """Weights as a runner takes them into use."""

    bound: Any
    fingerprint: str


_ROOM_STEPS = 16
"""Steps after which it is seen to what constraints have learnt."""


class _Step(NamedTuple):
    batch: Batch
    launched: Launched
    started: float


class Engine:
    """Continuous batching of requests on one runner. Not thread-safe."""

    def __init__(
        self,
        model: ModelConfig,
        runner: Runner,
        config: EngineConfig,
        fingerprint: str = "",
        weights_version: int = 1,
        label: str = "",
    ) -> None:
        """`label`: what a trainer calls these weights, if it does."""
        self.grammars = Grammars(model, config.model / "tokenizer.json")
        """Compiles the constraints of requests."""
        self.scheduler = Scheduler(
            model, msgspec.structs.replace(config, num_slots=runner.num_slots), self.grammars
        )
        self.num_steps = 0
        self.model = model
        self._fingerprint = fingerprint
        self.weights_version, self._label = weights_version, label
        self._max_waiting, self._max_logprobs = config.max_waiting, config.logprobs_limit(model)
        self._arithmetic = runner.arithmetic
        self.runner = runner
        """The runner that executes the batches of its steps."""
        self._queue_rate = QueueRate()  # at which sequences leave the queue
        self._in_flight: _Step | None = None
        self._is_settled = True  # False: complete the step under way before the next one
        self._tokens: list[StepTokens] = []
        self._returned: list[Output] = []  # states of prompts, since the last step
        self._num_restored = 0  # tokens of sequences that were parked when they were added
        self._last_completed = 0.0
        self.progress: Callable[[Request], Parked | None] = lambda _: None
        """Returns the progress that an equal durable request made before this engine."""
        metrics.NUM_SLOTS.set(runner.num_slots)
        metrics.CONTEXT_TOKENS.set(model.n_ctx)
        self._show_weights()
        self._counted: dict[Counter, float] = {}  # the scheduler's counts, as far as published
        self._levels: dict[Gauge, float] = {}  # the values that the gauges show
        self.update_gauges()

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self._in_flight is not None or self.scheduler.has_work

    def has_request(self, request_id: str) -> bool:
        """Whether Outputs of this request are still to come."""
        return self.scheduler.has_request(request_id)

    def add(self, request: Request, parked: Parked | None = None) -> None:
        """Accept a request, or raise a RequestError that says why not.

        Its samples in `parked` go on from there, all others start anew. A durable request may have
        the id of one that runs: it takes over what runs, if both ask for the same. For one that
        does not run, `progress` is asked.
        """
        self.scheduler.latencies.now = time.monotonic()
        if request.state_length and request.state_of != self._fingerprint:
            request = msgspec.structs.replace(request, state=b"", state_length=0, state_of="")
        if self.scheduler.is_sent_again(request):
            self._is_settled = False
        elif request.durable and self.scheduler.is_durable(request.id):
            self.abort(request.id)
        elif request.durable and parked is None:
            parked = self.progress(request)
        try:
            self.scheduler.add(request, parked)
        except RequestError as error:
            if isinstance(error, Overloaded):
                error.retry_after_s = self._queue_rate.seconds_until(error.excess, time.monotonic())
            metrics.REQUESTS.labels("refused").inc()
            metrics.REFUSALS.labels(error.code).inc()
            raise
        self._num_restored += sum(map(len, parked.tokens)) // 4 if parked else 0

    def abort(self, request_id: str) -> None:
        """Forget a request; no further Output of it follows. Unknown ids are ignored."""
        if ended := self.scheduler.abort(request_id):
            metrics.REQUESTS.labels("aborted").inc()
            metrics.SEQUENCES.labels("abort").inc(ended)
            self._publish()  # there may be no further step to do it

    def end(self, request_id: str) -> list[Output]:
        """End all that is left of a request, each of its completions with its tokens so far; the
        engine must be settled."""
        assert self._in_flight is None, "settle() comes first"
        outputs = self.scheduler.end(request_id)
        metrics.REQUESTS.labels("aborted").inc()
        metrics.SEQUENCES.labels("abort").inc(len(outputs))
        self._publish()
        return outputs

    def read_sample(self, asked: ReadSample) -> Done:
        """Return the tokens of a running sample, and in the detail the salt of what goes on from
        them; its state is kept for that as a prompt's is. The engine must be settled. Raises
        NotFound."""
        assert self._in_flight is None, "settle() comes first"
        sample = find_sample(asked, self.scheduler)
        if sample is None:
            name, _, prompt = asked.of.rpartition("-")
            raise NotFound(
                f"sample index = {asked.index} of prompt_index = {prompt} of {name[:80]!r} does "
                "not run: there is no such completion of yours, it has fewer prompts or samples, "
                "is a search, or the sample has ended",
                "index",
            )
        own, prefixes = sample.group, self.scheduler.prefixes
        states = sample.states
        if sample.slot is not None:
            states = self.runner.read_slots(np.array([sample.slot], np.int64))
        claimed = sample.tokens[:-1], own.order, own.request.salt
        if states and (prefix := prefixes.claim(*claimed, only_new=True)):
            self.runner.write_slots(np.array([prefix.slot], np.int64), states)
            prefixes.finish(prefix)
            prefixes.release(prefix)
        return Done(asked.id, {"salt": own.request.salt}, sample.tokens.astype("<i4").tobytes())

    def stop(self, request_id: str, indices: I32, cut: int | None = None) -> None:
        """End these samples of a request; no further Output of them follows. See StopSamples."""
        requests = self.scheduler.num_requests
        metrics.SEQUENCES.labels("stop").inc(self.scheduler.stop(request_id, indices, cut))
        metrics.REQUESTS.labels("finished").inc(requests - self.scheduler.num_requests)
        self._publish()  # there may be no further step to do it

    def start_below(self, request_id: str, index: int) -> None:
        """Let the samples of a request before this one start. See StartSamples."""
        self.scheduler.start_below(request_id, index)
        self._publish()

    def take_tokens(self) -> list[StepTokens]:
        """Take the Tokens of the steps since the last call, which come besides their Outputs."""
        tokens, self._tokens = self._tokens, []
        return tokens

    def step(self) -> list[Output]:
        """Feed one batch and wait for it. Completes what `step_overlapped` left under way first."""
        outputs = self.settle() + self._make_room()
        outputs += self._complete(self._launch())
        return outputs + self._take_returned()

    def step_overlapped(self) -> list[Output]:
        """Launch one batch, then complete the one launched before: the same tokens, a step later.

        Scheduling before the last step's tokens are known is possible because tokens stay on the
        device and every sequence's length limit is known beforehand. A sequence that a stop token
        ends has one row too many under way by then; `Scheduler.complete` drops it.
        """
        outputs = self._make_room()
        launched = self._launch()
        landing, self._in_flight = self._in_flight, launched
        return outputs + self._complete(landing) + self._take_returned()

    def settle(self) -> list[Output]:
        """Complete the step under way and launch no other; return its Outputs."""
        landing, self._in_flight = self._in_flight, None
        return self._complete(landing)

    def parked_of_all(self) -> Iterator[tuple[Request, Parked]]:
        """Yield all that durable requests need to go on in another engine, as far as they have
        sampled.

        A request may come several times, with other samples. The engine must be, and stay, settled.
        """
        for part in self.durable_parts():
            yield from part

    def durable_parts(self) -> Iterator[list[tuple[Request, Parked]]]:
        """Yield the same in parts, none empty, of at most READ_SLOTS sequences or of one request.

        Steps may be made between two parts, if the engine is settled when the next one is asked
        for. If a sequence moved meanwhile, the last part that has it is right, or no part has it.
        """
        last = -1
        while True:
            assert self._in_flight is None, "settle() comes first"
            slots = parkable(self.scheduler.table)
            slots = slots[slots > last][:READ_SLOTS]
            if not len(slots):
                break
            last = int(slots[-1])
            if len(durable := self.scheduler.durable_among(slots)):
                yield list(self.scheduler.parked_in(durable, self.runner.read_slots(durable)))
        yield from in_parts(list(self.scheduler.parked_apart()), READ_SLOTS)

    def state_layout(self) -> tuple[int, str]:
        """Return the number of values of a sequence's state, and their dtype as numpy writes it."""
        states = self.runner.read_slots(np.empty(0, np.int64)).states
        return states.shape[1], states.dtype.str

    def bind_weights(self, weights: Weights) -> BoundWeights:
        """Prepare other weights of the same configuration for `load_weights`. Any thread may call
        it, while steps are made."""
        assert weights.config == self.model
        return BoundWeights(self.runner.bind_weights(weights), weights.fingerprint)

    def load_weights(
        self,
        weights: Weights | BoundWeights,
        label: str = "",
        refeeds: bool = False,
        end_running: Callable[[], object] | None = None,
    ) -> None:
        """Go on with other weights of the same configuration, which their trainer may call
        something; the engine must be settled. Raises SRMError where the runner cannot use them:
        then nothing has changed.

        Running sequences go on from their states, or, with `refeeds`, from those that these weights
        make of their tokens. Whatever starts later uses no state of the old
        weights, except samples of a prompt of which others run. `end_running` is called once the
        runner has the weights, and what ends then is still of the old ones.
        """
        assert self._in_flight is None, "settle() comes first"
        prepared = weights if isinstance(weights, BoundWeights) else self.bind_weights(weights)
        try:
            self.runner.use_weights(prepared.bound)
        except Exception as error:  # as where a GPU has no room for both: the old ones go on
            why = f"weights {prepared.fingerprint} cannot be put to use: {error!r}"
            raise SRMError(why) from error
        if end_running is not None:
            end_running()
        self.scheduler.renew(self.weights_version, refeeds)
        self._fingerprint, self._label = prepared.fingerprint, label
        self.weights_version += 1
        self._show_weights()
        self.update_gauges()

    def _show_weights(self) -> None:
        metrics.WEIGHTS_VERSION.set(self.weights_version)
        metrics.WEIGHTS_FINGERPRINT.set(zlib.crc32(self._fingerprint.encode()))

    def status(self) -> Status:
        table = self.scheduler.table
        return Status(
            state="ready",
            num_slots=table.num_slots,
            running=table.num_owned,
            waiting=self.scheduler.num_waiting,
            max_waiting=self._max_waiting,
            retry_after_s=self._queue_rate.seconds_until(
                self.scheduler.num_waiting, time.monotonic()
            ),
            steps=self.num_steps,
            n_ctx=self.model.n_ctx,
            vocab_size=self.model.vocab_size,
            fingerprint=self._fingerprint,
            weights_version=self.weights_version,
            sampled=self.scheduler.latencies.num_sampled + self._num_restored,
            arithmetic=self._arithmetic,
            label=self._label,
            max_logprobs=self._max_logprobs,
        )

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        on_step: Callable[[int], None] = lambda _: None,
    ) -> list[list[Output]]:
        """Complete every prompt; returns, prompt by prompt, one Output per sample, by index. With
        `prompt_logprobs`, the scores of a prompt of 2 tokens or more come before its samples.

        Prompt i is sampled with seed `params.seed + i`, so that equal prompts differ. The engine
        must have no other work. `on_step` is given the number of Outputs that have come. Raises
        RequestError if a prompt is refused.
        """
        assert not self.has_work, "generate() needs the engine for itself"
        parts: list[defaultdict[int, list[Output]]] = [defaultdict(list) for _ in prompts]
        waiting = [
            Request(
                id=str(i),
                prompt_token_ids=np.asarray(prompt, "<i4").tobytes(),
                params=msgspec.structs.replace(params, seed=(params.seed + i) % 2**64),
                emit="delta" if params.logprobs else "final",
            )
            for i, prompt in enumerate(prompts)
        ]
        waiting.reverse()
        come = 0
        try:
            while waiting or self.has_work:
                with suppress(Overloaded):
                    while waiting:
                        self.scheduler.add(waiting[-1])
                        waiting.pop()
                for output in self.step_overlapped():
                    parts[int(output.id)][output.index].append(output)
                    come += 1
                on_step(come)
        except RequestError:
            for request_id in self.scheduler.request_ids():
                self.abort(request_id)
            self.step()
            raise
        return [[join(own[index]) for index in sorted(own)] for own in parts]

    def _make_room(self) -> list[Output]:
        """Park sequences that must give up their slots.

        Where any must, or a durable request was taken over, the step under way is completed first,
        so that the pool holds final states; return its Outputs.
        """
        outputs = [] if self._is_settled else self.settle()
        self._is_settled = True
        if len(self.scheduler.choose_preempted()):
            outputs += self.settle()
            slots = self.scheduler.choose_preempted()  # some may have ended meanwhile
            for begin in range(0, len(slots), READ_SLOTS):
                some = slots[begin : begin + READ_SLOTS]
                self.scheduler.park(some, self.runner.read_slots(some))
        return outputs

    def _launch(self) -> _Step | None:
        started = self.scheduler.latencies.now = time.monotonic()
        batch = self.scheduler.schedule()
        if resumed := self.scheduler.take_resumed():
            for slots, states in merge_writes(resumed, READ_SLOTS):
                self.runner.write_slots(slots, states)
        step = None if batch is None else _Step(batch, self.runner.launch(batch), started)
        self._return_states()
        return step

    def _return_states(self) -> None:
        """Read what requests want of states, which are complete once the step launched has run."""
        groups, slots = self.scheduler.take_prepared()
        if not groups:
            return
        known = np.unique(slots[slots >= 0])
        states: dict[int, bytes] = {NO_SLOT: b""}
        for begin in range(0, len(known), READ_SLOTS):
            some = known[begin : begin + READ_SLOTS]
            rows = self.runner.read_slots(some).states.astype("<f4", copy=False)
            states |= {slot: row.tobytes() for slot, row in zip(some.tolist(), rows, strict=True)}
        for group, slot in zip(groups, slots.tolist(), strict=True):
            self._returned += self.scheduler.return_state(group, states[slot])
        metrics.REQUESTS.labels("finished").inc(len(groups))
        self._publish()  # there may be no further step to do it

    def _take_returned(self) -> list[Output]:
        returned, self._returned = self._returned, []
        return returned

    def _complete(self, step: _Step | None) -> list[Output]:
        if step is None:
            return []
        result = step.launched.wait()
        now = self.scheduler.latencies.now = time.monotonic()
        requests = self.scheduler.num_requests
        outputs = self.scheduler.complete(step.batch, result)
        read, write = self.scheduler.take_copies()
        if len(read):
            self.runner.copy_slots(read, write)
        self.num_steps += 1
        if finished := requests - self.scheduler.num_requests:
            metrics.REQUESTS.labels("finished").inc(finished)
        ends = collections.Counter(output.finish_reason for output in outputs)
        for step_tokens in self.scheduler.take_tokens():
            counts = np.bincount(step_tokens.tokens.reasons).tolist()
            ends.update(dict(zip(REASONS, counts, strict=False)))
            self._tokens.append(step_tokens)
        for reason, count in ends.items():
            if reason is not None and count:
                metrics.SEQUENCES.labels(reason).inc(count)
        self._measure(step, now)
        return outputs

    def _measure(self, step: _Step, now: float) -> None:
        metrics.STEPS.inc()
        if prefilled := step.batch.num_tokens - step.batch.num_decode:
            metrics.PREFILL_TOKENS.inc(prefilled)
        if scored := step.batch.num_scored_prefill:
            metrics.SCORED_TOKENS.inc(scored)
        metrics.BATCH_ROWS.observe(step.batch.num_rows)
        metrics.STEP_TOKENS.observe(step.batch.num_tokens)
        metrics.STEP_SECONDS.observe(now - max(step.started, self._last_completed))
        self._last_completed = now
        if not self.num_steps % _ROOM_STEPS and (learnt := self.grammars.make_room()):
            self.scheduler.table.matchers.renew(learnt)
        self._queue_rate.note(self.scheduler.num_left, now)
        self._count()
        self._publish()

    def _count(self) -> None:
        prefixes, latencies = self.scheduler.prefixes, self.scheduler.latencies
        matchers = self.scheduler.table.matchers
        counts = {
            metrics.DECODE_TOKENS: latencies.num_sampled,
            metrics.PROMPT_TOKENS: latencies.num_prompt_tokens,
            metrics.PREFIX_HITS: prefixes.num_hits,
            metrics.CACHED_TOKENS: prefixes.num_cached_tokens,
            metrics.PREFIX_EVICTIONS: prefixes.num_evictions,
            metrics.MASKED_ROWS: matchers.num_masks,
            metrics.TABLED_ROWS: self.scheduler.num_tabled,
            metrics.MASK_SECONDS: matchers.seconds,
            metrics.PARKINGS: self.scheduler.parking.num_ever_parked,
            metrics.RESUMED: self.scheduler.parking.num_resumed,
        }
        for counter, count in counts.items():
            if more := count - self._counted.get(counter, 0):
                counter.inc(more)
        self._counted = counts

    def _publish(self) -> None:
        self.scheduler.latencies.publish(is_idle=not self.scheduler.num_requests)
        self.update_gauges()

    def update_gauges(self) -> None:
        scheduler, table = self.scheduler, self.scheduler.table
        levels = {
            metrics.PREFIXES: scheduler.prefixes.num_used,
            metrics.RUNNING: table.num_owned,
            metrics.WAITING: scheduler.num_waiting,
            metrics.PARKED: scheduler.parking.num_parked,
            metrics.FREE_SLOTS: table.num_free,
            metrics.SLOT_USAGE: table.num_owned / table.num_slots,
            metrics.TABLE_BYTES: table.tables.nbytes,
            metrics.GRAMMAR_BYTES: self.grammars.shown_bytes,
        }
        if levels != self._levels:
            self._levels = levels
            for gauge, level in levels.items():
                gauge.set(level)
