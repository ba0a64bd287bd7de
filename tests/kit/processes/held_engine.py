"""`python -m tests.kit.processes.held_engine`: numpy_engine, which a test can hold between two
steps.

What is under way then goes no further, however long anything else takes. All but steps goes on:
requests come and are ended, weights are changed, questions are answered.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from srm import logs
from srm.engine.config import EngineConfig
from srm.engine.messages import Output
from srm.engine.process.engine import Engine
from tests.kit.processes.numpy_engine import main


class HeldEngine(Engine):
    """A file beside the folder of its flag says whether it is held: not in it, where a change of
    weights might read it."""

    def __init__(self, model: Any, runner: Any, config: EngineConfig, *more: Any) -> None:
        super().__init__(model, runner, config, *more)
        flags = (flag[8:] for flag in sys.argv if flag.startswith("--model="))
        self._hold = _file(Path(next(flags, config.model)))
        self._made, self._began = 0, ""
        """Steps since it is held, and when that began: an idle engine does not see a release."""

    def step_overlapped(self) -> list[Output]:
        if self._may_step():
            return super().step_overlapped()
        time.sleep(0.002)
        outputs = self.settle()
        self.update_gauges()
        return outputs

    def _may_step(self) -> bool:
        try:
            steps, began = self._hold.read_text().split()
        except FileNotFoundError:
            return True
        if began != self._began:
            self._made, self._began = 0, began
        if self._made >= int(steps) and self.scheduler.table.num_owned:
            return False
        self._made += 1
        return True


def hold(folder: Path, steps: int = 1) -> None:
    """The engine makes so many steps from the first call on, until `release`, and others only
    while no sequence has a slot."""
    file = _file(folder)
    began = file.read_text().split()[1] if file.exists() else str(time.time_ns())
    partial = file.with_suffix(".partial")
    partial.write_text(f"{steps} {began}")
    partial.replace(file)


def release(folder: Path) -> None:
    _file(folder).unlink(missing_ok=True)


def _file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.hold")


@contextmanager
def held(folder: Path, steps: int = 1) -> Iterator[None]:
    hold(folder, steps)
    try:
        yield
    finally:
        release(folder)


if __name__ == "__main__":
    logs.configure("info", "text")
    raise SystemExit(main(sys.argv[1:], make_engine=HeldEngine))
