"""Kinds of problems with one or two steps, each in several wordings."""

from __future__ import annotations

import random

from srm.training.problems.problem import Problem, problem
from srm.training.problems.words import HOLDERS, does, name, pronoun, thing

_SIGNS = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}


def number(r: random.Random) -> int:
    """Draw a number: often below a hundred, often in the hundreds."""
    return r.randint(2, 99) if r.random() < 0.6 else r.randint(100, 600)


def gain(r: random.Random) -> Problem:
    who, what, a, b = name(r), thing(r), number(r), number(r)
    verb = r.choice(["buys", "finds", "wins", "is given", "gets", "collects"])
    asked = does(r.choice([who, pronoun(r)]))
    question = r.choice(
        [
            f"{who} has {a} {what} and {verb} {b} more. How many {what} {asked} have now?",
            f"{who} has {a} {what}. Then {who} {verb} {b} more. "
            f"How many {what} {asked} have in all?",
            f"{who} had {a} {what} and then {verb} {b} more {what}. "
            f"How many {what} {asked} have altogether?",
            f"{who} {verb} {b} {what} and had {a} before. How many {what} are there now?",
            f"There are {a} {what} on a table and {b} on another one. "
            f"How many {what} are there on both?",
            f"If {who} has {a} {what} and {verb} {b} more, how many {what} {asked} have?",
        ]
    )
    sentence = r.choice([f"Together there are {{}} {what}.", f"With {b} more that is {{}} {what}."])
    return problem("gain", question, (a, "+", b, sentence))


def loss(r: random.Random) -> Problem:
    who, what, a = name(r), thing(r), number(r) + 8
    b = r.randint(2, a - 1)
    verb = r.choice(["sells", "loses", "gives away", "breaks", "uses", "throws away"])
    asked = does(r.choice([who, pronoun(r)]))
    question = r.choice(
        [
            f"{who} has {a} {what} and {verb} {b} of them. How many {what} are left?",
            f"{who} has {a} {what} and {verb} {b}. How many {what} are left?",
            f"{who} has {a} {what} and {verb} {b} of them. How many {what} {asked} have now?",
            f"There were {a} {what}. {who} {verb} {b} of them. How many remain?",
            f"Of {a} {what}, {who} {verb} {b}. How many {what} {asked} still have?",
            f"If {who} has {a} {what} and {verb} {b}, how many {what} {asked} have left?",
        ]
    )
    sentence = r.choice(
        [
            f"Without the {b} that are gone {{}} {what} are left.",
            f"{b} of the {a} are gone, so {{}} {what} are left.",
        ]
    )
    return problem("loss", question, (a, "-", b, sentence))


def groups(r: random.Random) -> Problem:
    who, what, holder = name(r), thing(r), r.choice(HOLDERS)
    a, b = r.randint(2, 12), r.randint(2, 25) if r.random() < 0.6 else r.randint(26, 99)
    asked = does(r.choice([who, pronoun(r)]))
    question = r.choice(
        [
            f"{who} has {a} {holder} with {b} {what} each. How many {what} is that in all?",
            f"{who} has {a} {holder} of {b} {what}. How many {what} {asked} have?",
            f"There are {a} {holder} with {b} {what} in each. How many {what} are there in all?",
            f"Each of the {a} {holder} holds {b} {what}. How many {what} are there?",
            f"{who} puts {b} {what} into each of {a} {holder}. "
            f"How many {what} {asked} need altogether?",
            f"If {who} has {a} {holder} with {b} {what} each, how many {what} {asked} have?",
        ]
    )
    sentence = f"Each of the {a} {holder} holds {b} {what}, so {who} has {{}} {what}."
    return problem("groups", question, (a, "*", b, sentence))


def groups_then_change(r: random.Random) -> Problem:
    who, what, holder = name(r), thing(r), r.choice(HOLDERS)
    a, b = r.randint(2, 12), r.randint(2, 20)
    asked = does(r.choice([who, pronoun(r)]))
    if r.random() < 0.5:
        c, sign = r.randint(1, a * b - 1), "-"
        change = f"{r.choice(['gives away', 'sells', 'loses', 'uses'])} {c} of them"
        then = f"Without {c} of them {{}} {what} are left."
    else:
        c, sign = number(r), "+"
        change = f"{r.choice(['buys', 'finds', 'gets', 'wins'])} {c} more"
        then = f"With {c} more {who} has {{}} {what}."
    question = r.choice(
        [
            f"{who} has {a} {holder} with {b} {what} each and {change}. "
            f"How many {what} {asked} have now?",
            f"{who} has {a} {holder} of {b} {what}. Then {who} {change}. "
            f"How many {what} {asked} have?",
            f"There are {a} {holder} with {b} {what} in each. {who} {change}. "
            f"How many {what} are there now?",
            f"{who} owns {a} {holder}, each of which holds {b} {what}, and {change}. "
            f"How many {what} {asked} have in the end?",
        ]
    )
    first = f"In {a} {holder} with {b} {what} each there are {{}} {what}."
    return problem("groups then change", question, (a, "*", b, first), (a * b, sign, c, then))


def plain(r: random.Random) -> Problem:
    """A calculation without a story."""
    sign = r.choice("+-*/")
    a, b = number(r), number(r)
    if sign == "-":
        a, b = max(a, b), min(a, b)
    elif sign == "*":
        a, b = r.sample([r.randint(2, 12), r.randint(2, 99)], 2)
    elif sign == "/":
        b = r.randint(2, 12)
        a = b * r.randint(2, 40)
    written = r.choice([f"{a} {sign} {b}", f"{a} {sign} {b}", f"{a} {_SIGNS[sign]} {b}"])
    question = r.choice(
        [
            f"What is {written}?",
            f"What is {written}?",
            f"How much is {written}?",
            f"Calculate {written}.",
            f"{written} = ?",
        ]
    )
    sentence = r.choice(["We compute {}.", "That is {}."])
    return problem("plain", question, (a, sign, b, sentence))
