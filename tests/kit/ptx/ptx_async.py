"""What a block of a cluster does beside its threads: copies by TMA, products by wgmma, barriers.

A copy lands when `Cluster` lets it, a product reads its factors and a store its patch as late as
the kernel's waits allow. Who overwrites what these still read, or reads what is still to come, is
told, and so is a store of what no fence has shown to TMA. Addresses
in shared memory carry the block's rank in its cluster, as those of a GPU may.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from srm.engine.device.linear import round_bfloat16
from srm.engine.weights.float8 import from_e4m3
from tests.kernels.harness import widened
from tests.kit.ptx.ptx_memory import WARP, Memory
from tests.kit.ptx.ptx_steps import (
    KINDS,
    U32,
    Argument,
    Array,
    Kind,
    Read,
    Step,
    Steps,
    Threads,
    arrays_of,
    fields_of,
)
from tests.kit.ptx.ptx_text import Program, PTXError, names

RANK_BITS = 24
OFFSET = (1 << RANK_BITS) - 1
ROW_BYTES = 128  # of a tile: what its swizzle spans
DEPTH_BYTES = 32  # of a row that one product reads
M = 64  # rows of a product
WIDTHS = 128, 256
MULTIPLY = "wgmma.mma_async.sync.aligned.m64n"
TEAM = 4  # warps that begin a product together
F32, S32, U64 = KINDS["f32"], KINDS["s32"], KINDS["u64"]
_SUM, _LANE = np.ogrid[: max(WIDTHS) // 2, :WARP]
ROW_OF_SUM = _LANE // 4 + _SUM % 4 // 2 * 8
COLUMN_OF_SUM = _SUM // 4 * 8 + _LANE % 4 * 2 + _SUM % 2
"""Where in 16 rows of a product a lane's sums are."""
MATRIX = ("stmatrix", "ldmatrix")
IGNORED = ("fence", "setmaxnreg", "wgmma.fence")


class TensorMap(NamedTuple):
    """A matrix of bits, as TMA is told of it, and how many of its rows a copy takes."""

    matrix: Array
    rows: int
    is_weight: bool = False
    """Whether no kernel of a step writes it."""


@dataclass(slots=True)
class Barrier:
    """Waits for arrivals, and for the bytes that they promise."""

    count: int
    left: int = field(init=False)
    bytes: int = 0
    phase: int = 0

    def __post_init__(self) -> None:
        self.left = self.count

    def settle(self, arrivals: int, promised: int) -> None:
        """Count arrivals, and bytes that are promised (more than 0) or have come (less)."""
        self.left -= arrivals
        self.bytes += promised
        if self.left < 0:
            raise PTXError("more arrive at a barrier than it waits for")
        if self.left == 0 and self.bytes == 0:
            self.phase, self.left = self.phase ^ 1, self.count


class Copy(NamedTuple):
    """A copy under way, to the same place of some blocks."""

    blocks: list[AsyncSteps]
    start: int
    data: Array
    barrier: int

    def land(self) -> None:
        end = self.start + len(self.data)
        for block in self.blocks:
            block.memory.shared[self.start : end] = self.data
            block.coming.remove((self.start, end))
            block.barriers[self.barrier].settle(0, -len(self.data))


class Product(NamedTuple):
    """A product that a warp has begun: the registers of its sums, where its 16 rows and the columns
    begin, what bits of these mean, and the dtype of sums."""

    sums: Array
    x: int
    w: int
    meaning: Callable[[Array], Array]
    kind: Kind


class Store(NamedTuple):
    """A store that a thread has begun: of bytes from `start` to `end`, to a matrix's rows from
    `top` and columns from `first` on."""

    start: int
    end: int
    tensor: TensorMap
    top: int
    first: int


