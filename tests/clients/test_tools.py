"""Calls of tools by other people's clients: parsed, streamed, and answered."""

from __future__ import annotations

import pytest

from tests.clients.conftest import Noted, Printed
from tests.clients.test_structured import OTHER
from tests.kit.serving import Server


def test_openais_sdk_parses_calls(demo: Server, printed: Printed, noted: Noted) -> None:
    result = printed("openai_tools", demo.url)
    parsed = result["parsed"]
    assert {parsed["left"], parsed["right"]} <= {2, 3} and parsed["operator"] in "+-"
    noted("openai", "`chat.completions.parse(response_format=…)`")
    [call] = result["calls"]
    assert {call["left"], call["right"]} <= {2, 3} and call["operator"] in "+-"
    assert result["streamed"] == result["calls"]
    assert result["reasons"] == ["tool_calls", "tool_calls"]
    assert result["answer"]
    noted("openai", "`chat.completions.parse(tools=…)`, `.stream(tools=…)`")


def test_langchain_calls_bound_tools(demo: Server, printed: Printed, noted: Noted) -> None:
    result = printed("langchain_tools", demo.url)
    for method, made in result["structured"].items():
        assert {made["left"], made["right"]} <= {2, 3}
        noted("langchain-openai", f"`with_structured_output(…, method={method!r})`")
    assert result["free"] == "other"
    noted("langchain-openai", "`with_structured_output(…, method='json_mode')`", result=OTHER)
    assert result["named"] == ["add"]
    [[name, arguments]] = result["calls"]
    assert name in {"add", "subtract"} and {*arguments.values()} <= {2, 3}
    assert result["streamed"] == result["calls"]
    assert result["answer"]
    noted("langchain-openai", "`bind_tools(…)` with `invoke`, `stream`")


@pytest.mark.parametrize(
    ("package", "program"),
    [
        ("openai", ("chat_loop", "openai")),
        ("litellm", ("chat_loop", "litellm")),
        ("langchain-openai", ("langchain_loop",)),
        ("pydantic-ai-slim", ("pydantic_ai_loop",)),
        ("ai", ("ai_sdk_loop",)),
    ],
)
def test_tools_of_sets_and_open_classes_work(
    long_demo: Server,
    request: pytest.FixtureRequest,
    noted: Noted,
    package: str,
    program: tuple[str, ...],
) -> None:
    run = request.getfixturevalue("printed_by_node" if package == "ai" else "printed")
    name, *others = program
    results = run(name, long_demo.url, *others)
    assert results
    for api, made in results.items():
        assert made["counted"] > 0 and made["answer"]
        assert [person.keys() for person in made["people"]] == [{"name", "age", "hats"}] * 5
        noted(package, f"a tool that takes a set, and the answer to its result, of {api}")
        noted(package, f"an open schema, 60 tokens to the whole context, of {api}")
