"""The Agents SDK over several turns: a session, and responses that go on; prints JSON.

With `tool` as second argument each turn calls one and answers from its result. Argument: the URL.
"""

# mypy: disable-error-code="untyped-decorator"

import asyncio
import json
import sys
from typing import Any

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)

TURNS = ("How many are 2 hats and 3 hats?", "And 4 pens?", "How many boxes?", "And 2 pears?")
client = openai.AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
has_tool = sys.argv[2:] == ["tool"]


@function_tool
def count() -> str:
    return "5"


def agent(store: bool | None) -> Agent:
    choice = "required" if has_tool else None
    settings = ModelSettings(temperature=0, max_tokens=24, store=store, tool_choice=choice)
    model = OpenAIResponsesModel("demo", client)
    tools: list[Any] = [count] if has_tool else []
    return Agent(name="Adder", model=model, model_settings=settings, tools=tools)


async def turns(store: bool | None, is_stream: bool, **memory: Any) -> dict[str, Any]:
    """Run the turns; return their answers, the last items, and the tokens of all replies."""
    answers, usages, kinds = [], list[list[int]](), list[str]()
    for turn in TURNS:
        if is_stream:
            result: Any = Runner.run_streamed(agent(store), turn, **memory)
            async for _event in result.stream_events():
                pass
        else:
            result = await Runner.run(agent(store), turn, **memory)
        if "session" not in memory:
            memory = {"previous_response_id": result.last_response_id}
        answers.append(result.final_output)
        kinds = [item.type for item in result.new_items]
        for reply in result.raw_responses:
            cached = reply.usage.input_tokens_details.cached_tokens
            usages.append([reply.usage.total_tokens, cached])
    return {"answers": answers, "usages": usages, "kinds": kinds}


async def main() -> None:
    chained = {"auto_previous_response_id": True}
    results: dict[str, Any] = {
        "session": await turns(None, False, session=SQLiteSession("a")),
        "streamed session": await turns(None, True, session=SQLiteSession("b")),
        "chained": await turns(True, False, **chained),
        "streamed chain": await turns(True, True, **chained),
    }
    if not has_tool:
        session = SQLiteSession("c")
        try:
            while True:
                await Runner.run(agent(None), TURNS[0], session=session)
        except openai.BadRequestError as error:
            results["full"] = [error.code, len(await session.get_items())]
    print(json.dumps(results))


set_tracing_disabled(True)
asyncio.run(main())
