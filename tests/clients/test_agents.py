"""Agents SDKs, which ask for responses by default, and LiteLLM's proxy before the server."""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients import table
from tests.clients.conftest import Noted, Printed
from tests.kit.serving import Server, free_port, wait_until

PROXY = """
model_list:
  - model_name: demo
    litellm_params: {{model: hosted_vllm/demo, api_base: "{url}/v1", api_key: none}}
router_settings: {{allowed_fails: 1, cooldown_time: 600}}
"""


def check(result: dict[str, Any], package: str, noted: Noted) -> None:
    """Of both SDKs the same is asked."""
    plain, tool, stopped, handoff = (
        result[name] for name in ("plain", "tool", "stopped", "handoff")
    )
    assert plain["answer"] == result["streamed"] and plain["answer"].endswith("#### 42")
    noted(package, "an answer", "a stream")
    called = ["tool_call_item", "tool_call_output_item"]
    assert tool["kinds"] == [*called, "message_output_item"] and tool["answer"]
    noted(package, "a tool without arguments, and the answer to its result")
    assert stopped["kinds"] == called and int(stopped["answer"]) in {4, 5, 6}
    noted(
        package,
        "a tool with arguments",
        result="works with `stop_on_first_tool`: the SDK asks for the answer with `auto`, and the "
        "tool's schema and the result do not fit into the bundled model's 512 tokens",
    )
    handed = ["handoff_call_item", "handoff_output_item", "message_output_item"]
    assert handoff["kinds"] == handed and handoff["last"] == "Helper"
    noted(package, 'a handoff, `tool_choice="required"`')


def test_openai_agents(demo: Server, printed: Printed, noted: Noted) -> None:
    check(printed("openai_agents", demo.url), "openai-agents", noted)


def test_turns_of_openai_agents(demo: Server, printed: Printed, noted: Noted) -> None:
    """Those of a session are sent whole, and others go on from what is stored."""
    result = printed("openai_sessions", demo.url)
    assert result["full"][0] == "context_length_exceeded" and result["full"][1] > 20
    assert len(result["session"]["answers"]) == 4
    for way in ("session", "streamed session", "chained", "streamed chain"):
        assert result[way]["answers"] == result["session"]["answers"]
    for way in ("chained", "streamed chain"):
        usages = result[way]["usages"]
        assert all(usages[i + 1][1] >= usages[i][0] - 1 for i in range(3))  # all is kept
    noted("openai-agents", "`SQLiteSession`, four turns", "`SQLiteSession`, four turns, streamed")
    noted("openai-agents", "`auto_previous_response_id` with `store=True`, four turns")


def test_turns_with_tools(long_demo: Server, printed: Printed, noted: Noted) -> None:
    result = printed("openai_sessions", long_demo.url, "tool")
    for made in result.values():
        assert made["kinds"] == ["tool_call_item", "tool_call_output_item", "message_output_item"]
        assert len(made["usages"]) == 8 and all(made["answers"])
    noted(
        "openai-agents", "`SQLiteSession`, four turns with a tool each, a context of 4,096 tokens"
    )
    noted("openai-agents", "`auto_previous_response_id`, four turns with a tool each, the same")


def test_openai_agents_of_node(demo: Server, printed_by_node: Printed, noted: Noted) -> None:
    check(printed_by_node("agents_sdk", demo.url), "@openai/agents", noted)


@pytest.fixture
def proxy(demo: Server, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """LiteLLM's proxy before the server: its URL, and its key."""
    key, port = f"sk-{secrets.token_hex(32)}", free_port()
    (tmp_path / "proxy.yaml").write_text(PROXY.format(url=demo.url))
    url = f"http://127.0.0.1:{port}"
    with (tmp_path / "proxy.log").open("w") as log:
        process = subprocess.Popen(
            [
                *(str(table.AGENTS / "bin" / "litellm"), "--config", "proxy.yaml"),
                *("--host", "127.0.0.1", "--port", str(port), "--telemetry", "False"),
            ],
            cwd=tmp_path,
            env=os.environ
            | {"LITELLM_MASTER_KEY": key, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONPATH": ""},
            stdout=log,
            stderr=log,
        )

    def is_up() -> bool:
        assert process.poll() is None, (tmp_path / "proxy.log").read_text()[-3_000:]
        try:
            return httpx.get(f"{url}/health/liveliness", timeout=5).is_success
        except httpx.TransportError:
            return False

    try:
        wait_until(is_up, within_s=300)
        yield url, key
    finally:
        process.terminate()
        process.wait(60)


def test_litellms_proxy(proxy: tuple[str, str], printed: Printed, noted: Noted) -> None:
    result = printed("proxy_routes", *proxy)
    assert result["refused"] == 3
    for route, answer in result["answers"].items():
        assert answer.endswith("#### 42")
        noted("litellm", f"the proxy, {route}")
    noted("litellm", "the proxy, chats behind refused responses", result="works: no cooldown")
