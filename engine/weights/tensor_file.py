"""The tensors of a safetensors file, checked against the shapes that a model asks for.

Whatever is wrong with a file is a CheckpointError that names the file and the tensor.
"""

from __future__ import annotations

import errno
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import safetensors

from srm.engine.kept_model import INDEX, WEIGHTS, ShardIndex
from srm.engine.steps.batch import F32
from srm.engine.weights.tensors import Shapes
from srm.errors import UNDECODABLE, CheckpointError, cut, in_words
from srm.files import SMALL_BYTES, open_file
from srm.files import read_file as read_regular
from srm.memory import available_memory

DELTA_OF = "delta_of"
"""Key in the metadata of a delta: the fingerprint of the weights that it has the changes of."""
LONGEST_HEADER = 2**24
"""Most bytes of the headers of weights where nothing says how many tensors there are to be. The
library takes 20 µs for each."""
_LONGEST_METADATA = 100_000_000  # as safetensors itself allows
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_SHARD = re.compile(r"-\d+-of-0*(?!1\.)([1-9]\d*)\.safetensors$")
_LONGEST_NAME = 255
_OURS = re.compile(r"(^|\.)(input_layer|mixer_blocks|output_layer)\.")
_WEIGHTS = re.compile(r"\.(safetensors|bin|pt|pth|ckpt|distcp|gguf)(\.index\.json)?$")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as the file has it."""

    dtype: str  # as safetensors names it: F32, BF16, …
    shape: tuple[int, ...]
    data: bytes


def read_file(path: Path, most: int | None = None, within: Path | None = None) -> bytes:
    """Read a file of a model, of at most so many bytes or as many as the memory has. Raises
    CheckpointError as `open_file` raises OSError."""
    try:
        memory = available_memory()  # a system that promises more would kill us
        return read_regular(path, memory if most is None else min(most, memory), within)
    except OSError as error:
        others = path.parent.glob("*") if path.name == WEIGHTS and not path.exists() else ()
        names = [file.name for file in others if _WEIGHTS.search(file.name)]
        hint = f", but {path.parent} has {_first(names)}" if names else ""
        hint += f" and no {INDEX}{_absent(path.parent)}" if any(map(_SHARD.search, names)) else ""
        is_large = error.errno == errno.EFBIG and most is None
        reason = "it is larger than the memory" if is_large else error.strerror
        raise CheckpointError(f"cannot read {path}: {reason}{hint}") from None
    except MemoryError:
        raise CheckpointError(f"cannot read {path}: it is larger than the memory") from None


def _absent(folder: Path) -> str:
    """Return what to do about an index of shards that is not in the folder."""
    if (folder / INDEX).exists():
        return ""
    return (
        "; it is not there: copy it from where the shards were saved, or write it: "
        '{"weight_map": {"NAME OF A TENSOR": "ITS SHARD", …}}'
    )


def weights_path(folder: Path) -> Path:
    """Return the file of a folder that `read_tensors` is for: as Hugging Face's libraries take
    them, the index of shards only where all is not in one file."""
    is_whole = (folder / WEIGHTS).exists() or not (folder / INDEX).exists()
    return folder / (WEIGHTS if is_whole else INDEX)


def read_tensors(
    path: Path,
    note: Callable[[bytes], None] = lambda _content: None,
    most: int = LONGEST_HEADER,
) -> dict[str, StoredTensor]:
    """Return the tensors of a file, or of the shards that an index names; `note` is called with
    what is in each file. All headers together have at most `most` bytes."""
    if shard := _SHARD.search(path.name):
        raise CheckpointError(
            f"{path} is one of {shard[1]} shards: name their index, {INDEX}{_absent(path.parent)}"
        )
    if path.suffix != ".json":
        content = read_file(path)
        note(content)
        return stored_tensors(path, content, most)
    try:
        content = read_file(path, SMALL_BYTES)
        note(content)
        shards = msgspec.json.decode(content.removeprefix(BOM_UTF8), type=ShardIndex).weight_map
    except UNDECODABLE as error:
        raise CheckpointError(f"{path} is no index of shards: {in_words(error)}") from None
    names: dict[str, set[str]] = {}
    for name, file in shards.items():
        names.setdefault(file, set()).add(name)
    stored: dict[str, StoredTensor] = {}
    for file, own in sorted(names.items()):
        if not 0 < len(file) <= _LONGEST_NAME or "\0" in file or Path(file).name != file:
            raise CheckpointError(f"{path}: shard {cut(file, 64)!r} is no name of a file beside it")
        content = read_file(path.parent / file)
        note(content)
        some = stored_tensors(path.parent / file, content, most, own)
        most -= int.from_bytes(content[:8], "little")
        stored |= {name: some[name] for name in some if shards.get(name, file) == file}
    for name in sorted(shards.keys() - stored.keys()):
        raise CheckpointError(f"{path}: tensor {name} is not in {shards[name]}")
    return stored


def longest_header(tensors: int) -> int:
    """Return the most bytes of the headers of weights with so many tensors."""
    return 2**20 + 512 * tensors


class _Header(msgspec.Struct):
    """Header of a file. `save_model` of safetensors writes a tensor once, and puts its other names
    here, each with the name that it is stored under."""

    metadata: dict[str, str] | None = msgspec.field(default=None, name="__metadata__")


def stored_tensors(
    path: Path, content: bytes, most: int = LONGEST_HEADER, own: Container[str] | None = None
) -> dict[str, StoredTensor]:
    """Return the tensors in a file's content, or only its `own`, by name; one that is another's
    alias by both. Raises CheckpointError, also for a header of more than `most` bytes."""
    size = int.from_bytes(content[:8], "little")
    if most < size <= len(content):
        raise CheckpointError(f"{path}: its header has {size} bytes, and may have {most}")
    try:
        tensors = safetensors.deserialize(content)  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        hint = ""
        if content[:2] in {b"PK", b"\x80\x02"}:
            hint = "; it looks like a pickle of torch.save"
        elif content.startswith(b"version https://git-lfs"):
            hint = "; it is a pointer of Git LFS, which fetches the file with `git lfs pull`"
        raise CheckpointError(f"{path} is not a whole safetensors file: {error}{hint}") from None
    stored = {
        name: StoredTensor(entry["dtype"], tuple(entry["shape"]), entry["data"])
        for name, entry in tensors
        if own is None or name in own
    }
    aliases = msgspec.json.decode(content[8 : 8 + size], type=_Header).metadata or {}
    return {
        alias: stored[name]
        for alias, name in aliases.items()
        if name in stored and _OURS.search(alias)  # else it is a note that happens to be a name
    } | stored


def read_metadata(path: Path) -> dict[str, str]:
    """Return what a file says besides its tensors; nothing of one that cannot be read."""
    with suppress(OSError, *UNDECODABLE), open_file(path) as file:
        size = int.from_bytes(file.read(8), "little")
        if size <= _LONGEST_METADATA:
            return msgspec.json.decode(file.read(size), type=_Header).metadata or {}
    return {}


def encoded_tensors(
    path: Path, tensors: Mapping[str, StoredTensor], metadata: dict[str, str]
) -> bytes:
    """Return the content of a file of these tensors, as safetensors' own functions write it. Raises
    CheckpointError, which names the file `path`, for a dtype that no model has."""
    specs = {}
    for name, tensor in tensors.items():
        data = np.frombuffer(tensor.data, np.uint8)
        specs[name] = safetensors.TensorSpec(
            dtype=_DTYPES[_readable(path, name, tensor)],
            shape=tensor.shape,
            data_ptr=data.ctypes.data,
            data_len=data.nbytes,
        )
    return bytes(safetensors.serialize(specs, metadata or None))


def checked(
    path: Path, stored: Mapping[str, StoredTensor], shapes: Shapes, asker: str
) -> dict[str, F32]:
    """Return all tensors as float32. Raises CheckpointError for the first that is missing, foreign,
    not finite, or not as `asker` asks."""
    missing = [name for name in shapes if name not in stored]
    if missing:
        others = f", like {len(missing) - 1} more" if len(missing) > 1 else ""
        unasked = [name for name in stored if name not in shapes]
        hint = f", and the file has {_first(unasked)}" if unasked else ""
        if not unasked:
            hint += f"; a delta names its base in its metadata, {DELTA_OF}"
        if any(name.endswith(f".{missing[0]}") for name in unasked):
            hint += "; `srm convert` leaves wrappers out of names"
        raise CheckpointError(
            f"{path}: tensor {missing[0]} {list(shapes[missing[0]])} is missing{others}; "
            f"{asker} asks for it{hint}"
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
        listed = _first(f"{name} {list(stored[name].shape)}" for name in foreign)
        count = "1 tensor does" if len(foreign) == 1 else f"{len(foreign)} tensors do"
        raise CheckpointError(f"{path}: {count} not belong to the model of {asker}: {listed}")
    return {name: _as_float32(path, name, stored[name]) for name in shapes}


def _first(names: Iterable[str], most: int = 5) -> str:
    listed = sorted(names)
    return ", ".join([*listed[:most], *(["…"] if len(listed) > most else [])])


def _readable(path: Path, name: str, stored: StoredTensor) -> str:
    """Return a tensor's dtype. Raises CheckpointError for one that no model has."""
    if stored.dtype not in _DTYPES:
        raise CheckpointError(
            f"{path}: tensor {name} is {stored.dtype}; F32, F16 and BF16 can be read"
        )
    return stored.dtype


def _as_float32(path: Path, name: str, stored: StoredTensor) -> F32:
    dtype = _readable(path, name, stored)
    if dtype == "F32":
        values = np.frombuffer(stored.data, np.float32)
    elif dtype == "F16":
        values = np.frombuffer(stored.data, np.float16).astype(np.float32)
    else:  # BF16: the upper half of a float32
        values = (np.frombuffer(stored.data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    if not np.isfinite(values).all():
        raise CheckpointError(f"{path}: tensor {name} has values that are not finite")
    return values.reshape(stored.shape)
