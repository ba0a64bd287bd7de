"""Reads `tokenizer.json` for the server, the Python API, training and load tests, and decides what
it may be.

Trainers save what they set for their batches in that file, often by accident. It says nothing of
how a text is read, and is left out here.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Encoding, Tokenizer, pre_tokenizers, processors

from srm.errors import UNDECODABLE, CheckpointError, in_words
from srm.files import read_file as read_regular

logger = logging.getLogger(__name__)

LITERAL = f"literal-{secrets.token_hex(8)}-"
"""Stands behind the first character of a special token's name that is to be read as text."""
DESCRIPTIONS = ("tokenizer_config.json", "special_tokens_map.json")
"""Files of a model folder that name its special tokens, the first one first."""


class _Token(msgspec.Struct):
    content: str


class NamedTemplate(msgspec.Struct):
    name: str
    template: str


class Description(msgspec.Struct):
    """What a folder of Hugging Face says of its tokenizer; it says more."""

    bos_token: str | _Token | None = None
    eos_token: str | _Token | None = None
    unk_token: str | _Token | None = None
    sep_token: str | _Token | None = None
    pad_token: str | _Token | None = None
    cls_token: str | _Token | None = None
    mask_token: str | _Token | None = None
    add_bos_token: bool | None = None
    chat_template: str | list[NamedTemplate] | None = None


def read_tokenizer(
    path: Path, vocab_size: int | None = None, within: Path | None = None
) -> Tokenizer:
    """Load the tokenizer.json of a model of ours, with the begin token that its folder adds.

    Raises CheckpointError if there is none, it is damaged, or it is no byte-level BPE with ids
    below `vocab_size`.
    """
    tokenizer = parse_tokenizer(read_file(path, within), path)
    _check_spelling(tokenizer, path)
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if vocab_size is not None and not 0 <= largest < vocab_size:
        raise CheckpointError(f"{path}: token id {largest} lies outside the model's {vocab_size}")
    _prepend_begin(tokenizer, path.parent, within)
    return tokenizer


def read_file(path: Path, within: Path | None = None) -> bytes:
    """Read a tokenizer.json as it is. Raises CheckpointError if that cannot be."""
    try:
        return read_regular(path, within=within)
    except OSError as error:
        raise CheckpointError(f"{path} is not a tokenizer: {in_words(error)}") from None


def parse_tokenizer(data: bytes, path: Path, byte_level: bool = True) -> Tokenizer:
    """Make a tokenizer of what a tokenizer.json has, without truncation, padding and dropout. Of
    other servers it may be of any kind, if it need not be `byte_level`. Raises CheckpointError."""
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
    steps = [*_steps(spec.get("decoder"))]
    if byte_level and (steps.count("ByteLevel") != 1 or {*steps} - {"ByteLevel", "Fuse"}):
        raise CheckpointError(
            f"{path}: only byte-level BPE tokenizers are supported; its decoder is "
            f"{', '.join(steps) or 'none'}"
        )
    return tokenizer


def _steps(decoder: Any) -> Iterable[str]:
    """Yield the types of the decoders that one is made of, in order."""
    if isinstance(decoder, dict):
        if decoder.get("type") != "Sequence":
            yield str(decoder.get("type"))
        for inner in decoder.get("decoders") or ():
            yield from _steps(inner)


def _check_spelling(tokenizer: Tokenizer, path: Path) -> None:
    added = tokenizer.get_added_tokens_decoder()
    spelled = {token for token, i in tokenizer.get_vocab().items() if i not in added}
    if others := set().union(*spelled) - {*pre_tokenizers.ByteLevel.alphabet()}:
        raise CheckpointError(f"{path}: a token is not spelled in byte-level BPE: {min(others)!r}")


def describe(folder: Path, within: Path | None = None) -> dict[str, Any]:
    """Return what a folder says of its tokenizer, by the fields of Description. Raises
    CheckpointError."""
    described: dict[str, Any] = {}
    for path in (folder / file for file in DESCRIPTIONS):
        try:
            data = read_regular(path, within=within).decode("utf-8-sig")
            given = msgspec.json.decode(data, type=Description)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
        except UNDECODABLE as error:
            raise CheckpointError(f"{path}: {in_words(error)}") from None
        values = {name: getattr(given, name) for name in given.__struct_fields__}
        texts = {n: v.content if isinstance(v, _Token) else v for n, v in values.items()}
        described = {n: text for n, text in texts.items() if text is not None} | described
    return described


def _prepend_begin(tokenizer: Tokenizer, folder: Path, within: Path | None) -> None:
    """Have a tokenizer put its begin token before a text where the folder says so, as transformers
    does. Raises CheckpointError if it has no such token."""
    described = describe(folder, within)
    if not described.get("add_bos_token") or added_ids(tokenizer)[0]:
        return
    begin = described.get("bos_token")
    number = tokenizer.token_to_id(begin) if begin is not None else None
    if number is None:
        raise CheckpointError(f"{folder} adds a begin token, {begin!r}, that its tokenizer has not")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, number)]
    )


def added_ids(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the ids that a tokenizer puts before a text and behind it."""
    encoding = tokenizer.encode("a")
    of_text = [at for at, place in enumerate(encoding.sequence_ids) if place == 0]
    if not of_text:
        return encoding.ids, []
    return encoding.ids[: of_text[0]], encoding.ids[of_text[-1] + 1 :]


class TextEncoder:
    """Token ids of texts. A text that begins with the tokenizer's begin token, as a rendered chat
    does, gets no second one, and so with an end token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._begin, self._end = added_ids(tokenizer)
        self._is_reported = False

    def encode(self, texts: list[str], adds_special: bool = True) -> list[list[int]]:
        """Return the ids of each text, with what the tokenizer adds around it if `adds_special`."""
        encodings = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        ids = [
            self._read_literally(text, encoding) if LITERAL in text else encoding.ids
            for text, encoding in zip(texts, encodings, strict=True)
        ]
        return [self._surrounded(own) for own in ids] if adds_special else ids

    def _read_literally(self, text: str, encoding: Encoding) -> list[int]:
        """Return the ids of a text in which names are marked by LITERAL: cut at its special tokens,
        and the rest without the marks as text alone."""
        added, ids, start = self.tokenizer.get_added_tokens_decoder(), list[int](), 0
        for token, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token in added and added[token].special and not text.startswith(LITERAL, end):
                ids += [*self._plain_ids(text[start:begin]), token]
                start = end
        return ids + self._plain_ids(text[start:])

    def _plain_ids(self, text: str) -> list[int]:
        text = text.replace(LITERAL, "")
        ids: list[int] = self._without_special.encode(text, add_special_tokens=False).ids
        return ids

    @cached_property
    def _without_special(self) -> Tokenizer:
        copied = Tokenizer.from_str(self.tokenizer.to_str())
        copied.encode_special_tokens = True  # as text, that is
        return copied

    def _surrounded(self, own: list[int]) -> list[int]:
        begin, end = self._begin, self._end
        has_begin = bool(begin) and own[: len(begin)] == begin
        has_end = bool(end) and own[-len(end) :] == end
        if (has_begin or has_end) and not self._is_reported:
            self._is_reported = True
            name = self.tokenizer.id_to_token((begin if has_begin else end)[0])
            logger.warning(
                "a prompt already has %r, which the tokenizer adds: prompts get no second one",
                name,
            )
        return begin * (not has_begin) + own + end * (not has_end)
