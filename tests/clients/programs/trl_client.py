"""TRL's client of vLLM servers: it generates, by a regex too, scores and chats; prints JSON.

So it does what its trainers do at their start and for weights over NCCL, at the address of a second
server.

TRL refuses to make a client where vLLM is not installed, though the client only speaks HTTP: that
one check is answered here. Arguments: the URL, prompts as JSON, and that of a server's admin_port.
"""

import json
import sys

from trl.generation import vllm_client

vllm_client.is_vllm_available = lambda *_args, **_named: True

url, prompts, admin_url = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
client = vllm_client.VLLMClient(base_url=url, connection_timeout=10)
seeded = {"logprobs": 0, "generation_kwargs": {"seed": 1}}
sampling = {"n": 4, "max_tokens": 24, "temperature": 0.9, "top_p": 0.95, "top_k": 50, **seeded}
generated = client.generate(prompts, **sampling)
prompt_ids = generated["prompt_ids"]
completed = [prompt + generated["completion_ids"][4 * i] for i, prompt in enumerate(prompt_ids)]
chats = [
    [{"role": "user", "content": "Pia has 25 shells and sells 4 of them. How many are left?"}],
    [
        {"role": "user", "content": "How many are 2 hats and 3 hats?"},
        {"role": "assistant", "content": "2 + 3 = 5"},
        {"role": "user", "content": "How many are 5 hats and 6 hats?"},
    ],
]


def add(left: int, right: int) -> int:
    """Add two numbers.

    Args:
        left: A number.
        right: Another.
    """
    return left + right


trainers = vllm_client.VLLMClient(base_url=admin_url, connection_timeout=10)
trainers.reset_prefix_cache()
refusals = {}
for name, body in {
    "init_weight_transfer_engine": {"init_info": {"master_port": 51216, "world_size": 2}},
    "start_weight_update": {},
    "update_weights": {"update_info": {"names": [], "dtype_names": [], "shapes": []}},
    "finish_weight_update": {},
}.items():
    try:
        trainers._post(f"{admin_url}/{name}", json=body)  # of its methods, which need NCCL
    except Exception as error:  # noqa: BLE001 - it has no class of its own
        refusals[name] = str(error)
try:
    client.get_sequence_logprobs([prompt_ids[0]], [1])
except Exception as error:  # noqa: BLE001
    refusals["get_sequence_logprobs"] = str(error)

by_regex = {"structured_outputs_regex": r"#### \d{1,3}", "max_tokens": 16, "n": 2}
reply = {
    "model": client.model,
    "world_size": client.get_world_size(),
    "generated": generated,
    "by_ids": client.generate(prompt_ids, **sampling),
    "by_features": client.generate(prompt_ids, features=[None] * len(prompt_ids), **sampling),
    "server_info": trainers.get_server_info(),
    "refusals": refusals,
    "scored": client.get_sequence_logprobs(
        completed, list(map(len, prompt_ids)), top_logprobs=5, chunk_size=2
    ),
    "chats": client.chat(chats, n=2, max_tokens=16, **seeded),
    "by_regex": client.generate(prompts[:2], **by_regex)["completion_ids"]
    + client.chat(chats, **by_regex)["completion_ids"],
    "with_tools": client.chat(chats, n=2, max_tokens=16, tools=[add], **seeded),
}
print(json.dumps(reply))
