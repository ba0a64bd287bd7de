"""LangChain: a tool that takes a set, an answer to its result, an open class; prints JSON.

Both of chats and of responses. Argument: the URL.
"""

# mypy: disable-error-code="untyped-decorator"

import json
import sys
from typing import Annotated, Any

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

Name = Annotated[str, Field(max_length=9)]


class Person(BaseModel):
    """A person."""

    name: str
    age: int
    hats: list[str]


@tool
def count(names: Annotated[set[Name], Field(min_length=1, max_length=3)]) -> int:
    """Count names."""
    return len(names)


results: dict[str, Any] = {}
for api in ("chats", "responses"):

    def make(most: int | None, temperature: float | None = None, api: str = api) -> ChatOpenAI:
        return ChatOpenAI(
            base_url=f"{sys.argv[1]}/v1",
            api_key="none",
            model="demo",
            temperature=temperature,
            max_tokens=most,
            use_responses_api=api == "responses",
        )

    chat, question = make(200, 0), HumanMessage("How many are 2 hats and 3 hats?")
    message = chat.bind_tools([count], tool_choice="any").invoke([question])
    [call] = message.tool_calls
    result = count.invoke(call)
    people = [
        make(most).with_structured_output(Person, method="function_calling").invoke([question])
        for most in (60, 100, 200, 400, None)
    ]
    results[api] = {
        "counted": int(result.content),
        "answer": chat.bind_tools([count]).invoke([question, message, result]).text,
        "people": [person.model_dump() for person in people],
    }
print(json.dumps(results))
