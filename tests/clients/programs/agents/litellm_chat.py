"""LiteLLM: a chat of two turns, and a prompt beyond the context; prints JSON. Argument: the URL."""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it asks the internet for prices

import litellm

common = {"model": "hosted_vllm/demo", "api_base": f"{sys.argv[1]}/v1", "api_key": "none",
          "temperature": 0, "max_tokens": 16}  # fmt: skip
messages = [{"role": "user", "content": "How many are 2 hats and 3 hats?"}]
answers = []
for _turn in range(2):
    reply = litellm.completion(messages=messages, **common).choices[0].message
    answers.append(reply.content)
    messages += [reply.model_dump(), {"role": "user", "content": "And 4 hats?"}]
error = ""
try:
    litellm.completion(messages=[{"role": "user", "content": "hats " * 5_000}], **common)
except litellm.ContextWindowExceededError as refused:
    error = str(refused)
print(json.dumps({"answers": answers, "error": error}))
