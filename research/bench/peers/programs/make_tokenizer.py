"""A byte-level BPE tokenizer of as many entries as all models have, as a folder that peers load.

The task: `output` (the folder), `vocab_size`, `n_ctx`. Trained on the standard library's sources,
which every machine has. Ids 0, 1 and 2 are `<unk>`, `<s>` and `</s>`.
"""

from __future__ import annotations

import os
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from research.bench.peers.programs.timing import read_task

_FILES = 200


task = read_task()
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
trainer = trainers.BpeTrainer(
    vocab_size=task["vocab_size"],
    special_tokens=["<unk>", "<s>", "</s>"],
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
)
sources = sorted(Path(os.__file__).parent.glob("*.py"))[:_FILES]
tokenizer.train([str(path) for path in sources], trainer)
if tokenizer.get_vocab_size() != task["vocab_size"]:
    raise SystemExit(f"the tokenizer has {tokenizer.get_vocab_size()} entries")
PreTrainedTokenizerFast(
    tokenizer_object=tokenizer,
    unk_token="<unk>",
    bos_token="<s>",
    eos_token="</s>",
    pad_token="</s>",
    model_max_length=task["n_ctx"],
).save_pretrained(task["output"])
