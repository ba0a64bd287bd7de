"""instructor: a class from each of its modes for OpenAI; prints JSON. Argument: the URL."""

import json
import sys
from typing import Literal

import instructor
import openai
from instructor.core.exceptions import InstructorRetryException
from pydantic import BaseModel


class Step(BaseModel, extra="forbid"):
    """Two numbers."""

    left: Literal[2, 3]
    right: Literal[2, 3]


def make(mode: instructor.Mode) -> object:
    client = instructor.from_openai(
        openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none"), mode=mode
    )
    try:
        return client.create(
            model="demo",
            messages=[{"role": "user", "content": "How many are 2 hats and 3 hats?"}],
            response_model=Step,
            temperature=0,
            max_tokens=64,
            max_retries=0,
        ).model_dump()
    except InstructorRetryException:
        return "other"


modes = [instructor.Mode[name] for name in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "JSON")]
print(json.dumps({f"`create(response_model=…)`, {mode.name}": make(mode) for mode in modes}))
