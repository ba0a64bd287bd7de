"""`python -m tests.kernels.kept_graphs FOLDER`: looks whether graphs that are kept compiled are
those of this code; FOLDER has them unpacked.

Each is asked for as whoever compiles it does, and built, so that MAX's form of it is known. Nothing
is compiled, kernels neither, which a digest of their sources stands for. Prints those that FOLDER
has not.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import NoReturn

from max.engine import InferenceSession
from max.graph.graph import KernelLibrary

from deploy.gpu.graphs import GRAPHS
from engine.device.precompile import leave

KEPT = ("d 512", "ops of d 512")
"""Of `deploy.gpu.graphs`, and with them the graphs that copy slots."""


class MustCompile(Exception):
    """A graph is not there."""


def must_compile(*_: object, **__: object) -> NoReturn:
    raise MustCompile


def do_nothing(*_: object) -> None:
    """In place of compiling kernels, and of looking an op up among them."""


def main(argv: list[str]) -> int:
    InferenceSession.compile = must_compile
    KernelLibrary.load_paths = KernelLibrary.verify_custom_op = do_nothing
    for name in KEPT:
        module, *arguments = GRAPHS[name].split()
        try:
            import_module(module).main([*arguments, "--output", argv[0]])
        except MustCompile:
            print(name, flush=True)
    return 0


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
