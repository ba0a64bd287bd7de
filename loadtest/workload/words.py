"""Makes text of an exact number of tokens, and counts tokens in text, by a tokenizer.json.

A text is a sequence of words that are one token each wherever they stand, since no token of the
vocabulary spans their boundaries: a text of k words has k tokens. This is verified once, so that
requests need not be encoded again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from srm.errors import CheckpointError, ConfigError
from srm.loadtest.counter_rng import TOKENIZER, Draws
from srm.tokenizer_file import parse_tokenizer, read_file

_MOST_WORDS = 4096
_TRIED = 8192
"""Random words in the text that verifies all of them."""
_WORD = re.compile("[Ġ▁]?([A-Za-z]+)(?:</w>)?")
_OVER_A_SPACE = re.compile("[Ġ▁ A-Za-z]*[A-Za-z][Ġ▁ ][Ġ▁ A-Za-z]*")
_SEVERAL_LETTERS = re.compile("(?:##)?[A-Za-z]{2,}(?:</w>)?")
_LETTERS = [chr(first + place) for first in (ord("a"), ord("A")) for place in range(26)]


class Words:
    """The words of one tokenizer: with a space before each, or single letters if it has none."""

    def __init__(self, path: Path) -> None:
        """`path` is a tokenizer.json, or a folder with one. Raises ConfigError."""
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            self._tokenizer = parse_tokenizer(read_file(file), file, byte_level=False)
        except CheckpointError as error:
            raise ConfigError(f"tokenizer: {error}") from None
        self._cut = 0
        self.words = self._spaced() or self._letters()
        """The words that texts are made of."""
        if len(self.words) < 2:
            raise ConfigError(
                f"tokenizer: {file} has neither words nor letters that are one token wherever they "
                "stand; allowed are other tokenizers, prompts from a file, and token ids"
            )
        text = self.text(self.words)
        self.num_special = self.count(text, special=True) - self.count(text)
        """Number of tokens that the tokenizer adds to a text, such as a begin token."""

    def text(self, words: Iterable[str]) -> str:
        """Join the words to a text of as many tokens."""
        return "".join(words)[self._cut :]

    def count(self, text: str, special: bool = False) -> int:
        """Count the tokens of a text; those that the tokenizer adds to it only if `special`."""
        return len(self._tokenizer.encode(text, add_special_tokens=special))

    def _spaced(self) -> list[str]:
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=False)
        cores = map(_WORD.fullmatch, sorted(vocabulary, key=vocabulary.__getitem__))
        words = list(dict.fromkeys(f" {core[1]}" for core in cores if core))[: 2 * _MOST_WORDS]
        for self._cut in (0, 1):  # some tokenizers put a space of their own before a text
            words_found = self._keep_single_tokens(words)
            splits = self._tokenizer.pre_tokenizer
            if words_found and (
                not any(map(_OVER_A_SPACE.fullmatch, vocabulary))
                or (
                    splits
                    and len(splits.pre_tokenize_str(self.text(words_found))) >= len(words_found)
                )
            ):
                return words_found
        self._cut = 0
        return []

    def _letters(self) -> list[str]:
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=False)
        over = any(map(_SEVERAL_LETTERS.fullmatch, vocabulary))
        return [] if over else self._keep_single_tokens(_LETTERS)

    def _keep_single_tokens(self, words: list[str]) -> list[str]:
        """Keep words that are one token alone and two when doubled; none if a mixed text fails."""
        texts = [self.text([word] * times) for word in words for times in (1, 2)]
        words_found = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        pairs = zip(words, words_found[::2], words_found[1::2], strict=True)
        results = [word for word, once, twice in pairs if (len(once), len(twice)) == (1, 2)]
        results = results[:_MOST_WORDS]
        if not results:
            return []
        some = [
            results[number % len(results)] for number in Draws(0).raw(TOKENIZER, 0, _TRIED).tolist()
        ]
        tried = list(chain(results, some))
        return results if self.count(self.text(tried)) == len(tried) else []
