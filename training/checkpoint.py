"""Write and read model folders: `config.json`, `model.safetensors`, `tokenizer.json`.

Matrices are stored in bfloat16; the mixer's α, β and decay stay float32 (0.999 is 1.0 in
bfloat16). Files appear whole or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file

from engine.weights.checkpoint import read_model
from engine.weights.tensors import is_scalar
from training.model import SRM


def save_model(model: SRM, folder: Path) -> None:
    """Write `config.json` and `model.safetensors` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (value.float() if is_scalar(name) else value.bfloat16()).contiguous()
        for name, value in model.state_dict().items()
    }
    with whole(folder / "model.safetensors") as partial:
        save_file(tensors, partial, metadata={"format": "pt"})
    config = msgspec.json.format(msgspec.json.encode(model.config), indent=2)
    write_whole(folder / "config.json", config + b"\n")


def load_model(folder: Path) -> SRM:
    """Load the model of a folder, in float32. Raises CheckpointError if it is not one."""
    files = read_model(folder)
    model = SRM(files.config)
    model.load_state_dict({name: torch.tensor(value) for name, value in files.tensors.items()})
    return model


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Give a path to write to; what is there then replaces `path` in one step."""
    partial = path.with_name(path.name + ".partial")
    yield partial
    partial.replace(path)


def write_whole(path: Path, content: bytes) -> None:
    """Replace `path` by `content` in one step."""
    with whole(path) as partial:
        partial.write_bytes(content)
