"""`python -m research.bench.model.recurrence_rate TASK`: tokens a second of the PyTorch recurrence,
as JSON.

For `srm bench engine`, which does not import torch. TASK is JSON. Each dtype in each form decodes
at temperature 1 with each of the batch sizes and feeds back the sampled tokens. Forms are eager and
compiled, and on a GPU both also captured as a CUDA graph, which the host launches as a whole.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

from research.bench.frame import note, random_shape
from research.bench.model.recurrence import Recurrence
from srm.engine.weights.random_model import random_tensors
from srm.training.checkpoint import load_model
from srm.training.model import SRM

Step = Callable[[Tensor, Tensor, Tensor], Tensor]
FORMS = {
    "eager": "PyTorch eager",
    "compiled": "PyTorch compiled",
    "captured": "PyTorch captured",
    "compiled captured": "PyTorch compiled, captured",
    "max-autotune captured": "PyTorch compiled with max-autotune, captured",
}
"""Name of each form in a record."""
WARM_STEPS = 3
"""Number of steps before a capture, which must not be the first step."""


class RecurrenceTask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The measurements to make."""

    model: str
    """Checkpoint, or the width of a random model."""
    device: Literal["cpu", "gpu"]
    dtypes: tuple[Literal["float32", "bfloat16"], ...]
    batch_sizes: tuple[int, ...]
    repetitions: int
    seconds: float
    forms: tuple[str, ...] = ()
    """FORMS to measure; empty: all that the device has."""


def main(argv: list[str]) -> int:
    """Print a list of {by, dtype, first_steps_s, batches}; the first steps compile."""
    task = msgspec.json.decode(argv[0], type=RecurrenceTask)
    forms = task.forms or list(FORMS)[: 2 if task.device == "cpu" else None]
    dtypes = [_rates(form, dtype, task) for dtype in task.dtypes for form in forms]
    sys.stdout.write(msgspec.json.encode(dtypes).decode())
    return 0


def _load(model: str) -> SRM:
    """Return the model of a folder, or a random one of that width."""
    if not model.isdecimal():
        return load_model(Path(model))
    drawn = SRM(random_shape(int(model)))
    tensors = random_tensors(drawn.config)
    drawn.load_state_dict({name: torch.from_numpy(value) for name, value in tensors.items()})
    return drawn


def _rates(form: str, dtype: str, task: RecurrenceTask) -> dict[str, Any]:
    model = _load(task.model)
    decoder, batches, first_steps_s = Decoder(model, form, dtype, task.device), [], 0.0
    for batch_size in task.batch_sizes:
        measured = note(decoder.measure(batch_size, task.repetitions, task.seconds))
        first_steps_s += measured.pop("first_step_s")
        batches.append(measured)
    by = {"by": FORMS[form], "dtype": dtype, "first_steps_s": first_steps_s}
    return by | {"batches": batches}


class Decoder:
    """The recurrence of a model, which it takes, in one of FORMS on a "cpu" or a "gpu"; captured
    ones need the latter."""

    def __init__(self, model: SRM, form: str, dtype: str, device: str) -> None:
        torch.compiler.reset()
        self._on = "cpu" if device == "cpu" else "cuda"
        self._is_captured = form.endswith("captured")
        assert not self._is_captured or self._on == "cuda", "only a GPU has such graphs"
        self._model = Recurrence(model, getattr(torch, dtype)).to(self._on)
        with torch.inference_mode():
            options: dict[str, Any] = {"freezing": device == "cpu"}  # packs weights for a CPU
            self._step: Step = self._model
            if form.startswith("compiled"):
                self._step = torch.compile(self._model, fullgraph=True, options=options)
            elif form.startswith("max-autotune"):
                mode = "max-autotune-no-cudagraphs"
                self._step = torch.compile(self._model, fullgraph=True, dynamic=False, mode=mode)

    def measure(self, batch_size: int, repetitions: int, seconds: float) -> dict[str, Any]:
        """Return tokens a second, and how long the first step took, compilation included."""
        with torch.inference_mode():
            started = time.perf_counter()
            advance = (self._captured if self._is_captured else self._plain)(batch_size)
            self._count(advance, 0)
            first = time.perf_counter() - started
            steps = [self._count(advance, seconds) for _ in range(repetitions)]
        rates = [batch_size * step for step in steps]
        entries = {"batch_size": batch_size, "tokens_per_s": median(rates), "raw": rates}
        return entries | {"first_step_s": first}

    def _count(self, advance: Callable[[], None], seconds: float) -> float:
        """Return steps a second over at least `seconds` and at least one step."""
        done, started = 0, time.perf_counter()
        while not done or time.perf_counter() - started < seconds:
            advance()
            done += 1
            if self._on == "cuda" and done % 4 == 0:  # the clock sees what the device has done
                torch.cuda.synchronize()
        if self._on == "cuda":
            torch.cuda.synchronize()
        return done / (time.perf_counter() - started)

    def _plain(self, batch_size: int) -> Callable[[], None]:
        state, steps = self._model.empty_state(batch_size), count()
        tokens = torch.zeros(batch_size, dtype=torch.int64, device=self._on)
        positions = torch.arange(self._model.config.n_ctx, device=self._on)[:, None]

        def advance() -> None:
            nonlocal tokens
            tokens = self._step(tokens, state, positions[next(steps) % len(positions)])

        return advance

    def _captured(self, batch_size: int) -> Callable[[], None]:
        """Return the replay of a graph that feeds tokens back and counts its position itself."""
        state = self._model.empty_state(batch_size)
        tokens = torch.zeros(batch_size, dtype=torch.int64, device=self._on)
        position = torch.zeros(1, dtype=torch.int64, device=self._on)

        def advance() -> None:
            tokens.copy_(self._step(tokens, state, position))
            position.add_(1).remainder_(self._model.config.n_ctx)

        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(WARM_STEPS):
                advance()
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            advance()
        return graph.replay


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
