"""Reads `tokenizer.json`, for the server, the Python API, training and load tests alike.

Trainers save what they set for their batches in that file, often by accident. It says nothing of
how a text is read, and is left out here.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer, decoders, pre_tokenizers

from srm.engine.errors import CheckpointError, in_words
from srm.engine.files import read_file as read_regular

logger = logging.getLogger(__name__)


def read_tokenizer(path: Path, within: Path | None = None) -> Tokenizer:
    """Load a tokenizer.json without its truncation, padding and dropout. Raises CheckpointError if
    there is none, or it is damaged."""
    return parse_tokenizer(read_file(path, within), path)


def read_file(path: Path, within: Path | None = None) -> bytes:
    """Read a tokenizer.json as it is. Raises CheckpointError if that cannot be."""
    try:
        return read_regular(path, within=within)
    except OSError as error:
        raise CheckpointError(f"{path} is not a tokenizer: {in_words(error)}") from None


def parse_tokenizer(data: bytes, path: Path) -> Tokenizer:
    """As `read_tokenizer`, of what was read there."""
    try:
        spec = msgspec.json.decode(data.decode("utf-8-sig"), type=dict[str, Any])
        ignored = {name: spec.pop(name, None) for name in ("truncation", "padding")}
        model = spec.get("model")
        ignored["dropout"] = model.pop("dropout", None) if isinstance(model, dict) else None
        tokenizer = Tokenizer.from_str(msgspec.json.encode(spec).decode())
    except Exception as error:  # noqa: BLE001 - the library raises plain Exception
        raise CheckpointError(f"{path} is not a tokenizer: {in_words(error)}") from None
    if names := [name for name, value in ignored.items() if value]:
        logger.warning("%s: %s is ignored: it is for training", path, " and ".join(names))
    return tokenizer


def read_byte_level(path: Path) -> Tokenizer:
    """As `read_tokenizer`. Raises CheckpointError also for a tokenizer that no server of ours
    reads."""
    tokenizer = read_tokenizer(path)
    if not isinstance(tokenizer.decoder, decoders.ByteLevel):
        raise CheckpointError(f"{path}: only byte-level BPE tokenizers are supported")
    added = tokenizer.get_added_tokens_decoder()
    spelled = {token for token, i in tokenizer.get_vocab().items() if i not in added}
    if others := set().union(*spelled) - {*pre_tokenizers.ByteLevel.alphabet()}:
        raise CheckpointError(f"{path}: a token is not spelled in byte-level BPE: {min(others)!r}")
    return tokenizer
