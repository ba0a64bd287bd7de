"""Runs PTX of kernels whose blocks work in clusters, as `ptx.py` runs those of single blocks.

Warps run in turns, each as far as it gets, in an order drawn by a seed; copies land when no warp
can go on, in any order. So a result does not rest on one that happens to be right.
"""

from __future__ import annotations

import re

import numpy as np

from tests.kit.ptx.ptx_async import AsyncSteps, Copy, TensorMap, read_program
from tests.kit.ptx.ptx_memory import WARP
from tests.kit.ptx.ptx_steps import Argument, Array
from tests.kit.ptx.ptx_text import PTXError

WAITED_FOR = {"mbarrier", "wgmma", "bar", "barrier"}
"""Names of instructions that concern other warps."""


class Cluster:
    """A launch of one cluster."""

    def __init__(
        self,
        text: str,
        threads: int,
        shared_bytes: int,
        arguments: tuple[Argument | TensorMap, ...],
        seed: int,
        is_dependent: bool = False,
    ) -> None:
        self._chance = np.random.default_rng(seed)
        self._copies: list[Copy] = []
        self._blocks = blocks = list[AsyncSteps]()
        size = int(re.findall(r"\.reqnctapercluster (\d+)", text)[0])
        for rank in range(size):
            program = read_program(text, rank, shared_bytes)
            block = AsyncSteps(program, rank, size, threads, arguments, blocks, self._copies)
            block.is_dependent = is_dependent
            block.place((rank, 0, 0))
            blocks.append(block)
        self._warps = [
            _Warp(self, block, first) for block in blocks for first in range(0, threads, WARP)
        ]
        self._arrived = 0
        self.generation = 0

    def run(self) -> None:
        """Run to the end. Raises PTXError for a mistake, a deadlock among them."""
        with np.errstate(all="ignore"):
            self._run()

    def moved(self) -> list[int]:
        """Bytes of sectors of each array that warps read and wrote, but for copies by TMA."""
        return [sum(parts) for parts in zip(*(b.memory.moved for b in self._blocks), strict=True)]

    def _run(self) -> None:
        while running := [warp for warp in self._warps if not warp.ended.all()]:
            moved = [running[i].run() for i in self._chance.permutation(len(running))]
            if not any(moved):
                if not self._copies:
                    raise PTXError("deadlock: every warp waits, and no copy is under way")
                self._copies.pop(int(self._chance.integers(len(self._copies)))).land()
        if self._copies:
            raise PTXError("the blocks ended before their copies")

    def arrive(self) -> None:
        """A warp is at the cluster's barrier."""
        self._arrived += 1
        if self._arrived == len(self._warps):
            self._arrived, self.generation = 0, self.generation + 1


class _Warp:
    """32 threads of a block."""

    def __init__(self, cluster: Cluster, block: AsyncSteps, first: int) -> None:
        self._cluster, self._block, self._first = cluster, block, first
        self._code = block.code
        self._counter = np.zeros(WARP, np.int64)
        self.ended = np.zeros(WARP, np.bool_)
        self._generation = 0

    def run(self) -> bool:
        """Run as far as it goes; whether that was at all."""
        moved = False
        while not self.ended.all():
            counters = self._counter[~self.ended]
            first, last = int(counters.min()), int(counters.max())
            for at in [first] if first == last else np.unique(counters).tolist():
                if self._advance(~self.ended & (self._counter == at), at):
                    moved = True
                    break
            else:
                return moved
        return moved

    def _advance(self, group: Array, at: int) -> bool:
        """Run lanes that stand together up to a branch, a wait, or where others stand."""
        lanes, start = np.flatnonzero(group), at
        whole = len(lanes) == WARP
        chosen = slice(self._first, self._first + WARP) if whole else self._first + lanes
        ahead = self._counter[~self.ended & (self._counter > at)]
        until = int(ahead.min()) if len(ahead) else -1
        while at == start or at != until:
            line, acting = self._code[at], group
            if line.guard is not None:
                acting = group.copy()
                acting[lanes] = line.guard[chosen] == line.wanted
            if line.name == "bra":
                self._counter[group] = at + 1
                self._counter[acting] = self._block.program.labels[line.operands[0]]
                return True
            if line.name == "ret":
                self._counter[group] = at + 1
                self.ended |= acting
                self._block.end(self._first + np.flatnonzero(acting))
                return True
            if line.guard is not None:
                raise PTXError(f"{line.opcode} with a guard is not known")
            if line.is_of_warps and not whole:
                break
            if line.name in WAITED_FOR and not self._pass(line.opcode, line.operands, chosen):
                break
            if line.step is not None:
                line.step(chosen)
            at += 1
        self._counter[group] = at
        return at != start

    def _pass(self, opcode: str, operands: list[str], chosen: Array | slice) -> bool:
        """Do what concerns other warps; False where it has to be waited for."""
        block = self._block
        if opcode == "mbarrier.wait":
            barrier = block.barrier(block.address(operands[0])(chosen))
            return barrier.phase != block.number(operands[1])(chosen)
        if opcode.startswith("wgmma.wait_group"):
            return block.may_pass(self._first // WARP, int(operands[0]))
        if opcode == "bar.warp.sync":
            block.memory.pass_warp(self._first // WARP)
        elif opcode.startswith("barrier.cluster.arrive"):
            self._cluster.arrive()
        elif opcode.startswith("barrier.cluster.wait"):
            if self._cluster.generation == self._generation:
                return False
            self._generation += 1
        return True
