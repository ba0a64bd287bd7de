"""TRL's client of vLLM servers: it generates, by a regex too, scores and chats; prints JSON.

TRL refuses to make a client where vLLM is not installed, though the client only speaks HTTP: that
one check is answered here. Arguments: the URL, and prompts as JSON.
"""

import json
import sys

from trl.generation import vllm_client

vllm_client.is_vllm_available = lambda *_args, **_named: True

url, prompts = sys.argv[1], json.loads(sys.argv[2])
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


by_regex = {"structured_outputs_regex": r"#### \d{1,3}", "max_tokens": 16, "n": 2}
reply = {
    "model": client.model,
    "world_size": client.get_world_size(),
    "generated": generated,
    "by_ids": client.generate(prompt_ids, **sampling),
    "scored": client.get_sequence_logprobs(
        completed, list(map(len, prompt_ids)), top_logprobs=5, chunk_size=2
    ),
    "chats": client.chat(chats, n=2, max_tokens=16, **seeded),
    "by_regex": client.generate(prompts[:2], **by_regex)["completion_ids"]
    + client.chat(chats, **by_regex)["completion_ids"],
    "with_tools": client.chat(chats, n=2, max_tokens=16, tools=[add], **seeded),
}
print(json.dumps(reply))
