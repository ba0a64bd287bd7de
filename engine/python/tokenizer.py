"""The tokenizer of a model folder, for the Python API: the only file of `engine` that handles text.

`tokenizer.json` is read when a text is given or asked for, and not before.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from srm.engine.steps.batch import I32
from srm.errors import InvalidRequest
from srm.tokenizer_file import TextEncoder, read_tokenizer


class FolderTokenizer:
    """Converts text to token ids and back; its folder may have no tokenizer."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "tokenizer.json"
        self._tokenizer: TextEncoder | None = None

    def encode(self, texts: list[str], adds_special: bool = True) -> list[I32]:
        """Return i32[tokens] of each text, with what the tokenizer adds around a prompt if
        `adds_special`. Raises InvalidRequest where there is no tokenizer, CheckpointError where it
        is none."""
        return [np.array(ids, np.int32) for ids in self._load().encode(texts, adds_special)]

    @property
    def exists(self) -> bool:
        """Whether there is a tokenizer."""
        return self._tokenizer is not None or self._path.exists()

    def decode(self, token_ids: I32) -> str:
        """Return the text of token ids, without special tokens. Raises as `encode`."""
        tokenizer = self._load().tokenizer
        return str(tokenizer.decode(token_ids.tolist(), skip_special_tokens=True))

    def _load(self) -> TextEncoder:
        if self._tokenizer is None:
            if not self._path.exists():
                raise InvalidRequest(
                    "prompts and completions are token ids alone: this model has no tokenizer"
                )
            self._tokenizer = TextEncoder(read_tokenizer(self._path))
        return self._tokenizer
