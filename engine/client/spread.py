"""Spread: which engine runs which samples of a request, where there are several.

Every engine gives the same tokens, so this decides only when they come. Part p of P has the samples
p, p + P, p + 2P, …: so the first ones, which `until` asks for first, come from all engines alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from zlib import crc32

import msgspec
import numpy as np

from srm.engine.messages import Request, Status
from srm.engine.steps.batch import I64

PART_SAMPLES = 8
"""Least samples of a part: each of its engines prefills the prompt."""
PREFIX_BYTES = 4 * 64
"""First bytes of a prompt by which an engine is preferred, since it may keep their state."""
MAX_RUNS = 3
"""Engines that are given a part, one after the other, if each is lost with it."""


@dataclass(slots=True, eq=False)
class Part:
    """Samples of a request that one engine runs."""

    request: Request
    """Request that the engine is sent."""
    place: int
    """Place of the whole request in its stream."""
    engine: int
    samples: I64 | None
    """i64[n] which of the request's samples these are, ascending; None: all."""
    runs: int

    def local(self, samples: I64) -> I64:
        """Return the places here of those of the request's samples that are in this part."""
        if self.samples is None:
            return samples
        return np.flatnonzero(np.isin(self.samples, samples))

    def first_from(self, sample: int) -> int:
        """Return how many of the samples here come before this one of the request's."""
        return sample if self.samples is None else int(np.searchsorted(self.samples, sample))

    def sample(self, index: int) -> int:
        """Return which of the request's samples the one at this place is."""
        return index if self.samples is None else int(self.samples[index])

    def again(self, left: I64, engine: int, start_below: int | None) -> Part:
        """Return what another engine is to run: the samples `left`, under an id of its own, of
        which those of the request's before `start_below` may start, None: all."""
        runs = self.runs + 1
        name = self.request.id.rpartition("~")[0] if self.runs > 1 else self.request.id
        request = _only(self.request, f"{name}~{runs}", left, start_below)
        return Part(request, self.place, engine, left, runs)


class Spread:
    """Decides which engine gets which samples, from what is known of each engine."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.statuses: list[Status | None] = [None] * count
        """Last Status of each engine; None while it cannot be reached."""
        self.is_away = [False] * count
        """Whether an engine has been unreachable for so long that nothing waits for it."""
        self.given = [0] * count
        """Samples of streams that are open here, for which each engine is waited for."""
        self._first, self._processes = 0, 1
        self._total = [0] * count  # samples that an engine had by its last Status
        self._own = [0] * count  # `given` at that time

    def share(self, number: int, processes: int) -> None:
        """Allow for so many processes that give engines streams. Where several engines have as much
        to do, engine `number`, counted around, is chosen first."""
        self._first, self._processes = number % self.count, max(1, processes)

    def note_status(self, engine: int, status: Status | None) -> None:
        """Note what an engine says of itself, or that it is not to be given anything."""
        self.statuses[engine] = status
        self.is_away[engine] &= status is None
        own = 0 if status is None else self.given[engine]
        self._own[engine] = own
        self._total[engine] = max(own, 0 if status is None else status.running + status.waiting)

    def parts(self, request: Request, place: int) -> list[Part]:
        """Divide a request.

        A durable one goes to the same engines whenever it is sent, since they have its snapshots,
        unless these are away. One whose prompt is scored is not divided: scores come once, and
        before any sample.
        """
        if self.count == 1:
            return [Part(request, place, 0, None, 1)]
        params = request.params
        most = max(1, params.n // PART_SAMPLES) if params.prompt_logprobs is None else 1
        if request.durable:
            home = crc32(request.id.encode())
            own = [(home + part) % self.count for part in range(self.count)]
            engines = (
                [engine_index for engine_index in own if not self.is_away[engine_index]] or own
            )[:most]
        else:
            engines = self.choose(request, most) or [0]  # which then refuses it
        if len(engines) == 1:
            return [Part(request, place, engines[0], None, 1)]
        divided = []
        for part, engine in enumerate(engines):
            samples = np.arange(part, params.n, len(engines))
            name = f"{request.id}#{part}" if part else request.id
            of_part = _only(request, name, samples, request.first_wave)
            divided.append(Part(of_part, place, engine, samples, 1))
        return divided

    def choose(self, request: Request, most: int, without: int = -1) -> list[int]:
        """Return engines, the one with the least to do first, `most` at most; none if none is up.

        A single one is that which has most likely had the prompt's beginning before, unless it has
        more than 1/16 of its slots more to do than another.
        """
        # Statuses are up to a second old. Meanwhile other processes, which see the same ones, are
        # taken to have done what this one did: else all would fill one engine's gap.
        own = sum(self._own)
        processes = min(sum(self._total) / own if own else 1.0, self._processes)
        up = {
            engine: self._load(engine, status, processes)
            for engine, status in enumerate(self.statuses)
            if status is not None and engine != without
        }
        ready = [engine for engine in up if self._is_ready(engine)] or list(up)
        engines = sorted(
            ready, key=lambda engine: (up[engine], (engine - self._first) % self.count)
        )[:most]
        prompt = request.prompt_token_ids
        if len(engines) == 1 and len(prompt) >= PREFIX_BYTES:
            known = ready[crc32(prompt[:PREFIX_BYTES]) % len(ready)]
            if up[known] <= up[engines[0]] + 1 / 16:
                return [known]
        return engines

    def _is_ready(self, engine: int) -> bool:
        status = self.statuses[engine]
        return status is not None and status.state == "ready"

    def _load(self, engine: int, status: Status, processes: float) -> float:
        """Return the sequences that an engine has to run by now, by slot, where so many processes
        like this one give it some."""
        given = self.given[engine]
        now = self._total[engine] + processes * (given - self._own[engine])
        return max(given, now) / status.num_slots


def _only(request: Request, name: str, samples: I64, start_below: int | None) -> Request:
    """Return the request for these of its samples alone, of which those before may start."""
    params = msgspec.structs.replace(request.params, n=len(samples))
    numbers = samples.astype("<i4").tobytes()
    wave = None if start_below is None else int(np.searchsorted(samples, start_below))
    return msgspec.structs.replace(
        request, id=name, params=params, samples=numbers, first_wave=wave
    )
