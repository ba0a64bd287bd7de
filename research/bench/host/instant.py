"""`python -m research.bench.host.instant`: the engine process on a runner that computes nothing.

Takes the flags of `python -m srm.engine`; of the checkpoint it reads only `config.json`. It returns
made-up tokens, none of which ends a sequence, at the speed of the scheduler: benchmarks with it
measure all that lies between engine and socket.
"""

from __future__ import annotations

import sys

import msgspec
import numpy as np

from srm.engine.config import EngineConfig, ModelConfig
from srm.engine.device.libc import keep_freed_memory
from srm.engine.process.engine import Engine
from srm.engine.process.process import serve
from srm.engine.steps.batch import I64, Batch, Scores, SlotStates, StepResult
from srm.engine.weights.weights import Weights
from srm.engine.wiring import EngineWiring
from srm.errors import SRMError
from srm.memory import collect_rarely
from srm.settings import load

DEFAULT_SLOTS = 65_536
"""Slots if num_slots is 0."""


class InstantRunner:
    """Samples from a row of made-up tokens, with made-up scores, one step after the other."""

    arithmetic = "none"

    def __init__(self, model: ModelConfig, config: EngineConfig) -> None:
        self.num_slots = config.num_slots or DEFAULT_SLOTS
        rng = np.random.default_rng(0)
        self._rows, tokens = config.step_limits(model)
        count = self._rows + max(self._rows, tokens)
        # A window of these that moves from step to step, so that a sequence's tokens differ.
        ordinary = [token for token in range(model.vocab_size) if token not in model.end_ids]
        self._tokens = rng.choice(np.array(ordinary, np.int32), count)
        self._logprobs = -rng.random(count, np.float32)
        likely = (count, config.logprobs_limit(model))
        self._top_ids = rng.choice(np.array(ordinary, np.int32), likely)
        self._top_logprobs = -np.sort(rng.random(likely, np.float32))
        self._steps = 0

    def launch(self, batch: Batch) -> InstantStep:
        self._steps += 1
        window = self._steps % self._rows
        rows = slice(window, window + batch.num_decode)
        scored = slice(window, window + len(batch.score_rows))
        top = self._top_ids[scored], self._top_logprobs[scored]
        scores = Scores(self._logprobs[scored], np.ones(len(top[0]), np.int32), *top)
        return InstantStep(StepResult(self._tokens[rows], self._logprobs[rows], scores))

    def read_slots(self, slots: I64) -> SlotStates:
        return SlotStates(np.zeros((len(slots), 1), np.float32), np.zeros(len(slots), np.int32))

    def write_slots(self, slots: I64, states: SlotStates) -> None:
        """Do nothing: it has no states."""

    def copy_slots(self, read: I64, write: I64) -> None:
        """Do nothing: it has no states."""

    def bind_weights(self, weights: Weights) -> Weights:
        """Return them as they are: it has no weights."""
        return weights

    def use_weights(self, bound: Weights) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class InstantStep:
    """A step that is done when it is launched."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def wait(self) -> StepResult:
        return self._result


def main(argv: list[str]) -> int:
    """Serve until told to stop; return the exit code."""
    keep_freed_memory()
    try:
        config = load(EngineWiring, argv, prog="python -m research.bench.host.instant")
        model = msgspec.json.decode((config.model / "config.json").read_bytes(), type=ModelConfig)
        collect_rarely()
        return serve(Engine(model, InstantRunner(model, config), config, "instant"), config)
    except SRMError as error:
        sys.stderr.write(f"{error.message}\n")
        return error.exit_code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
