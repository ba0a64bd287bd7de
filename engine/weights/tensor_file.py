"""The tensors of a safetensors file, checked against the shapes that a model asks for.

Whatever is wrong with a file is a CheckpointError that names the file and the tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors

from engine.errors import CheckpointError
from engine.memory import available_memory
from engine.steps.batch import F32
from engine.weights.tensors import Shapes


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as the file has it."""

    dtype: str  # as safetensors names it: F32, BF16, …
    shape: tuple[int, ...]
    data: bytes


def read_file(path: Path) -> bytes:
    try:
        if path.stat().st_size > available_memory():  # a system that promises more would kill us
            raise MemoryError
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except MemoryError:
        raise CheckpointError(f"cannot read {path}: it is larger than the memory") from None


def stored_tensors(path: Path, content: bytes) -> dict[str, StoredTensor]:
    """Return the tensors in a file's content, by name."""
    try:
        tensors = safetensors.deserialize(content)  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        hint = ""
        if content[:2] in {b"PK", b"\x80\x02"}:
            hint = "; it looks like a pickle of torch.save"
        elif content.startswith(b"version https://git-lfs"):
            hint = "; it is a pointer of Git LFS, which fetches the file with `git lfs pull`"
        raise CheckpointError(f"{path} is not a whole safetensors file: {error}{hint}") from None
    return {
        name: StoredTensor(entry["dtype"], tuple(entry["shape"]), entry["data"])
        for name, entry in tensors
    }


def checked(
    path: Path, stored: Mapping[str, StoredTensor], shapes: Shapes, asker: str
) -> dict[str, F32]:
    """Return all tensors as float32. Raises CheckpointError for the first that is missing, foreign,
    not finite, or not as `asker` asks."""
    missing = [name for name in shapes if name not in stored]
    if missing:
        others = f", like {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(
            f"{path}: tensor {missing[0]} {list(shapes[missing[0]])} is missing{others}; "
            f"{asker} asks for it"
        )
    for name, shape in shapes.items():
        stored_shape = stored[name].shape
        if stored_shape != shape:
            turned = ": it is transposed" if stored_shape == shape[::-1] else ""
            raise CheckpointError(
                f"{path}: tensor {name} has shape {list(stored_shape)}, "
                f"but {asker} asks for {list(shape)}{turned}"
            )
    if foreign := sorted(stored.keys() - shapes.keys()):
        listed = [f"{name} {list(stored[name].shape)}" for name in foreign[:5]]
        listed += ["…"] if len(foreign) > 5 else []
        count = "1 tensor does" if len(foreign) == 1 else f"{len(foreign)} tensors do"
        raise CheckpointError(
            f"{path}: {count} not belong to the model of {asker}: {', '.join(listed)}"
        )
    return {name: _as_float32(path, name, stored[name]) for name in shapes}


def _as_float32(path: Path, name: str, stored: StoredTensor) -> F32:
    if stored.dtype == "F32":
        values = np.frombuffer(stored.data, np.float32)
    elif stored.dtype == "F16":
        values = np.frombuffer(stored.data, np.float16).astype(np.float32)
    elif stored.dtype == "BF16":  # the upper half of a float32
        values = (np.frombuffer(stored.data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        raise CheckpointError(
            f"{path}: tensor {name} is {stored.dtype}; F32, F16 and BF16 can be read"
        )
    if not np.isfinite(values).all():
        raise CheckpointError(f"{path}: tensor {name} has values that are not finite")
    return values.reshape(stored.shape)
