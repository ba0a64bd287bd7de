"""`python -m bench.host.sleeping`: the instant engine, whose steps take a fixed time each.

The file `step_s` beside the model's `config.json` has that time, in seconds. It computes nothing,
so a machine of two cores has as many such engines as it can feed.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

from bench.host.instant import InstantRunner, InstantStep, main
from engine.config import DEMO_MODEL, EngineConfig, ModelConfig
from engine.steps.batch import Batch, StepResult

STEP_FILE = "step_s"


def copy_model(folder: Path) -> None:
    """Make a folder with what such an engine and its server read of the demo model."""
    folder.mkdir()
    for file in ("config.json", "tokenizer.json"):
        shutil.copy(DEMO_MODEL / file, folder)


class SleepingRunner(InstantRunner):
    """Makes one step after the other, as a device does."""

    def __init__(self, model: ModelConfig, config: EngineConfig) -> None:
        super().__init__(model, config)
        self._step_s = float((config.model / STEP_FILE).read_text())
        self._free_at = 0.0

    def launch(self, batch: Batch) -> SleepingStep:
        result = super().launch(batch).wait()
        self._free_at = max(time.monotonic(), self._free_at) + self._step_s
        return SleepingStep(result, self._free_at)


class SleepingStep(InstantStep):
    """A step that is done at a moment known before."""

    def __init__(self, result: StepResult, done_at: float) -> None:
        super().__init__(result)
        self._done_at = done_at

    def wait(self) -> StepResult:
        time.sleep(max(0.0, self._done_at - time.monotonic()))
        return super().wait()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:], SleepingRunner))
