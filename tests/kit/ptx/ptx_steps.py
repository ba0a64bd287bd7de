"""PTX instructions compiled to numpy steps over the registers of all threads of a block."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from srm.engine.device.linear import round_bfloat16
from srm.engine.weights.float8 import round_e4m3
from tests.kit.ptx.ptx_memory import STRIDE, WARP, Memory
from tests.kit.ptx.ptx_text import Program, PTXError, names

Array = npt.NDArray[Any]
Argument = Array | int | tuple[Array | int, ...]
"""Of a kernel; a structure has fields of 8 bytes."""
Threads = Any  # what selects threads of a register: all, or their numbers
Read = Callable[[Threads], Any]
Kind = np.dtype[Any]
Step = Callable[[Threads], None]

BOOL, U32, BF16 = np.dtype(np.bool_), np.dtype(np.uint32), np.dtype("V2")
REGISTERS = {"p": np.bool_, "rs": np.uint16, "r": np.uint32, "rd": np.uint64}
KINDS: dict[str, Kind] = {"pred": BOOL, "f32": np.dtype("f4"), "f64": np.dtype("f8")}
KINDS |= {"bf16": BF16, "bf16x2": U32}
for bits in (8, 16, 32, 64):
    for letter, numpys in {"b": "u", "u": "u", "s": "i"}.items():
        KINDS[f"{letter}{bits}"] = np.dtype(f"{numpys}{bits // 8}")

COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": np.equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "ne": lambda a, b: (a < b) | (a > b),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}  # fmt: skip
"""All but the last are false where either is NaN; with a "u" behind, true."""


def negated(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda a, b: ~compare(a, b)


for opposites in ("eq", "ne"), ("lt", "ge"), ("le", "gt"):
    for name, opposite in opposites, opposites[::-1]:
        COMPARISONS[f"{name}u"] = negated(COMPARISONS[opposite])


def shift_left(a: Any, b: Any) -> Any:
    bits = 8 * a.dtype.itemsize
    return np.where(b < bits, a << (b % bits), 0)


def shift_right(a: Any, b: Any) -> Any:
    bits = 8 * a.dtype.itemsize
    if a.dtype.kind == "i":
        return a >> np.minimum(b, bits - 1)
    return np.where(b < bits, a >> (b % bits), 0)


def upper_half(a: Any, b: Any) -> Any:
    """That of a product twice as wide."""
    exact = np.asarray(a).astype(object) * np.asarray(b).astype(object)
    return np.asarray(exact >> 8 * a.dtype.itemsize).astype(a.dtype)


def same(a: Any) -> Any:
    return a


def pair(high: Any, low: Any) -> Any:
    """Two numbers as bfloat16 in one register."""
    return round_bfloat16(high).astype(np.uint32) << 16 | round_bfloat16(low)


def of_pairs(function: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    """The function of both numbers of `pair` in a and b."""
    high = ((item >> 16 << 16).view(np.float32) for item in (a, b))
    low = ((item << 16).view(np.float32) for item in (a, b))
    return pair(function(*high), function(*low))


def pair_e4m3(high: Any, low: Any) -> Any:
    """Two numbers as e4m3 in half a register."""
    return round_e4m3(high).astype(np.uint16) << 8 | round_e4m3(low)


def permuted(a: Any, b: Any, choice: Any) -> Any:
    """Four bytes of two registers, each chosen by four bits; no sign is copied."""
    both = np.asarray(b, np.uint64) << np.uint64(32) | np.asarray(a, np.uint64)
    if (np.asarray(choice) & 0x8888).any():
        raise PTXError("a permutation that copies signs is not known")
    bytes_ = (both >> ((choice >> 4 * i & 7) * np.uint64(8)) & np.uint64(255) for i in range(4))
    return sum(byte << np.uint64(8 * i) for i, byte in enumerate(bytes_)).astype(np.uint32)


def rounded_down(name: str, *given: Any) -> Any:
    """The sum, or that of a product, of float32, rounded towards minus infinity."""
    *factors, c = np.broadcast_arrays(*(np.asarray(item, np.float64) for item in given))
    a = factors[0] * factors[1] if name == "fma" else factors[0]  # exact in float64
    total = a + c
    left = (a - (total - c)) + (c - (total - (total - c)))  # of the sum, by its rounding
    nearest = total.astype(np.float32)
    is_above = (nearest > total) | ((nearest == total) & (left < 0))
    return np.where(is_above, np.nextafter(nearest, np.float32(-np.inf)), nearest)


def saturated(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given: np.clip(np.nan_to_num(function(*given), nan=0), 0, 1)


def flushed(function: Callable[..., Any]) -> Callable[..., Any]:
    """With zero for what is denormal."""
    tiny = np.finfo(np.float32).tiny

    def result(*given: Any) -> Any:
        values = function(*given)
        return np.where(np.abs(values) < tiny, 0, values)

    return result


def inexact_tanh(a: Any) -> Any:
    """The tangent as wrong as it may be: by 2^-11 of itself, up or down by the last bit of `a`."""
    return np.tanh(a) * np.where(a.view(np.uint32) & 1, 1 + 2**-11, 1 - 2**-11).astype(a.dtype)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide,
    "min": np.fmin, "max": np.fmax,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert,
    "shl": shift_left, "shr": shift_right, "neg": np.negative, "abs": np.abs,
    "mov": same, "cvta": same, "cvt": same,
    "ex2": np.exp2, "lg2": np.log2, "sqrt": np.sqrt, "tanh": inexact_tanh,
    "prmt": permuted,
    "rcp": lambda a: 1 / a, "rsqrt": lambda a: 1 / np.sqrt(a),
    "selp": lambda a, b, condition: np.where(condition, a, b),
    "mad": lambda a, b, c: a * b + c,
    "fma": lambda a, b, c: (np.asarray(a, np.float64) * b + c).astype(a.dtype),
}  # fmt: skip


class Instruction(NamedTuple):
    """One of the program, as the threads of a block run it."""

    guard: Array | None
    """The register that says which threads act."""
    wanted: bool
    opcode: str
    name: str
    """What the opcode begins with."""
    operands: list[str]
    is_of_warps: bool
    """Whether only a warp with all its lanes runs it."""
    step: Step | None


def fields_of(
    params: Sequence[str], arguments: Sequence[Argument]
) -> Iterator[tuple[str, Array | int]]:
    """Each parameter with its argument, a structure by its fields."""
    for name, given in zip(params, arguments, strict=True):
        for i, field in enumerate(given if isinstance(given, tuple) else (given,)):
            yield (f"{name}+{8 * i}" if i else name), field


def arrays_of(fields: Iterable[Array | int]) -> list[Array]:
    """Those that are global memory."""
    return [given for given in fields if isinstance(given, np.ndarray)]


class Steps:
    """Registers, memory, and a step for every instruction but those that move the counters."""

    memory: Memory
    is_dependent = False
    """Whether the launch does not wait for the kernel before it, and each thread must."""
    of_warps: tuple[str, ...] = ("shfl", "redux")
    """Beginnings of instructions that only a whole warp runs."""

    def __init__(self, program: Program, threads: tuple[int, ...]) -> None:
        self.program, self.threads = program, int(np.prod(threads))
        self._params: dict[str, int] = {}
        self._numbers = np.arange(self.threads)
        number = self._numbers.astype(np.uint32)
        self._registers: dict[str, Array] = {
            kind: np.zeros((count, self.threads), REGISTERS[kind])
            for kind, count in program.registers.items()
        }
        self._special = {"%laneid": number % WARP}
        places = np.unravel_index(number, threads[::-1])[::-1]
        for axis, place, many in zip("xyz", places, threads, strict=True):
            self._special[f"%tid.{axis}"] = place.astype(np.uint32)
            self._special[f"%ntid.{axis}"] = np.full_like(number, many)
            for name in ("ctaid", "nctaid"):
                self._special[f"%{name}.{axis}"] = np.zeros_like(number)
        self.code = [self._compile(*line) for line in program.code]

    def bind(self, blocks: tuple[int, ...], arguments: tuple[Argument, ...]) -> None:
        """Begin a launch: registers are 0, arrays are global memory."""
        for registers in self._registers.values():
            registers.fill(0)
        for axis, count in zip("xyz", blocks, strict=True):
            self._special[f"%nctaid.{axis}"][:] = count
        fields = dict(fields_of(self.program.params, arguments))
        self.memory = Memory(arrays_of(fields.values()), self.program.shared_bytes)
        numbers = iter(range(1, len(fields) + 1))
        for name, given in fields.items():
            self._params[name] = given if isinstance(given, int) else next(numbers) << STRIDE

    def place(self, block: tuple[int, ...]) -> None:
        """Say which block of the grid this is. Its threads begin, and have not waited yet."""
        self._has_waited = np.full(self.threads, not self.is_dependent)
        for axis, number in zip("xyz", block, strict=True):
            self._special[f"%ctaid.{axis}"][:] = number

    def check_waited(self, chosen: Threads, what: str) -> None:
        """Raise PTXError if threads do what the kernel before them must have ended for."""
        if not self._has_waited[chosen].all():
            raise PTXError(f"{what} before the wait for the kernel before")

    def _compile_dependency(self, action: str) -> Step:
        def step(chosen: Threads) -> None:
            if action == "wait":
                self._has_waited[chosen] = True
            self.check_waited(chosen, "the next kernel is started")

        return step

    def _compile(self, guard: str | None, opcode: str, operands: list[str]) -> Instruction:
        return Instruction(
            self._register(guard.lstrip("!")) if guard else None,
            not (guard or "").startswith("!"),
            opcode,
            opcode.partition(".")[0],
            operands,
            opcode.startswith(self.of_warps),
            self.compile_step(opcode, operands),
        )

    def _row(self, name: str) -> tuple[str, int]:
        """Which of the registers of its kind a register is."""
        kind = name.strip("%0123456789")
        return kind, int(name[1 + len(kind) :])

    def _register(self, name: str) -> Array:
        if name in self._special:
            return self._special[name]
        kind, number = self._row(name)
        register: Array = self._registers[kind][number]
        return register

    def _operand(self, text: str, kind: Kind) -> Read:
        """Reads a register, a constant or the address of shared memory; bfloat16 as float32."""
        if kind == BF16:
            narrow = self._operand(text, KINDS["u16"])
            return lambda chosen: (narrow(chosen).astype(np.uint32) << 16).view(np.float32)
        if text.startswith("{"):
            half = np.dtype(f"u{kind.itemsize // 2}")
            low, high = (self._operand(name, half) for name in names(text))
            size = kind.type(8 * half.itemsize)
            return lambda chosen: low(chosen).astype(kind) | high(chosen).astype(kind) << size
        if text.startswith("%"):
            values = self._register(text)
            if values.dtype.itemsize != kind.itemsize:
                return lambda chosen: values[chosen].astype(kind)
            view = values.view(kind)
            return lambda chosen: view[chosen]
        if match := re.fullmatch(r"0([fd])([0-9A-F]+)", text):
            width = 4 if match[1] == "f" else 8
            bits = np.array(int(match[2], 16), f"u{width}")
            constant: Any = (bits.view(f"f{width}") if kind.kind == "f" else bits)[()]
        else:
            number = (
                self.program.shared[text]
                if text in self.program.shared
                else int(text.rstrip("U"), 0)
            )
            constant = np.asarray(number).astype(kind)[()]
        return lambda chosen: constant

    def _assign(self, name: str, kind: Kind) -> Callable[[Threads, Any], None]:
        """Sets a register to values of a type; one that is wider extends them."""
        if name == "_":
            return lambda chosen, values: None
        if kind == BF16:
            narrow = self._assign(name, KINDS["u16"])
            return lambda chosen, values: narrow(chosen, round_bfloat16(values))
        target = self._register(name)
        if target.dtype.itemsize == kind.itemsize:
            view = target.view(kind)
        else:  # keeps the sign
            view = target.view(f"{'i' if kind.kind == 'i' else 'u'}{target.dtype.itemsize}")

        def assign(chosen: Threads, values: Any) -> None:
            view[chosen] = values if values.dtype == kind else values.astype(kind)

        return assign

    def compile_step(self, opcode: str, operands: list[str]) -> Step | None:
        name, *parts = opcode.split(".")
        kinds = [KINDS[part] for part in parts if part in KINDS]
        if name in {"bra", "bar", "ret"}:
            return None
        if name in {"ld", "st"}:
            return self._compile_access(name, parts[0].split("::")[0], operands, kinds[0])
        if name == "griddepcontrol":
            return self._compile_dependency(parts[0])
        if name == "shfl":
            return self._compile_shuffle(parts[1], operands)
        if (name, *parts[:1]) == ("redux", "sync"):
            return self._compile_warp_reduction(parts[1], operands)
        if operands[0].startswith("{"):
            return self._compile_pieces(operands, kinds[0])
        is_comparison = name in {"set", "setp"}
        function: Any = COMPARISONS.get(parts[0]) if is_comparison else FUNCTIONS.get(name)
        if function is None or (name == "div" and kinds[0].kind != "f"):
            raise PTXError(f"unknown instruction {opcode}")
        sources, to = [kinds[-1]] * (len(operands) - 1), BOOL if name == "setp" else kinds[0]
        if name in {"shl", "shr"}:
            sources[1] = U32
        if name == "selp":
            sources[2] = BOOL
        if "rm" in parts:
            function = partial(rounded_down, name)
        if "rmi" in parts:
            function = np.floor
        if "bf16x2" in parts:
            function = pair if name == "cvt" else partial(of_pairs, function)
        if "e4m3x2" in parts:
            sources, to, function = [KINDS["f32"]] * 2, KINDS["u16"], pair_e4m3
        if "hi" in parts:
            function = upper_half
        if "wide" in parts:
            to = np.dtype(f"{to.kind}{2 * to.itemsize}")
            function = partial(np.multiply, dtype=to)
        if "sat" in parts:
            function = saturated(function)
        if "ftz" in parts:
            function = flushed(function)
        read = [self._operand(text, kind) for text, kind in zip(operands[1:], sources, strict=True)]
        assign = self._assign(operands[0], to)
        return lambda chosen: assign(chosen, function(*[item(chosen) for item in read]))

    def _compile_pieces(self, operands: list[str], kind: Kind) -> Step:
        """A register to its halves."""
        half = np.dtype(f"u{kind.itemsize // 2}")
        low, high = (self._assign(name, half) for name in names(operands[0]))
        whole = self._operand(operands[1], kind)

        def split(chosen: Threads) -> None:
            low(chosen, whole(chosen))
            high(chosen, whole(chosen) >> 8 * half.itemsize)

        return split

    def _compile_shuffle(self, mode: str, operands: list[str]) -> Step:
        assign = self._assign(operands[0].split("|")[0], U32)
        values, by, clamp = (self._operand(text, U32) for text in operands[1:4])

        def step(chosen: Threads) -> None:
            threads = self._whole_warps(chosen)
            lane, distance = threads % WARP, np.asarray(by(chosen)).astype(np.int64)
            source = {"bfly": lane ^ distance, "up": lane - distance, "idx": distance}[mode]
            limit = np.asarray(clamp(chosen)).astype(np.int64)
            if (limit >> 8).any():
                raise PTXError("a shuffle of parts of a warp is not known")
            retained = source >= limit if mode == "up" else source <= limit
            place = threads - lane + np.where(retained, source, lane)
            everyone = np.zeros(self.threads, U32)
            everyone[chosen] = values(chosen)
            assign(chosen, everyone[place])

        return step

    def _whole_warps(self, chosen: Threads) -> Array:
        """The numbers of the threads chosen. Raises PTXError if a warp is not whole."""
        threads: Array = self._numbers[chosen]
        if len(threads) % WARP or (threads.reshape(-1, WARP)[:, 0] % WARP).any():
            raise PTXError("a warp exchanges values without all its lanes")
        return threads

    def _compile_warp_reduction(self, mode: str, operands: list[str]) -> Step:
        """Of 32-bit integers; the largest of unsigned ones."""
        assign, values = self._assign(operands[0], U32), self._operand(operands[1], U32)
        reduce = {"add": np.add, "max": np.maximum}[mode].reduce

        def step(chosen: Threads) -> None:
            warps = np.broadcast_to(values(chosen), self._whole_warps(chosen).shape)
            assign(chosen, np.repeat(reduce(warps.reshape(-1, WARP), axis=1, dtype=U32), WARP))

        return step

    def _compile_access(self, name: str, space: str, operands: list[str], kind: Kind) -> Step:
        where, what = operands if name == "st" else operands[::-1]
        base, _, offset = where.strip("[]").partition("+")
        if space == "param":
            assign = self._assign(what, kind)
            field = f"{base}+{offset}" if int(offset or 0) else base
            return lambda chosen: assign(chosen, np.asarray(self._params[field]).astype(kind))
        shared = space == "shared"
        start = self._operand(base, np.dtype(np.uint32 if shared else np.uint64))
        pieces, first = names(what), int(offset or 0)
        size = len(pieces) * kind.itemsize
        targets = [self._assign(piece, kind) for piece in pieces] if name == "ld" else []
        values = [self._operand(piece, kind) for piece in pieces] if name == "st" else []

        def step(chosen: Threads) -> None:
            threads = self._numbers[chosen]
            address = np.broadcast_to(np.asarray(start(chosen)).astype(np.int64), threads.shape)
            address = address + first
            if not shared:
                self.check_waited(chosen, "memory is read or written")
                self.memory.count(threads, address, size)
            memory, place = self.memory.find(shared, address, size)
            if shared:
                self.memory.touch(threads, place, size, name == "st")
            rows = memory[: len(memory) // size * size].reshape(-1, size)
            if targets:
                columns = rows[place // size].view(kind)
                for i, target in enumerate(targets):
                    target(chosen, columns[:, i])
                return
            columns = np.empty((len(threads), len(values)), kind)
            for i, value in enumerate(values):
                columns[:, i] = value(chosen)
            rows[place // size] = columns.view(np.uint8)

        return step
