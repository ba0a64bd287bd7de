"""OpenAI's SDK or LiteLLM: a tool that takes a set, an answer to its result, an open class.

Prints JSON. Arguments: the URL, and which.
"""

import json
import sys
from functools import partial
from typing import Annotated, Any

import litellm
import openai
from pydantic import BaseModel, Field

Name = Annotated[str, Field(max_length=9)]


class Person(BaseModel):
    name: str
    age: int
    hats: list[str]


class Names(BaseModel):
    names: Annotated[set[Name], Field(min_length=1, max_length=3)]


url, which = sys.argv[1:]
server: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "none"}
create: Any = (
    partial(openai.OpenAI(**server).chat.completions.create, model="demo")
    if which == "openai"
    else partial(litellm.completion, model="hosted_vllm/demo", **server)
)
messages: list[Any] = [{"role": "user", "content": "How many are 2 hats and 3 hats?"}]
tool = {"function": {"name": "count", "parameters": Names.model_json_schema()}, "type": "function"}
asked = {"messages": messages, "tools": [tool], "temperature": 0, "max_tokens": 200}
message = create(**asked, tool_choice="required").choices[0].message
[call] = message.tool_calls
counted = len(Names.model_validate_json(call.function.arguments).names)
result = {"role": "tool", "tool_call_id": call.id, "content": str(counted)}
answer = create(**asked | {"messages": [*messages, message.model_dump(), result]})
schema = {"name": "person", "schema": Person.model_json_schema()}
people = [
    create(
        messages=messages,
        response_format={"type": "json_schema", "json_schema": schema},
        max_tokens=most,
        seed=seed,
    )
    .choices[0]
    .message.content
    for seed, most in enumerate([60, 100, 200, 400, None])
]
print(
    json.dumps(
        {
            "chats": {
                "counted": counted,
                "answer": answer.choices[0].message.content,
                "people": [Person.model_validate_json(text).model_dump() for text in people],
            }
        }
    )
)
