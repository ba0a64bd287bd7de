"""TRL's client of vLLM servers, chatting; prints what it returned as JSON. Argument: the URL."""

import json
import sys

from trl.generation import vllm_client

vllm_client.is_vllm_available = lambda *_args, **_named: True

client = vllm_client.VLLMClient(base_url=sys.argv[1], connection_timeout=10)
messages = [
    [{"role": "user", "content": "Pia has 25 shells and sells 4 of them. How many are left?"}],
    [
        {"role": "user", "content": "How many are 2 hats and 3 hats?"},
        {"role": "assistant", "content": "2 + 3 = 5"},
        {"role": "user", "content": "How many are 5 hats and 6 hats?"},
    ],
]
found = client.chat(messages, n=2, max_tokens=16, logprobs=0, generation_kwargs={"seed": 1})
print(json.dumps(found))
