"""Trains by TRL's GRPOTrainer, whose rollouts a server makes that goes on with its weights.

It runs in an environment with TRL and writes what its updates were like. Argument: a JSON file, as
`Settings.task` of `research/experiments/trainers.py` has it.
"""

import json
import re
import sys
import time
from decimal import Decimal, InvalidOperation
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import trl
from datasets import Dataset

from srm.trl import RolloutServer

task = json.loads(Path(sys.argv[1]).read_text())
torch.set_num_threads(task["threads"])
arguments = trl.GRPOConfig(**task["arguments"])
began: list[float] = []
waited: list[float] = []
tokens: list[int] = []
rewards: list[list[float]] = []
judged: list[Any] = []


def rollouts(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """Return what the server samples from the newest weights; note how long that took."""
    began.append(time.monotonic())
    made: dict[str, Any] = server.rollout_func(prompts, trainer)
    waited.append(time.monotonic() - began[-1])
    tokens.append(sum(map(len, made["completion_ids"])))
    return made


def is_right(completion: str, answer: str) -> bool:
    """Whether the first `#### NUMBER` is the answer's. It is `gsm8k_strict`, whose module needs
    packages that are not in TRL's environment."""
    match = re.search(r"####\s*([-$0-9.,]*[0-9])", completion.partition("Question:")[0])
    try:
        value = Decimal(re.sub(r"[$,]", "", match[1])) if match else None
    except InvalidOperation:
        return False
    return value == Decimal(answer.rpartition("####")[2].strip())


def reward(completions: list[str], answer: list[str], **_others: Any) -> list[float]:
    """Return 1 for each completion that is right, else 0."""
    rewards.append([float(is_right(*pair)) for pair in zip(completions, answer, strict=True)])
    judged[:] = zip(completions, answer, rewards[-1], strict=True)
    return rewards[-1]


trainer = trl.GRPOTrainer(
    task["model"],
    reward_funcs=reward,
    args=arguments,
    train_dataset=Dataset.from_list(task["rows"]),
    rollout_func=rollouts,
)
server = RolloutServer(task["url"], Path(task["output"]).parent, trainer.model.config)
groups: dict[bool, list[torch.nn.Parameter]] = {False: [], True: []}
for name, parameter in trainer.model.named_parameters():
    groups[name.endswith(task["decays"]["name"])].append(parameter)
trainer.optimizer = torch.optim.AdamW(
    [{"params": groups[False]}, {"params": groups[True], "lr": task["decays"]["learning_rate"]}],
    lr=arguments.learning_rate,
    weight_decay=0.0,
)
trainer.train()
began.append(time.monotonic())
trainer.save_model(task["output"])
groups_of = [torch.tensor(each).view(-1, arguments.num_generations) for each in rewards]
result = {
    "rewards": [fmean(each) for each in rewards],
    "mixed": [fmean((each.amin(1) < each.amax(1)).tolist()) for each in groups_of],
    "tokens": tokens,
    "seconds": [after - before for before, after in pairwise(began)],
    "waited": waited,
    "judged": judged,
    "trl": trl.__version__,
    "torch": str(torch.__version__),
}
Path(task["result"]).write_text(json.dumps(result))
