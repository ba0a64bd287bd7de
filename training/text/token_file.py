"""A file of token ids that is read through memory: documents behind each other, each between a
begin and an end token.

`NAME.bin` has the ids, of two bytes where the vocabulary allows it, else of four, and `NAME.json`
says what they are: it is written last, so a file without it is not whole. Ids of another tokenizer
or other texts are never taken for these, nor ids of which a bit has changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from srm.errors import ConfigError
from srm.files import open_file, read_file
from srm.tokenizer_file import added_ids
from srm.training.text.documents import TextPart
from srm.training.text.tokenizer import count_entries
from srm.training.text.whole_files import replace_file, write_whole

_DOCUMENTS, _CHARACTERS = 256, 1024 * 1024
"""Most texts, and about the most characters of them, that are encoded at once, on all cores."""

Ids = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


class TokenFileInfo(msgspec.Struct, frozen=True):
    """Description of a token file."""

    source: str
    """Hash of the tokenizer and of the texts' names, sizes and times."""
    dtype: str
    tokens: int
    documents: int
    sha256: str
    """SHA-256 of the ids, in hexadecimal."""


def token_file(
    path: Path,
    source: str,
    texts: Callable[[], Iterable[str]],
    tokenizer: Tokenizer,
    end_id: int,
    tell: Callable[[int, int], None] = lambda *_: None,
) -> tuple[TokenFileInfo, Ids]:
    """Return the ids of these texts from the file at `path`, which is written first if need be.

    `tell` hears of documents and tokens written so far. Raises ConfigError where there is no token,
    and for a file that is damaged.
    """
    note, ids = path.with_suffix(".json"), path.with_suffix(".bin")
    about = _read(note, ids, source)
    if about is None:
        note.unlink(missing_ok=True)
        about = _write(ids, source, texts(), tokenizer, end_id, tell)
        write_whole(note, msgspec.json.encode(about))
    return about, np.memmap(ids, about.dtype, "r", shape=(about.tokens,))


def _read(note: Path, ids: Path, source: str) -> TokenFileInfo | None:
    try:
        about = msgspec.json.decode(read_file(note), type=TokenFileInfo)
        is_whole = ids.stat().st_size == about.tokens * np.dtype(about.dtype).itemsize
    except (OSError, msgspec.DecodeError, TypeError):
        return None
    if not is_whole or about.source != source:
        return None
    with open_file(ids) as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != about.sha256:
            raise ConfigError(f"{ids} is damaged, as its SHA-256 says: remove it to have it anew")
    return about


def _write(
    path: Path,
    source: str,
    texts: Iterable[str],
    tokenizer: Tokenizer,
    end_id: int,
    tell: Callable[[int, int], None],
) -> TokenFileInfo:
    dtype = "<u2" if count_entries(tokenizer) <= 2**16 else "<u4"
    documents = tokens = 0
    digest = hashlib.sha256()
    is_begin, begin = True, added_ids(tokenizer)[0]
    with replace_file(path) as partial, partial.open("wb") as file:
        for some in _batched(texts):
            encodings = tokenizer.encode_batch_fast(some, add_special_tokens=False)
            for text, encoding in zip(some, encodings, strict=True):
                is_end = not isinstance(text, TextPart)
                own = encoding.ids  # which may have the begin and end tokens already
                before = begin * (is_begin and own[: len(begin)] != begin)
                ids = np.array(before + own + [end_id] * (is_end and own[-1:] != [end_id]), dtype)
                file.write(ids.tobytes())
                digest.update(ids.tobytes())
                tokens += len(ids)
                documents += is_end
                is_begin = is_end
            tell(documents, tokens)
    if not tokens:
        raise ConfigError("texts: there is no text in them")
    return TokenFileInfo(source, dtype, tokens, documents, digest.hexdigest())


def _batched(texts: Iterable[str]) -> Iterator[list[str]]:
    some: list[str] = []
    size = 0
    for text in texts:
        some.append(text)
        size += len(text)
        if len(some) == _DOCUMENTS or size >= _CHARACTERS:
            yield some
            some, size = [], 0
    if some:
        yield some
