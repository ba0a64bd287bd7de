"""Runs PTX, what the GPU's kernels compile to, block by block in numpy, on a machine without a GPU.

Every thread of a block has its own program counter; those at the lowest one go first, together, so
each instruction is a few numpy operations. Only the instructions that our kernels need are known.
Stricter than a GPU: an error is raised for an access outside the arrays given, for shared memory
that two threads touch, one of them writing, without a barrier between, for a warp that exchanges
values without all its lanes, and for a barrier that not all threads reach. Shared memory begins as
NaN. Approximate functions are exact here.
"""

from __future__ import annotations

import numpy as np

from tests.kernels.ptx_steps import WARP, Array, Steps
from tests.kernels.ptx_text import Program, PTXError


class Kernel:
    """One entry of a PTX text."""

    def __init__(self, text: str) -> None:
        """Raises PTXError for a text without a kernel, or with one that needs local memory."""
        self.program = Program(text)

    def launch(self, blocks: int, threads: int, *arguments: Array | int) -> None:
        """Run blocks one after the other; arrays are global memory, and changed in place."""
        if len(arguments) != len(self.program.params):
            raise PTXError(f"{len(self.program.params)} arguments wanted, got {len(arguments)}")
        processor = _Processor(self.program, blocks, threads, arguments)
        for block in range(blocks):
            processor.run(block)


class _Processor(Steps):
    """The threads of a block, at work."""

    def run(self, block: int) -> None:
        """Run a block to its end."""
        self._register("%ctaid.x")[:] = block
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
        while True:
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
