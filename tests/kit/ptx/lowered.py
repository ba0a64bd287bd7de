"""What MAX makes of step graphs before their kernels become machine code: for a GPU, without one.

MAX is stopped once it has written the Mojo of the graphs, which takes seconds. Read from it, and
from the sequence of calls beside it, is what a step launches, in order, and what else is done in a
step and when weights are bound. `python -m tests.kit.ptx.lowered KIND:WIDTH …` prints it as JSON,
in a process of its own, since a virtual GPU cannot be taken back. KIND is a product in bfloat16,
"float8", or a variant of "own", "int8" one of float8's; WIDTH may also be the name of a bundled
model.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import msgspec
from max.dtype import DType
from max.engine import CompilationStopped, InferenceSession
from max.graph import Module

from srm import engine
from srm.engine.config import ModelConfig, read_model_config
from srm.engine.device.model import build_step_graph
from srm.engine.device.precompile import PrecompileConfig, leave, open_target
from srm.engine.device.products import FLOAT8, OPS, VARIANTS, Product
from tests.kit.kept import keep_compiled
from tests.kit.serving import ROOT

LAYERS = 2
"""Enough to tell what is done once a layer from what is done once a step."""


MEMORY = re.compile(r"primitives\.mgp_(buffer_alloc|buffer_(?:host|device)_to_\w+|\w*sync\w*)")


class Launch(msgspec.Struct, frozen=True):
    """A kernel that is launched, or what runs on the host in place of one."""

    device: str
    name: str
    """Its op, with what is fused with it."""
    settings: dict[str, str]
    """Parameters of the op."""


class Stage(msgspec.Struct, frozen=True):
    """What is done when weights are bound, or in a step."""

    launches: list[Launch]
    memory: list[str]
    """Where and by which of MAX's primitives memory is allocated and copied, or waited for."""


class Lowered(msgspec.Struct, frozen=True):
    """A step graph as it will run."""

    declared: dict[str, int]
    """Bytes of each weight that the graph declares."""
    bound: dict[str, int]
    """Bytes of each that is read from the host when weights are bound."""
    init: Stage
    execute: Stage


Graphs = dict[str, Lowered]


def lower(*names: str) -> dict[str, Lowered]:
    """Lower the step graphs of LAYERS layers that are named KIND:WIDTH."""
    command = [sys.executable, "-m", "tests.kit.ptx.lowered", *names]

    def run() -> bytes:
        return subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout

    sources = [Path(__file__), *Path(engine.__path__[0]).rglob("*.py")]
    return msgspec.json.decode(keep_compiled("lowered", sources, names, run), type=Graphs)


def read_graphs(mojo: str, calls: str, declared: dict[str, dict[str, int]]) -> dict[str, Lowered]:
    """Read graphs from the Mojo of their functions and the calls of these; `declared` by scope."""
    bodies = dict(re.findall(r"^def (\w+)\(.*\n((?:[ \t].*\n|\n)*)", mojo, re.M))
    graphs = {}
    for scope, weights in declared.items():
        graph = calls.partition(f"mgp.model @{scope}srm_step ")[2].partition("\n  } loc(")[0]
        init, execute = graph.split("} execute (")
        read = re.findall(
            r'string\.create "(.+?)".*\n.*buffer\.constant\.external .*?\[%\d+, (\d+)', init
        )
        graphs[scope] = Lowered(
            declared=weights,
            bound={name: int(size) for name, size in read},
            init=_stage(init, bodies),
            execute=_stage(execute, bodies),
        )
    return graphs


def _stage(calls: str, bodies: dict[str, str]) -> Stage:
    """What calls come to: of functions that call kernels and primitives."""
    launches, memory = [], []
    for name, device in re.findall(r'compiled\.call @(\w+)\(.*device_ref<"(\w+)"', calls):
        body = bodies[name]
        launches += [_launch(bodies[match]) for match in re.findall(r"^ +(__\w+)\(", body, re.M)]
        memory += [f"{device} {match}" for match in MEMORY.findall(body)]
    return Stage(launches, memory)


def _launch(kernel: str) -> Launch:
    trace = re.search(r'Trace\[.*StaticString\("(\w+)"\)\]\("(.*?)", task_id', kernel)
    assert trace is not None, f"a kernel without a trace: {kernel}"
    settings = re.search(r"\.execute\[(.*)\]\(", kernel)
    given = re.findall(r'(\w+) = "?(\w+)', settings[1]) if settings else []
    return Launch(trace[1], trace[2].removeprefix("custom__"), dict(given))


def shape_of(name: str) -> ModelConfig:
    """Of a width, or of a bundled model, with LAYERS layers."""
    if name.isdecimal():
        return PrecompileConfig(d_model=int(name), num_layers=LAYERS).shape()
    bundled, _ = read_model_config(ROOT / "models" / name)
    return msgspec.structs.replace(bundled, num_layers=LAYERS)


def main(argv: list[str]) -> int:
    device, module = open_target(PrecompileConfig()), Module()
    declared = {}
    for number, name in enumerate(argv):
        kind, width = name.split(":")
        shape = shape_of(width)
        scope = f"g{number}."  # of all of them MAX makes the name of a file
        dtype = FLOAT8 if kind in {"float8", "int8"} else DType.bfloat16
        product = cast(Product, kind if kind in OPS else "own")
        variants = frozenset({kind} & {*VARIANTS})
        graph = build_step_graph(shape, dtype, device, scope, module, product, variants=variants)
        declared[scope] = {
            weight: item.value.dtype.size_in_bytes * math.prod(map(int, item.value.shape))
            for weight, item in graph._weights.items()
            if weight.startswith(scope)
        }
    session = InferenceSession(devices=[device])
    session.debug.pre_jit = True
    with TemporaryDirectory() as folder:
        session.debug.ir_output_dir = folder
        with suppress(CompilationStopped):
            session.compile(module, custom_extensions=graph.kernel_libraries_paths)
        mojo, calls = (next(Path(folder).glob(end)).read_text() for end in ("*.mojo", "*.mgp.mlir"))
    graphs = read_graphs(mojo, calls, declared)
    sys.stdout.buffer.write(msgspec.json.encode(dict(zip(argv, graphs.values(), strict=True))))
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
