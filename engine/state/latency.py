"""Latencies: how long sequences waited, were prefilled and sampled, and what requests asked for.

A step only notes which sequences began and ended in it, as arrays; the metrics are worked out for
many steps at once, in `publish`. The owner of the scheduler says what time it is. Keeps: the work
of a step depends on what begins and ends in it, not on its rows; an aborted request leaves no times
behind.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from prometheus_client import Histogram

from engine import metrics
from engine.state.sequence import SequenceGroup
from engine.steps.batch import I32, I64, Bool

F64 = npt.NDArray[np.float64]
Turn = tuple[int, int]
"""From the first slot up to but not including the second, past the last slot if need be."""
MIXED: Turn = (-1, -1)  # the slots served do not follow each other
Gap = tuple[float, int]  # seconds between two tokens, and how many rows waited so long
EACH = math.nan  # in place of a stretch's time: each of its slots has one of its own


class InterTokenLatency:
    """When each slot was served last, as stretches of slots.

    A step serves every running slot of one stretch: all of them, or those whose turn it is. So
    slots last served by the same step lie side by side, and a few boundaries say when each was.
    Only where steps serve slots of high priority beside some of a lower one is the time of each
    slot kept.
    Keeps: the counts of a step add up to its rows that are not their sequence's first.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._begins = [0]  # of the stretches, ascending
        self._times = [0.0]  # seconds, of the step that served each, or EACH
        self._each: F64 | None = None  # f64[num_slots] seconds, in stretches of EACH

    def serve(self, slots: I64, first: I64, turn: Turn | None, now: float) -> list[Gap]:
        """Note that a turn's running slots, or all, were served at `now`; return (seconds, rows)
        pairs.

        `slots`: i64[D], ascending from where the turn begins, but for MIXED. `first`: i64[S], those
        of them that were served for the first time, and so did not wait for a next token.
        """
        if turn is None and len(self._begins) == 1 and self._each is None:
            gaps = [(now - self._times[0], len(slots) - len(first))]
            self._times[0] = now
            return gaps if gaps[0][1] else []
        if turn == MIXED:
            return self._serve_mixed(slots, first, now)
        found: list[Gap] = []
        first = np.sort(first)
        begin, stop = turn or (0, self._num_slots)
        if begin < stop:
            found = self._serve_stretch(slots, first, begin, stop, now)
        else:
            # Past the last slot: two stretches, and the slots of each ascend.
            cut = bisect_left(range(len(slots)), True, key=lambda row: bool(slots[row] < begin))
            if begin < self._num_slots:
                found += self._serve_stretch(slots[:cut], first, begin, self._num_slots, now)
            if stop:
                found += self._serve_stretch(slots[cut:], first, 0, stop, now)
        if self._each is not None and not any(map(math.isnan, self._times)):
            self._each = None
        return found

    def last(self, slots: I64) -> F64:
        """When these slots were served last: f64[len(slots)], in seconds."""
        times = np.array(self._times)[np.searchsorted(self._begins, slots, "right") - 1]
        return times if self._each is None else np.where(np.isnan(times), self._each[slots], times)

    def _serve_mixed(self, slots: I64, first: I64, now: float) -> list[Gap]:
        each = self._each if self._each is not None else np.zeros(self._num_slots)
        ends = [*self._begins[1:], self._num_slots]
        for begin, end, time in zip(self._begins, ends, self._times, strict=True):
            if not math.isnan(time):
                each[begin:end] = time
        self._each, self._begins, self._times = each, [0], [EACH]
        gaps = self._gaps_of_each(slots, first, now)
        each[slots] = now
        return gaps

    def _gaps_of_each(self, slots: I64, first: I64, now: float) -> list[Gap]:
        assert self._each is not None
        waited = slots[~np.isin(slots, first)] if len(first) else slots
        times, counts = np.unique(self._each[waited], return_counts=True)
        return list(zip((now - times).tolist(), counts.tolist(), strict=True))

    def _serve_stretch(
        self, slots: I64, first: I64, begin: int, stop: int, now: float
    ) -> list[Gap]:
        low = bisect_right(self._begins, begin) - 1
        high = bisect_left(self._begins, stop)
        edges = [begin, *self._begins[low + 1 : high], stop]
        cuts = np.searchsorted(slots, edges)
        rows = np.diff(cuts) - np.diff(np.searchsorted(first, edges))
        gaps: list[Gap] = []
        for place, (time, count) in enumerate(
            zip(self._times[low:high], rows.tolist(), strict=True)
        ):
            if math.isnan(time):
                gaps += self._gaps_of_each(slots[cuts[place] : cuts[place + 1]], first, now)
            elif count:
                gaps.append((now - time, count))
        begins, times = [begin], [now]
        if stop < (self._begins[high] if high < len(self._begins) else self._num_slots):
            begins.append(stop)  # the rest of the last one
            times.append(self._times[high - 1])
        low += self._begins[low] < begin  # the beginning of the first one stays
        self._begins[low:high], self._times[low:high] = begins, times
        return gaps


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
        self._groups: dict[int, SequenceGroup] = {}  # by first id, until all is published
        self._aborted: list[int] = []
        self._gaps: list[Gap] = []
        self._spoke: list[tuple[float, I64]] = []  # when, and the groups of who spoke first
        self._ended: list[_Ended] = []
        self._finished: list[SequenceGroup] = []
        self._published = 0.0

    def arrive(self, group: SequenceGroup) -> None:
        group.arrived = self.now
        self._groups[group.first_id] = group

    def take_up(self, group: SequenceGroup) -> None:
        """Note that its prompt, or what a kept state left of it, is fed from now on."""
        group.taken_up = self.now
        self.num_prompt_tokens += len(group.prompt)

    def start(self, group: SequenceGroup, slots: I32) -> None:
        """Note the slots of its next sequences: the first began with the prompt, others now."""
        assert group.taken_up is not None
        self._taken_up[slots] = self.now if group.started else group.taken_up

    def sample(self, slots: I64, first: I64, first_ids: I64, turn: Turn | None) -> None:
        """Note that a step sampled a token for each of these slots, in the order of its turn: for
        those of `first`, i64[S], of the groups `first_ids`, the first one."""
        self.num_sampled += len(slots)
        late = self._end_pauses(slots, first) if self._paused else first
        self._gaps += self._pace.serve(slots, late, turn, self.now)
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
        found = paused[np.isin(paused, slots)]
        last = np.array([self._paused.pop(slot) for slot in found.tolist()])
        resumed = ~np.isin(found, first)
        known = last[resumed & ~np.isnan(last)]
        self._gaps += [(self.now - one, 1) for one in known.tolist()]
        return np.concatenate([first, found[resumed]])

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
                self._groups.pop(first_id, None)
            self._aborted.clear()

    def _publish_tokens(self) -> None:
        metrics.observe_counts(metrics.INTER_TOKEN_SECONDS, self._gaps)
        waits = []
        for now, first_ids in self._spoke:
            ids, counts = np.unique(first_ids, return_counts=True)
            for first_id, count in zip(ids.tolist(), counts.tolist(), strict=True):
                waits.append((now - self._groups[first_id].arrived, count))
        metrics.observe_counts(metrics.FIRST_TOKEN_SECONDS, waits)
        self._gaps.clear()
        self._spoke.clear()

    def _publish_ended(self) -> None:
        if not self._ended:
            return
        lengths = [len(one.tokens) for one in self._ended]
        now = np.repeat([one.now for one in self._ended], lengths)
        first_ids = np.concatenate([one.first_ids for one in self._ended])
        taken_up = np.concatenate([one.taken_up for one in self._ended])
        first_token = np.concatenate([one.first_token for one in self._ended])
        tokens = np.concatenate([one.tokens for one in self._ended])
        self._ended.clear()
        order = np.argsort(first_ids, kind="stable")
        ids, begins, counts = np.unique(first_ids[order], return_index=True, return_counts=True)
        groups = [self._groups[first_id] for first_id in ids.tolist()]
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
            del self._groups[group.first_id]
        params = [group.request.params for group in groups]
        facts: tuple[tuple[Histogram, Sequence[float]], ...] = (
            (metrics.REQUEST_SECONDS, [group.finished - group.arrived for group in groups]),
            (metrics.REQUEST_PROMPT_TOKENS, [len(group.prompt) for group in groups]),
            (metrics.REQUEST_TOKENS, [group.sampled for group in groups]),
            (metrics.REQUEST_LONGEST, [group.longest for group in groups]),
            (metrics.REQUEST_N, [one.n for one in params]),
            (metrics.REQUEST_MAX_TOKENS, [one.max_tokens for one in params]),
        )
        for histogram, values in facts:
            metrics.observe(histogram, np.array(values))
