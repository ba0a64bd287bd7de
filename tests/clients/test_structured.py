"""Structured outputs: each client makes its own type of what the server sends."""

from __future__ import annotations

import pytest

from tests.clients.conftest import Noted, Printed
from tests.kit.serving import Server

OTHER = (
    "answered, but with JSON of no such class: the mode puts the schema into the prompt "
    "alone, and the bundled model was not trained to read one; use another mode"
)


@pytest.mark.parametrize(
    ("package", "program", "calls", "other"),
    [
        ("instructor", "instructor_modes", 4, ", JSON"),
        ("pydantic-ai-slim", "pydantic_ai_outputs", 6, "PromptedOutput(…))`"),
        ("litellm", "litellm_formats", 4, None),
        ("dspy", "dspy_predict", 2, None),
        ("inspect-ai", "inspect_eval", 2, None),
    ],
)
def test_values_are_those_of_the_schema(
    demo: Server,
    printed: Printed,
    noted: Noted,
    package: str,
    program: str,
    calls: int,
    other: str | None,
) -> None:
    results = printed(program, demo.url)
    assert len(results) == calls
    for called, made in results.items():
        if other and called.endswith(other):
            assert made == "other"
            noted(package, called, result=OTHER)
        else:
            assert "left" in made and {*made.values()} <= {2, 3}
            noted(package, called)


def test_the_ai_sdk(demo: Server, printed_by_node: Printed, noted: Noted) -> None:
    result = printed_by_node("ai_sdk", demo.url)
    assert result["whole"] == result["streamed"] and result["whole"].endswith("#### 42")
    noted("@ai-sdk/openai", "`createOpenAI()(model)` with `generateText`, `streamText`")
    for called, made in result["objects"].items():
        assert made.keys() == {"left", "right"} and {*made.values()} <= {2, 3}
        noted("ai", called)
    assert result["added"] in {4, 5, 6}
