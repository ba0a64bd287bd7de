"""`python -m research.bench.peers setup`: other engines, each in an environment of its own, and all
models.

A list of packages is pinned and complete, so each is installed without its dependencies: some of
these engines require conflicting packages, or a GPU's. Models have random weights of the right
shapes, each made once, in its engine's environment. Runs none of the models.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

from research.bench.peers.config import Peer
from research.bench.peers.shapes import HEADS, LAYERS, N_CTX, VOCAB_SIZE, shape_of
from srm.engine.config import ModelConfig
from srm.engine.weights.random_model import write_random_model
from srm.errors import ConfigError
from srm.loadtest.records import ROOT

LISTS = Path(__file__).resolve().parent / "requirements"
ENVIRONMENTS = ("llama", "torch", "vllm")
PROGRAMS = "research.bench.peers.programs."
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
    _run(sys.executable, "-m", "venv", environment)
    pip = environment / "bin" / "pip"
    # llama.cpp itself is compiled once, below.
    python_only = os.environ | {"CMAKE_ARGS": "-DLLAMA_BUILD=OFF"}
    _run(pip, "install", "--no-deps", "-r", LISTS / f"{name}.txt", env=python_only)
    if name == "llama":
        _compile_llama(environment, wanted)
    marker.write_text(wanted)


def _compile_llama(environment: Path, wanted: str) -> None:
    """Compile llama-server from llama-cpp-python's source package, which contains all of
    llama.cpp."""
    match = re.search(r"^llama[_-]cpp[_-]python==(\S+)$", wanted, re.MULTILINE)
    if not match:
        raise ConfigError(f"{LISTS / 'llama.txt'} names no version of llama_cpp_python")
    for tool in ("cmake", "ninja", "g++"):
        if shutil.which(tool) is None:
            raise ConfigError(f"llama.cpp is compiled by cmake, ninja and g++: no {tool} here")
    source, build = environment / "source", environment / "build"
    source.mkdir()
    download = (environment / "bin" / "pip", "download", "--no-deps", "--dest", source)
    _run(*download, "--no-binary", "llama-cpp-python", f"llama-cpp-python=={match[1]}")
    (packed,) = source.glob("*.tar.gz")
    with tarfile.open(packed) as file:
        file.extractall(source, filter="data")
    (tree,) = source.glob("*/vendor/llama.cpp")
    _run("cmake", "-S", tree, "-B", build, *_LLAMA_CMAKE)
    _run("cmake", "--build", build, "--target", "llama-server")
    (environment / "bin" / "llama-server").symlink_to(build / "bin" / "llama-server")


def _run(*command: str | Path, **how: Any) -> None:
    if subprocess.run(command, check=False, **how).returncode:
        raise ConfigError(f"`{' '.join(map(str, command))}` failed; what it says is above")


def python_of(environment: str, folder: Path) -> str:
    """Return the interpreter of an environment; our own for the empty name."""
    return str(folder / environment / "bin" / "python") if environment else sys.executable


def surroundings(environment: str, folder: Path) -> dict[str, str]:
    """Return the variables of programs in an environment; they keep it off the network."""
    entries = {**os.environ, "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    if environment:
        entries["PATH"] = f"{folder / environment / 'bin'}:{entries.get('PATH', '')}"
    else:  # our server is that of this tree, wherever it is started
        entries["PYTHONPATH"] = str(ROOT)
    return entries


def model_path(peer: Peer, folder: Path) -> Path:
    """Return the path of a peer's model, whether it exists or not."""
    return folder / "models" / f"{peer.model}{peer.suffix}"


def make_model(peer: Peer, folder: Path) -> Path:
    """Return the path of a peer's model, made if it does not exist. Raises ConfigError."""
    path = model_path(peer, folder)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"part-{path.name}")
        shutil.rmtree(part, ignore_errors=True)
        _make(peer, part, folder)
        part.rename(path)
    return path


def _make(peer: Peer, path: Path, folder: Path) -> None:
    shape = shape_of(peer.model)
    task = {"shape": shape.task(), "output": str(path)}
    tokenizer = folder / "models" / "tokenizer"
    if not tokenizer.exists():
        made = {"output": str(tokenizer), "vocab_size": VOCAB_SIZE, "n_ctx": N_CTX}
        _program("torch", folder, PROGRAMS + "make_tokenizer", json.dumps(made))
    if shape.kind == "srm":
        sizes: dict[str, Any] = {
            "num_layers": LAYERS,
            "num_heads": HEADS,
            "n_ctx": shape.n_ctx,
            "vocab_size": VOCAB_SIZE,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        write_random_model(path, ModelConfig(d_model=shape.d_model, **sizes))
        shutil.copy(tokenizer / "tokenizer.json", path)
    elif peer.suffix == ".gguf":
        task["tokenizer"] = str(tokenizer / "tokenizer.json")
        _program("llama", folder, PROGRAMS + "make_gguf", json.dumps(task))
    else:
        _program("torch", folder, PROGRAMS + "make_transformers", json.dumps(task))
        shutil.copytree(tokenizer, path, dirs_exist_ok=True)


def _program(environment: str, folder: Path, *arguments: str) -> None:
    command = [python_of(environment, folder), "-m", *arguments]
    done = subprocess.run(
        command,
        cwd=folder / "models",
        env=surroundings(environment, folder) | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ConfigError(f"`{' '.join(command)[:300]}` failed: {done.stderr.strip()[-500:]}")
