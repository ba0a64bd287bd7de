"""dspy: a signature with a typed answer, by both adapters; prints JSON. Argument: the URL.

dspy asks for a schema only where it knows that a model keeps to one: it is told so here.
"""

# mypy: disable-error-code="misc"

import json
import sys
from typing import Literal

import dspy
from dspy.lm15 import (
    AccessPolicy,
    EndpointSupport,
    ModelSupport,
    OpenAIChatCompat,
    ProviderDefinition,
    register_provider,
)


class Step(dspy.Signature):
    """Add."""

    question: str = dspy.InputField()
    left: Literal[2, 3] = dspy.OutputField()


access = AccessPolicy(
    provider="srm",
    supports=EndpointSupport(complete=True),
    auth_modes=("bearer",),
    base_url=f"{sys.argv[1]}/v1",
)
register_provider(
    ProviderDefinition.chat(access, compat=OpenAIChatCompat.preset("vllm")),
    supports=ModelSupport(response_schema=True),
)
model = dspy.LM(
    "srm/demo", api_base=access.base_url, api_key="none", temperature=0, max_tokens=64, cache=False
)
results = {}
for adapter in (dspy.JSONAdapter(), dspy.ChatAdapter()):
    with dspy.context(lm=model, adapter=adapter):
        made = dspy.Predict(Step)(question="2+3?")
    results[f"`Predict(…)`, {type(adapter).__name__}"] = {"left": made.left}
print(json.dumps(results))
