"""The tokenizer of countdown puzzles: every whole number up to 999 and every word is a token.

A token is spelled with a space before it, and spaces in a text are not read: "25*3" and "25 * 3"
are the same tokens, which are decoded as " 25 * 3". What is no such token is `<unk>`.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from srm.training.problems.countdown import BOS, EOS, VOCABULARY

UNKNOWN = "<unk>"
_SPECIAL = (VOCABULARY[BOS], VOCABULARY[EOS], UNKNOWN)
_SPACE = "Ġ"
"""A space in byte-level BPE."""


def countdown_tokenizer(vocabulary: Sequence[str] = VOCABULARY) -> Tokenizer:
    """Return the tokenizer, whose ids are those of the vocabulary."""
    words = (*vocabulary, UNKNOWN)
    spelled = (word if word in _SPECIAL else _SPACE + word for word in words)
    entries = {word: token for token, word in enumerate(spelled)}
    model = models.BPE(entries, [], unk_token=UNKNOWN, fuse_unk=True, ignore_merges=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d+|[a-z]+|\S"), "removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in _SPECIAL])
    begin = VOCABULARY[BOS]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, vocabulary.index(begin))]
    )
    return tokenizer
