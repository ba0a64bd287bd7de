"""What the machine code of a GPU's kernels takes of a processor, read from what an assembler wrote.

Compiled graphs of MAX hold such files (ELF), one a kernel, and Mojo's compiler writes them too; no
program of CUDA's is needed. `python -m tests.kit.ptx.cubin FILE …` shows the kernels of compiled
graphs; its exit status counts those of ours that spill registers.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

OURS = "mojo_pkg"
"""What the names of our kernels begin with in a compiled graph."""
MAGIC, CUDA = b"\x7fELF", 190
TEXT, SHARED, INFO = ".text.", ".nv.shared.", ".nv.info"
REGISTERS, FRAME, STACK = 0x2F, 0x11, 0x12
"""Attributes that a kernel, or a function that it calls, has in INFO."""
PAIR = 4
"""The form of an attribute that has a number for a symbol."""
MUFU, LDG, STG, HGMMA = 0x308, 0x981, 0x986, 0x9F0
"""Opcodes: approximate functions, loads from global memory, products of bfloat16."""
ACQBULK, PREEXIT, UTMALDG = 0x82E, 0x82D, 0x3B4
"""Opcodes: wait for the kernel before, let the next kernel start, load by TMA."""
RESERVED = 1024
"""Bytes of shared memory that the system has in each block."""


class Resources(NamedTuple):
    """What a kernel takes."""

    registers: int  # of a thread
    stack: int  # bytes of a thread, where the compiler puts what finds no register
    shared: int  # bytes of a block, without those that a launch asks for


def kernels_of(data: bytes) -> dict[str, Resources]:
    """Return the kernels in a compiled graph, or in one file of machine code, by their names."""
    return dict(map(_kernel, _files_in(data)))


def codes_of_kernels(data: bytes) -> dict[str, list[int]]:
    """Return the opcodes of the kernels in a compiled graph, by their names."""
    return {_kernel(elf)[0]: opcodes_of(elf) for elf in _files_in(data)}


def _files_in(data: bytes) -> Iterator[bytes]:
    """Yield files of machine code, each with what lies behind it."""
    at = data.find(MAGIC)
    while at >= 0:
        if int.from_bytes(data[at + 18 : at + 20], "little") == CUDA:
            yield data[at:]
        at = data.find(MAGIC, at + 1)


def opcodes_of(elf: bytes) -> list[int]:
    """Return the opcodes of a kernel's instructions: the lowest 12 bits of each 16 bytes."""
    elf = elf[elf.find(MAGIC) :]
    ((start, size),) = (place for name, *place in _sections(elf) if name.startswith(TEXT))
    return [struct.unpack_from("<H", elf, at)[0] & 0xFFF for at in range(start, start + size, 16)]


def _kernel(elf: bytes) -> tuple[str, Resources]:
    sections = {name: (start, size) for name, start, size in _sections(elf)}
    (name,) = (section.removeprefix(TEXT) for section in sections if section.startswith(TEXT))
    start, size = sections[INFO]
    given = list(_attributes(elf[start : start + size]))
    (registers,) = (value for kind, value in given if kind == REGISTERS)
    stack = max(value for kind, value in given if kind in {FRAME, STACK})
    _, shared = sections.get(SHARED + name, (0, RESERVED))
    return name, Resources(registers, stack, shared - RESERVED)


def _sections(elf: bytes) -> Iterator[tuple[str, int, int]]:
    """Yield each section's name, place and size."""
    (table,) = struct.unpack_from("<Q", elf, 40)
    size, count, of_names = struct.unpack_from("<HHH", elf, 58)
    heads = [struct.unpack_from("<II16xQQ", elf, table + i * size) for i in range(count)]
    for at, _, start, length in heads:
        begin = heads[of_names][2] + at
        yield elf[begin : elf.index(b"\0", begin)].decode(), start, length


def _attributes(info: bytes) -> Iterator[tuple[int, int]]:
    at = 0
    while at < len(info):
        form, kind, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == PAIR:
            yield kind, struct.unpack_from("<4xI", info, at)[0]
            at += size


def main(argv: list[str]) -> int:
    spilling = 0
    for path in map(Path, argv):
        kernels = kernels_of(path.read_bytes())
        if not kernels:
            raise SystemExit(f"{path}: no machine code of a GPU")
        for name, taken in kernels.items():
            spilling += name.startswith(OURS) and taken.stack > 0
            facts = ", ".join(f"{value} {what}" for what, value in taken._asdict().items())
            print(f"{path.name} {name[:24]}…{name[-16:]}: {facts}")
    return spilling


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
