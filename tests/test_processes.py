"""docs/processes.md knows every place that begins a task or a thread, and names tests that are."""

from __future__ import annotations

import ast
import re

import pytest

from tests.kit.serving import ROOT

PAGE = (ROOT / "docs" / "processes.md").read_text()
BEGIN = {
    *("create_task", "ensure_future", "run_coroutine_threadsafe", "beside", "call_later"),
    *("call_at", "Thread", "Timer", "ThreadPoolExecutor", "ProcessPoolExecutor", "Popen"),
    "create_subprocess_exec",
}
"""Calls that begin what goes on by itself."""
ELSEWHERE = {
    "srm/tasks.py",  # the words themselves
    "engine/device/precompile.py",  # compiles, and ends
}
SOURCES = [
    path for top in ("engine", "server", "deploy/ray") for path in (ROOT / top).rglob("*.py")
]
SOURCES += (ROOT / "srm").glob("*.py")


def begins(tree: ast.AST) -> set[str]:
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    names = (getattr(call, "attr", getattr(call, "id", "")) for call in calls)
    return BEGIN.intersection(names)


def test_every_place_that_begins_a_task_is_on_the_page() -> None:
    members = {
        str(path.relative_to(ROOT)) for path in SOURCES if begins(ast.parse(path.read_text()))
    }
    missing = {path for path in members - ELSEWHERE if f"`{path}`" not in PAGE}
    assert not missing, "say in docs/processes.md what becomes of its tasks"


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(tests/[^`]+)`", PAGE))))
def test_every_test_that_the_page_names_is_there(name: str) -> None:
    path, _, function = name.partition("::")
    assert f"def {function}(" in (ROOT / path).read_text() if function else (ROOT / path).exists()
