"""LiteLLM: a class as `response_format`, and a tool; prints JSON. Argument: the URL."""

import json
import sys
from typing import Literal

import litellm
from pydantic import BaseModel


class Step(BaseModel):
    """Two numbers."""

    left: Literal[2, 3]
    right: Literal[2, 3]


results = {}
tool = {"type": "function", "function": {"name": "add", "parameters": Step.model_json_schema()}}
for provider in ("hosted_vllm", "openai"):
    asked = {
        "model": f"{provider}/demo",
        "api_base": f"{sys.argv[1]}/v1",
        "api_key": "none",
        "messages": [{"role": "user", "content": "How many are 2 hats and 3 hats?"}],
        "temperature": 0,
        "max_tokens": 64,
    }
    text = litellm.completion(**asked, response_format=Step).choices[0].message.content
    called = litellm.completion(**asked, tools=[tool], tool_choice="required").choices[0].message
    [call] = called.tool_calls
    texts = {"response_format=…": text, "tools=…": call.function.arguments}
    for fields, made in texts.items():
        name = f'`completion("{provider}/demo", {fields})`'
        results[name] = Step.model_validate_json(made).model_dump()
print(json.dumps(results))
