"""inspect-ai: an evaluation with a schema, and one with a tool; prints JSON. Argument: the URL."""

import json
import sys
from typing import Literal

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, ResponseSchema, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import ToolDef
from inspect_ai.util import json_schema
from pydantic import BaseModel


class Step(BaseModel):
    """Two numbers."""

    left: Literal[2, 3]
    right: Literal[2, 3]


async def add(left: Literal[2, 3], right: Literal[2, 3]) -> str:
    """Add two numbers."""
    return str(left + right)


tool = ToolDef(add, parameters={"left": "A number.", "right": "A number."}).as_tool()
schema = ResponseSchema(name="step", json_schema=json_schema(Step))
tasks = [
    Task(
        [Sample(input="How many are 2 hats and 3 hats?", target="2")],
        solver=solver,
        scorer=includes(),
        config=GenerateConfig(temperature=0, max_tokens=64, response_schema=wanted),
    )
    for solver, wanted in (
        ([generate()], schema),
        ([use_tools(tool, tool_choice="any"), generate("single")], None),
    )
]
model = get_model("openai-api/srm/demo", base_url=f"{sys.argv[1]}/v1", api_key="none")
first, second = eval(tasks, model=model, display="none", log_dir="logs", score=False)
for log in (first, second):
    assert log.status == "success" and log.samples, log.error
[call] = second.samples[0].messages[1].tool_calls
results = {
    "`GenerateConfig(response_schema=…)`": Step.model_validate_json(
        first.samples[0].output.completion
    ).model_dump(),
    '`use_tools(…, tool_choice="any")`': call.arguments,
}
assert second.samples[0].messages[2].text == str(sum(call.arguments.values()))
print(json.dumps(results))
