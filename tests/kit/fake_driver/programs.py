"""`python -m tests.kit.fake_driver.programs NAME ARGUMENTS`: what tests run on the fake driver.

Each is a process of its own, since the driver reads its environment once. It prints a JSON object
last, and marks in the driver's log what it is about to do.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from max.engine import InferenceSession

from research.bench.engine.decode import decode_rows, random_runner, random_tokens
from research.bench.engine.models import StepsConfig
from research.bench.frame import random_shape
from srm.engine.device.gpu import pci_address
from srm.engine.device.graph_cache import GraphCache
from srm.engine.device.products import VariantName
from srm.engine.device.runner import ModelRunner, open_device
from srm.engine.device.slot_copies import SlotCopies
from srm.engine.device.state_pool import StatePool
from srm.engine.steps.batch import SlotStates
from srm.errors import SRMError

ROWS = 4_096
D_MODEL = 512
MODEL = random_shape(D_MODEL)


@cache
def _log() -> int:
    return os.open(os.environ.get("FAKE_CUDA_LOG", os.devnull), os.O_WRONLY | os.O_APPEND)


def mark(what: str) -> None:
    os.write(_log(), json.dumps({"mark": what}).encode() + b"\n")


def _runner(
    folder: str, rows: int, slots: int = 0, variants: tuple[VariantName, ...] = ()
) -> ModelRunner:
    config = StepsConfig(cache_dir=Path(folder), variants=variants)
    return random_runner(MODEL, config, "bfloat16", rows, slots)


def open_gpu(*numbers: str) -> dict[str, Any]:
    """Open a GPU as the engine does."""
    try:
        device = open_device("gpu", *map(int, numbers))
    except SRMError as error:
        return {"refused": error.message}
    stats = {name: device.stats[f"{name}_memory"] for name in ("free", "total")}
    architecture = str(device.architecture_name)
    name, address = str(device.model_name), pci_address()
    return stats | {"name": name, "architecture": architecture, "address": address}


def steps(folder: str, *variants: VariantName) -> dict[str, Any]:
    """Two steps one by one, then two that overlap; all of random weights."""
    runner = _runner(folder, ROWS, variants=variants)
    (tokens,) = random_tokens(MODEL, 1, ROWS)
    batch = decode_rows(tokens, 0)
    for number in ("first", "second", "third"):  # both sets of buffers are there after these
        mark(number)
        runner.launch(batch).wait()
    mark("warm")
    one, other = runner.launch(batch), runner.launch(batch)
    one.wait(), other.wait()
    mark("overlap")
    one, other = runner.launch(batch), runner.launch(batch)
    one.wait()
    mark("read the first")
    other.wait()
    runner.replay_steps(True)
    for number in ("captured", "replayed"):
        mark(number)
        runner.launch(batch).wait()
    mark("eager beside it")
    runner.launch(replace(batch, score_rows=batch.slots[:1], num_top=batch.slots[:1])).wait()
    mark("both")
    one, other = runner.launch(batch), runner.launch(batch)
    one.wait(), other.wait()
    mark("closed")
    runner.close()
    return {"arithmetic": runner.arithmetic, "slots": runner.num_slots}


def wait_for_a_step(folder: str, until: str = "") -> dict[str, Any]:
    """A step, whatever becomes of it. Another thread makes the file that a wait of the driver's
    lasts until, once that has begun."""
    runner = _runner(folder, 256)
    (tokens,) = random_tokens(MODEL, 1, 256)
    mark("step")
    if until:
        threading.Thread(target=_end_the_wait, args=(until,)).start()
    try:
        runner.launch(decode_rows(tokens, 0)).wait()
    except RuntimeError as error:
        return {"failed": str(error)}
    return {"failed": ""}


def _end_the_wait(until: str) -> None:
    while f'"until": "{until}"' not in Path(os.environ["FAKE_CUDA_LOG"]).read_text():
        time.sleep(0.01)
    Path(until).touch()


def start(folder: str, slots: str) -> dict[str, Any]:
    """Start a runner of so many slots."""
    try:
        runner = _runner(folder, 256, int(slots))
    except SRMError as error:
        return {"refused": error.message}
    return {"slots": runner.num_slots}


def copy_slots(folder: str, slots: str) -> dict[str, Any]:
    """A pool of so many slots, of which the highest are written and read."""
    device, model, count = open_device("gpu"), MODEL, int(slots)
    session = InferenceSession(devices=[device])
    compiled = GraphCache(session, device, Path(folder)).slots()
    copies = SlotCopies(session, compiled, model.state_width, device)
    mark("pool")
    pool = StatePool(model, count, device, copies)
    device.synchronize()
    chosen = np.arange(count - 700, count)
    states = np.random.default_rng(0).standard_normal((700, model.state_width), np.float32)
    mark("write")
    pool.write(chosen, SlotStates(states, np.arange(700, dtype=np.int32)))
    mark("read")
    content = pool.read(chosen)
    mark("end")
    # Nothing is launched, so what was packed to be written is still there to be read.
    same = bool((content.states == states).all() and (content.last_tokens == np.arange(700)).all())
    return {"same": same, "width": model.state_width, "free": device.stats["free_memory"]}


PROGRAMS: dict[str, Callable[..., dict[str, Any]]] = {
    item.__name__: item for item in (open_gpu, steps, wait_for_a_step, start, copy_slots)
}


def main(argv: list[str]) -> int:
    name, *arguments = argv
    print(json.dumps(PROGRAMS[name](*arguments)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
