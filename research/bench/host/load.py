"""A scheduler kept busy with made-up results, and its cost on the host.

Steps are scheduled as in an engine, each before the previous one is completed; results are there at
once.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, fields

import numpy as np

from srm.engine.config import EngineConfig, ModelConfig
from srm.engine.messages import Request, SamplingParams
from srm.engine.scheduler.scheduler import Scheduler
from srm.engine.steps.batch import F32, I32, Batch, StepResult

MODEL = ModelConfig(d_model=512, num_layers=8, num_heads=4, n_ctx=512, vocab_size=8192)
"""The model's shape; no result here depends on its width."""
PROMPT_LENGTH = 8
LEAST_STEPS = 8
"""The fewest steps of a measurement, however long they take."""


@dataclass(slots=True)
class Cost:
    """Seconds by activity, and the rows, ended sequences and steps done."""

    add: float = 0.0
    schedule: float = 0.0
    complete: float = 0.0
    rows: int = 0
    ended: int = 0
    steps: int = 0

    def entry(self) -> dict[str, float]:
        """Return times in nanoseconds per decode row, and the counts."""
        times = {name: getattr(self, name) for name in ("add", "schedule", "complete")}
        return {name: 1e9 * seconds / self.rows for name, seconds in times.items()} | {
            "ended_per_row": self.ended / self.rows,
            "rows": self.rows,
            "steps": self.steps,
        }


class Load:
    """A scheduler with `running` sequences.

    Sequences of `length` tokens are replaced when they end; None: they fill the context.
    """

    def __init__(self, running: int, rows: int, length: int | None, samples: int) -> None:
        self.scheduler = Scheduler(
            MODEL,
            EngineConfig(
                num_slots=running,
                prefix_slots=running // samples + 2,
                prefix_cache=False,  # all prompts are the same
                max_step_rows=rows,
                max_step_tokens=2 * rows + PROMPT_LENGTH * running,
                max_waiting=2 * running + samples,
            ),
        )
        self._length = length
        self._samples = min(samples, running)
        self._least_waiting = running // 4 if length else 0
        self._landing: Batch | None = None
        self._num_requests = 0
        rng = np.random.default_rng(0)
        # Made up, and none that ends a sequence.
        self._tokens: I32 = rng.integers(2, MODEL.vocab_size, rows, dtype=np.int32)
        self._logprobs: F32 = np.zeros(rows, np.float32)
        if length is None:
            self._add(running, MODEL.n_ctx)
        else:  # the first ones have all ages, so that about as many end in every step
            for age in rng.integers(0, length, running // self._samples).tolist():
                self._add(self._samples, length - age)

    def run(self, seconds: float, least_steps: int, most_steps: int | None = None) -> Cost:
        """Run for at least `seconds` and `least_steps`, and at most `most_steps`."""
        cost, began = Cost(), time.perf_counter()
        while cost.steps < least_steps or time.perf_counter() - began < seconds:
            self._step(cost)
            if cost.steps == most_steps:
                break
        return cost

    def bytes_per_row(self) -> float:
        """Return the least bytes that a step moves in the host's memory, per decode row.

        These are the step's arrays, which the host writes, and the result's, which it reads.
        """
        batch = self._landing
        assert batch is not None
        arrays = [getattr(batch, field.name) for field in fields(batch)]
        written = sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))
        read = self._tokens.itemsize + self._logprobs.itemsize
        return written / batch.num_decode + read

    def _step(self, cost: Cost) -> None:
        clock = time.perf_counter
        started = clock()
        while self.scheduler.num_waiting < self._least_waiting:
            self._add(self._samples, self._length or 0)
        added = clock()
        batch = self.scheduler.schedule()
        scheduled = clock()
        landing, self._landing = self._landing, batch
        self.scheduler.latencies.now = scheduled
        if landing is not None:
            count = landing.num_decode
            result = StepResult(self._tokens[:count], self._logprobs[:count])
            cost.ended += len(self.scheduler.complete(landing, result))
            self.scheduler.latencies.publish(is_idle=False)
            cost.rows += count
        cost.add += added - started
        cost.schedule += scheduled - added
        cost.complete += clock() - scheduled
        cost.steps += 1

    def _add(self, n: int, max_tokens: int) -> None:
        self._num_requests += 1
        params = SamplingParams(
            n=n, max_tokens=max_tokens, temperature=1.0, top_p=0.9, seed=self._num_requests
        )
        prompt = np.full(PROMPT_LENGTH, 2, "<i4").tobytes()
        request = Request(id=str(self._num_requests), prompt_token_ids=prompt, params=params)
        self.scheduler.add(request)
