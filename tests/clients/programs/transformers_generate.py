"""Generates and refuses with the bundled model as transformers loads it. Prints JSON.

Arguments: the model's folder, prompts as JSON, the root of the source tree, a file with fields of
configurations as JSON.
"""

import json
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, prompts, root = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
trusted = {"trust_remote_code": True}
tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left", **trusted)
model = AutoModelForCausalLM.from_pretrained(folder, **trusted).eval()
batch = tokenizer(prompts, return_tensors="pt", padding=True)
some = tokenizer(prompts[:2], return_tensors="pt", padding=True)


def generated(inputs: Any, **settings: Any) -> Any:
    output = model.generate(**inputs, max_new_tokens=12, **settings)
    return output[:, inputs["input_ids"].shape[1] :].tolist()


def seeded(**settings: Any) -> Any:
    torch.manual_seed(1)
    return generated(some, do_sample=True, top_k=0, num_return_sequences=3, **settings)


def refusal(**arguments: Any) -> str:
    try:
        model(**arguments)
    except ValueError as error:
        return str(error)
    return ""


greedy = {"do_sample": False}
alone = [generated(tokenizer([prompt], return_tensors="pt"), **greedy)[0] for prompt in prompts]
right = AutoTokenizer.from_pretrained(folder, **trusted)
right = right(prompts, return_tensors="pt", padding=True)

# The state of a prompt begins two generations.
ids = batch["input_ids"][:1][:, batch["attention_mask"][0] == 1]
with torch.no_grad():
    output = model(ids[:, :-2], use_cache=True)
name = "cache" if "cache" in output else "past_key_values"
twice = [
    model.generate(ids, max_new_tokens=12, **greedy, **{name: deepcopy(output[name])})
    for _ in range(2)
]

n_ctx = model.config.n_ctx
ones = torch.ones(1, 8, dtype=torch.long)
full = model(torch.ones(1, n_ctx, dtype=torch.long), use_cache=True)[name]
two = model(ones.view(2, 4), use_cache=True)[name]
reply = {
    "token_ids": [tokenizer(prompt)["input_ids"] for prompt in prompts],
    "text": tokenizer.decode(tokenizer(prompts[0])["input_ids"], skip_special_tokens=True),
    "alone": alone,
    "left": generated(batch, **greedy),
    "right": generated(right, **greedy),
    "from a state": [row[0, ids.shape[1] :].tolist() for row in twice],
    "beams": generated(some, num_beams=4, **greedy),
    "beams without states": generated(some, num_beams=4, use_cache=False, **greedy),
    "samples": seeded(),
    "samples without states": seeded(use_cache=False),
    "refusals": {
        "length": refusal(input_ids=torch.ones(1, n_ctx + 1, dtype=torch.long)),
        "length of a state": refusal(input_ids=ones[:, :1], **{name: full}),
        "mask": refusal(input_ids=ones, attention_mask=ones * 2),
        "mask of four dimensions": refusal(input_ids=ones, attention_mask=ones[None, None]),
        "no token": refusal(input_ids=ones, attention_mask=ones * 0),
        "positions": refusal(input_ids=ones, position_ids=torch.arange(1, 9)[None]),
        "packed with a state": refusal(
            input_ids=ones, position_ids=torch.arange(8)[None] % 4, use_cache=True
        ),
        "rows that go on": refusal(
            input_ids=ones.view(2, 4), position_ids=torch.arange(8).view(2, 4)
        ),
        "seq_idx": refusal(input_ids=ones, seq_idx=ones),
        "another cache": refusal(input_ids=ones, cache=object()),
        "other rows": refusal(input_ids=ones, **{name: two}),
        "no token of a row": refusal(
            input_ids=ones.view(2, 4)[:, :1],
            attention_mask=torch.tensor([[1] * 5, [1] * 4 + [0]]),
            **{name: two},
        ),
    },
}

sys.path.insert(0, root)  # the module as a package has it needs no trust
from srm.training.huggingface.configuration_srm import SRMConfig  # noqa: E402
from srm.training.huggingface.modeling_srm import SRMForCausalLM  # noqa: E402

installed = AutoModelForCausalLM.from_pretrained(folder)
assert type(installed) is SRMForCausalLM
reply["installed"] = bool(torch.equal(installed(ids).logits, model(ids).logits))
reply["drawn"] = {
    name: [float(value.mean()), float(value.std(unbiased=False))]
    for name, value in SRMForCausalLM(SRMConfig(num_layers=1)).named_parameters()
}
reply["configs"] = []
for fields in json.loads(Path(sys.argv[4]).read_text()):
    try:
        SRMConfig(**fields)
        reply["configs"].append("")
    except ValueError as error:
        reply["configs"].append(str(error))
print(json.dumps(reply))
