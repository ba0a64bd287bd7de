"""The tokenizer of regexes from examples: every printable ASCII character is a token, and so is
each mark. Any other character is `<unk>`."""

from __future__ import annotations

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from srm.training.problems.regexes import ANSWER, MATCHES, MISSES

FIRST, LAST = " ", "~"
CHARACTERS = (*map(chr, range(ord(FIRST), ord(LAST) + 1)), MATCHES, MISSES, ANSWER)
BEGIN, END, UNKNOWN = "<s>", "</s>", "<unk>"
VOCABULARY = (*CHARACTERS, BEGIN, END, UNKNOWN)
IDS = {name: token for token, name in enumerate(VOCABULARY)}
"""Token ids of characters and special tokens."""


def regex_tokenizer() -> Tokenizer:
    """Return the tokenizer, whose ids are those of `VOCABULARY`."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spelled = {byte_level.pre_tokenize_str(name)[0][0]: IDS[name] for name in CHARACTERS}
    entries = spelled | {name: IDS[name] for name in (BEGIN, END, UNKNOWN)}
    tokenizer = Tokenizer(
        models.BPE(entries, [], unk_token=UNKNOWN, fuse_unk=True, ignore_merges=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated"), byte_level]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in (BEGIN, END, UNKNOWN)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, IDS[BEGIN])]
    )
    return tokenizer
