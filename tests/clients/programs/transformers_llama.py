"""Compares a Llama's logits with those beside it: `ids` and `logits` in expected.safetensors.

Argument: the folder. Prints, as JSON, the largest error, the class that read it, and the ids that
its tokenizer makes of "make 6 4 of 25 3 :".
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = Path(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(folder).eval()
expected = load_file(folder / "expected.safetensors")
with torch.no_grad():
    error = (model(expected["ids"]).logits - expected["logits"]).abs().max()
ids = AutoTokenizer.from_pretrained(folder)("make 6 4 of 25 3 :", add_special_tokens=False)
print(json.dumps([float(error), type(model).__name__, ids["input_ids"]]))
