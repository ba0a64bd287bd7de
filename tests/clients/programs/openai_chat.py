"""OpenAI's SDK: a chat of two turns, with the reply's message as it is; prints JSON.

Argument: the URL.
"""

import json
import sys
from typing import Any

import openai

client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none")
messages: list[Any] = [{"role": "user", "content": "How many are 2 hats and 3 hats?"}]
answers = []
for _turn in range(2):
    reply = client.chat.completions.create(
        model="demo", messages=messages, temperature=0, max_tokens=16
    )
    message = reply.choices[0].message
    answers.append(message.content)
    messages += [
        message.model_dump(),
        {"role": "user", "content": "How many are 3 hats and 3 hats?"},
    ]
print(json.dumps({"answers": answers}))
