"""Kinds of problems with two to four steps, each in several wordings."""

from __future__ import annotations

import random

from srm.training.problems.problem import Problem, problem
from srm.training.problems.words import GOODS, HOLDERS, does, name, names, pronoun, thing


def shopping(r: random.Random) -> Problem:
    who, good, other = name(r), *r.sample(GOODS, 2)
    a, b, c, d = (r.randint(2, 12) for _ in range(4))
    if r.random() < 0.5:
        b = r.randint(13, 40)
    asked = does(r.choice([who, pronoun(r)]))
    question = r.choice(
        [
            f"{who} buys {a} {good}s at {b} dollars each and {c} {other}s at {d} dollars each. "
            f"How many dollars {asked} pay?",
            f"{who} buys {a} {good}s for {b} dollars each and {c} {other}s for {d} dollars each. "
            f"How much {asked} spend?",
            f"{who} buys {a} {good}s that cost {b} dollars each, and {c} {other}s that cost {d} "
            f"dollars each. What does it cost in all?",
            f"In a shop {who} takes {a} {good}s at {b} dollars and {c} {other}s at {d} dollars. "
            f"How many dollars {asked} pay altogether?",
        ]
    )
    steps = (
        (a, "*", b, f"The {a} {good}s cost {{}} dollars."),
        (c, "*", d, f"The {c} {other}s cost {{}} dollars."),
        (a * b, "+", c * d, f"Together {who} pays {{}} dollars."),
    )
    return problem("shopping", question, *steps)


def change_from_a_bill(r: random.Random) -> Problem:
    who, good, other = name(r), *r.sample(GOODS, 2)
    bill = r.choice([50, 100, 200, 500])
    while True:
        a, b, c = r.randint(2, 12), r.randint(2, 15), r.randint(2, 40)
        if a * b + c < bill:
            break
    asked = does(r.choice([who, pronoun(r)]))
    question = r.choice(
        [
            f"{who} buys {a} {good}s at {b} dollars each and one {other} for {c} dollars, "
            f"and pays with {bill} dollars. How many dollars {asked} get back?",
            f"{who} buys {a} {good}s for {b} dollars each and a {other} for {c} dollars, "
            f"and gives the cashier {bill} dollars. How much change {asked} get?",
            f"{who} has {bill} dollars and buys {a} {good}s at {b} dollars each and one {other} "
            f"for {c} dollars. How many dollars {asked} have left?",
            f"A {good} costs {b} dollars and a {other} costs {c} dollars. With {bill} dollars "
            f"{who} buys {a} {good}s and one {other}. How many dollars are left?",
        ]
    )
    steps = (
        (a, "*", b, f"The {a} {good}s cost {{}} dollars."),
        (a * b, "+", c, f"With the {other} that is {{}} dollars."),
        (bill, "-", a * b + c, f"Of {bill} dollars {{}} are left."),
    )
    return problem("change from a bill", question, *steps)


def times_as_many(r: random.Random) -> Problem:
    who, other = names(r, 2)
    what, a, k = thing(r), r.randint(2, 60), r.randint(2, 9)
    question = r.choice(
        [
            f"{who} has {a} {what}. {other} has {k} times as many. "
            f"How many {what} do they have together?",
            f"{who} has {a} {what} and {other} has {k} times as many as {who}. "
            f"How many {what} do they have in all?",
            f"{who} has {a} {what}, and {other} has {k} times that. "
            f"How many {what} do the two have together?",
            f"{other} has {k} times as many {what} as {who}, who has {a}. "
            f"How many {what} do both have?",
        ]
    )
    steps = (
        (a, "*", k, f"{other} has {{}} {what}."),
        (a, "+", a * k, f"Together they have {{}} {what}."),
    )
    return problem("times as many", question, *steps)


def three_friends(r: random.Random) -> Problem:
    first, second, third = names(r, 3)
    what, a, b = thing(r), r.randint(5, 90), r.randint(2, 60)
    c = r.randint(1, a + b - 1)
    question = r.choice(
        [
            f"{first} has {a} {what}. {second} has {b} more than {first}. "
            f"{third} has {c} fewer than {second}. How many {what} do the three have together?",
            f"{first} has {a} {what}, {second} has {b} more than {first}, and {third} has {c} "
            f"fewer than {second}. How many {what} do they have in all?",
            f"{first} finds {a} {what}. {second} finds {b} more than that, and {third} {c} "
            f"fewer than {second}. How many {what} do they find together?",
            f"There are three friends. {first} has {a} {what}. {second} has {b} more. {third} has "
            f"{c} fewer than {second}. How many {what} is that altogether?",
        ]
    )
    more, fewer = a + b, a + b - c
    steps = (
        (a, "+", b, f"{second} has {{}} {what}."),
        (more, "-", c, f"{third} has {{}} {what}."),
        (a, "+", more, f"{first} and {second} have {{}} {what}."),
        (a + more, "+", fewer, f"All three have {{}} {what}."),
    )
    return problem("three friends", question, *steps)


def shared(r: random.Random) -> Problem:
    who, what, holder = name(r), thing(r), r.choice(HOLDERS)
    while True:
        a, b, c, d = (r.randint(2, 12) for _ in range(4))
        b = r.randint(2, 20)
        total = a * b + c
        if total % d == 0:
            break
    people = r.choice(["friends", "children", "neighbours"])
    one = {"friends": "friend", "children": "child", "neighbours": "neighbour"}[people]
    question = r.choice(
        [
            f"{who} has {a} {holder} with {b} {what} each and {c} more {what}. "
            f"{who} shares them equally among {d} {people}. "
            f"How many {what} does each {one} get?",
            f"{who} has {a} {holder} of {b} {what} and {c} single ones, and shares all equally "
            f"among {d} {people}. How many {what} does each get?",
            f"There are {a} {holder} with {b} {what} in each, and {c} more {what}. They are shared "
            f"equally by {d} {people}. How many {what} does every {one} get?",
            f"{who} divides {a} {holder} with {b} {what} each and {c} more equally between {d} "
            f"{people}. How many {what} are there for each of them?",
        ]
    )
    steps = (
        (a, "*", b, f"In the {holder} there are {{}} {what}."),
        (a * b, "+", c, f"With {c} more that is {{}} {what}."),
        (total, "/", d, f"Each of the {d} {people} gets {{}} {what}."),
    )
    return problem("shared", question, *steps)
