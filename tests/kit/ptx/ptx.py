"""Runs PTX, what the GPU's kernels compile to, block by block in numpy, on a machine without a GPU.

Every thread of a block has its own program counter; those at the lowest one go first, together, so
each instruction is a few numpy operations. Only the instructions that our kernels need are known.
Stricter than a GPU: an error is raised for an access outside the arrays given, for shared memory
that two threads touch, one of them writing, without a barrier between, for a warp that exchanges
values without all its lanes, and for a barrier that not all threads reach. Shared memory begins as
NaN. Approximate functions are exact here.

What ran is counted: instructions of threads and of warps, and the bytes that warps moved, in whole
sectors, since that is what memory gives and takes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tests.kit.ptx.mojo_program import printed
from tests.kit.ptx.ptx_memory import WARP
from tests.kit.ptx.ptx_steps import Array, Steps
from tests.kit.ptx.ptx_text import Program, PTXError

Axes = tuple[int, ...]


class Counts(NamedTuple):
    """What a launch took."""

    instructions: int  # each once for every thread that got to it, guarded ones too
    warp_instructions: int
    moved: list[int]  # bytes of sectors of each array that warps read and wrote, without a cache


class Kernel:
    """One entry of a PTX text."""

    def __init__(self, text: str) -> None:
        """Raises PTXError for a text without a kernel, or with one that needs local memory."""
        self.program = Program(text)

    def launch(self, blocks: int | Axes, threads: int | Axes, *arguments: Array | int) -> Counts:
        """Run blocks one after the other; arrays are global memory, and changed in place.

        Blocks and threads are numbers of them, or up to three: along x, y and z.
        """
        if len(arguments) != len(self.program.params):
            raise PTXError(f"{len(self.program.params)} arguments wanted, got {len(arguments)}")
        grid, block = _axes(blocks), _axes(threads)
        processor = _Processor(self.program, grid, block, arguments)
        for z, y, x in np.ndindex(grid[::-1]):
            processor.run((x, y, z))
        return Counts(*processor.ran, processor.memory.moved)


def compiled(source: str) -> dict[str, Kernel]:
    """The kernels of a Mojo program beside this file, by name."""
    return {name: Kernel(text.decode()) for name, text in printed(source).items()}


def _axes(given: int | Axes) -> Axes:
    """Three numbers of one to three."""
    return (*((given,) if isinstance(given, int) else given), 1, 1)[:3]


class _Processor(Steps):
    """The threads of a block, at work."""

    ran = (0, 0)
    """Instructions of threads, and of warps."""

    def run(self, block: Axes) -> None:
        """Run a block to its end."""
        for axis, place in zip("xyz", block, strict=True):
            self._register(f"%ctaid.{axis}")[:] = place
        self.memory.begin_block()
        self.counter = np.zeros(self.threads, np.int64)
        self.waits = np.zeros(self.threads, np.bool_)
        self.ended = np.zeros(self.threads, np.bool_)
        while not self.ended.all():
            ready = ~self.waits & ~self.ended
            if not ready.any():
                if self.ended.any():
                    raise PTXError("a barrier that some threads have passed by ending")
                self.waits[:] = False
                self.memory.pass_barrier()
                continue
            for at in np.unique(self.counter[ready]).tolist():
                group = self._together(np.flatnonzero(ready & (self.counter == at)), at)
                if len(group):
                    break
            else:
                raise PTXError("a warp exchanges values without all its lanes")
            others = self.counter[ready & (self.counter > at)]
            self._advance(group, at, int(others.min()) if len(others) else -1)

    def _together(self, threads: Array, at: int) -> Array:
        """Those of the threads at an instruction that may run it: lanes wait for their warp."""
        if not self.program.code[at][1].startswith(("shfl", "redux")):
            return threads
        warps, sizes = np.unique(threads // WARP, return_counts=True)
        return threads[np.isin(threads // WARP, warps[sizes == WARP])]

    def _advance(self, group: Array, at: int, until: int) -> None:
        """Run threads that stand together up to a branch, a barrier or where others stand."""
        chosen = slice(None) if len(group) == self.threads else group
        warps = len(np.unique(group // WARP))
        while True:
            self.ran = self.ran[0] + len(group), self.ran[1] + warps
            guard, opcode, operands = self.program.code[at]
            acting = group
            if guard is not None:
                holds = self.registers[guard.lstrip("!")][group] != guard.startswith("!")
                acting = group[holds]
            if opcode.startswith("bra"):
                self.counter[group] = at + 1
                self.counter[acting] = self.program.labels[operands[0]]
                return
            if opcode.startswith("bar"):
                self.counter[group] = at + 1
                self.waits[acting] = True
                return
            if opcode == "ret":
                self.counter[group] = at + 1
                self.ended[acting] = True
                return
            step = self.steps[at]
            assert step is not None
            if len(acting):
                step(chosen if len(acting) == len(group) else acting)
            at += 1
            if at == until or len(self._together(group, at)) < len(group):
                self.counter[group] = at
                return
