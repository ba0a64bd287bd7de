"""Deltas: model folders that have only the tensors which differ from those of another model.

The metadata of a delta's one file of weights names that model by its fingerprint (`delta_of`). A
server that runs it makes the folder whole; what it keeps and loads is no delta any more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from srm.engine.kept_model import WEIGHTS
from srm.engine.weights.checkpoint import read_stored
from srm.engine.weights.tensor_file import (
    DELTA_OF,
    StoredTensor,
    encoded_tensors,
    longest_header,
    read_file,
    read_metadata,
    stored_tensors,
    weights_path,
)
from srm.errors import CheckpointError, ConfigError
from srm.files import SMALL_BYTES


def made_whole(path: Path, base: Mapping[str, StoredTensor]) -> bytes:
    """Return the content of a file of weights that has the tensors of a delta at `path`, and all
    others of its base. Raises CheckpointError if the delta cannot be read."""
    own = stored_tensors(path, read_file(path), longest_header(len(base)))
    metadata = {name: text for name, text in read_metadata(path).items() if name != DELTA_OF}
    return encoded_tensors(path, {**base, **own}, metadata)


def write_delta(base: Path, new: Path, output: Path) -> list[str]:
    """Write what is to be changed in the model `base` to have the model `new`; return what was
    decided, line by line. Raises CheckpointError for what is no model, and ConfigError for two that
    cannot follow each other; then nothing is written."""
    before, after = read_stored(base), read_stored(new)
    for folder in (base, new):
        if output.exists() and output.samefile(folder):
            raise ConfigError(f"--output {output} is the folder of a model, which stays as it is")
    if before.config != after.config:
        raise ConfigError(f"--delta-of {base} and {new} differ in their architecture")
    if unshared := sorted(before.tensors.keys() ^ after.tensors.keys()):
        raise CheckpointError(f"{base} and {new} do not both have tensor {unshared[0]}")
    changed = {
        name: tensor for name, tensor in after.tensors.items() if tensor != before.tensors[name]
    }
    metadata = read_metadata(weights_path(new))
    whole = encoded_tensors(new, {**before.tensors, **changed}, metadata)
    content = encoded_tensors(new, changed, metadata | {DELTA_OF: before.fingerprint})
    config_bytes = read_file(new / "config.json", SMALL_BYTES)
    partial = output / f"{WEIGHTS}.partial"
    try:
        output.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(content)
        partial.replace(output / WEIGHTS)  # which somebody may be reading
        (output / "config.json").write_bytes(config_bytes)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise ConfigError(f"cannot write {output}: {error.strerror}") from None
    made = hashlib.sha256(config_bytes + whole).hexdigest()[:16]
    what = f"{len(changed)} of {len(after.tensors)} tensors, which differ from"
    return [
        f"{what if changed else 'changes nothing: no tensor differs from'} {before.fingerprint}",
        f"a server that takes them has weights {made}, which the next delta is of",
    ]
