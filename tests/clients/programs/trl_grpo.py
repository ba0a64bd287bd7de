"""TRL's GRPOTrainer over four steps, its rollouts by a server that goes on with its weights.

Prints JSON: what each call of the server sampled and, of each token, how far its log-probability is
from that of the model which the trainer holds then, and of the one that it began with. Arguments:
the root of the source tree, the model's folder, the server's URL, a folder to write into, prompts
as JSON.
"""

import json
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

root, folder, url, output, prompts = sys.argv[1:]
sys.path.insert(0, root)  # as an installed package would be found
from srm.trl import RolloutServer  # noqa: E402

torch.set_num_threads(1)
TEMPERATURE = 1.3
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True, padding_side="left")
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
first = deepcopy(model).eval()
server = RolloutServer(url, output, model.config)
calls: list[dict[str, Any]] = []


def logprobs(policy: Any, ids: list[int], count: int) -> torch.Tensor:
    """The log-probabilities of the last so many ids, at TEMPERATURE."""
    row = torch.tensor([ids])
    with torch.no_grad():
        logits: torch.Tensor = policy(row).logits[0, -count - 1 : -1] / TEMPERATURE
    return logits.log_softmax(-1).gather(1, row[0, -count:, None])[:, 0]


def gaps_of(made: dict[str, Any], policy: Any) -> list[float]:
    """How far each token's log-probability is from this model's."""
    gaps: list[float] = []
    keys = ("prompt_ids", "completion_ids", "logprobs")
    for prompt, tokens, scores in zip(*(made[key] for key in keys), strict=True):
        expected = logprobs(policy, prompt + tokens, len(tokens))
        gaps += (torch.tensor(scores) - expected).abs().tolist()
    return gaps


def rollouts(asked: list[Any], trainer: Any) -> dict[str, Any]:
    made = server.rollout_func(asked, trainer)
    calls.append(
        {
            "step": trainer.state.global_step,
            "version": server.weights_version,
            "prompts": len(asked),
            "distinct": len({tuple(ids) for ids in made["prompt_ids"]}),
            "completion_ids": made["completion_ids"],
            "now": gaps_of(made, trainer.model),
            "first": gaps_of(made, first),
        }
    )
    return made


def reward_even_ids(completion_ids: list[list[int]], **_others: Any) -> list[float]:
    """Return a reward that differs between any two samples: every group has something to learn."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


chats = [[{"role": "user", "content": prompt}] for prompt in json.loads(prompts)]
rows = Dataset.from_list([{"prompt": chat} for chat in chats])
trainer = GRPOTrainer(
    model,
    reward_funcs=reward_even_ids,
    args=GRPOConfig(
        output_dir=f"{output}/trainer",
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=48,
        temperature=TEMPERATURE,
        top_k=50,
        learning_rate=1e-3,
        max_steps=4,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    ),
    train_dataset=rows,
    processing_class=tokenizer,
    rollout_func=rollouts,
)
trainer.args.generation_kwargs = {"seed": 1}  # of the server's samples alone
trainer.train()
server.init_weight_transfer()
server.pause()
server.send_weights(model.named_parameters())  # as AsyncGRPOTrainer has it sent
server.resume()
trainer.save_model(f"{output}/saved")
refusals = {}
for name, tensors in {
    "a tensor is missing": list(model.named_parameters())[1:],
    "a number is none": [
        (name, tensor * float("nan")) for name, tensor in model.named_parameters()
    ],
}.items():
    try:
        server.send_weights(tensors)
    except RuntimeError as error:
        refusals[name] = str(error)
# Weights that change within a step, as the best ones do that a trainer loads at its end; and a
# second trainer that the same object serves.
again: dict[str, list[float]] = {}
step = trainer.state.global_step
saved = deepcopy(model.state_dict())
model.load_state_dict(first.state_dict())
again["first weights at the last step"] = gaps_of(server.rollout_func(chats[:2], trainer), first)
other = GRPOTrainer(
    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True),
    reward_funcs=reward_even_ids,
    args=trainer.args,
    train_dataset=rows,
    processing_class=tokenizer,
    rollout_func=server.rollout_func,
)
with torch.no_grad():
    other.model.get_output_embeddings().weight.mul_(1.1)
again["a second trainer"] = gaps_of(server.rollout_func(chats[:2], other), other.model)
model.load_state_dict(saved)
again["the first one again"] = gaps_of(server.rollout_func(chats[:2], trainer), model)
version = server.weights_version
server.rollout_func(chats[:2], trainer)
assert server.weights_version == version, "equal weights were sent twice"
assert trainer.state.global_step == step
beside = RolloutServer(url, output, model.config)  # of another process, say
beside.send_weights(first.named_parameters())
try:
    server.rollout_func(chats[:1], trainer)
except RuntimeError as error:
    refusals["weights of somebody else"] = str(error)
beside.send_weights(model.named_parameters())
beside.destroy()
server.destroy()
reply = {
    "calls": calls,
    "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    "clipped": [
        entry["completions/clipped_ratio"]
        for entry in trainer.state.log_history
        if "completions/clipped_ratio" in entry
    ],
    "left": [path.name for path in Path(output).iterdir()],
    "refusals": refusals,
    "again": again,
}
print(json.dumps(reply))