class WarpMemory(Memory):
    """Shared memory of which each word belongs to one warp, which meets in barriers of its own."""

    def pass_barrier(self) -> None:
        super().pass_barrier()
        self._warp = np.full(len(self._writer), -1)
        self._is_unfenced = np.zeros(len(self._writer), np.bool_)
        self._stores: list[Store] = []

    def fence(self, warp: int) -> None:
        """Show TMA what this warp wrote."""
        self._is_unfenced[self._warp == warp] = False

    def begin_store(self, thread: int, store: Store) -> None:
        """A store reads a patch from now on. Raises PTXError if it may not see what is there."""
        self._read(thread, store)
        if self._is_unfenced[store.start // 4 : store.end // 4].any():
            raise PTXError("a store of what no fence has shown to TMA")
        self._stores.append(store)

    def _read(self, thread: int, store: Store) -> None:
        places = np.arange(store.start, store.end, 16)
        super().touch(np.full(len(places), thread), places, 16, writes=False)

    def end_store(self, thread: int, store: Store) -> None:
        """Write what a store read of its patch to the rows that the matrix has. Only the thread
        that waited for it knows, until it meets its warp."""
        self._read(thread, store)
        self._stores.remove(store)
        matrix, rows, _ = store.tensor
        chunks, at = self.shared[store.start : store.end].reshape(rows, 8, 16), np.arange(8)
        data = np.stack([chunk[at ^ i % 8] for i, chunk in enumerate(chunks)])
        values = data.reshape(rows, ROW_BYTES).view(matrix.dtype)
        to = matrix[store.top : store.top + rows, store.first : store.first + values.shape[1]]
        to[:] = values[: len(to)]

    def pass_warp(self, warp: int) -> None:
        """What this warp touched so far races with nothing after it."""
        own = self._warp == warp
        self._writer[own] = self._reader[own] = -1

    def touch(self, threads: Array, address: Array, size: int, writes: bool) -> None:
        super().touch(threads, address, size, writes)
        ends = address + size
        if writes and any(((address < s.end) & (s.start < ends)).any() for s in self._stores):
            raise PTXError("a patch is written that a store still reads")
        threads, at = self.words(threads, address, size)
        self._is_unfenced[at] |= writes
        owner, warp = self._warp[at], threads // WARP
        if ((owner >= 0) & (owner != warp)).any():
            raise PTXError("a race: two warps touch a word")
        self._warp[at] = warp


class AsyncSteps(Steps):
    """The threads of a block: instructions that `Steps` does not know."""

    memory: WarpMemory
    of_warps = (*Steps.of_warps, *MATRIX, "wgmma", "bar.warp", "barrier.cluster", "setmaxnreg")
    of_warps = (*of_warps, "fence.proxy")

    def __init__(
        self,
        program: Program,
        rank: int,
        size: int,
        threads: int,
        arguments: tuple[Argument | TensorMap, ...],
        blocks: list[AsyncSteps],
        copies: list[Copy],
    ) -> None:
        self.rank, self._blocks, self._copies = rank, blocks, copies
        self.barriers: dict[int, Barrier] = {}
        self.coming: list[tuple[int, int]] = []
        self._begun: dict[int, list[Product]] = {warp: [] for warp in range(threads // WARP)}
        self._groups: dict[int, deque[list[Product]]] = {w: deque() for w in self._begun}
        self._committed = dict.fromkeys(self._begun, 0)
        self._stores: dict[int, deque[list[Store]]] = {
            thread: deque([[]]) for thread in range(threads)
        }
        self._maps = [given for given in arguments if isinstance(given, TensorMap)]
        numbers = iter(range(len(self._maps)))
        for name, given in zip(program.params, arguments, strict=True):
            if isinstance(given, TensorMap):
                program.shared[name] = next(numbers)  # its address is its number
        others = tuple(0 if isinstance(given, TensorMap) else given for given in arguments)
        super().__init__(program, (threads, 1, 1))
        self.bind((size, 1, 1), others)
        arrays = arrays_of(given for _, given in fields_of(program.params, others))
        self.memory = WarpMemory(arrays, program.shared_bytes, rank << RANK_BITS)

    def barrier(self, address: int) -> Barrier:
        """One of this block. Raises PTXError where there is none."""
        value = self.barriers.get(address & OFFSET)
        if value is None or address >> RANK_BITS != self.rank:
            raise PTXError("no barrier of this block is there")
        return value

    def address(self, text: str) -> Callable[[Threads], int]:
        """Of `[base+offset]`, the same for all that are chosen."""
        base, _, offset = text.strip("[] ").partition("+")
        read = self._operand(base, U32)
        return lambda chosen: _one(read(chosen)) + int(offset or 0)

    def number(self, text: str) -> Callable[[Threads], int]:
        """A signed operand, the same for all that are chosen."""
        read = self._operand(text, KINDS["s16" if text.startswith("%rs") else "s32"])
        return lambda chosen: _one(read(chosen))

    def _by_lane(self, text: str) -> Read:
        """A 32-bit operand of each of those chosen."""
        read = self._operand(text, U32)
        return lambda chosen: np.broadcast_to(read(chosen), self._numbers[chosen].shape)

    def compile_step(self, opcode: str, operands: list[str]) -> Step | None:
        if opcode == "fence.proxy.async.shared::cta":
            return lambda chosen: self.memory.fence(chosen.start // WARP)
        if opcode.startswith(IGNORED):
            return lambda chosen: None
        if opcode.startswith(("barrier.cluster", "mbarrier.wait")):
            return None
        for prefix, compile_it in self._known().items():
            if opcode.startswith(prefix):
                return compile_it(operands)
        return super().compile_step(opcode, operands)

    def _known(self) -> dict[str, Callable[[list[str]], Step]]:
        return {
            "cvt.rn.bf16x2.f32": self._compile_pair,
            "cvt.rn.bf16.f32": self._compile_pair,
            "stmatrix.sync.aligned.m8n8.x4.shared.b16": self._compile_store_matrix,
            "ldmatrix.sync.aligned.m8n8.x4.shared.b16": self._compile_load_matrix,
            "mbarrier.init.shared.b64": self._compile_init,
            "mbarrier.arrive.expect_tx.shared.b64": self._compile_expect,
            "mbarrier.arrive.remote": self._compile_arrive,
            "cp.async.bulk.tensor.2d.shared::cluster.global": self._compile_copy,
            "cp.async.bulk.tensor.2d.global.shared::cta": self._compile_store,
            "cp.async.bulk.commit_group": self._compile_commit_stores,
            "cp.async.bulk.wait_group.read": self._compile_wait_for_stores,
            **{
                f"{MULTIPLY}{width}{name}": partial(self._compile_product, width, *factors)
                for width in WIDTHS
                for name, factors in FACTORS.items()
            },
            "wgmma.commit_group": self._compile_commit,
            "wgmma.wait_group": self._compile_wait,
        }

    def _compile_pair(self, operands: list[str]) -> Step:
        """One float32 rounded, or two into one register, the first one into its upper half."""
        assign = self._assign(operands[0], KINDS["u16"] if len(operands) == 2 else U32)
        read = [self._operand(text, F32) for text in operands[1:]]

        def step(chosen: Threads) -> None:
            *upper, lower = (round_bfloat16(item(chosen)).astype(np.uint32) for item in read)
            assign(chosen, upper[0] << 16 | lower if upper else lower)

        return step

    def _matrix_words(self, where: str) -> Callable[[Threads, bool], tuple[Array, Array]]:
        """Shared memory, and the place in it of each lane's words of four 8 x 8 matrices, whose
        rows begin at the addresses that the lanes give."""
        start = self._operand(where.strip("[]"), U32)

        def words(chosen: Threads, writes: bool) -> tuple[Array, Array]:
            given = start(chosen).astype(np.int64)
            memory, row = self.memory.find(True, given, 16)
            self.memory.touch(self._whole_warps(chosen), row, 16, writes)
            lane = np.arange(WARP)
            return memory, row.reshape(4, 8)[:, lane // 4] + lane % 4 * 4

        return words

    def _compile_store_matrix(self, operands: list[str]) -> Step:
        words = self._matrix_words(operands[0])
        read = [self._operand(piece, U32) for piece in names(operands[1])]

        def step(chosen: Threads) -> None:
            memory, at = words(chosen, True)
            for place, item in zip(at, read, strict=True):
                memory.view(np.uint32)[place // 4] = item(chosen)

        return step

    def _compile_load_matrix(self, operands: list[str]) -> Step:
        words = self._matrix_words(operands[1])
        assign = [self._assign(piece, U32) for piece in names(operands[0])]

        def step(chosen: Threads) -> None:
            memory, at = words(chosen, False)
            for place, item in zip(at, assign, strict=True):
                item(chosen, memory.view(np.uint32)[place // 4])

        return step

    def _compile_init(self, operands: list[str]) -> Step:
        where, count = self.address(operands[0]), self.number(operands[1])

        def step(chosen: Threads) -> None:
            self.barriers[where(chosen) & OFFSET] = Barrier(count(chosen))

        return step

    def _compile_expect(self, operands: list[str]) -> Step:
        where, promised = self.address(operands[1]), self.number(operands[2])
        return lambda chosen: self.barrier(where(chosen)).settle(1, promised(chosen))

    def _compile_arrive(self, operands: list[str]) -> Step:
        """Each lane at the barrier of the block that it names."""
        where, rank, count = self.address(operands[0]), *map(self._by_lane, operands[1:])

        def step(chosen: Threads) -> None:
            for block, arrivals in zip(rank(chosen), count(chosen), strict=True):
                barrier = self._blocks[block].barriers[where(chosen) & OFFSET]
                barrier.settle(int(arrivals), 0)

        return step

    def _compile_copy(self, operands: list[str]) -> Step:
        to, barrier, mask = map(self.address, (operands[0], operands[2], operands[3]))
        number, column, row = names(operands[1].strip("[]"))
        place = self.address(number), self.number(column), self.number(row)

        def step(chosen: Threads) -> None:
            tensor, first, top = (read(chosen) for read in place)
            matrix, rows, is_weight = self._maps[tensor]
            if not is_weight:
                self.check_waited(chosen, "a step's tensor is loaded")
            width = ROW_BYTES // matrix.itemsize
            data = np.zeros((rows, width), matrix.dtype)  # what lies beyond it is zero
            result = matrix[top : top + rows, first : first + width]
            data[: len(result)] = result
            chunks, at = data.view(np.uint8).reshape(rows, 8, 16), np.arange(8)
            placed = np.empty_like(chunks)
            for i in range(rows):
                placed[i, at ^ i % 8] = chunks[i]
            start = to(chosen)
            if start >> RANK_BITS != self.rank or start & 1023:
                raise PTXError("a copy to another block, or not to the start of a swizzle")
            self.barrier(barrier(chosen))
            blocks = [block for block in self._blocks if mask(chosen) >> block.rank & 1]
            copy = Copy(blocks, start & OFFSET, placed.reshape(-1), barrier(chosen) & OFFSET)
            for block in blocks:
                block.expect(copy.start, copy.start + len(copy.data))
            self._copies.append(copy)

        return step

    def _compile_store(self, operands: list[str]) -> Step:
        """Of a patch by one thread; groups of its stores are in `_stores`, that it adds to last."""
        number, column, row = names(operands[0].strip("[]"))
        place = self.address(number), self.number(column), self.number(row)
        from_ = self.address(operands[1])

        def step(chosen: Threads) -> None:
            (thread,) = self._numbers[chosen]
            self.check_waited(chosen, "a tensor is stored")
            tensor, first, top = (read(chosen) for read in place)
            start, size = from_(chosen), self._maps[tensor].rows * ROW_BYTES
            if start >> RANK_BITS != self.rank or start & 1023:
                raise PTXError("a store of another block, or not from the start of a swizzle")
            start &= OFFSET
            store = Store(start, start + size, self._maps[tensor], top, first)
            self.memory.begin_store(int(thread), store)
            self._stores[int(thread)][-1].append(store)

        return step

    def _compile_commit_stores(self, _: list[str]) -> Step:
        def step(chosen: Threads) -> None:
            for thread in self._numbers[chosen]:
                self._stores[int(thread)].append([])

        return step

    def _compile_wait_for_stores(self, operands: list[str]) -> Step:
        def step(chosen: Threads) -> None:
            for thread in self._numbers[chosen]:
                groups = self._stores[int(thread)]
                while len(groups) - 1 > int(operands[0]):
                    for store in groups.popleft():
                        self.memory.end_store(int(thread), store)

        return step

    def end(self, chosen: Threads) -> None:
        """Threads end. Raises PTXError if they have not waited for the kernel before, or a store of
        theirs may still read shared memory."""
        self.check_waited(chosen, "a thread ends")
        if any(any(self._stores[int(thread)]) for thread in self._numbers[chosen]):
            raise PTXError("a thread ends whose store still reads")

    def expect(self, start: int, end: int) -> None:
        """A copy is under way. Raises PTXError if a product may still read there."""
        for warp, groups in self._groups.items():
            for product in (item for group in (*groups, self._begun[warp]) for item in group):
                for place, rows in ((product.x, M), (product.w, 2 * len(product.sums))):
                    first = place & ~1023
                    if first < end and start < first + rows * ROW_BYTES:
                        raise PTXError("a stage is loaded that a product still reads")
        self.coming.append((start, end))

    def _compile_product(
        self, width: int, meaning: Callable[[Array], Array], kind: Kind, operands: list[str]
    ) -> Step:
        x, w = (self._operand(text, U64) for text in operands[1:3])
        sums = np.array([self._row(piece)[1] for piece in names(operands[0])])
        assert len(sums) == width // 2
        signs = [] if kind == S32 else ["1", "1"]
        if operands[4:] not in (signs, [*signs, "0", "0"]):
            raise PTXError("only products of two K-major factors are known")

        def step(chosen: Threads) -> None:
            self._whole_warps(chosen)
            x_at, w_at = (_place(_one(read(chosen))) for read in (x, w))
            for place, rows in ((x_at, M), (w_at, width)):
                first = place & ~1023
                if any(s < first + rows * ROW_BYTES and first < e for s, e in self.coming):
                    raise PTXError("a product reads a stage that is still to come")
            self._begun[chosen.start // WARP].append(Product(sums, x_at, w_at, meaning, kind))

        return step

    def _compile_commit(self, operands: list[str]) -> Step:
        def step(chosen: Threads) -> None:
            warp = chosen.start // WARP
            self._groups[warp].append(self._begun[warp])
            self._begun[warp] = []
            self._committed[warp] += 1

        return step

    def may_pass(self, warp: int, left: int) -> bool:
        """Whether a warp's groups but the last `left` may be complete: a product is one of four
        warps, which all must have begun it."""
        team = range(warp // TEAM * TEAM, warp // TEAM * TEAM + TEAM)
        return min(self._committed[index] for index in team) >= self._committed[warp] - left

    def _compile_wait(self, operands: list[str]) -> Step:
        def step(chosen: Threads) -> None:
            warp = chosen.start // WARP
            done = self._committed[warp] - int(operands[0])
            for index in range(warp // TEAM * TEAM, warp // TEAM * TEAM + TEAM):
                groups = self._groups[index]
                while groups and self._committed[index] - len(groups) < done:
                    for product in groups.popleft():
                        self._multiply(index, product)

        return step

    def _multiply(self, warp: int, product: Product) -> None:
        """Add a warp's 16 rows of a product to its sums."""
        x = product.meaning(self._factor(product.x, warp % TEAM * 16, 16))
        count = len(product.sums)
        y = x @ product.meaning(self._factor(product.w, 0, 2 * count)).T
        lanes = slice(warp * WARP, warp * WARP + WARP)
        registers = self._registers["r"].view(product.kind)[:, lanes]
        values = y[ROW_OF_SUM[:count], COLUMN_OF_SUM[:count]]
        registers[product.sums] += values.astype(product.kind)

    def _factor(self, start: int, first: int, rows: int) -> Array:
        """Bits of rows of a tile, DEPTH_BYTES deep."""
        at = start + np.arange(first, first + rows)[:, None] * ROW_BYTES + np.arange(DEPTH_BYTES)
        at ^= (at >> 7 & 7) << 4  # the hardware swizzles bits of the address
        bits: Array = self.memory.shared[at]
        return bits


def from_bfloat16(bytes_: Array) -> Array:
    """The values that the bytes of rows mean."""
    return widened(bytes_.view(np.uint16))


def from_int8(bytes_: Array) -> Array:
    """The same in int8, in float64, which holds their sums."""
    return bytes_.view(np.int8).astype(np.float64)


FACTORS = {
    "k16.f32.bf16.bf16": (from_bfloat16, F32),
    "k32.f32.e4m3.e4m3": (from_e4m3, F32),
    "k32.s32.s8.s8": (from_int8, S32),
}
"""What bits of a product's factors mean and what its sums are, by the end of its opcode."""


def _one(values: Any) -> int:
    """The value that all lanes have. Raises PTXError if they have not."""
    if np.ndim(values) and (values != values[0]).any():
        raise PTXError("lanes give different values where they must agree")
    return int(np.ravel(values)[0])


def _place(descriptor: int) -> int:
    """Where a factor begins: K-major, rows of 128 bytes that are swizzled."""
    if descriptor >> 62 != 1 or (descriptor >> 32 & 0x3FFF) << 4 != 8 * ROW_BYTES:
        raise PTXError("only tiles with a swizzle of 128 bytes are known")
    return (descriptor & 0x3FFF) << 4


WAIT = re.compile(
    r"\{\s*\.reg \.pred P1;\s*LAB_WAIT:\s*mbarrier\.try_wait\.parity\.shared::cta\.b64 P1, "
    r"(\S+), (\S+);\s*@P1 bra DONE;\s*bra LAB_WAIT;\s*DONE:\s*\}"
)
ARRIVE = re.compile(
    r"\{\s*\.reg \.b32 remAddr32;\s*mapa\.shared::cluster\.u32\s+remAddr32, (\S+), (\S+);\s*"
    r"mbarrier\.arrive\.shared::cluster\.b64\s+_, \[remAddr32\], (\S+);\s*\}"
)
PRODUCT = re.compile(r"\{\s*\.reg \.pred p;\s*setp\.ne\.b32 p, 1, 0;\s*(wgmma[^;]*;)\s*\}")


def read_program(text: str, rank: int, shared_bytes: int) -> Program:
    """Take a text apart for a block of this rank. What MAX writes as inline assembly with labels
    and registers of its own becomes one instruction each."""
    text = WAIT.sub(r"mbarrier.wait \1, \2;", text)
    text = ARRIVE.sub(r"mbarrier.arrive.remote [\1], \2, \3;", text)
    program = Program(PRODUCT.sub(r"\1", text))
    for name in re.findall(r"\.extern \.shared \.align \d+ \.b8 (\w+)\[\]", text):
        program.shared[name] = rank << RANK_BITS
    program.shared_bytes = shared_bytes
    return program
