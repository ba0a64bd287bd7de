"""Latencies: how long sequences waited, were prefilled and sampled, and what requests asked for.

A step only notes which sequences began and ended in it, as arrays; the metrics are worked out for
many steps at once, in `publish`. The owner of the scheduler says what time it is. Keeps: the work
of a step depends on what begins and ends in it, not on its rows; an aborted request leaves no times
behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from prometheus_client import Histogram

from srm.engine import metrics
from srm.engine.state.sequence import SequenceGroup
from srm.engine.steps.batch import I32, I64, Bool

F64 = npt.NDArray[np.float64]
Gap = tuple[float, int]  # seconds between two tokens, and how many rows waited so long
MOST_STEPS = 4_096
"""Steps whose times are kept before those that no slot needs any more are dropped."""


class InterTokenLatency:
    """When each slot was served last, as the number of the step that did it.

    As long as every step serves all running slots, they share one number, and a step costs the same
    whatever its rows. Keeps: the counts of a step add up to its rows that are not their sequence's
    first.
    """

    def __init__(self, num_slots: int, most_steps: int = MOST_STEPS) -> None:
        self._last: I64 = np.zeros(num_slots, np.int64)  # i64 step that served each slot, or older
        self._floor = 0  # the last step that served all running slots
        self.times = [0.0]
        """Seconds, of the steps from `_floor` on."""
        self._most_steps = most_steps

    def serve(self, slots: I64, first: I64, is_partial: bool, now: float) -> list[Gap]:
        """Note that a step served these slots, i64[D], at `now`; return (seconds, rows) pairs.

        `first`: i64[S], those of them that were served for the first time, and so did not wait for
        a next token. `is_partial`: others, which run too, were not served.
        """
        num_known, step = len(self.times), self._floor + len(self.times)
        self.times.append(now)
        if num_known == 1 and not is_partial:
            counts = np.array([len(slots) - len(first)])
        else:
            self._last[first] = step
            counts = self._counts(slots, num_known + 1)[:num_known]
            self._last[slots] = step
        waited = np.flatnonzero(counts)
        gaps = [
            (now - self.times[place], count)
            for place, count in zip(waited.tolist(), counts[waited].tolist(), strict=True)
        ]
        if not is_partial:
            self._floor, self.times = step, [now]
        elif num_known >= self._most_steps:
            self._drop_unused()
        return gaps

    def last(self, slots: I64) -> F64:
        """When these slots were served last: f64[len(slots)], in seconds."""
        return np.array(self.times)[self._places(self._last[slots])]

    def _places(self, steps: I64) -> I64:
        """Return the places in `times` of these steps."""
        return np.maximum(steps - self._floor, 0)

    def _counts(self, slots: I64, num_places: int) -> I64:
        """Return how many of these slots were served last by the step at each place."""
        last = self._last[slots]
        # Neighbours were mostly served by the same step, so there are few pieces.
        begins = np.flatnonzero(np.diff(last, prepend=-1))
        counts = np.diff(begins, append=len(last))
        sums = np.bincount(self._places(last[begins]), counts, num_places)
        return sums.astype(np.int64)

    def _drop_unused(self) -> None:
        """Number the steps anew, without those after which each slot was served again."""
        places = self._places(self._last)
        used = np.bincount(places, minlength=len(self.times)) > 0
        self._last = (np.cumsum(used) - 1)[places]
        self._floor, self.times = 0, np.array(self.times)[used].tolist()
        self._most_steps = max(self._most_steps, 2 * len(self.times))


PUBLISH_S = 0.1
"""Most seconds that histograms lag while steps go on; they never lag once the engine is idle."""


class _Ended(NamedTuple):
    now: float
    first_ids: I64
    taken_up: F64
    first_token: F64
    tokens: I64


class RequestTimes(NamedTuple):
    """Times of parked sequences, in seconds; of another engine's, when they were added here."""

    taken_up: F64
    first_token: F64
    last_token: F64  # NaN where that is not known

    def only(self, places: slice | I64 | Bool) -> RequestTimes:
        """Select the sequences at these places."""
        return RequestTimes(*(column[places] for column in self))


