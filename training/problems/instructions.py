"""System messages, and the style of answer that each asks for. Without one it is equations."""

from __future__ import annotations

import random

from training.problems.problem import Style

_POLITE = ("", "", "", "", "You are a helpful assistant. ", "You solve word problems. ")
_ASKS: dict[Style, tuple[str, ...]] = {
    "prose": (
        *("Explain in words.", "Explain your answer in words.", "Explain each step in words."),
        *("Answer in words.", "Answer in whole sentences.", "Answer in prose.", "Explain."),
        *("Explain how you get there.", "Write whole sentences.", "Explain your reasoning."),
        *("Please explain the answer.", "Use sentences.", "Think step by step, in words."),
    ),
    "number": (
        *("Only the number.", "Answer with the number only.", "Give only the number."),
        *("Just the number.", "Say only the result.", "No explanation.", "Only the result."),
        *("Answer with a number and nothing else.", "Give just the answer.", "Only the answer."),
        *("Do not explain.", "Reply with only the final number."),
    ),
    "equations": (
        *("You are a helpful assistant.", "You are a helpful assistant.", "Be kind."),
        *("Answer the question.", "Solve the problem.", "You are good at arithmetic."),
        *("Show the equations.", "Write equations.", "Answer with equations."),
        *("Be brief.", "Show the steps.", "Calculate step by step."),
    ),
}
_SHARES: dict[Style, float] = {"prose": 0.27, "number": 0.1, "equations": 0.13}


def instruction(r: random.Random) -> tuple[str, Style]:
    """Draw a system message, or "", and the style of the answer to it."""
    place = r.random()
    for style, share in _SHARES.items():
        if place < share:
            polite = "" if style == "equations" else r.choice(_POLITE)
            return polite + r.choice(_ASKS[style]), style
        place -= share
    return "", "equations"
