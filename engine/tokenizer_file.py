"""Reads `tokenizer.json`, for the server, the Python API, training and load tests alike.

Trainers save what they set for their batches in that file, often by accident. It says nothing of
how a text is read, and is left out here.
"""

from __future__ import annotations

import errno
import logging
from pathlib import Path

from tokenizers import Tokenizer

from engine.errors import CheckpointError

logger = logging.getLogger(__name__)


def read_tokenizer(path: Path) -> Tokenizer:
    """Load a tokenizer.json without its truncation, padding and dropout. Raises CheckpointError if
    there is none, or it is damaged."""
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise OSError(errno.EINVAL, "must be a regular file", str(path))
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8-sig"))
    except Exception as error:  # noqa: BLE001 - the library raises plain Exception
        raise CheckpointError(f"{path} is not a tokenizer: {error}") from None
    ignored = {
        "truncation": tokenizer.truncation,
        "padding": tokenizer.padding,
        "dropout": getattr(tokenizer.model, "dropout", None),
    }
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if ignored["dropout"]:
        tokenizer.model.dropout = None
    if names := [name for name, value in ignored.items() if value]:
        logger.warning("%s: %s is ignored: it is for training", path, " and ".join(names))
    return tokenizer
