"""TRL's client of vLLM servers, generating and scoring; prints what it returned as JSON.

TRL refuses to make a client where vLLM is not installed, though the client only speaks HTTP: that
one check is answered here. Arguments: the URL, and prompts as JSON.
"""

import json
import sys

from trl.generation import vllm_client

vllm_client.is_vllm_available = lambda *_args, **_named: True

url, prompts = sys.argv[1], json.loads(sys.argv[2])
client = vllm_client.VLLMClient(base_url=url, connection_timeout=10)
sampling = {"n": 4, "max_tokens": 24, "temperature": 0.9, "top_p": 0.95, "top_k": 50}
generated = client.generate(prompts, logprobs=0, generation_kwargs={"seed": 1}, **sampling)
by_ids = client.generate(
    generated["prompt_ids"], logprobs=0, generation_kwargs={"seed": 1}, **sampling
)
sequences = [
    prompt + generated["completion_ids"][4 * i] for i, prompt in enumerate(generated["prompt_ids"])
]
lengths = [len(prompt) for prompt in generated["prompt_ids"]]
scored = client.get_sequence_logprobs(sequences, lengths, top_logprobs=5, chunk_size=2)
found = {"model": client.model, "generated": generated, "by_ids": by_ids, "scored": scored}
if "with-world-size" in sys.argv:
    found["world_size"] = client.get_world_size()
print(json.dumps(found))
