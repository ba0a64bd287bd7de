"""The Agents SDK: an answer, a stream, a tool and a handoff, by responses; prints JSON.

The context of the bundled model holds no tool with arguments beside a result, which the SDK asks
for with `auto`: one tool has none, and the run of the other ends with what it returns.
Argument: the URL.
"""

# mypy: disable-error-code="untyped-decorator"

import asyncio
import json
import sys
from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    Runner,
    function_tool,
    set_default_openai_client,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

QUESTION = "Ava has 6 boxes with 7 pears each. How many pears is that in all?"


@function_tool
def add(left: Literal[2, 3], right: Literal[2, 3]) -> int:
    """Add two numbers."""
    return left + right


@function_tool
def count() -> str:
    return "5"


def agent(tool_choice: str | None = None, **others: Any) -> Agent:
    settings = ModelSettings(temperature=0, max_tokens=48, tool_choice=tool_choice)
    return Agent(name="Adder", model="demo", model_settings=settings, **others)


async def ran(started: Agent) -> dict[str, Any]:
    result = await Runner.run(started, QUESTION)
    kinds = [item.type for item in result.new_items]
    return {"answer": result.final_output, "kinds": kinds, "last": result.last_agent.name}


async def streamed() -> str:
    result = Runner.run_streamed(agent(), QUESTION)
    async for _event in result.stream_events():
        pass
    answer: str = result.final_output
    return answer


async def main() -> None:
    helper = Agent(
        name="Helper",
        model="demo",
        model_settings=ModelSettings(temperature=0, max_tokens=48),
    )
    results = {
        "plain": await ran(agent()),
        "streamed": await streamed(),
        "tool": await ran(agent("required", tools=[count])),
        "stopped": await ran(
            agent("required", tools=[add], tool_use_behavior="stop_on_first_tool")
        ),
        "handoff": await ran(agent("required", handoffs=[helper])),
    }
    print(json.dumps(results))


set_tracing_disabled(True)
set_default_openai_client(AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none"))
asyncio.run(main())
