"""A PTX text taken apart: parameters, shared memory, labels and instructions."""

from __future__ import annotations

import re


class PTXError(Exception):
    """What a GPU would not have told: a race, a wrong address, a lane left behind."""


class Program:
    """One entry of a PTX text."""

    def __init__(self, text: str) -> None:
        """Raises PTXError for a text without a kernel or with unknown instructions."""
        body = re.sub(r"//[^\n]*", "", text)
        if "__local_depot" in body:
            raise PTXError("the kernel needs local memory: its values do not fit the registers")
        match = re.search(r"\.entry\s+(\S+?)\((.*?)\)\s*(?:\.\w+[^\n{]*\s*)*\{(.*)\}", body, re.S)
        if match is None:
            raise PTXError("no kernel")
        self.params = re.findall(r"(\w+_param_\d+)", match[2])
        self.shared: dict[str, int] = {}
        self.shared_bytes = 0
        self.registers: dict[str, int] = {}
        self.labels: dict[str, int] = {}
        self.code: list[tuple[str | None, str, list[str]]] = []
        for line in re.split(r"[;\n]", match[3]):
            self._read_line(line.strip())

    def _read_line(self, line: str) -> None:
        if not line or line in "{}":
            return
        if match := re.fullmatch(r"\.shared\s+\.align\s+(\d+)\s+\.b8\s+(\S+)\[(\d+)\]", line):
            start = -(-self.shared_bytes // int(match[1])) * int(match[1])
            self.shared[match[2]] = start
            self.shared_bytes = start + int(match[3])
        elif match := re.fullmatch(r"\.reg\s+\.\w+\s+%(\w+)<(\d+)>", line):
            self.registers[match[1]] = int(match[2])
        elif match := re.fullmatch(r"(\$\w+):", line):
            self.labels[match[1]] = len(self.code)
        elif not line.startswith("."):
            match = re.fullmatch(r"(?:@(!?%p\d+)\s+)?(\S+)\s*(.*)", line)
            assert match is not None
            operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", match[3])
            self.code.append((match[1], match[2], operands))


def names(pieces: str) -> list[str]:
    """The registers of `{a, b}`, or of `a`."""
    return re.findall(r"[^{},\s]+", pieces)
