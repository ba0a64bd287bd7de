"""Tells which model a folder has, without reading all of its weights."""

from __future__ import annotations

import logging
import os
from hashlib import blake2b
from pathlib import Path

from srm.engine.kept_model import weight_names
from srm.files import open_file, read_file

log = logging.getLogger(__name__)

_HEAD = 64 * 1024
"""Bytes read at each end of the weights to tell them from others."""


def model_parts(folder: Path) -> list[bytes]:
    """Return the bytes that tell models apart. Raises OSError if there is no model."""
    ends: list[bytes] = []
    for weights in (folder / name for name in sorted(weight_names(folder))):
        if weights.exists():
            with open_file(weights) as file:
                size = os.fstat(file.fileno()).st_size
                ends += [file.read(_HEAD), str(size).encode()]
                file.seek(max(0, size - _HEAD))
                ends.append(file.read(_HEAD))
    return [read_file(folder / "config.json"), *(ends or [b""])]


def model_id(folder: Path) -> str:
    """Return the id of the model and its tokenizer; empty if there is no model."""
    tokenizer = folder / "tokenizer.json"
    try:
        parts = model_parts(folder)
        parts.append(read_file(tokenizer) if tokenizer.exists() else b"")
    except OSError:  # whoever serves it says what is wrong
        return ""
    return digest(parts)


def as_started(model: Path, message: str) -> Path:
    """Return the model's folder, or its copy from the server's start where a small file of the
    folder is not the same any more. Blocks."""
    if not message:
        return model
    weights = weight_names(Path(message))  # an engine's
    small = (file for file in Path(message).iterdir() if file.name not in weights)
    if all(_is_same(file, model) for file in small):
        return model
    log.warning("%s has changed since the server started: going on as it was", model)
    return Path(message)


def _is_same(file: Path, folder: Path) -> bool:
    try:
        return read_file(file) == read_file(folder / file.name)
    except OSError:
        return False


def digest(parts: list[bytes]) -> str:
    hasher = blake2b(digest_size=8)
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little") + part)
    return hasher.hexdigest()
