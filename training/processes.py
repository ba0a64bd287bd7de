"""One training run over several processes: each has a part of every batch.

`torchrun --nproc-per-node 2 -m srm train pretrain …` starts them, and says in the environment who
is who; without it there is one. Gradients are averaged by DistributedDataParallel, or, sharded
with weights and optimizer, by `fully_shard`. Sums go over nccl on GPUs, and over gloo elsewhere.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from types import FrameType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from srm.errors import ConfigError
from srm.training.model import LanguageModel

Batch = tuple[Tensor, Tensor]
Maker = Callable[[int], Batch]
Arrays = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
_PR_SET_PDEATHSIG = 1
FIRST_ALONE = timedelta(days=7)
"""Longest that processes wait for what the first one does alone, such as reading texts for hours.
Otherwise the minutes hold that torch sets, after which a process is lost."""


_makers: list[Maker] = []
"""In a process that makes batches: what makes them."""


@dataclass(frozen=True)
class Processes:
    """This process and its rank among those of the run."""

    rank: int
    count: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that prints and writes for all."""
        return self.rank == 0

    def part(self, batch: Tensor) -> Tensor:
        """Return this process's rows of a batch, on its device."""
        return batch[self.rank :: self.count].to(self.device, non_blocking=True)

    @contextmanager
    def first_alone(self) -> Iterator[None]:
        """Let the first process run the block before the others, which then find what it has
        written."""
        if self.count == 1:
            yield
            return
        patient = distributed.new_group(backend="gloo", timeout=FIRST_ALONE)
        if not self.is_first:
            distributed.barrier(patient)
        yield
        if self.is_first:
            distributed.barrier(patient)

    @contextmanager
    def alone_in(self, folder: Path) -> Iterator[None]:
        """Keep other runs out of a folder, which is made, until this one leaves it or dies.

        Raises ConfigError if another run is in it, or it cannot be written.
        """
        with ExitStack() as held:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                if self.is_first:
                    file = held.enter_context((folder / "run.lock").open("w"))
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"output: another run is in {folder}: wait for its end or change output"
                ) from None
            except OSError as error:
                raise ConfigError(f"output: {folder}: {error.strerror}") from error
            yield

    def total(self, value: Tensor) -> float:
        """Return the sum of a number over all processes."""
        if self.count > 1:
            distributed.all_reduce(value := value.detach().clone())
        return float(value)

    def meet(self) -> None:
        """Wait until all processes are here: none ends while another still writes."""
        if self.count > 1:
            distributed.barrier()


def process_count() -> int:
    """Return how many processes torchrun has started for this run; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def in_order(make: Maker, steps: Iterable[int], workers: int) -> Generator[Batch]:
    """Yield the batches of steps, which so many processes make ahead; 0: none does. Raises
    ConfigError if one of them ends."""
    if not workers:
        yield from map(make, steps)
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads are not in forked processes
    fork, pending = get_context("fork"), deque[Future[Arrays]]()
    pool = ProcessPoolExecutor(workers, fork, _begin_worker, (make, os.getpid()))
    try:
        for step in steps:
            pending.append(pool.submit(_make_batch, step))
            if len(pending) > 2 * workers:
                yield _tensors(pending.popleft().result())
        while pending:
            yield _tensors(pending.popleft().result())
    except BrokenProcessPool as error:
        raise ConfigError(f"data_workers: {error}: is there memory for {workers}?") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _begin_worker(make: Maker, parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run is saved first, and ends it
    torch.set_num_threads(1)
    _makers.append(make)


def _make_batch(step: int) -> Arrays:
    inputs, targets = _makers[-1](step)
    return inputs.numpy(), targets.numpy()


def _tensors(arrays: Arrays) -> Batch:
    return torch.from_numpy(arrays[0]), torch.from_numpy(arrays[1])


@contextmanager
def stop_asked() -> Iterator[threading.Event]:
    """Yield an event that the first SIGTERM or SIGINT sets, so that the run can be saved; a second
    signal ends the process as usual. Of several processes each gets SIGTERM from torchrun too,
    which kills those that take too long: there a second SIGTERM does nothing. Outside the main
    thread, which alone gets signals, the event is never set."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def note(number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT or process_count() == 1:
            signal.signal(number, before[signal.Signals(number)])
        if number == signal.SIGINT:  # not by print, which this may have interrupted
            os.write(2, b"\nstopping after this step; Ctrl-C again stops at once\n")
        asked.set()

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def processes(device: str) -> Iterator[Processes]:
    """Join the processes of this run, on `cpu` or `gpu`. Raises ConfigError without a GPU."""
    if device == "gpu" and not torch.cuda.is_available():
        raise ConfigError(
            "device = gpu, and torch finds no GPU: install torch for CUDA, or use cpu"
        )
    rank, count = int(os.environ.get("RANK", "0")), process_count()
    place = torch.device("cpu")
    if device == "gpu":
        place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(place)
    if count > 1:
        distributed.init_process_group("nccl" if device == "gpu" else "gloo")
    try:
        yield Processes(rank, count, place)
        if count > 1:
            distributed.barrier()  # none closes its connections while another may need them
    finally:
        if count > 1:
            distributed.destroy_process_group()


def spread(model: LanguageModel, own: Processes, shard: bool) -> nn.Module:
    """Return the model wrapped so that all processes train it together.

    With `shard`, each holds a part of every block's weights, gradients and optimizer state.
    """
    model.to(own.device)
    if own.count == 1:
        return model
    if not shard:
        return DistributedDataParallel(model)
    for block in model.mixer_blocks:
        fully_shard(block)
    fully_shard(model)
    return model
