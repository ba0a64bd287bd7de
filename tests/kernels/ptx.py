"""Runs PTX, what the GPU's kernels compile to, block by block in numpy, on a machine without a GPU.

Every thread of a block has its own program counter; those at the lowest one go first, together, so
each instruction is a few numpy operations. Only the instructions that our kernels need are known.
Stricter than a GPU: an error is raised for an access outside the arrays given, for shared memory
that two threads touch, one of them writing, without a barrier between, for a warp that exchanges
values without all its lanes, and for a barrier that not all threads reach. Shared memory begins as
NaN. Approximate functions are exact here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Threads = Any  # what selects threads of a register: all, or their numbers
Read = Callable[[Threads], Any]
Kind = np.dtype[Any]
Step = Callable[[Threads], None]

WARP = 32
_STRIDE = 40  # bits of an address inside a global array
_REGISTERS = {"p": np.bool_, "rs": np.uint16, "r": np.uint32, "rd": np.uint64}
_TYPES = {
    **{f"{kind}{bits}": np.dtype(f"{letter}{bits // 8}") for kind, letter in
       (("u", "u"), ("b", "u"), ("s", "i"), ("f", "f")) for bits in (8, 16, 32, 64)
       if (kind, bits) != ("f", 8)},
    "bf16": np.dtype(np.uint16),
    "pred": np.dtype(np.bool_),
}  # fmt: skip

_compare: dict[str, Callable[[Any, Any], Any]] = {
    **{name: getattr(np, to) for name, to in
       (("eq", "equal"), ("ne", "not_equal"), ("lt", "less"), ("le", "less_equal"),
        ("gt", "greater"), ("ge", "greater_equal"))},
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
}  # fmt: skip


def _or_unordered(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda a, b: compare(a, b) | np.isnan(a) | np.isnan(b)


_compare |= {
    name + "u": _or_unordered(_compare[name]) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}

_binary: dict[str, Callable[[Any, Any], Any]] = {
    **{name: getattr(np, to) for name, to in
       (("add", "add"), ("sub", "subtract"), ("mul", "multiply"), ("min", "minimum"),
        ("max", "maximum"), ("and", "bitwise_and"), ("or", "bitwise_or"), ("xor", "bitwise_xor"))},
    "shl": lambda a, b: np.where(b < 8 * a.dtype.itemsize, a << (b % (8 * a.dtype.itemsize)), 0),
    "shr": lambda a, b: a >> np.minimum(b, 8 * a.dtype.itemsize - 1)
    if a.dtype.kind == "i"
    else np.where(b < 8 * a.dtype.itemsize, a >> (b % (8 * a.dtype.itemsize)), 0),
}  # fmt: skip
_unary: dict[str, Callable[[Any], Any]] = {
    "neg": np.negative, "abs": np.abs, "ex2": np.exp2, "lg2": np.log2, "sqrt": np.sqrt,
    "rcp": lambda a: 1 / a, "rsqrt": lambda a: 1 / np.sqrt(a), "mov": lambda a: a,
    "cvta": lambda a: a, "not": np.invert,
}  # fmt: skip


class PTXError(Exception):
    """What a GPU would not have told: a race, a wrong address, a lane left behind."""


class Kernel:
    """One entry of a PTX text."""

    def __init__(self, text: str) -> None:
        """Raises PTXError for a text without a kernel or with unknown instructions."""
        body = re.sub(r"//[^\n]*", "", text)
        if "__local_depot" in body:
            raise PTXError("the kernel needs local memory: its values do not fit the registers")
        found = re.search(r"\.entry\s+(\S+?)\((.*?)\)\s*(?:\.\w+[^\n{]*\s*)*\{(.*)\}", body, re.S)
        if found is None:
            raise PTXError("no kernel")
        self.params = re.findall(r"(\w+_param_\d+)", found[2])
        self.shared: dict[str, int] = {}
        self.shared_bytes = 0
        self.register_counts: dict[str, int] = {}
        self.labels: dict[str, int] = {}
        self.code: list[tuple[str | None, str, list[str]]] = []
        for line in re.split(r"[;\n]", found[3]):
            self._read_line(line.strip())

    def _read_line(self, line: str) -> None:
        if not line or line in "{}":
            return
        if match := re.fullmatch(r"\.shared\s+\.align\s+(\d+)\s+\.b8\s+(\S+)\[(\d+)\]", line):
            start = -(-self.shared_bytes // int(match[1])) * int(match[1])
            self.shared[match[2]] = start
            self.shared_bytes = start + int(match[3])
        elif match := re.fullmatch(r"\.reg\s+\S+\s+%(\w+)<(\d+)>", line):
            self.register_counts[match[1]] = int(match[2])
        elif match := re.fullmatch(r"(\$\w+):", line):
            self.labels[match[1]] = len(self.code)
        elif not line.startswith("."):
            match = re.fullmatch(r"(?:@(!?%p\d+)\s+)?(\S+)\s*(.*)", line)
            assert match is not None
            operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", match[3])
            self.code.append((match[1], match[2], operands))

    def launch(self, blocks: int, threads: int, *arguments: Array | int) -> None:
        """Run blocks one after the other; arrays are global memory, and changed in place."""
        if len(arguments) != len(self.params):
            raise PTXError(f"{len(self.params)} arguments wanted, got {len(arguments)}")
        processor = _Processor(self, blocks, threads, arguments)
        for block in range(blocks):
            processor.run(block)


class _Processor:
    """The threads of a block, at work."""

    def __init__(
        self, kernel: Kernel, blocks: int, threads: int, arguments: tuple[Array | int, ...]
    ) -> None:
        self.kernel, self.threads = kernel, threads
        self.memory = [np.ravel(a).view(np.uint8) for a in arguments if isinstance(a, np.ndarray)]
        numbers = iter(range(1, len(arguments) + 1))
        self.params = {
            name: next(numbers) << _STRIDE if isinstance(given, np.ndarray) else given
            for name, given in zip(kernel.params, arguments, strict=True)
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
            self._compile(opcode.split("."), operands) for _, opcode, operands in kernel.code
        ]

    def _forget_touches(self) -> None:
        """At a barrier: what was touched before it races with nothing after it."""
        self.writer = np.full(len(self.shared) // 4, -1)
        self.reader = np.full(len(self.shared) // 4, -1)  # -2: more than one

    def run(self, block: int) -> None:
        """Run a block to its end."""
        self._register("%ctaid.x")[:] = block
        self.shared = np.full(self.kernel.shared_bytes, 0xFF, np.uint8)
        self._forget_touches()
        self.counter = np.zeros(self.threads, np.int64)
        self.waits = np.zeros(self.threads, np.bool_)
        self.ended = np.zeros(self.threads, np.bool_)
        while not self.ended.all():
            ready = ~self.waits & ~self.ended
            if not ready.any():
                if self.ended.any():
                    raise PTXError("a barrier that some threads have passed by ending")
                self.waits[:] = False
                self._forget_touches()
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
        if not self.kernel.code[at][1].startswith(("shfl", "redux")):
            return threads
        warps, sizes = np.unique(threads // WARP, return_counts=True)
        return threads[np.isin(threads // WARP, warps[sizes == WARP])]

    def _advance(self, group: Array, at: int, until: int) -> None:
        """Run threads that stand together up to a branch, a barrier or where others stand."""
        chosen = slice(None) if len(group) == self.threads else group
        while True:
            guard, opcode, operands = self.kernel.code[at]
            acting = group
            if guard is not None:
                holds = self.registers[guard.lstrip("!")][group] != guard.startswith("!")
                acting = group[holds]
            if opcode.startswith("bra"):
                self.counter[group] = at + 1
                self.counter[acting] = self.kernel.labels[operands[0]]
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
        elif text in self.kernel.shared:
            constant = np.asarray(self.kernel.shared[text]).astype(kind)[()]
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
        if name == "mov" and (operands[0].startswith("{") or operands[1].startswith("{")):
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
            function = _compare[opcode[1]]
        elif "wide" in opcode:
            wide = np.dtype(f"{kind.kind}{2 * kind.itemsize}")
            return lambda chosen: (
                np.asarray(read[0](chosen)).astype(wide) * np.asarray(read[1](chosen)).astype(wide)
            )
        elif name in {"shl", "shr"}:
            read[1] = self._operand(operands[1], np.dtype(np.uint32))
            function = _binary[name]
        elif kind.kind == "f" and name in {"min", "max"}:
            function = {"min": np.fmin, "max": np.fmax}[name]
        elif name in _unary and "ftz" in opcode:
            return lambda chosen: _without_denormals(_unary[name](read[0](chosen)))
        elif name in _unary:
            return lambda chosen: _unary[name](read[0](chosen))
        elif name in _binary:
            function = _binary[name]
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
        """A register to its halves, or the other way round."""
        half = np.dtype(f"u{kind.itemsize // 2}")
        bits = 8 * half.itemsize
        if operands[0].startswith("{"):
            low, high = (self._assign(name, half) for name in _names(operands[0]))
            whole = self._operand(operands[1], kind)

            def split(chosen: Threads) -> None:
                values = whole(chosen)
                low(chosen, values.astype(half))
                high(chosen, (values >> bits).astype(half))

            return split
        parts = [self._operand(name, half) for name in _names(operands[1])]
        assign = self._assign(operands[0], kind)

        def join(chosen: Threads) -> None:
            low, high = (np.asarray(part(chosen)).astype(kind) for part in parts)
            assign(chosen, low | high << bits)

        return join

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
        places = [int(offset or 0) + i * kind.itemsize for i in range(len(_names(what)))]
        targets = [self._assign(piece, kind) for piece in _names(what)] if name == "ld" else []
        values = [self._operand(piece, kind) for piece in _names(what)] if name == "st" else []

        def step(chosen: Threads) -> None:
            threads = np.arange(self.threads)[chosen]
            first = np.broadcast_to(np.asarray(start(chosen)).astype(np.int64), threads.shape)
            for i, place in enumerate(places):
                memory, address = self._find(shared, first + place, kind.itemsize)
                if shared:
                    self._touch(threads, address, kind.itemsize, name == "st")
                at = address[:, None] + np.arange(kind.itemsize)
                if targets:
                    targets[i](chosen, np.ascontiguousarray(memory[at]).view(kind)[:, 0])
                else:
                    stored = np.broadcast_to(values[i](chosen), threads.shape)
                    memory[at] = np.ascontiguousarray(stored).view(np.uint8).reshape(at.shape)

        return step

    def _find(self, shared: bool, address: Array, size: int) -> tuple[Array, Array]:
        """Memory and offsets in it. Raises PTXError where they lie outside or are not aligned."""
        memory, place = self.shared, address
        if not shared:
            number = address >> _STRIDE
            if (number != number[0]).any() or not 1 <= number[0] <= len(self.memory):
                raise PTXError("a global address in no array")
            memory, place = self.memory[number[0] - 1], address & ((1 << _STRIDE) - 1)
        if (place < 0).any() or (place + size > len(memory)).any() or (place % size).any():
            raise PTXError(f"an address outside of its array or not aligned: {place.tolist()}")
        return memory, place

    def _touch(self, threads: Array, address: Array, size: int, writes: bool) -> None:
        """Keep who touched which word of shared memory. Raises PTXError where that is a race."""
        for word in range(-(-size // 4)):
            at = address // 4 + word
            if writes:
                strange = (self.writer[at] >= 0) & (self.writer[at] != threads)
                strange |= (self.reader[at] != -1) & (self.reader[at] != threads)
                if strange.any() or len(np.unique(at)) != len(at):
                    raise PTXError("a race: shared memory written that another thread touched")
                self.writer[at] = threads
            else:
                if ((self.writer[at] >= 0) & (self.writer[at] != threads)).any():
                    raise PTXError("a race: shared memory read that another thread wrote")
                first = np.where(self.reader[at] == -1, threads, self.reader[at])
                self.reader[at] = np.where(first == threads, threads, -2)
                order = np.argsort(at, kind="stable")
                repeated = at[order][1:] == at[order][:-1]
                self.reader[at[order][1:][repeated]] = -2


def _without_denormals(values: Array) -> Array:
    return np.where(np.abs(values) < np.finfo(np.float32).tiny, np.float32(0), values)


def _names(pieces: str) -> list[str]:
    return re.findall(r"[^{},\s]+", pieces)
