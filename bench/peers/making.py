"""The models of peers: random weights of the right shapes, each made once, in its environment.

Knows which program makes which; runs none of the models.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.peers.peer import Peer
from bench.peers.shapes import HEADS, LAYERS, N_CTX, VOCAB_SIZE, shape_of
from engine.errors import ConfigError
from engine.records import ROOT

_PROGRAMS = "bench.peers.programs."
_SRM = """
import sys
from pathlib import Path
from engine.config import ModelConfig
from engine.weights.random_model import write_random_model
width, layers, heads, n_ctx, vocab_size = map(int, sys.argv[2:])
shape = ModelConfig(d_model=width, num_layers=layers, num_heads=heads, n_ctx=n_ctx,
                    vocab_size=vocab_size)
write_random_model(Path(sys.argv[1]), shape)
"""


def python_of(environment: str, folder: Path) -> str:
    """Return the interpreter of an environment; our own for the empty name."""
    return str(folder / environment / "bin" / "python") if environment else sys.executable


def surroundings(environment: str, folder: Path) -> dict[str, str]:
    """Return the variables of programs in an environment; they keep it off the network."""
    found = {**os.environ, "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    if environment:
        found["PATH"] = f"{folder / environment / 'bin'}:{found.get('PATH', '')}"
    if environment == "llama":
        found["LLAMA_CPP_LIB_PATH"] = str(folder / "llama" / "build" / "bin")
    return found


def model_path(peer: Peer, folder: Path) -> Path:
    """Return the path of a peer's model, whether it exists or not."""
    return folder / "models" / f"{peer.model}{peer.suffix}"


def make_model(peer: Peer, folder: Path) -> Path:
    """Return the path of a peer's model, made if it does not exist. Raises ConfigError."""
    path = model_path(peer, folder)
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"part-{path.name}")
    if part.is_dir():
        shutil.rmtree(part)
    _make(peer, part, folder)
    part.rename(path)
    return path


def _make(peer: Peer, path: Path, folder: Path) -> None:
    shape = shape_of(peer.model)
    task = {"kind": shape.kind, "shape": shape.task(), "output": str(path)}
    tokenizer = folder / "models" / "tokenizer"
    if shape.kind == "srm":
        numbers = map(str, (shape.d_model, LAYERS, HEADS, N_CTX, VOCAB_SIZE))
        _run("", folder, "-c", _SRM, str(path), *numbers)
        return
    if not tokenizer.exists():
        made = {"output": str(tokenizer), "vocab_size": VOCAB_SIZE, "n_ctx": N_CTX}
        _program("torch", folder, "make_tokenizer", made)
    if peer.suffix == ".gguf":
        task["tokenizer"] = str(tokenizer / "tokenizer.json")
        _program("llama", folder, "make_gguf", task)
    elif peer.suffix == ".pth":
        _program("torch", folder, "make_rwkv", task)
    elif peer.suffix == "-ctranslate2":
        plain = folder / "models" / peer.model
        if not plain.exists():
            raise ConfigError(f"{path} is made from {plain}: make that peer's model first")
        converter = ("-m", "ctranslate2.converters.transformers", "--output_dir", str(path))
        _run("torch", folder, *converter, "--model", str(plain))
    else:
        _program("torch", folder, "make_transformers", task)
        shutil.copytree(tokenizer, path, dirs_exist_ok=True)


def _program(environment: str, folder: Path, name: str, task: dict[str, Any]) -> None:
    _run(environment, folder, "-m", _PROGRAMS + name, json.dumps(task))


def _run(environment: str, folder: Path, *arguments: str) -> None:
    command = [python_of(environment, folder), *arguments]
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
