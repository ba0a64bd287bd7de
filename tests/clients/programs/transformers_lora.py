"""Trains an adapter of peft's for two steps, merges and saves the model. Prints JSON.

Arguments: the model's folder, prompts as JSON, a folder to write into.
"""

import json
import sys
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, prompts, output = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
torch.manual_seed(1)
trusted = {"trust_remote_code": True}
tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left", **trusted)
model: Any = AutoModelForCausalLM.from_pretrained(folder, **trusted)
batch = tokenizer(prompts, return_tensors="pt", padding=True)


def greedy(held: Any) -> list[list[int]]:
    made = held.eval().generate(**batch, max_new_tokens=16, do_sample=False)
    return [row.tolist() for row in made[:, batch["input_ids"].shape[1] :]]


before = greedy(model)
adapted: Any = get_peft_model(
    model, LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
)
adapted.train()
labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
optimizer = torch.optim.AdamW([own for own in adapted.parameters() if own.requires_grad], lr=2e-2)
losses = []
for _ in range(2):
    loss = adapted(**batch, labels=labels).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(float(loss))
adapted_tokens = greedy(adapted)
merged = adapted.merge_and_unload()
merged.save_pretrained(output)
print(
    json.dumps(
        {
            "targets": sorted({name.split(".")[-1] for name in adapted.targeted_module_names}),
            "losses": losses,
            "before": before,
            "adapted": adapted_tokens,
            "merged": greedy(merged),
            "token_ids": [
                ids[mask == 1].tolist()
                for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
            ],
        }
    )
)
