"""A problem solved with a calculator: a call for each step, in the words of the chat template."""

from __future__ import annotations

import random

from srm.training.problems.problem import Problem, Turn, prompt

_NAMES = ("calculator",) * 6 + ("calculate", "calc", "compute", "evaluate")
_FIELDS = ("expression",) * 6 + ("expr", "formula", "input", "query")


def draw_tool(r: random.Random) -> str:
    """Return a tool as a prompt shows it, such as calculator(expression)."""
    return f"{r.choice(_NAMES)}({r.choice(_FIELDS)})"


def call_tool(problem: Problem, system: str, tool: str) -> list[Turn]:
    """Return the turns in which that tool solves the problem: its question and each result are
    prompts, each step but its result is a call, and the last reply is the answer alone."""
    name, _, field = tool.rstrip(")").partition("(")
    prompts = [prompt(problem.question, system, tool)]
    replies = []
    for step in problem.steps:
        expression, _, result = step.partition(" = ")
        replies.append(f'{{"name":"{name}","arguments":{{"{field}":"{expression}"}}}}')
        prompts.append(f"Result: {result}\nAnswer:")
    replies.append(f" #### {problem.answer}")
    return list(zip(prompts, replies, strict=True))
