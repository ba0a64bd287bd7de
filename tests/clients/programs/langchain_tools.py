"""LangChain: structured outputs, calls of bound tools, as a stream too, and an answer to a result.

Prints JSON. Argument: the URL.
"""

# mypy: disable-error-code="untyped-decorator"

import json
import sys
from typing import Any, Literal

from langchain_core.exceptions import OutputParserException
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

chat = ChatOpenAI(
    base_url=f"{sys.argv[1]}/v1", api_key="none", model="demo", temperature=0, max_tokens=64
)
question = HumanMessage("How many are 2 hats and 3 hats?")


class Step(BaseModel, extra="forbid"):
    """A sum of two numbers."""

    left: Literal[2, 3]
    right: Literal[2, 3]


@tool
def add(left: Literal[2, 3], right: Literal[2, 3]) -> int:
    """Add two numbers."""
    return left + right


@tool
def subtract(left: Literal[2, 3], right: Literal[2, 3]) -> int:
    """Subtract a number from another."""
    return left - right


structured: dict[str, Any] = {}
for method in ("function_calling", "json_schema"):
    structured[method] = chat.with_structured_output(Step, method=method).invoke([question])
free = "of the class"
try:
    chat.with_structured_output(Step, method="json_mode").invoke([question])
except OutputParserException:
    free = "other"
tools = {"add": add, "subtract": subtract}
bound = chat.bind_tools([*tools.values()], tool_choice="any")
message = bound.invoke([question])
streamed: Any = None
for chunk in bound.stream([question]):
    streamed = chunk if streamed is None else streamed + chunk
results = [tools[call["name"]].invoke(call) for call in message.tool_calls]
print(
    json.dumps(
        {
            "structured": {method: made.model_dump() for method, made in structured.items()},
            "free": free,
            "named": [
                call["name"]
                for call in chat.bind_tools([*tools.values()], tool_choice="add")
                .invoke([question])
                .tool_calls
            ],
            "calls": [[call["name"], call["args"]] for call in message.tool_calls],
            "streamed": [[call["name"], call["args"]] for call in streamed.tool_calls],
            "answer": chat.invoke([question, message, *results]).content,
        }
    )
)
