"""A tokenizer of 32 tokens, one for each character, for the model that tests call TINY."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CHARACTERS = 'abcdefghij0123456789,:-. {}[]"'
"""Those of the ids 2 … 31; the other two are special, the second one ends a text."""


@cache
def tiny_folder() -> Path:
    """A folder with this tokenizer, which is made once a process."""
    spelled = {" ": "Ġ"}
    vocab = {spelled.get(character, character): i for i, character in enumerate(CHARACTERS, 2)}
    tokenizer = Tokenizer(models.BPE(vocab={"<s>": 0, "</s>": 1} | vocab, merges=[]))
    tokenizer.add_special_tokens(
        [AddedToken("<s>", special=True), AddedToken("</s>", special=True)]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder = Path(mkdtemp(prefix="srm-tiny-"))
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
