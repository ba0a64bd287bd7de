"""A stand-in for a CUDA graph on a CPU: what torch ran within a `with` block, run again on the same
tensors.

As with a graph, Python runs once, at capture, which changes no tensor that was there before; a
replay reads and writes the tensors of the capture and has its numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class RecordedGraph(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Stands for `torch.cuda.CUDAGraph`; records while it is entered."""

    captures = replays = 0
    """Of all graphs since `install`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self._before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema, kwargs = func._schema, kwargs or {}
        written = [
            tensor
            for number, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tree_leaves(args[number] if number < len(args) else kwargs[argument.name])
        ]
        self._before += [(tensor, tensor.clone()) for tensor in written]
        result = func(*args, **kwargs)
        made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        if not any(returned.alias_info and not schema.is_mutable for returned in schema.returns):
            self._calls.append((func, args, kwargs, [] if schema.is_mutable else made))
        return result

    def end(self) -> None:
        """Undo what capturing wrote."""
        with torch.no_grad():
            for tensor, before in reversed(self._before):
                tensor.copy_(before)
        RecordedGraph.captures += 1

    def replay(self) -> None:
        with torch.no_grad():
            for operation, args, kwargs, made in self._calls:
                anew = tree_leaves(operation(*args, **kwargs))
                for tensor, value in zip(made, anew, strict=bool(made)):
                    tensor.copy_(value)
        RecordedGraph.replays += 1


@contextmanager
def _recorded(graph: RecordedGraph) -> Iterator[None]:
    with graph:
        yield
    graph.end()


class _Stream:
    def wait_stream(self, other: object) -> None:
        """Nothing runs beside anything here."""


def install(monkeypatch: pytest.MonkeyPatch) -> type[RecordedGraph]:
    """Have torch capture on a CPU for a test."""
    RecordedGraph.captures = RecordedGraph.replays = 0
    for name, value in {
        "CUDAGraph": RecordedGraph,
        "graph": _recorded,
        "Stream": _Stream,
        "stream": nullcontext,
        "current_stream": _Stream,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return RecordedGraph
