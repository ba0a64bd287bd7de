"""A training run's update as one CUDA graph, which one launch replays.

A graph has addresses and numbers as they were when it was captured. So inputs are copied into
tensors that stay, learning rates are tensors, whether an update is skipped is decided on the GPU,
and nothing waits for the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from srm.errors import ConfigError

WARM_UP = 3
"""Updates before the one that is captured: kernels are loaded and moments made, outside a graph."""
Part = tuple[Tensor, ...]


class CapturedUpdate:
    """Makes updates of parts of one number and shape: the first ones launch by launch, the others
    by replaying the graph of one."""

    def __init__(self, make: Callable[[Sequence[Part]], Tensor]) -> None:
        """`make` is what is captured: it makes an update of the parts and returns its numbers."""
        self._make = make
        self._parts: list[Part] = []
        self._numbers = torch.empty(0)
        self._count = 0
        self._graph = torch.cuda.CUDAGraph()
        self._aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, parts: Sequence[Part]) -> list[float]:
        """Make an update and return its numbers, for which the host waits. Raises ConfigError for
        one that needs the host meanwhile, and for parts of other shapes."""
        self._place(parts)
        if self._count < WARM_UP:
            self._aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._aside):
                self._numbers = self._make_first() if not self._count else self._make(self._parts)
            torch.cuda.current_stream().wait_stream(self._aside)
        else:
            if self._count == WARM_UP:
                with torch.cuda.graph(self._graph):
                    self._numbers = self._make(self._parts)
            self._graph.replay()
        self._count += 1
        numbers: list[float] = self._numbers.tolist()
        return numbers

    def _place(self, parts: Sequence[Part]) -> None:
        """Copy the parts to where the graph reads them."""
        if not self._parts:
            self._parts = [tuple(tensor.clone() for tensor in part) for part in parts]
        shapes, new = ([[t.shape for t in part] for part in some] for some in (self._parts, parts))
        if shapes != new:
            raise ConfigError(
                f"capture must be false where batches differ in shape: {new} follow {shapes}"
            )
        for place, part in zip(self._parts, parts, strict=True):
            for tensor, value in zip(place, part, strict=True):
                tensor.copy_(value)

    def _make_first(self) -> Tensor:
        with _WithoutHost():  # type: ignore[no-untyped-call]
            return self._make(self._parts)


class _WithoutHost(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations that wait for the host: those whose result or shape depends on values, and
    copies between devices."""

    _REFUSED = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
    _SOURCES = {torch.ops.aten._to_copy.default: 0, torch.ops.aten.copy_.default: 1}  # noqa: RUF012
    """Which argument of a copy has what is copied."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        source = args[self._SOURCES[func]] if func in self._SOURCES else result
        is_between = source is not result and source.device.type != result.device.type
        if is_between or not self._REFUSED.isdisjoint(func.tags):
            raise ConfigError(f"capture must be false: an update needs the host for {func}")
        return result
