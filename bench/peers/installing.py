"""`python -m bench.peers setup`: other engines, each in an environment of its own, pinned.

A list of packages is complete, so each is installed without its dependencies: some of these engines
require conflicting packages, or a GPU's. Knows no model.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from engine.errors import ConfigError

LISTS = Path(__file__).resolve().parent / "requirements"
ENVIRONMENTS = ("llama", "max", "torch", "vllm")
_LLAMA_CMAKE = (
    *("-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=ON"),
    *("-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_APP=OFF"),
    *("-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF"),
)


def install(name: str, folder: Path) -> None:
    """Make the environment `folder/name`, unless it exists and matches its current list."""
    wanted = (LISTS / f"{name}.txt").read_text()
    environment = folder / name
    marker = environment / "installed.txt"
    if marker.exists() and marker.read_text() == wanted:
        return
    shutil.rmtree(environment, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(environment)])
    pip = [str(environment / "bin" / "pip"), "install", "--no-deps"]
    python_only = {"CMAKE_ARGS": "-DLLAMA_BUILD=OFF"}  # llama.cpp itself is compiled once, below
    _run([*pip, "-r", str(LISTS / f"{name}.txt")], python_only)
    if name == "llama":
        _compile_llama(environment, wanted)
    marker.write_text(wanted)


def _compile_llama(environment: Path, wanted: str) -> None:
    """Compile llama-server, and the library that llama-cpp-python is told to load.

    Both are built from llama-cpp-python's source package, which contains all of llama.cpp.
    """
    found = re.search(r"^llama[_-]cpp[_-]python==(\S+)$", wanted, re.MULTILINE)
    if not found:
        raise ConfigError(f"{LISTS / 'llama.txt'} names no version of llama_cpp_python")
    for tool in ("cmake", "ninja", "g++"):
        if shutil.which(tool) is None:
            raise ConfigError(f"llama.cpp is compiled by cmake, ninja and g++: no {tool} here")
    source = environment / "source"
    source.mkdir()
    pip = [
        str(environment / "bin" / "pip"),
        "download",
        "--no-deps",
        "--no-binary",
        "llama-cpp-python",
    ]
    _run([*pip, "--dest", str(source), f"llama-cpp-python=={found[1]}"])
    (packed,) = source.glob("*.tar.gz")
    with tarfile.open(packed) as file:
        file.extractall(source, filter="data")
    (tree,) = source.glob("*/vendor/llama.cpp")
    build = environment / "build"
    _run(["cmake", "-S", str(tree), "-B", str(build), *_LLAMA_CMAKE])
    _run(["cmake", "--build", str(build), "--target", "llama-server"])
    (environment / "bin" / "llama-server").symlink_to(build / "bin" / "llama-server")


def _run(command: list[str], variables: dict[str, str] | None = None) -> None:
    if subprocess.run(command, env={**os.environ, **(variables or {})}, check=False).returncode:
        raise ConfigError(f"`{' '.join(command)}` failed; what it says is above")
