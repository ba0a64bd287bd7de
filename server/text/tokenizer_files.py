"""Reads special tokens, the chat template and how to sample from a model folder in Hugging Face's
format, and says what in it is not honoured.

Knows no tokenizer: that is `text`, and runs no template: that is `chat_template`.
"""

from __future__ import annotations

import logging
from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from srm.engine.config import GENERATION, GenerationDefaults, read_generation_config
from srm.errors import UNDECODABLE, CheckpointError, ConfigError, SRMError, cut, in_words
from srm.files import read_file
from srm.server.config import SamplingDefaults
from srm.server.schema import validation
from srm.server.schema.sampling_fields import SamplingRequest
from srm.tokenizer_file import NamedTemplate, describe

log = logging.getLogger(__name__)

MAX_BYTES = 16 * 1024 * 1024
"""Most bytes of one of these files."""
_HONOURED = {"bos_token_id", "pad_token_id", "use_cache", "transformers_version"}
"""Fields of generation_config.json that ask for nothing, besides those that are read."""
_CHANGING = {
    *("add_eos_token", "add_prefix_space", "clean_up_tokenization_spaces", "split_special_tokens"),
}
"""Fields of tokenizer_config.json that change which tokens a text has, or which text tokens
have."""
_FOREIGN = ("adapter_config.json", "added_tokens.json")
"""Files that change a model, or its tokenizer, elsewhere."""


def special_tokens(folder: Path, within: Path | None = None) -> dict[str, str]:
    """Texts of the special tokens that the folder names, by `bos_token`, `eos_token` and so on."""
    return {
        name: text
        for name, text in describe(folder, within).items()
        if name.endswith("_token") and isinstance(text, str)
    }


def chat_template(folder: Path, file: str = "", within: Path | None = None) -> str | None:
    """The source in `file`, or else of the folder; None if it has none.

    Raises ConfigError for a file that cannot be read, CheckpointError for a folder that is wrong.
    """
    if file:
        return _read(Path(file), ConfigError)
    if (folder / "chat_template.jinja").exists():
        return _read(folder / "chat_template.jinja", CheckpointError, within)
    given: str | list[NamedTemplate] | None = describe(folder, within).get("chat_template")
    if isinstance(given, list):  # of several, the one for plain chats
        return next((choice.template for choice in given if choice.name == "default"), None)
    return given


def use_defaults(folder: Path, source: SamplingDefaults) -> None:
    """Have this process take the model's own sampling parameters for those that requests leave out,
    if `source` is model. Raises CheckpointError for values that no request may have."""
    validation.SAMPLING.clear()
    if source == "model":
        validation.SAMPLING.update(_sampling(folder))


def _sampling(folder: Path) -> dict[str, float]:
    values, hints = read_generation_config(folder).sampling, validation.hints_of(SamplingRequest)
    for name, value in values.items():
        try:
            msgspec.convert(value, hints[name])
        except msgspec.ValidationError as error:
            raise CheckpointError(f"{folder / GENERATION}: {name}: {in_words(error)}") from None
    return values


def report_unread(folder: Path, source: SamplingDefaults) -> None:
    """Log how the folder says to sample, and what it asks for and is not done. Raises
    CheckpointError."""
    if values := _sampling(folder):
        named = ", ".join(f"{name} = {value:g}" for name, value in values.items())
        use = "used" if source == "model" else "not used"
        log.info(
            "%s: %s: %s for requests that leave them out, as sampling_defaults = %s",
            *(folder / GENERATION, named, use, source),
        )
    if names := [*_unread(folder)]:
        log.warning("%s: not honoured: %s", folder, ", ".join(names))


def _unread(folder: Path) -> Iterator[str]:
    templates = describe(folder).get("chat_template")
    names = [choice.name for choice in templates] if isinstance(templates, list) else []
    names += sorted(path.stem for path in folder.glob("additional_chat_templates/*.jinja"))
    yield from (f"the chat template {name!r}" for name in names if name != "default")
    known = _HONOURED | {*GenerationDefaults.__struct_fields__}
    for name, value in _fields(folder / GENERATION).items():
        is_known = name in known or name.startswith("_") or (name, value) == ("do_sample", True)
        if not is_known and value not in (None, False, [], {}):
            yield f"{name} = {_shown(value)} of {GENERATION}"
    for name, value in _fields(folder / "tokenizer_config.json").items():
        if name in _CHANGING and value:
            yield f"{name} = {_shown(value)} of tokenizer_config.json"
    yield from (name for name in _FOREIGN if (folder / name).exists())


def _fields(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return msgspec.json.decode(_read(path, CheckpointError), type=dict[str, Any])
    except UNDECODABLE as error:
        raise CheckpointError(f"{path}: {in_words(error)}") from None


def _shown(value: Any) -> str:
    return cut(msgspec.json.encode(value).decode(), 64)


def _read(path: Path, kind: type[SRMError], within: Path | None = None) -> str:
    try:
        return read_file(path, MAX_BYTES, within).removeprefix(BOM_UTF8).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise kind(f"cannot read {path}: {error}") from None
