"""`python -m bench.model.recurrence_rate TASK`: tokens a second of the PyTorch recurrence, as JSON.

For `srm bench engine`, which does not import torch. TASK is JSON. Each dtype, eager and compiled,
decodes at temperature 1 with each of the batch sizes and feeds back the sampled tokens.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

from engine.weights.checkpoint import load_checkpoint
from training.recurrence import Recurrence

Step = Callable[[Tensor, Tensor, Tensor], Tensor]


class Task(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The measurements to make."""

    model: str
    device: Literal["cpu", "gpu"]
    dtypes: tuple[Literal["float32", "bfloat16"], ...]
    batch_sizes: tuple[int, ...]
    repetitions: int
    seconds: float


def main(argv: list[str]) -> int:
    """Print a list of {by, dtype, first_steps_s, batches}; the first steps compile."""
    task = msgspec.json.decode(argv[0], type=Task)
    weights = load_checkpoint(Path(task.model))
    device = "cpu" if task.device == "cpu" else "cuda"
    options: dict[str, Any] = {"freezing": task.device == "cpu"}  # packs weights for a CPU
    found = []
    with torch.inference_mode():
        for dtype in task.dtypes:
            model = Recurrence(weights, getattr(torch, dtype)).to(device)
            found += [_rates("PyTorch eager", model, model, task) | {"dtype": dtype}]
            compiled = torch.compile(model, fullgraph=True, options=options)
            found += [_rates("PyTorch compiled", model, compiled, task) | {"dtype": dtype}]
    sys.stdout.write(msgspec.json.encode(found).decode())
    return 0


def _rates(name: str, model: Recurrence, step: Step, task: Task) -> dict[str, Any]:
    torch.compiler.reset()
    batches, first_steps_s = [], 0.0
    for batch_size in task.batch_sizes:
        started = time.perf_counter()
        _decode(model, step, batch_size, seconds=0)
        first_steps_s += time.perf_counter() - started
        rates = [_decode(model, step, batch_size, task.seconds) for _ in range(task.repetitions)]
        batches.append({"batch_size": batch_size, "tokens_per_s": median(rates), "raw": rates})
    return {"by": name, "first_steps_s": first_steps_s, "batches": batches}


def _decode(model: Recurrence, step: Step, batch_size: int, seconds: float) -> float:
    """Return tokens a second over at least `seconds` and at least one step."""
    state = model.empty_state(batch_size)
    tokens = torch.zeros(batch_size, dtype=torch.int64, device=state.device)
    positions = torch.arange(model.config.n_ctx, device=state.device)[:, None]
    done, started = 0, time.perf_counter()
    while not done or time.perf_counter() - started < seconds:
        tokens = step(tokens, state, positions[done % len(positions)])
        done += 1
        if state.is_cuda and done % 4 == 0:  # so that the clock sees what the device has done
            torch.cuda.synchronize()
    if state.is_cuda:
        torch.cuda.synchronize()
    return done * batch_size / (time.perf_counter() - started)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
