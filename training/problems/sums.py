"""Calculations without a story, of one step or two."""

from __future__ import annotations

import random

from srm.training.problems.patterns import fill
from srm.training.problems.problem import Problem, Step, problem
from srm.training.problems.story import dress, number, written

_SIGNS = {
    "+": ("+", "+", "+", "plus"),
    "-": ("-", "-", "-", "–", "minus"),
    "*": ("*", "*", "*", "x", "×", "times"),
    "/": ("/", "/", "/", "÷", "divided by"),
}
_ASKED = (
    "[What is {sum}?|What is {sum}?|What is {sum}?|How much is {sum}?|Calculate {sum}.|{sum} = "
    "?|{sum}|"
    "{sum} =|{sum}?|Compute {sum}.|Work out {sum}.|What's {sum}?|What does {sum} make?|Solve "
    "{sum}.|"
    "What do you get for {sum}?|Evaluate {sum}.|Tell me what {sum} is.|Find {sum}.|{sum} equals "
    "what?|"
    "What does {sum} equal?|Can you [calculate|work out|compute] {sum}?|How much does {sum} make?|"
    "Please [calculate|compute] {sum}.|what is {sum}|whats {sum}|{sum}=|The result of {sum}?|"
    "What is the [result|answer|value] of {sum}?|Do you know what {sum} is?|Give me {sum}.]"
)
_IN_WORDS = {
    "+": "[Add {a} and {b}.|Add {b} to {a}.|What is the sum of {a} and {b}?|"
    "Find the sum of {a} and {b}.|"
    "What do you get [if|when] you add {a} and {b}?|What is {b} more than {a}?|What is the total "
    "of {a} "
    "and {b}?|How much are {a} and {b} [together|in all]?|[What|Which] number is {b} more than "
    "{a}?|"
    "Increase {a} by {b}.|I think of {a} and add {b}. What do I get?|What's {a} and {b}?]",
    "-": "[Subtract {b} from {a}.|"
    "Take {b} away from {a}.|What is the difference between {a} and {b}?|"
    "What is {b} less than {a}?|What do you get [if|when] you [subtract|take] {b} from {a}?|Take "
    "{b} from "
    "{a}.|[What|Which] number is {b} less than {a}?|What is left if you take {b} [away |]from "
    "{a}?|Decrease {a} by {b}.|"
    "How much more is {a} than {b}?|Find the difference of {a} and {b}.|What must be added to "
    "{b} to get {a}?]",
    "*": "[Multiply {a} by {b}.|Multiply {a} and {b}.|What is the product of {a} and {b}?|"
    "Find the product "
    "of {a} and {b}.|What do you get [if|when] you multiply {a} by {b}?|How much are {a} times "
    "{b}?|"
    "What is {a} multiplied by {b}?|What are {a} groups of {b}?]",
    "/": "[Divide {a} by {b}.|What do you get [if|when] you divide {a} by {b}?|"
    "How many times does {b} go "
    "into {a}?|How many times does {b} fit into {a}?|What is {a} over {b}?|Find the quotient of "
    "{a} and "
    "{b}.|How often does {b} go into {a}?|Split {a} into {b} equal parts. How [big|large] is "
    "each?]",
}


def plain(r: random.Random) -> Problem:
    """A calculation without a story."""
    if r.random() < 0.22:
        return _two_steps(r)
    sign = r.choice("++--**/")
    a, b = _operands(r, sign)
    words = {"a": written(r, a), "b": written(r, b)}
    place = r.random()
    if place < 0.22:
        text = fill(r, _IN_WORDS[sign], words)
    elif place < 0.27 and sign in "*/":
        text, a, b = _of_two(r, sign, a)
    else:
        text = fill(r, _ASKED, {"sum": _written(r, words["a"], sign, words["b"])})
    return problem(
        "plain", dress(r, text), (a, sign, b, r.choice(("We compute {}.", "That is {}.")))
    )


def _operands(r: random.Random, sign: str) -> tuple[int, int]:
    if sign in "+-":
        a, b = number(r, 0), number(r, 0)
        if r.random() < 0.08:
            a, b = r.choice((100, 1_000, 10, 50, 200, 500)), r.randint(0, 10)
        if r.random() < 0.15:
            a, b = r.randint(0, 9), r.randint(0, 9)
        return (a, b) if sign == "+" else (max(a, b), min(a, b))
    if sign == "*":
        place = r.random()
        if place < 0.45:
            return r.randint(0, 12), r.randint(0, 12)
        if place < 0.65:
            a, b = r.sample([r.randint(2, 12), r.randint(10, 99)], 2)
            return a, b
        if place < 0.8:
            a, b = r.sample([r.randint(2, 9), r.randint(100, 999)], 2)
            return a, b
        return r.randint(11, 99), r.randint(11, 99)
    b = r.randint(1, 12)
    return b * (r.randint(1, 12) if r.random() < 0.5 else r.randint(2, 99)), b


def _written(r: random.Random, a: str, sign: str, b: str) -> str:
    drawn = r.choice(_SIGNS[sign])
    between = (
        "" if len(drawn) == 1 and a[0].isdigit() and b[0].isdigit() and r.random() < 0.25 else " "
    )
    return f"{a}{between}{drawn}{between}{b}"


def _of_two(r: random.Random, sign: str, a: int) -> tuple[str, int, int]:
    """Return a question about a double or a half, and the operands."""
    if sign == "*":
        text = r.choice(
            ("What is double {}?", "Double {}.", "What is twice {}?", "How much is two times {}?")
        )
        return text.format(a), a, 2
    text = r.choice(
        ("What is half of {}?", "What is one half of {}?", "How much is half of {}?", "Halve {}.")
    )
    return text.replace("one half", "a half").format(2 * a), 2 * a, 2


def _two_steps(r: random.Random) -> Problem:
    """A sum of three numbers, or a product and a sum, whose product is computed first."""
    place = r.random()
    sign = r.choice("+-")
    if place < 0.55:
        a, b = r.randint(2, 12), r.randint(2, 12) if r.random() < 0.6 else r.randint(10, 40)
        c = r.randint(1, 9) if r.random() < 0.4 else r.randint(10, 99)
        c = min(c, a * b) if sign == "-" else c
        first: Step = (a, "*", b, "First {}.")
        second: Step = (a * b, sign, c, "So that is {}.")
        text = f"{_written(r, str(a), '*', str(b))} {sign} {c}"
        if sign == "+" and r.random() < 0.25:
            text = f"{c} + {_written(r, str(a), '*', str(b))}"
            second = (c, "+", a * b, "So that is {}.")
    else:
        a, b, c = (number(r) % 1_000 + 1 for _ in range(3))
        if r.random() < 0.4:
            a, b, c = (r.randint(1, 20) for _ in range(3))
        c = min(c, a + b) if sign == "-" else c
        first, second = (a, "+", b, "First {}."), (a + b, sign, c, "So that is {}.")
        between = "" if r.random() < 0.2 else " "
        text = f"{a}{between}+{between}{b}{between}{sign}{between}{c}"
        if r.random() < 0.15 and sign == "+":
            drawn = r.choice(("Add {}, {} and {}.", "What is the sum of {}, {} and {}?"))
            return problem("plain", dress(r, drawn.format(a, b, c)), first, second)
    return problem("plain", dress(r, fill(r, _ASKED, {"sum": text})), first, second)
