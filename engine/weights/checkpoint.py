"""Read a model folder: `config.json` and `model.safetensors`, or its shards and their index.

It holds exactly the tensors of its config (`tensors.tensor_shapes`), finite, in float32,
float16 or bfloat16; whatever is wrong with it is a CheckpointError that names it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from srm.engine.config import ModelConfig, read_model_config
from srm.engine.steps.batch import F32
from srm.engine.weights.tensor_file import (
    DELTA_OF,
    StoredTensor,
    checked,
    longest_header,
    read_metadata,
    read_tensors,
    weights_path,
)
from srm.engine.weights.tensors import tensor_shapes
from srm.engine.weights.weights import Weights, fold
from srm.errors import CheckpointError, cut


@dataclass(frozen=True, slots=True, eq=False)
class ModelFiles:
    """Contents of a model folder. `fingerprint` is of config and tensors, hexadecimal."""

    config: ModelConfig
    tensors: dict[str, F32]
    dtypes: dict[str, str]  # how the files store each tensor: F32, BF16, …
    fingerprint: str


@dataclass(frozen=True, slots=True, eq=False)
class StoredModel:
    """The same with its tensors as they are stored, and not checked."""

    config: ModelConfig
    tensors: dict[str, StoredTensor]
    fingerprint: str


def read_model(folder: Path) -> ModelFiles:
    """Read and check the files in `folder`. Raises CheckpointError naming the file, and the field
    or tensor, that is missing, unknown, of the wrong shape or not finite."""
    stored = read_stored(folder)
    shapes = tensor_shapes(stored.config)
    return ModelFiles(
        config=stored.config,
        tensors=checked(weights_path(folder), stored.tensors, shapes, "config.json"),
        dtypes={name: tensor.dtype for name, tensor in stored.tensors.items()},
        fingerprint=stored.fingerprint,
    )


def read_stored(folder: Path) -> StoredModel:
    """Read the files in `folder`. Raises CheckpointError naming the one that cannot be read, and
    for a delta, which is no model of its own."""
    config, config_bytes = read_model_config(folder)
    tensor_path = weights_path(folder)
    if (base := read_metadata(tensor_path).get(DELTA_OF)) is not None:
        raise CheckpointError(
            f"{tensor_path} is a delta: it has only what differs from weights {cut(base, 64)!r}, "
            "and is for a server that runs these"
        )
    hasher = hashlib.sha256(config_bytes)
    tensors = read_tensors(tensor_path, hasher.update, longest_header(len(tensor_shapes(config))))
    return StoredModel(config, tensors, hasher.hexdigest()[:16])


def with_ends_of(folder: Path, weights: Weights) -> Weights:
    """Return the weights with the end tokens of the model in a folder: those of a trainer, which
    are served in its place, may name fewer. Raises CheckpointError."""
    ends = read_model_config(folder)[0].eos_token_id
    config = msgspec.structs.replace(weights.config, eos_token_id=ends)
    return replace(weights, config=config)


def load_checkpoint(folder: Path) -> Weights:
    """Load the weights in `folder` in the step graph's form. Raises CheckpointError."""
    files = read_model(folder)
    return fold(files.config, files.tensors, files.fingerprint)
