"""Builds the fake driver, runs programs on it and reads what it wrote."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.serving import ROOT

SOURCES = Path(__file__).parent
LIBRARIES = {
    "libcuda.so.1": ("card.c", "cuda.c", "memory.c", "launches.c"),
    "libnvidia-ml.so.1": ("card.c", "nvml.c"),
}
FLAGS = ("-std=c11", "-O1", "-Wall", "-Wno-format-zero-length", "-shared", "-fPIC")
RUN_S = 1200
"""Seconds after which a program hangs, on a very busy machine too."""

Call = dict[str, Any]
"""A line of the log: a call of the driver with what it was given, or a mark of a program's."""


def build(folder: Path) -> Path:
    """Compile both libraries into a folder; it is what LD_LIBRARY_PATH must name."""
    if not (compiler := shutil.which("cc")):
        pytest.fail("there is no cc: the fake driver is C, and nothing else tries the GPU's path")
    for library, sources in LIBRARIES.items():
        paths = [str(SOURCES / source) for source in sources]
        command = [compiler, *FLAGS, "-fvisibility=hidden", "-o", str(folder / library), *paths]
        subprocess.run([*command, "-lpthread"], check=True)
    return folder


class FakeDriver:
    """Where the fake driver is, and how programs get it."""

    def __init__(self, libraries: Path) -> None:
        self._libraries = libraries

    def environment(self, log: Path | None = None, **settings: object) -> dict[str, str]:
        """Variables of a process that is to see GPUs; a setting `card` is FAKE_CUDA_CARD."""
        entries = {f"FAKE_CUDA_{name.upper()}": str(value) for name, value in settings.items()}
        if log is not None:
            entries["FAKE_CUDA_LOG"] = str(log)
        return entries | {"LD_LIBRARY_PATH": str(self._libraries)}

    def start(
        self, name: str, *arguments: object, log: Path | None = None, **settings: object
    ) -> subprocess.Popen[str]:
        """Start a program of `tests.kit.fake_driver.programs`."""
        return subprocess.Popen(
            [sys.executable, "-m", "tests.kit.fake_driver.programs", name, *map(str, arguments)],
            cwd=ROOT,
            env=os.environ | self.environment(log, **settings),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(
        self, name: str, *arguments: object, log: Path | None = None, **settings: object
    ) -> dict[str, Any]:
        """Run a program to its end; return what it says."""
        with self.start(name, *arguments, log=log, **settings) as process:
            out, err = process.communicate(timeout=RUN_S)
        assert process.returncode == 0, err
        document: dict[str, Any] = json.loads(out.splitlines()[-1])
        return document


def read_log(path: Path) -> list[Call]:
    """Read what is written by now; a line that is being written is left out."""
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    return [json.loads(line) for line in whole.splitlines()]


def parts(log: list[Call]) -> dict[str, list[Call]]:
    """Divide a log at the marks of a program; what comes before the first is called ""."""
    entries: dict[str, list[Call]] = {"": []}
    for line in log:
        if "mark" in line:
            entries[line["mark"]] = []
        else:
            entries[[*entries][-1]].append(line)
    return entries


def calls_of(lines: list[Call], *names: str) -> list[Call]:
    return [line for line in lines if line["call"].removesuffix("_v2") in names]


def launches_of(lines: list[Call]) -> list[Call]:
    return calls_of(lines, "cuLaunchKernelEx", "cuLaunchKernel")


def words(parameter: str) -> list[int]:
    """The 64-bit words of a kernel's parameter, which the log has as bytes."""
    data = bytes.fromhex(parameter)
    return [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]


def enqueued(lines: list[Call]) -> Iterator[str]:
    """What is done on a stream, in order: "up", "launch", "down", "event" and waits as "wait"."""
    for line in lines:
        name = line["call"]
        if "copy" in line:
            yield line["copy"]
        elif name.startswith("cuLaunch"):
            yield "launch"
        elif name == "cuGraphLaunch":
            yield f"graph of {line['launches']}"
        elif name == "cuEventRecord":
            yield "event"
        elif "Synchronize" in name:
            yield "wait"
        elif name.startswith(("cuMemset", "cuMemAlloc", "cuMemHostAlloc", "cuMemCreate")):
            yield name
