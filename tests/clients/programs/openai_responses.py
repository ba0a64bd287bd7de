"""OpenAI's SDK and its Responses API: whole, streamed, two turns, a model and a tool; prints JSON.

Argument: the URL.
"""

import json
import sys
import time
from typing import Annotated, Any

import openai
from pydantic import BaseModel, Field

QUESTION = "Ava has 6 boxes with 7 pears each. How many pears is that in all?"
Small = Annotated[int, Field(ge=0, le=99)]


class Add(BaseModel):
    """Adds two numbers."""

    first: Small
    second: Small


client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
asked: dict[str, Any] = {"model": "demo", "temperature": 0, "max_output_tokens": 64}
whole: Any = client.responses.create(input=QUESTION, store=True, **asked)
with client.responses.stream(input=QUESTION, **asked) as stream:
    kinds = [event.type for event in stream]
    streamed = stream.get_final_response()
turns: list[Any] = [{"role": "user", "content": QUESTION}, *whole.output]
turns.append({"role": "user", "content": "How many are 2 hats and 3 hats?"})
parsed = client.responses.parse(input=QUESTION, text_format=Add, **asked).output_parsed
tools = [openai.pydantic_function_tool(Add)]
(call,) = client.responses.parse(
    input=QUESTION, tools=tools, tool_choice="required", **asked
).output
assert call.type == "function_call" and isinstance(call.parsed_arguments, Add)
begun = client.responses.create(input=QUESTION, store=True, background=True, **asked)
made = begun
while made.status in {"queued", "in_progress"}:
    time.sleep(0.05)
    made = client.responses.retrieve(begun.id)
assert client.responses.cancel(begun.id) == made
refusals = []
try:
    client.responses.create(input=QUESTION, background=True, **asked)
except openai.BadRequestError as error:
    refusals.append(error.param)
after = client.responses.create(input=turns[-1:], previous_response_id=whole.id, **asked)
assert client.responses.retrieve(whole.id) == whole
client.responses.delete(whole.id)
print(
    json.dumps(
        {
            "whole": whole.output_text,
            "stored": whole.store,
            "background": [begun.status, made.status, made.output_text],
            "streamed": streamed.output_text,
            "kinds": kinds,
            "second": client.responses.create(input=turns, **asked).output_text,
            "parsed": parsed.model_dump() if parsed else None,
            "called": call.parsed_arguments.model_dump(),
            "refusals": refusals,
            "after": after.output_text,
        }
    )
)
