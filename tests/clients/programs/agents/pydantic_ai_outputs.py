"""pydantic-ai: a class as output in each of its modes, of chats and responses; prints JSON.

Argument: the URL.
"""

import json
import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, ModelSettings, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.exceptions import UnexpectedModelBehavior
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Step(BaseModel):
    """Two numbers."""

    left: Literal[2, 3]
    right: Literal[2, 3]


provider = OpenAIProvider(base_url=f"{sys.argv[1]}/v1", api_key="none")
settings = ModelSettings(temperature=0, max_tokens=64)
results: dict[str, object] = {}
for api in (OpenAIChatModel, OpenAIResponsesModel):
    for kind in (ToolOutput, NativeOutput, PromptedOutput):
        agent = Agent(
            api("demo", provider=provider),
            output_type=kind(Step),
            model_settings=settings,
            retries=0,
        )
        called = f"`Agent({api.__name__}(…), output_type={kind.__name__}(…))`"
        try:
            made = agent.run_sync("How many are 2 hats and 3 hats?").output
            results[called] = made.model_dump()
        except UnexpectedModelBehavior:
            results[called] = "other"
print(json.dumps(results))
