"""`python -m tests.kit.ptx.kept_graphs FOLDER [CALL]`: which of the kit's graphs FOLDER has not.

Each is asked for as whoever compiles it does, and built, so that MAX's form of it is known: one
that was made of the same gets the name that this code looks for. Nothing is compiled, kernels
neither, which a digest of their sources stands for. Prints the names of those that are not there.
"""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from typing import NoReturn

from max.engine import InferenceSession
from max.graph.graph import KernelLibrary

from deploy.gpu.graphs import GRAPHS, OF_CALLS
from srm.engine.device.precompile import leave


class MustCompile(Exception):
    """A graph is not there."""


def must_compile(*_: object, **__: object) -> NoReturn:
    raise MustCompile


def do_nothing(*_: object) -> None:
    """In place of compiling kernels, and of looking an op up among them."""


def main(argv: list[str]) -> int:
    logging.disable(logging.INFO)  # of how long compiling took, which is not done
    InferenceSession.compile = must_compile
    KernelLibrary.load_paths = KernelLibrary.verify_custom_op = do_nothing
    for name, command in (OF_CALLS[argv[1]] if argv[1:] else GRAPHS).items():
        module, *arguments = command.split()
        try:
            import_module(module).main([*arguments, "--output", argv[0]])
        except MustCompile:
            sys.stdout.write(f"{name}\n")
    return 0


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
