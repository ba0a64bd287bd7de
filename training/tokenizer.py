"""Train a byte-level BPE tokenizer on problem text (Hugging Face `tokenizers`).

Id 0 begins a text and is prepended by the tokenizer itself; id 1 ends a text and pads.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
BEGIN_ID, END_ID = 0, 1


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a tokenizer of at most `vocab_size` entries, every byte among them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
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
