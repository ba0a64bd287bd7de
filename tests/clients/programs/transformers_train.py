"""Trains a model with transformers' Trainer and saves it, in several ways. Prints JSON.

Arguments: the model's folder, a file with `ids` [steps, batch, length], a folder to write into.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

folder, ids, output = sys.argv[1], load_file(sys.argv[2])["ids"], Path(sys.argv[3])
torch.set_num_threads(1)


def loaded() -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)


def trained(name: str, model: Any, **settings: Any) -> list[float]:
    arguments = TrainingArguments(
        output_dir=output / name,
        per_device_train_batch_size=ids.shape[1],
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        weight_decay=0.0,
        max_steps=len(ids),
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **settings,
    )
    # Older Trainers count a first token's label too, though nothing predicts it.
    labels = ids.clone()
    labels[:, :, 0] = -100
    both = zip(ids.flatten(0, 1), labels.flatten(0, 1), strict=True)
    rows: Any = [{"input_ids": row, "labels": label} for row, label in both]
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.get_train_dataloader = lambda: trainer.accelerator.prepare(
        torch.utils.data.DataLoader(rows, batch_size=ids.shape[1])
    )
    trainer.train()
    trainer.save_model(output / name)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


reply: dict[str, Any] = {
    "trainer": trained("trainer", loaded()),
    "checkpointed": trained(
        "checkpointed",
        loaded(),
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
    ),
}
model = loaded()
model.save_pretrained(output / "shards", max_shard_size="8KB")
half = AutoModelForCausalLM.from_pretrained(
    output / "shards", trust_remote_code=True, dtype=torch.bfloat16
)
half.save_pretrained(output / "half")
reply["dtypes"] = {name: str(value.dtype) for name, value in half.state_dict().items()}

# Padding and packing change no loss.
rows = ids[0, :2]
row = torch.cat([rows[0], rows[1, :5]])
n = rows.shape[1]
pad = torch.zeros(1, n - 5, dtype=torch.long)
mask = torch.ones(2, n, dtype=torch.long)
mask[1, : n - 5] = 0
left = torch.stack([rows[0], torch.cat([pad[0], rows[1, :5]])])
positions = torch.cat([torch.arange(n), torch.arange(5)])[None]
losses = {
    "left": model(left, attention_mask=mask, labels=left.masked_fill(mask == 0, -100)).loss,
    "packed": model(row[None], position_ids=positions, labels=row[None]).loss,
}
reply["losses"] = {name: float(loss) for name, loss in losses.items()}
print(json.dumps(reply))
