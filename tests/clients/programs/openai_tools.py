"""OpenAI's SDK: a class from a reply and from a call, streamed too, and the answer to its result.

Prints JSON. Argument: the URL.
"""

import json
import sys
from typing import Any, Literal

import openai
from pydantic import BaseModel


class Step(BaseModel):
    left: Literal[2, 3]
    operator: Literal["+", "-"]
    right: Literal[2, 3]


client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none")
messages: list[Any] = [{"role": "user", "content": "How many are 2 hats and 3 hats?"}]
asked: dict[str, Any] = {
    "model": "demo",
    "messages": messages,
    "temperature": 0,
    "max_tokens": 64,
}
reply: Any = client.chat.completions.parse(**asked, response_format=Step).choices[0].message
asked |= {
    "tools": [openai.pydantic_function_tool(Step)],
    "tool_choice": "required",
}
parsed: Any = client.chat.completions.parse(**asked).choices[0]
message = parsed.message
with client.chat.completions.stream(**asked) as stream:
    streamed: Any = stream.get_final_completion().choices[0]
result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "5"}
answer = client.chat.completions.create(
    model="demo", messages=[*messages, message, result], temperature=0, max_tokens=16
)
print(
    json.dumps(
        {
            "parsed": reply.parsed.model_dump(),
            "calls": [call.function.parsed_arguments.model_dump() for call in message.tool_calls],
            "streamed": [
                call.function.parsed_arguments.model_dump() for call in streamed.message.tool_calls
            ],
            "reasons": [parsed.finish_reason, streamed.finish_reason],
            "answer": answer.choices[0].message.content,
        }
    )
)
