"""Write and read model folders: `config.json`, `model.safetensors`, `tokenizer.json`.

Matrices are stored in bfloat16; the mixer's α, β and decay stay float32 (0.999 is 1.0 in
bfloat16). Files appear whole or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from srm.engine.config import ModelConfig
from srm.engine.errors import ConfigError
from srm.engine.weights.checkpoint import read_model
from srm.engine.weights.tensors import is_scalar
from srm.training.model import SRM
from srm.training.text.whole_files import replace_file, write_whole


def save_model(
    config: ModelConfig, weights: Mapping[str, Tensor], folder: Path, text_files: Path | None = None
) -> None:
    """Write a model's state dict into `folder`, with the tokenizer of the folder `text_files`.

    Weights come last, and what stands there already is not written again: within a run only weights
    change, so that a reader finds a model whole at any time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if text_files is not None and text_files != folder:
        copy_text_files(text_files, folder)
    written = msgspec.json.format(msgspec.json.encode(config), indent=2)
    write_whole(folder / "config.json", written + b"\n")
    tensors = {
        name: (value.float() if is_scalar(name) else value.bfloat16()).contiguous()
        for name, value in weights.items()
    }
    with replace_file(folder / "model.safetensors") as partial:
        try:
            save_file(tensors, partial, metadata={"format": "pt"})
        except SafetensorError as error:
            raise ConfigError(
                f"{folder / 'model.safetensors'} cannot be written: {error}"
            ) from error


def load_model(folder: Path) -> SRM:
    """Load the model of a folder, in float32. Raises CheckpointError if it is not one."""
    files = read_model(folder)
    model = SRM(files.config)
    model.load_state_dict({name: torch.tensor(value) for name, value in files.tensors.items()})
    return model


def copy_text_files(model: Path, folder: Path) -> None:
    """Copy the tokenizer and the chat template, if there are any, from a model's folder to that of
    a model trained from it."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (model / name).exists():
            write_whole(folder / name, (model / name).read_bytes())