class Latencies:
    """Collects times that the scheduler notes, until they are published."""

    def __init__(self, num_slots: int) -> None:
        self.now = 0.0  # seconds, as the owner of the scheduler last said
        self.num_sampled = 0  # tokens, ever
        self.num_prompt_tokens = 0  # of all prompts whose turn came
        self._taken_up = np.zeros(num_slots)  # f64 seconds, by slot
        self._first_token = np.zeros(num_slots)  # f64 seconds, by slot
        self._pace = InterTokenLatency(num_slots)
        self._paused: dict[int, float] = {}  # seconds of the last token before parking, by slot
        self.groups: dict[int, SequenceGroup] = {}
        """By first id, until all is published."""
        self._aborted: list[int] = []
        self._gaps: list[Gap] = []
        self._spoke: list[tuple[float, I64]] = []  # when, and the groups of who spoke first
        self._ended: list[_Ended] = []
        self._finished: list[SequenceGroup] = []
        self._published = 0.0

    def arrive(self, group: SequenceGroup) -> None:
        group.arrived = self.now
        self.groups[group.first_id] = group

    def take_up(self, group: SequenceGroup) -> None:
        """Note that its prompt, or what a kept state left of it, is fed from now on."""
        group.taken_up = self.now
        self.num_prompt_tokens += len(group.prompt)

    def start(self, group: SequenceGroup, slots: I32) -> None:
        """Note the slots of its next sequences: the first began with the prompt, others now."""
        assert group.taken_up is not None
        self._taken_up[slots] = self.now if group.started else group.taken_up

    def sample(self, slots: I64, first: I64, first_ids: I64, is_partial: bool) -> None:
        """Note that a step sampled a token for each of these slots: for those of `first`, i64[S],
        of the groups `first_ids`, the first one. `is_partial`: other slots run too."""
        self.num_sampled += len(slots)
        late = self._end_pauses(slots, first) if self._paused else first
        self._gaps += self._pace.serve(slots, late, is_partial, self.now)
        if len(first):
            self._first_token[first] = self.now
            self._spoke.append((self.now, first_ids))

    def unknown(self, count: int) -> RequestTimes:
        """Return times for sequences that another engine began."""
        now = np.full(count, self.now)
        return RequestTimes(now, now, np.full(count, np.nan))

    def park(self, slots: I64) -> RequestTimes:
        """Return the times of sequences that leave their slots, to go on in others."""
        last = self._pace.last(slots)
        for place, slot in enumerate(slots.tolist()) if self._paused else ():
            last[place] = self._paused.pop(slot, last[place])  # parked again before any token
        return RequestTimes(self._taken_up[slots], self._first_token[slots], last)

    def resume(self, slots: I32, times: RequestTimes) -> None:
        """Note that sequences with these times go on in these slots."""
        self._taken_up[slots], self._first_token[slots] = times.taken_up, times.first_token
        self._paused.update(zip(slots.tolist(), times.last_token.tolist(), strict=True))

    def _end_pauses(self, slots: I64, first: I64) -> I64:
        """Return `first` and the slots that sample for the first time since their sequences were
        parked.

        The latter waited since then. A sequence that begins in such a slot was never parked.
        """
        paused = np.fromiter(self._paused, np.int64, len(self._paused))
        ended = paused[np.isin(paused, slots)]
        last = np.array([self._paused.pop(slot) for slot in ended.tolist()])
        resumed = ~np.isin(ended, first)
        known = last[resumed & ~np.isnan(last)]
        self._gaps += [(self.now - key, 1) for key in known.tolist()]
        return np.concatenate([first, ended[resumed]])

    def end_parked(self, first_id: int, times: RequestTimes, tokens: I64) -> None:
        """Note that these sequences of a group ended where they were parked."""
        if len(tokens):
            first_ids = np.full(len(tokens), first_id)
            ended = _Ended(self.now, first_ids, times.taken_up, times.first_token, tokens)
            self._ended.append(ended)

    def end(self, slots: I64, first_ids: I64, tokens: I64) -> None:
        """Note that these sequences ended, with so many tokens each."""
        if len(slots):
            taken_up, first_token = self._taken_up[slots], self._first_token[slots]
            self._ended.append(_Ended(self.now, first_ids, taken_up, first_token, tokens))

    def finish(self, group: SequenceGroup) -> None:
        """Note that all its sequences have ended, or that none is to begin."""
        group.finished = self.now
        self._finished.append(group)

    def abort(self, group: SequenceGroup) -> None:
        self._aborted.append(group.first_id)

    def publish(self, is_idle: bool) -> None:
        """Put what was noted into the metrics every PUBLISH_S, and at once if nothing runs on."""
        if is_idle or self.now - self._published >= PUBLISH_S:
            self._published = self.now
            self._publish_tokens()
            self._publish_ended()
            self._publish_finished()
            for first_id in self._aborted:
                self.groups.pop(first_id, None)
            self._aborted.clear()

    def _publish_tokens(self) -> None:
        metrics.observe_counts(metrics.INTER_TOKEN_SECONDS, self._gaps)
        waits = []
        for now, first_ids in self._spoke:
            ids, counts = np.unique(first_ids, return_counts=True)
            for first_id, count in zip(ids.tolist(), counts.tolist(), strict=True):
                waits.append((now - self.groups[first_id].arrived, count))
        metrics.observe_counts(metrics.FIRST_TOKEN_SECONDS, waits)
        self._gaps.clear()
        self._spoke.clear()

    def _publish_ended(self) -> None:
        if not self._ended:
            return
        lengths = [len(future.tokens) for future in self._ended]
        now = np.repeat([future.now for future in self._ended], lengths)
        first_ids = np.concatenate([future.first_ids for future in self._ended])
        taken_up = np.concatenate([future.taken_up for future in self._ended])
        first_token = np.concatenate([future.first_token for future in self._ended])
        tokens = np.concatenate([future.tokens for future in self._ended])
        self._ended.clear()
        order = np.argsort(first_ids, kind="stable")
        ids, begins, counts = np.unique(first_ids[order], return_index=True, return_counts=True)
        groups = [self.groups[first_id] for first_id in ids.tolist()]
        arrived = np.empty(len(tokens))
        arrived[order] = np.repeat([group.arrived for group in groups], counts)
        totals = np.add.reduceat(tokens[order], begins)
        longest = np.maximum.reduceat(tokens[order], begins)
        for group, total, most in zip(groups, totals.tolist(), longest.tolist(), strict=True):
            group.sampled += total
            group.longest = max(group.longest, most)
        metrics.observe(metrics.SEQUENCE_SECONDS, now - arrived)
        metrics.observe(metrics.SEQUENCE_QUEUE_SECONDS, taken_up - arrived)
        metrics.observe(metrics.SEQUENCE_PREFILL_SECONDS, first_token - taken_up)
        metrics.observe(metrics.SEQUENCE_DECODE_SECONDS, now - first_token)
        metrics.observe(metrics.SEQUENCE_INFERENCE_SECONDS, now - taken_up)
        metrics.observe(metrics.SEQUENCE_TOKENS, tokens)
        spoke_on = tokens > 1
        pace = (now - first_token)[spoke_on] / (tokens[spoke_on] - 1)
        metrics.observe(metrics.SEQUENCE_TOKEN_SECONDS, pace)

    def _publish_finished(self) -> None:
        groups, self._finished = self._finished, []
        for group in groups:
            del self.groups[group.first_id]
        params = [group.request.params for group in groups]
        facts: tuple[tuple[Histogram, Sequence[float]], ...] = (
            (metrics.REQUEST_SECONDS, [group.finished - group.arrived for group in groups]),
            (metrics.REQUEST_PROMPT_TOKENS, [len(group.prompt) for group in groups]),
            (metrics.REQUEST_TOKENS, [group.sampled for group in groups]),
            (metrics.REQUEST_LONGEST, [group.longest for group in groups]),
            (metrics.REQUEST_N, [param.n for param in params]),
            (metrics.REQUEST_MAX_TOKENS, [param.max_tokens for param in params]),
        )
        for histogram, values in facts:
            metrics.observe(histogram, np.array(values))
