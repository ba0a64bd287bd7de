"""Read a checkpoint folder into validated weights.

A file holds exactly the tensors of its config (`tensors.tensor_shapes`), finite, in float32,
float16 or bfloat16; whatever is wrong with it is a CheckpointError that names it. Does not know
what the tensors mean: `weights.fold` does.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import safetensors

from engine.batch import F32
from engine.config import ModelConfig
from engine.errors import CheckpointError
from engine.tensors import tensor_shapes
from engine.weights import Weights, fold


def load_checkpoint(folder: Path) -> Weights:
    """The weights in `folder` (`config.json`, `model.safetensors`).

    Raises CheckpointError naming the file, and the field or tensor, that is missing, unknown, of
    the wrong shape or not finite.
    """
    config_path, tensor_path = folder / "config.json", folder / "model.safetensors"
    config_bytes, tensor_bytes = _read(config_path), _read(tensor_path)
    try:
        config = msgspec.json.decode(config_bytes, type=ModelConfig)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{config_path}: {error}") from None
    fingerprint = hashlib.sha256(config_bytes + tensor_bytes).hexdigest()[:16]
    return fold(config, _tensors(tensor_path, tensor_bytes, config), fingerprint)


def _tensors(path: Path, content: bytes, config: ModelConfig) -> dict[str, F32]:
    """All tensors of the file as float32, each of the shape that the config asks for."""
    try:
        found = dict(safetensors.deserialize(content))  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{path} is not a whole safetensors file: {error}") from None
    shapes = tensor_shapes(config)
    for name, shape in shapes.items():
        if name not in found:
            raise CheckpointError(f"{path}: tensor {name} {list(shape)} is missing")
        if tuple(found[name]["shape"]) != shape:
            raise CheckpointError(
                f"{path}: tensor {name} has shape {found[name]['shape']}, "
                f"but config.json asks for {list(shape)}"
            )
    if foreign := sorted(found.keys() - shapes.keys()):
        raise CheckpointError(
            f"{path}: {len(foreign)} tensors do not belong to this model: {', '.join(foreign[:5])}"
        )
    tensors = {}
    for name, shape in shapes.items():
        tensors[name] = _as_float32(path, name, found[name]).reshape(shape)
        if not np.isfinite(tensors[name]).all():
            raise CheckpointError(f"{path}: tensor {name} has values that are not finite")
    return tensors


def _as_float32(path: Path, name: str, tensor: dict[str, Any]) -> F32:
    dtype, data = tensor["dtype"], tensor["data"]
    if dtype == "F32":
        return np.frombuffer(data, np.float32)
    if dtype == "F16":
        return np.frombuffer(data, np.float16).astype(np.float32)
    if dtype == "BF16":  # the upper half of a float32
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    raise CheckpointError(f"{path}: tensor {name} is {dtype}; F32, F16 and BF16 can be read")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
