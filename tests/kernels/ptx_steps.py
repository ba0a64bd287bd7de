"""PTX instructions compiled to numpy steps over the registers of all threads of a block."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.kernels.ptx_memory import STRIDE, Memory
from tests.kernels.ptx_text import Program, PTXError, names

Array = npt.NDArray[Any]
Threads = Any  # what selects threads of a register: all, or their numbers
Read = Callable[[Threads], Any]
Kind = np.dtype[Any]
Step = Callable[[Threads], None]

WARP = 32
_REGISTERS = {"p": np.bool_, "rs": np.uint16, "r": np.uint32, "rd": np.uint64}
_TYPES = {
    **{f"{kind}{bits}": np.dtype(f"{letter}{bits // 8}") for kind, letter in
       (("u", "u"), ("b", "u"), ("s", "i"), ("f", "f")) for bits in (8, 16, 32, 64)
       if (kind, bits) != ("f", 8)},
    "bf16": np.dtype(np.uint16),
    "pred": np.dtype(np.bool_),
}  # fmt: skip

COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    **{name: getattr(np, to) for name, to in
       (("eq", "equal"), ("ne", "not_equal"), ("lt", "less"), ("le", "less_equal"),
        ("gt", "greater"), ("ge", "greater_equal"))},
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
}  # fmt: skip


def _or_unordered(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda a, b: compare(a, b) | np.isnan(a) | np.isnan(b)


COMPARISONS |= {
    name + "u": _or_unordered(COMPARISONS[name]) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}

BINARY: dict[str, Callable[[Any, Any], Any]] = {
    **{name: getattr(np, to) for name, to in
       (("add", "add"), ("sub", "subtract"), ("mul", "multiply"), ("min", "minimum"),
        ("max", "maximum"), ("and", "bitwise_and"), ("or", "bitwise_or"), ("xor", "bitwise_xor"))},
    "shl": lambda a, b: np.where(b < 8 * a.dtype.itemsize, a << (b % (8 * a.dtype.itemsize)), 0),
    "shr": lambda a, b: a >> np.minimum(b, 8 * a.dtype.itemsize - 1)
    if a.dtype.kind == "i"
    else np.where(b < 8 * a.dtype.itemsize, a >> (b % (8 * a.dtype.itemsize)), 0),
}  # fmt: skip
UNARY: dict[str, Callable[[Any], Any]] = {
    "neg": np.negative, "abs": np.abs, "ex2": np.exp2, "lg2": np.log2, "sqrt": np.sqrt,
    "rcp": lambda a: 1 / a, "rsqrt": lambda a: 1 / np.sqrt(a), "mov": lambda a: a,
    "cvta": lambda a: a, "not": np.invert,
}  # fmt: skip


def without_denormals(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """What `ftz` does: flush to zero."""
    return np.where(np.abs(values) < np.finfo(np.float32).tiny, np.float32(0), values)


class Steps:
    """Registers, memory, and a step for every instruction but those that move the counters."""

    def __init__(
        self, program: Program, blocks: int, threads: int, arguments: tuple[Array | int, ...]
    ) -> None:
        self.program, self.threads = program, threads
        arrays = [given for given in arguments if isinstance(given, np.ndarray)]
        self.memory = Memory(arrays, program.shared_bytes)
        numbers = iter(range(1, len(arguments) + 1))
        self.params = {
            name: next(numbers) << STRIDE if isinstance(given, np.ndarray) else given
            for name, given in zip(program.params, arguments, strict=True)
        }
        thread = np.arange(threads, dtype=np.uint32)
        self.registers: dict[str, Array] = {
            "%tid.x": thread,
            "%laneid": thread % WARP,
            **{f"%tid.{axis}": 0 * thread for axis in "yz"},
            "%ntid.x": np.full_like(thread, threads),
            **{f"%ntid.{axis}": np.full_like(thread, 1) for axis in "yz"},
            "%nctaid.x": np.full_like(thread, blocks),
        }
        self.steps: list[Step | None] = [
            self._compile(opcode.split("."), operands) for _, opcode, operands in program.code
        ]

    def _register(self, name: str) -> Array:
        if name not in self.registers:
            kind = np.uint32 if "." in name else _REGISTERS[name.strip("%0123456789")]
            self.registers[name] = np.zeros(self.threads, kind)
        return self.registers[name]

    def _operand(self, text: str, kind: Kind) -> Read:
        """Reads a register, a constant or the address of shared memory as a type."""
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
        elif text in self.program.shared:
            constant = np.asarray(self.program.shared[text]).astype(kind)[()]
        else:
            constant = np.asarray(int(text)).astype(kind)[()]
        return lambda chosen: constant

    def _assign(self, name: str, kind: Kind) -> Callable[[Threads, Any], None]:
        """Sets a register to values of a type; one that is wider extends them."""
        if name == "_":
            return lambda chosen, values: None
        target = self._register(name)
        if target.dtype.itemsize == kind.itemsize:
            view = target.view(kind)
        else:  # keeps the sign
            view = target.view(f"{'i' if kind.kind == 'i' else 'u'}{target.dtype.itemsize}")

        def assign(chosen: Threads, values: Any) -> None:
            view[chosen] = values

        return assign

    def _compile(self, opcode: list[str], operands: list[str]) -> Step | None:
        name, kinds = opcode[0], [_TYPES[part] for part in opcode if part in _TYPES]
        if name in {"bra", "bar", "ret"}:
            return None
        if name in {"ld", "st"}:
            return self._compile_access(name, opcode, operands, kinds[0])
        if name == "mov" and operands[0].startswith("{"):
            return self._compile_pieces(operands, kinds[0])
        if name == "shfl":
            return self._compile_shuffle(opcode[2], operands)
        if opcode[:3] == ["redux", "sync", "add"]:
            return self._compile_warp_sum(operands)
        result = self._compile_function(name, opcode, kinds, operands[1:])
        to = {"setp": np.dtype(np.bool_), "cvt": kinds[0]}.get(name, kinds[-1])
        if "wide" in opcode:
            to = np.dtype(f"{kinds[0].kind}{2 * kinds[0].itemsize}")
        assign = self._assign(operands[0], to)

        def step(chosen: Threads) -> None:
            with np.errstate(all="ignore"):
                assign(chosen, result(chosen))

        return step

    def _compile_function(
        self, name: str, opcode: list[str], kinds: list[Kind], operands: list[str]
    ) -> Read:
        if name == "cvt":
            return self._compile_conversion(opcode, kinds, operands[0])
        if opcode[-1] == "bf16":  # a comparison of two
            kind, read = np.dtype(np.float32), [self._bfloat16(text) for text in operands]
        else:
            kind = kinds[-1]
            read = [self._operand(text, kind) for text in operands]
        if name == "selp":
            condition = self._operand(operands[2], np.dtype(np.bool_))
            return lambda chosen: np.where(condition(chosen), read[0](chosen), read[1](chosen))
        if name == "fma":
            return lambda chosen: (
                read[0](chosen).astype(np.float64) * read[1](chosen) + read[2](chosen)
            ).astype(kind)
        if name in {"setp", "set"}:
            function = COMPARISONS[opcode[1]]
        elif "wide" in opcode:
            wide = np.dtype(f"{kind.kind}{2 * kind.itemsize}")
            return lambda chosen: (
                np.asarray(read[0](chosen)).astype(wide) * np.asarray(read[1](chosen)).astype(wide)
            )
        elif name in {"shl", "shr"}:
            read[1] = self._operand(operands[1], np.dtype(np.uint32))
            function = BINARY[name]
        elif kind.kind == "f" and name in {"min", "max"}:
            function = {"min": np.fmin, "max": np.fmax}[name]
        elif name in UNARY and "ftz" in opcode:
            return lambda chosen: without_denormals(UNARY[name](read[0](chosen)))
        elif name in UNARY:
            return lambda chosen: UNARY[name](read[0](chosen))
        elif name in BINARY:
            function = BINARY[name]
        else:
            raise PTXError(f"unknown instruction {'.'.join(opcode)}")
        return lambda chosen: function(np.asarray(read[0](chosen)), np.asarray(read[1](chosen)))

    def _compile_conversion(self, opcode: list[str], kinds: list[Kind], operand: str) -> Read:
        if opcode[-1] == "bf16":
            return self._bfloat16(operand)
        read, to = self._operand(operand, kinds[1]), kinds[0]
        if "rzi" in opcode:
            return lambda chosen: np.trunc(read(chosen)).astype(to)
        return lambda chosen: read(chosen).astype(to)

    def _bfloat16(self, text: str) -> Read:
        """Reads a register as bfloat16, widened."""
        narrow = self._operand(text, np.dtype(np.uint16))
        return lambda chosen: (narrow(chosen).astype(np.uint32) << 16).view(np.float32)

    def _compile_pieces(self, operands: list[str], kind: Kind) -> Step:
        """A register to its halves."""
        half = np.dtype(f"u{kind.itemsize // 2}")
        low, high = (self._assign(name, half) for name in names(operands[0]))
        whole = self._operand(operands[1], kind)

        def split(chosen: Threads) -> None:
            values = whole(chosen)
            low(chosen, values.astype(half))
            high(chosen, (values >> 8 * half.itemsize).astype(half))

        return split

    def _compile_shuffle(self, mode: str, operands: list[str]) -> Step:
        word = np.dtype(np.uint32)
        assign = self._assign(operands[0].split("|")[0], word)
        values, by, clamp = (self._operand(text, word) for text in operands[1:4])

        def step(chosen: Threads) -> None:
            threads = self._whole_warps(chosen)
            lane, distance = threads % WARP, np.asarray(by(chosen)).astype(np.int64)
            source = {
                "bfly": lane ^ distance,
                "up": lane - distance,
                "down": lane + distance,
                "idx": distance + 0 * lane,
            }[mode]
            limit = np.asarray(clamp(chosen)).astype(np.int64)
            if (limit >> 8).any():
                raise PTXError("a shuffle of parts of a warp is not known")
            kept = source >= limit if mode == "up" else source <= limit
            place = threads - lane + np.where(kept, source, lane)
            everyone = np.zeros(self.threads, word)
            everyone[chosen] = values(chosen)
            assign(chosen, everyone[place])

        return step

    def _whole_warps(self, chosen: Threads) -> Array:
        """The numbers of the threads chosen. Raises PTXError if a warp is not whole."""
        threads = np.arange(self.threads)[chosen]
        if len(threads) % WARP or (threads.reshape(-1, WARP)[:, 0] % WARP).any():
            raise PTXError("a warp exchanges values without all its lanes")
        return threads

    def _compile_warp_sum(self, operands: list[str]) -> Step:
        word = np.dtype(np.uint32)
        assign, values = self._assign(operands[0], word), self._operand(operands[1], word)

        def step(chosen: Threads) -> None:
            warps = np.broadcast_to(values(chosen), self._whole_warps(chosen).shape)
            assign(chosen, np.repeat(warps.reshape(-1, WARP).sum(1, dtype=word), WARP))

        return step

    def _compile_access(
        self, name: str, opcode: list[str], operands: list[str], kind: Kind
    ) -> Step:
        space = opcode[1].split("::")[0]
        where, what = operands if name == "st" else operands[::-1]
        base, _, offset = where.strip("[]").partition("+")
        if space == "param":
            assign, given = self._assign(what, kind), np.asarray(self.params[base]).astype(kind)
            return lambda chosen: assign(chosen, given)
        shared = space == "shared"
        start = self._operand(base, np.dtype(np.uint32 if shared else np.uint64))
        places = [int(offset or 0) + i * kind.itemsize for i in range(len(names(what)))]
        targets = [self._assign(piece, kind) for piece in names(what)] if name == "ld" else []
        values = [self._operand(piece, kind) for piece in names(what)] if name == "st" else []

        def step(chosen: Threads) -> None:
            threads = np.arange(self.threads)[chosen]
            first = np.broadcast_to(np.asarray(start(chosen)).astype(np.int64), threads.shape)
            for i, place in enumerate(places):
                memory, address = self.memory.find(shared, first + place, kind.itemsize)
                if shared:
                    self.memory.touch(threads, address, kind.itemsize, name == "st")
                at = address[:, None] + np.arange(kind.itemsize)
                if targets:
                    targets[i](chosen, np.ascontiguousarray(memory[at]).view(kind)[:, 0])
                else:
                    stored = np.broadcast_to(values[i](chosen), threads.shape)
                    memory[at] = np.ascontiguousarray(stored).view(np.uint8).reshape(at.shape)

        return step
