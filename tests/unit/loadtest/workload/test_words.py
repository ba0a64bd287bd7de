"""Texts of exactly so many tokens, with tokenizers of all kinds."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from srm.errors import ConfigError
from srm.loadtest.workload.words import Words
from tests.kit.serving import ROOT

CORPUS = ["the cat sat on the mat with the other cat and was glad of it all day long"] * 9


def begun_by(token: str) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(single=f"{token} $A", special_tokens=[(token, 0)])


def byte_pairs(vocab_size: int, add_prefix_space: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    begin = ["<|begin_of_text|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=begin, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def only_bytes() -> Tokenizer:
    tokenizer = byte_pairs(257)
    tokenizer.post_processor = begun_by("<|begin_of_text|>")
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=80, unk_token="?", show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def sentence_pieces() -> Tokenizer:
    """As Llama 2 has it: no pre-tokenizer, spaces are ▁, and one is put before each text."""
    pieces = ["<s>", "▁", *"abcdefghijklmnopqrstuvwxyz", "th", "the", "▁the", "▁a", "at", "cat"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "a"), ("a", "t"), ("c", "at")]
    tokenizer = Tokenizer(models.BPE({piece: at for at, piece in enumerate(pieces)}, merges))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.post_processor = begun_by("<s>")
    return tokenizer


def word_pieces() -> Tokenizer:
    vocabulary = ["[UNK]", "[CLS]", "[SEP]", "cat", "mat", "day", "##s", "of"]
    numbers = {name: at for at, name in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordPiece(numbers, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return tokenizer


def over_spaces(*more: str) -> Tokenizer:
    """A token reaches over a space, and nothing splits there: letters are left."""
    pieces = ["<s>", "▁", "a", "b", "▁a", "▁b", "▁a▁b", *more]
    merges = [("▁", "a"), ("▁", "b"), ("▁a", "▁b")]
    tokenizer = Tokenizer(models.BPE({piece: at for at, piece in enumerate(pieces)}, merges))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    return tokenizer


def truncating() -> Tokenizer:
    tokenizer = byte_pairs(320)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=9)
    return tokenizer


KINDS: dict[str, tuple[Callable[[], Tokenizer], int]] = {
    "byte pairs": (lambda: byte_pairs(320), 0),
    "byte pairs that begin with a space": (lambda: byte_pairs(320, add_prefix_space=True), 0),
    "bytes": (only_bytes, 1),
    "unigram": (unigram, 0),
    "sentence pieces": (sentence_pieces, 1),
    "word pieces": (word_pieces, 2),
    "tokens over spaces": (over_spaces, 0),
    "truncating": (truncating, 0),
    "demo": (lambda: Tokenizer.from_file(str(ROOT / "models/demo/tokenizer.json")), 1),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_of_so_many_words_has_so_many_tokens(kind: str, tmp_path: Path) -> None:
    make, num_special = KINDS[kind]
    tokenizer = make()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    words = Words(tmp_path)
    assert words.num_special == num_special
    tokenizer.no_truncation()
    tokenizer.no_padding()
    chosen = random.Random(0)
    for length in (1, 2, 3, 10, 100, 1000, 3000):
        text = words.text(chosen.choices(words.words, k=length))
        assert len(tokenizer.encode(text, add_special_tokens=False)) == length
        assert len(tokenizer.encode(text)) == words.count(text, special=True)
        assert words.count(text) == length == words.count(text, special=True) - num_special


def test_the_demo_model_has_many_words() -> None:
    words = Words(ROOT / "models/demo/tokenizer.json")
    assert len(words.words) > 200
    assert all(word[0] == " " and word[1:].isalpha() for word in words.words)


def test_a_tokenizer_without_words_is_refused(tmp_path: Path) -> None:
    over_spaces("ab").save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"neither words nor letters .* token ids"):
        Words(tmp_path)


@pytest.mark.parametrize("text", [None, "{}", "words"])
def test_what_is_no_tokenizer_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError, match=r"tokenizer: .*tokenizer.json is not a tokenizer"):
        Words(tmp_path)
