"""`srm train tokenizer`: a byte-level BPE tokenizer of any texts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from srm.errors import ConfigError
from srm.progress import Tell, show_progress
from srm.tokenizer_file import added_ids, describe
from srm.training.text.documents import documents, files
from srm.training.text.whole_files import write_whole

BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
BEGIN_ID, END_ID = 0, 1
"""Id 0 begins a text and is prepended by the tokenizer itself; id 1 ends a text and pads."""
MIN_VOCAB_SIZE = 258
"""Least entries of a tokenizer: every byte, and the begin and end tokens."""
MAX_VOCAB_SIZE = 1_000_000
"""Most entries of a tokenizer; the trainer reserves memory for all of them."""

_LONG_RUN = re.compile(r"(\S{512}|\s{512})")
"""A run without a break is one word to the trainer, whose time grows with the square of a word."""

_ENDS = (END, "<|endoftext|>", "</s>", "<eos>", "<|end▁of▁sentence|>")
"""Names of the token that ends a text, in ours and Llama's tokenizers, GPT-2's and Qwen's, Llama
2's and Mistral's, Gemma's, DeepSeek's."""


class SpecialIds(NamedTuple):
    """Ids of the tokens that begin and end a text."""

    begin: int
    end: int


OWN_IDS = SpecialIds(BEGIN_ID, END_ID)


def special_ids(tokenizer: Tokenizer, folder: Path | None = None) -> SpecialIds:
    """Return the ids of a tokenizer that may be of others. The end token is the one that `folder`
    names, or else goes by its name. The begin token is what the tokenizer prepends, or else the end
    token, as GPT-2 has it.

    Raises ConfigError for a tokenizer without an end token.
    """
    named = describe(folder).get("eos_token") if folder else None
    ends = _ENDS if named is None else (named,)
    end = next((i for i in map(tokenizer.token_to_id, ends) if i is not None), None)
    if end is None and named is not None:
        raise ConfigError(f"tokenizer: {folder} has the end token {named!r}, tokenizer.json not")
    if end is None:
        raise ConfigError(f"tokenizer: it must have an end token, one of {', '.join(_ENDS)}")
    return SpecialIds(next(iter(added_ids(tokenizer)[0]), end), end)


def count_entries(tokenizer: Tokenizer) -> int:
    """Return one more than the largest id, of which a tokenizer may leave some out."""
    return max(tokenizer.get_vocab().values()) + 1


class TokenizerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm train tokenizer`."""

    texts: tuple[Path, ...] = ()
    """Files and folders of text: .jsonl, .parquet; any other file is one text."""
    suffix: str = ""
    """End of the names of the files that are read in folders of `texts`; empty: all."""
    text_member: str = "text"
    """Name of the .jsonl member or .parquet column that has the text."""
    max_vocab_size: int = 8_000
    """Most entries of the tokenizer, which always has every byte and two special tokens."""
    output: Path = Path("tokenizer.json")
    """File that the tokenizer is written to."""

    def __post_init__(self) -> None:
        if not self.texts:
            raise ValueError("texts must be files or folders, got none")
        if not MIN_VOCAB_SIZE <= self.max_vocab_size <= MAX_VOCAB_SIZE:
            raise ValueError(
                f"max_vocab_size must be {MIN_VOCAB_SIZE} … {MAX_VOCAB_SIZE}, got "
                f"{self.max_vocab_size}"
            )


def make_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Train a tokenizer and write its file. Raises ConfigError for texts that cannot be read,
    and for an output that is one of them."""
    if config.output.resolve() in map(Path.resolve, files(config.texts, config.suffix)):
        raise ConfigError(f"output must be another file than the texts, got {config.output}")
    texts = documents(config.texts, config.suffix, config.text_member)
    with show_progress("reading", None) as tell:
        tokenizer = train_tokenizer(_counted(texts, tell), config.max_vocab_size)
    try:
        config.output.parent.mkdir(parents=True, exist_ok=True)
        write_whole(config.output, tokenizer.to_str(pretty=True).encode())
    except OSError as error:
        raise ConfigError(f"output: {config.output}: {error.strerror}") from error
    return tokenizer


def _counted(texts: Iterable[str], tell: Tell) -> Iterator[str]:
    read = 0
    for text in texts:
        yield text
        read += len(text)
        tell(read, f"{read:,} characters")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a tokenizer of at most `vocab_size` entries, every byte among them.

    Every digit is a token, so that arithmetic can be learned by digits and not by heart.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        (part for text in texts for part in _LONG_RUN.split(text) if part),
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[BEGIN, END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, BEGIN_ID)]
    )
    return tokenizer
