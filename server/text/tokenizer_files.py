"""Reads special tokens and the chat template from a model folder in Hugging Face's format.

They are in `chat_template.jinja` and `tokenizer_config.json`. Knows no tokenizer: that is `text`,
and runs no template: that is `chat_template`.
"""

from __future__ import annotations

from codecs import BOM_UTF8
from pathlib import Path

import msgspec

from srm.engine.errors import UNDECODABLE, CheckpointError, ConfigError, SRMError, in_words
from srm.engine.files import read_file

MAX_BYTES = 16 * 1024 * 1024
"""Most bytes of one of these files."""


class _Token(msgspec.Struct):
    content: str


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class _Described(msgspec.Struct):
    """The fields of tokenizer_config.json that are read; it has many more."""

    bos_token: str | _Token | None = None
    eos_token: str | _Token | None = None
    unk_token: str | _Token | None = None
    sep_token: str | _Token | None = None
    pad_token: str | _Token | None = None
    cls_token: str | _Token | None = None
    mask_token: str | _Token | None = None
    chat_template: str | list[_NamedTemplate] | None = None


def special_tokens(folder: Path, within: Path | None = None) -> dict[str, str]:
    """Texts of the special tokens that the folder names, by `bos_token`, `eos_token` and so on."""
    config = _read_config(folder, within)
    given = {name: getattr(config, name) for name in config.__struct_fields__ if "_token" in name}
    return {
        name: token.content if isinstance(token, _Token) else token
        for name, token in given.items()
        if token is not None
    }


def chat_template(folder: Path, file: str = "", within: Path | None = None) -> str | None:
    """The source in `file`, or else of the folder; None if it has none.

    Raises ConfigError for a file that cannot be read, CheckpointError for a folder that is wrong.
    """
    if file:
        return _read(Path(file), ConfigError)
    if (folder / "chat_template.jinja").exists():
        return _read(folder / "chat_template.jinja", CheckpointError, within)
    given = _read_config(folder, within).chat_template
    if isinstance(given, list):  # of several, the one for plain chats
        return next((choice.template for choice in given if choice.name == "default"), None)
    return given


def _read_config(folder: Path, within: Path | None) -> _Described:
    path = folder / "tokenizer_config.json"
    if not path.exists():
        return _Described()
    try:
        return msgspec.json.decode(_read(path, CheckpointError, within), type=_Described)
    except UNDECODABLE as error:
        raise CheckpointError(f"{path}: {in_words(error)}") from None


def _read(path: Path, kind: type[SRMError], within: Path | None = None) -> str:
    try:
        return read_file(path, MAX_BYTES, within).removeprefix(BOM_UTF8).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise kind(f"cannot read {path}: {error}") from None
