"""pydantic-ai: a tool that takes a set, an answer to its result, an open class; prints JSON.

Both of chats and of responses. Argument: the URL.
"""

import json
import sys
from typing import Annotated, Any

from pydantic import BaseModel, Field
from pydantic_ai import Agent, ModelSettings, RunContext
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

QUESTION = "How many are 2 hats and 3 hats?"


Name = Annotated[str, Field(max_length=9)]


class Person(BaseModel):
    name: str
    age: int
    hats: list[str]


def count(names: Annotated[set[Name], Field(min_length=1, max_length=3)]) -> int:
    """Count names."""
    counts.append(len(names))
    return len(names)


def settings(context: RunContext[None]) -> ModelSettings:
    choice = "required" if context.run_step == 1 else "auto"
    return ModelSettings(temperature=0, max_tokens=200, tool_choice=choice)


counts: list[int] = []
provider = OpenAIProvider(base_url=f"{sys.argv[1]}/v1", api_key="none")
results: dict[str, Any] = {}
for name, api in {"chats": OpenAIChatModel, "responses": OpenAIResponsesModel}.items():
    model = api("demo", provider=provider)
    answer = Agent(model, tools=[count], model_settings=settings, retries=0).run_sync(QUESTION)
    person = Agent(model, output_type=Person, retries=0)
    limits = [{"max_tokens": most} for most in (60, 100, 200, 400)]
    made = [
        person.run_sync(QUESTION, model_settings=ModelSettings(**limit)) for limit in [*limits, {}]
    ]
    results[name] = {
        "counted": counts.pop(),
        "answer": answer.output,
        "people": [run.output.model_dump() for run in made],
    }
print(json.dumps(results))
