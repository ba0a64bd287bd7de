"""Values of arithmetic expressions that samples write, for rules of `verify`; exact, and no code.

An expression has whole numbers, + - * / and brackets. It is read only after its numbers were found
to be those that it must use, so its work is bounded by the rule and not by who wrote it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

_TOKEN = re.compile(r"[0-9]+|\S")
_RANKS = {"+": 1, "-": 1, "*": 2, "/": 2}
MAX_TOKENS = 8
"""Most tokens of an expression for each of its numbers: brackets around one may be many."""


def evaluate(text: str, using: Sequence[int]) -> Fraction | None:
    """Return the value of an expression that uses each of the numbers exactly once; None for a text
    that is none, and for a division by 0."""
    tokens: list[str] = _TOKEN.findall(text)
    if len(tokens) > MAX_TOKENS * len(using):
        return None
    numbers = [token for token in tokens if _is_number(token)]
    if sorted(numbers) != sorted(map(str, using)):
        return None
    return _value(tokens)


def _is_number(token: str) -> bool:
    return token.isascii() and token.isdigit()


def _value(tokens: list[str]) -> Fraction | None:
    """Return the value of tokens: two stacks, so that no depth of brackets is too much."""
    values: list[Fraction] = []
    waiting: list[str] = []  # signs and open brackets whose right side is still being read

    def apply(rank: int) -> None:
        while waiting and _RANKS.get(waiting[-1], 0) >= rank:
            right, left = values.pop(), values.pop()
            values.append(_combined(left, waiting.pop(), right))

    wants_operand = True
    try:
        for token in tokens:
            if wants_operand and token == "(":
                waiting.append(token)
            elif wants_operand and _is_number(token):
                values.append(Fraction(int(token)))
                wants_operand = False
            elif not wants_operand and token in _RANKS:
                apply(_RANKS[token])
                waiting.append(token)
                wants_operand = True
            elif not wants_operand and token == ")":
                apply(1)
                if not waiting:
                    return None
                waiting.pop()
            else:
                return None
        if wants_operand:
            return None
        apply(1)
    except ZeroDivisionError:
        return None
    return None if waiting else values[0]


def _combined(left: Fraction, sign: str, right: Fraction) -> Fraction:
    if sign == "+":
        return left + right
    if sign == "-":
        return left - right
    return left * right if sign == "*" else left / right
