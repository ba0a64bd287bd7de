"""Text to token ids and back, for byte-level BPE tokenizers.

Decoding is a table from token id to bytes and one join, so a completion costs one call however long
it is, and a character split over tokens comes out whole: bytes are joined before they are decoded.
Special tokens have no bytes, or those of their names where that is asked for. For a model without a
tokenizer, token 17 reads `token_id:17`, and there is no way from text to tokens.
"""

from __future__ import annotations

import logging
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken

from srm.engine.config import read_model_config
from srm.server.text import tokenizer_files
from srm.server.text.stream import ByteTable
from srm.tokenizer_file import TextEncoder, read_tokenizer

log = logging.getLogger(__name__)

AT_ONCE = 128 * 1024
"""Characters that are tokenized together: the library takes up to 600 bytes for each."""

assert sys.byteorder == "little"  # token ids travel as little-endian bytes and are used in place


class Text:
    """The tokenizer of one checkpoint, if it has one."""

    def __init__(self, folder: Path) -> None:
        """Load `config.json` and `tokenizer.json`. Raises CheckpointError naming the file."""
        self.model = read_model_config(folder)[0]
        self.labels = [f"token_id:{token}" for token in range(self.model.vocab_size)]
        """How each token is written where one token is shown alone."""
        self.longest_token = len(self.labels[-1])
        """Most characters of text that one token can stand for."""
        self._table = self._table_with_special = ByteTable(list(map(str.encode, self.labels)))
        self.special_tokens: dict[str, str] = {}
        """Texts of special tokens, by `bos_token`, `eos_token` and what else the folder names."""
        self.special_names: frozenset[str] = frozenset()
        """Names of all special tokens, which `encode` reads as the tokens."""
        self._encoder: TextEncoder | None = None
        if (folder / "tokenizer.json").exists():
            self._load(folder / "tokenizer.json")
            own = {"bos_token": self.model.bos_token_id, "eos_token": self.model.end_id}
            spellings = {name: self._spelling(token) for name, token in own.items()}
            self.special_tokens = {
                name: text for name, text in spellings.items() if text is not None
            }
            self.special_tokens |= tokenizer_files.special_tokens(folder)

    @property
    def has_tokenizer(self) -> bool:
        return self._encoder is not None

    def _load(self, path: Path) -> None:
        tokenizer = read_tokenizer(path, self.model.vocab_size)
        self._encoder = TextEncoder(tokenizer)
        vocab = tokenizer.get_vocab(with_added_tokens=True)
        if absent := sorted({*self.model.end_ids} - {*vocab.values()}):
            log.warning("%s: end tokens that only the model has: %s", path, absent)
        added = tokenizer.get_added_tokens_decoder()
        special = {token_id: token.content for token_id, token in added.items() if token.special}
        self.special_names = frozenset(special.values())
        plain = _entries(vocab, added, self.model.vocab_size)
        self._table = ByteTable(plain)
        self._table_with_special = ByteTable(
            [special[i].encode() if i in special else data for i, data in enumerate(plain)]
        )
        self.labels = _labels(plain, vocab)
        self.longest_token = max(map(len, vocab))

    def encode(self, texts: list[str], adds_special: bool = True) -> list[bytes]:
        """Token ids of each text, int32 little-endian, with what the tokenizer adds around it."""
        assert self._encoder is not None
        encoded: list[bytes] = []
        for some in _by_length(texts):
            ids = self._encoder.encode(some, adds_special)
            encoded += [array("i", own).tobytes() for own in ids]
        return encoded

    def table(self, with_special: bool = False) -> ByteTable:
        """The bytes of every token; those of special tokens are their names, or nothing."""
        return self._table_with_special if with_special else self._table

    def decode(self, token_ids: bytes) -> bytes:
        """UTF-8 of int32 little-endian token ids; may end, or begin, inside a character."""
        return self._table.join(token_ids)

    def spell(self, token_ids: bytes) -> bytes:
        """As `decode`, and special tokens by their names: `encode` reads these as the tokens."""
        return self._table_with_special.join(token_ids)

    def _spelling(self, token: int) -> str | None:
        """Return the token's name if `encode` reads it as this one token, else None."""
        name = self.labels[token]
        ids = self.encode([name], adds_special=False)[0]
        return name if ids == array("i", [token]).tobytes() else None

    def pieces(self, token_ids: bytes) -> list[bytes]:
        """The bytes of each token."""
        return self._table.pieces(token_ids)


def _by_length(texts: list[str]) -> Iterator[list[str]]:
    """Yield the texts in lists of at most AT_ONCE characters, or of one text that has more."""
    some: list[str] = []
    characters = 0
    for text in texts:
        if some and characters + len(text) > AT_ONCE:
            yield some
            some, characters = [], 0
        some.append(text)
        characters += len(text)
    if some:
        yield some


def _entries(vocab: dict[str, int], added: dict[int, AddedToken], size: int) -> list[bytes]:
    """Bytes of every token id below `size`; special tokens and ids that are no tokens have none."""
    table = [b""] * size
    byte_of = _bytes_of_characters()
    for token, token_id in vocab.items():
        if token_id not in added:
            table[token_id] = bytes(byte_of[character] for character in token)
        elif not added[token_id].special:
            table[token_id] = token.encode()
    return table


def _labels(table: list[bytes], vocab: dict[str, int]) -> list[str]:
    """Text of each token; special tokens by name, parts of characters as `bytes:\\xe2\\x82`."""
    names = {token_id: name for name, token_id in vocab.items()}
    labels = []
    for token_id, data in enumerate(table):
        try:
            labels.append(data.decode() or names.get(token_id, f"token_id:{token_id}"))
        except UnicodeDecodeError:
            labels.append("bytes:" + "".join(f"\\x{byte:02x}" for byte in data))
    return labels


def _bytes_of_characters() -> dict[str, int]:
    """Byte-level BPE spells each byte as one visible character; this is the way back.

    Printable Latin-1 characters stand for themselves, the other bytes for U+0100 and on.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    spelled = {chr(0x100 + order): byte for order, byte in enumerate(hidden)}
    return {chr(byte): byte for byte in visible} | spelled
