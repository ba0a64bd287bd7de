"""Batches that other processes make ahead of their use, so that no device waits for them."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

AHEAD = 4
"""Batches that each process makes before the first of them is used."""


class Batches(Protocol):
    """Inputs and targets by index; they can be pickled."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]: ...


@contextmanager
def batches_ahead(batches: Batches, steps: int, workers: int) -> Iterator[Batches]:
    """Yield the same batches, made by so many processes up to that of the last step; with none they
    are made when they are asked for. The processes end with the block."""
    if not workers:
        yield batches
        return
    ahead = _Ahead(batches, steps, workers)
    try:
        yield ahead
    finally:
        ahead.close()


class _Ahead:
    def __init__(self, batches: Batches, steps: int, workers: int) -> None:
        self._arrays, self._steps, self._workers = _Arrays(batches), steps, workers
        self._next = -1
        self._made: Any = None

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index != self._next:
            self.close()
            self._made = iter(self._loader(index))
        inputs, targets = next(self._made)
        self._next = index + 1
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def _loader(self, index: int) -> DataLoader[Any]:
        # CUDA does not survive a fork: the processes come from one that knows nothing but modules.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["srm.training.data"])
        return DataLoader(
            self._arrays,
            batch_size=None,
            sampler=range(index, self._steps),
            num_workers=self._workers,
            prefetch_factor=AHEAD,
            collate_fn=_unchanged,
            worker_init_fn=_begin,
            multiprocessing_context=context,
        )

    def close(self) -> None:
        """End the processes, which an iterator does when nothing refers to it."""
        if self._made is not None:
            self._made._shutdown_workers()
        self._made, self._next = None, -1


class _Arrays(Dataset[tuple[Any, Any]]):
    """Batches as arrays, which are sent through a pipe: tensors would need shared memory, of which
    containers have little."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def __getitem__(self, index: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        inputs, targets = self._batches[index]
        return inputs.numpy(), targets.numpy()


def _unchanged(batch: Any) -> Any:
    return batch


def _begin(_: int) -> None:
    """Leave Ctrl-C to the run, which saves first, and keep to one thread."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
