"""Calls of tools by other people's clients: parsed, streamed, and answered."""

from __future__ import annotations

from tests.clients.conftest import Printed
from tests.serving import Server


def test_openais_sdk_parses_calls(demo: Server, printed: Printed) -> None:
    result = printed("openai_tools", demo.url)
    [call] = result["calls"]
    assert {call["left"], call["right"]} <= {2, 3} and call["operator"] in "+-"
    assert result["streamed"] == result["calls"]
    assert result["reasons"] == ["tool_calls", "tool_calls"]
    assert result["answer"]


def test_langchain_calls_bound_tools(demo: Server, printed: Printed) -> None:
    result = printed("langchain_tools", demo.url)
    assert result["structured"].keys() == {"left", "right"}
    assert result["named"] == ["add"]
    [[name, arguments]] = result["calls"]
    assert name in {"add", "subtract"} and {*arguments.values()} <= {2, 3}
    assert result["streamed"] == result["calls"]
    assert result["answer"]
