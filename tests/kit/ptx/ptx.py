"""Runs PTX, what the GPU's kernels compile to, block by block in numpy, on a machine without a GPU.

Every thread of a block has its own program counter; those at the lowest one go first, together, so
each instruction is a few numpy operations. Only the instructions that our kernels need are known.
Stricter than a GPU: an error is raised for an access outside the arrays given, for shared memory
that two threads touch, one of them writing, without a barrier between, for a warp that exchanges
values without all its lanes, and for a barrier that not all threads reach. In a dependent launch a
thread that has not waited for the kernel before may neither touch global memory nor start the next
kernel nor end. Shared memory begins as NaN. Approximate functions are exact here, but for the
hyperbolic tangent: it has the largest error that is documented.

What ran is counted: instructions of threads and of warps, and the bytes that warps moved, in whole
sectors, since that is what memory gives and takes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tests.kit.ptx.mojo_program import printed
from tests.kit.ptx.ptx_memory import WARP
from tests.kit.ptx.ptx_steps import Argument, Array, Steps
from tests.kit.ptx.ptx_text import Program, PTXError

Axes = tuple[int, ...]


class Counts(NamedTuple):
    """What a launch took."""

    instructions: int  # each once for every thread that got to it, guarded ones too
    warp_instructions: int
    moved: list[int]  # bytes of sectors of each array that warps read and wrote, without a cache


class Kernel:
    """One entry of a PTX text."""

    def __init__(self, text: str, is_dependent: bool = False) -> None:
        """Raises PTXError for a text without a kernel, or with one that needs local memory.
        `is_dependent` is that of `Steps`."""
        self.program, self._is_dependent = Program(text), is_dependent
        self._processors: dict[Axes, _Processor] = {}

    def launch(self, blocks: int | Axes, threads: int | Axes, *arguments: Array | int) -> Counts:
        """Run blocks one after the other; arrays are global memory, and changed in place.

        Blocks and threads are numbers of them, or up to three: along x, y and z.
        """
        if len(arguments) != len(self.program.params):
            raise PTXError(f"{len(self.program.params)} arguments wanted, got {len(arguments)}")
        grid, block = _axes(blocks), _axes(threads)
        if block not in self._processors:
            self._processors[block] = _Processor(self.program, block)
        processor = self._processors[block]
        processor.is_dependent = self._is_dependent
        processor.bind(grid, arguments)
        with np.errstate(all="ignore"):
            for z, y, x in np.ndindex(grid[::-1]):
                processor.run((x, y, z))
        return Counts(processor.instructions, processor.warp_instructions, processor.memory.moved)


def compiled(source: str, *defines: str) -> dict[str, Kernel]:
    """The kernels of a Mojo program beside this file, by name; with "pdl" launched early."""
    texts = printed(source, *defines)
    return {name: Kernel(text.decode(), "pdl" in defines) for name, text in texts.items()}


def _axes(given: int | Axes) -> Axes:
    """Three numbers of one to three."""
    return (*((given,) if isinstance(given, int) else given), 1, 1)[:3]


class _Processor(Steps):
    """The threads of a block, at work."""

    instructions = warp_instructions = 0

    def bind(self, blocks: Axes, arguments: tuple[Argument, ...]) -> None:
        super().bind(blocks, arguments)
        self.instructions = self.warp_instructions = 0

    def run(self, block: Axes) -> None:
        """Run a block to its end."""
        self.place(block)
        self.memory.begin_block()
        self.counter = np.zeros(self.threads, np.int64)
        self.waits = np.zeros(self.threads, np.bool_)
        self.ended = np.zeros(self.threads, np.bool_)
        while not self.ended.all():
            ready = np.flatnonzero(~(self.waits | self.ended))
            if not len(ready):
                if self.ended.any():
                    raise PTXError("a barrier that some threads have passed by ending")
                self.waits[:] = False
                self.memory.pass_barrier()
                continue
            self._advance_lowest(ready)

    def _advance_lowest(self, ready: Array) -> None:
        """Run those of the threads that stand at the lowest counter and may go on."""
        while len(ready):
            counters = self.counter[ready]
            at = int(counters.min())
            group, ready = ready[counters == at], ready[counters > at]
            if len(group := self._together(group, at)):
                self._advance(group, at, int(self.counter[ready].min()) if len(ready) else -1)
                return
        raise PTXError("a warp exchanges values without all its lanes")

    def _together(self, threads: Array, at: int) -> Array:
        """Those of the threads at an instruction that may run it: lanes wait for their warp."""
        if not self.code[at].is_of_warps:
            return threads
        is_whole: Array = np.bincount(threads // WARP)[threads // WARP] == WARP
        return threads[is_whole]

    def _advance(self, group: Array, at: int, until: int) -> None:
        """Run threads that stand together up to a branch, a barrier or where others stand."""
        chosen = slice(None) if len(group) == self.threads else group
        warps = int(np.count_nonzero(np.bincount(group // WARP)))
        while True:
            self.instructions += len(group)
            self.warp_instructions += warps
            line, acting = self.code[at], group
            at += 1
            if line.guard is not None:
                acting = group[line.guard[group] == line.wanted]
            if line.step is None:
                self.counter[group] = at
                if line.name == "bra":
                    self.counter[acting] = self.program.labels[line.operands[0]]
                elif line.name == "ret":
                    self.check_waited(acting, "a thread ends")
                    self.ended[acting] = True
                else:
                    self.waits[acting] = True
                return
            if len(acting):
                line.step(chosen if len(acting) == len(group) else acting)
            if at == until or (
                self.code[at].is_of_warps and len(self._together(group, at)) < len(group)
            ):
                self.counter[group] = at
                return
