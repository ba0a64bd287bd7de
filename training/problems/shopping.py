"""Kinds of problems about what goods cost, and the change."""

from __future__ import annotations

import random

from srm.training.problems.groups import draw_money
from srm.training.problems.problem import Problem, Step, problem
from srm.training.problems.story import Ask, Story, number
from srm.training.problems.words import GOODS, article, plural

_PAYS = Ask(
    "how [much|much money|many {money}] <do> @ [pay|spend|pay in all|spend altogether|need|spend "
    "in "
    "total|have to pay]",
    "how [much|much money|many {money}] @ <pay>",
    "the total[| cost| price| amount]",
)
_COSTS = Ask(
    "[what does it cost[| in all| altogether]|how much is that[| in all| altogether]|how "
    "[much|many "
    "{money}] does [it|everything|that] cost|what is the total]",
    "how [much|many {money}] [it costs|that is|everything costs]",
    "the total[| cost| price| amount]",
)
_GETS_BACK = Ask(
    "[how many {money} <do> @ get back|how much change <do> @ get[| back]|how much <do> @ get back|"
    "how [much money|many {money}|much] <!do> @ have left|how [many {money}|much] are left|what "
    "change <do> @ get|how much change should @ get|how much is left]",
    "how much [change @ <get>|@ <get> back|@ <have> left|is left]",
    "[^ change|the change|what is left]",
)


def shopping(r: random.Random) -> Problem:
    story = Story(r)
    _draw_goods(story)
    a, c = r.randint(2, 12), r.randint(2, 12)
    b, d = (r.randint(2, 12) if r.random() < 0.6 else r.randint(13, 60) for _ in range(2))
    money, goods, others = (story.words[name] for name in ("money", "goods", "others"))
    story.numbers(a=a, b=b, c=c, d=d)
    family = r.random()
    ask = _PAYS
    if family < 0.66:
        steps: list[Step] = [
            (a, "*", b, f"The {a} {goods} cost {{}} {money}."),
            (c, "*", d, f"The {c} {others} cost {{}} {money}."),
            (a * b, "+", c * d, f"Together that is {{}} {money}."),
        ]
        facts = _fill_facts(
            story,
            (
                ("@ <buy> {a} {goods} [at|for] {pb} each", "{c} {others} [at|for] {pd} each"),
                ("@ <buy> {a} {goods} that cost {pb} each", "{c} {others} that cost {pd} each"),
                ("@ <take> {a} {goods} at {pb}", "{c} {others} at {pd}"),
                ("@ <buy> {a} {goods} for {pb} each", "@ also <buy> {c} {others} for {pd} each"),
            ),
            (
                (
                    "{a1} {good} <-cost> {pb}",
                    "{a2} {other} <-cost> {pd}",
                    "@ <buy> {a} {goods} and {c} {others}",
                ),
                (
                    "@ <buy> {a} {goods} and {c} {others}",
                    "[each|one|every] {good} <-cost> {pb}",
                    "[each|one|every] {other} <-cost> {pd}",
                ),
                (
                    "{goods} <+cost> {pb} [each|apiece]",
                    "{others} <+cost> {pd} [each|apiece]",
                    "@ <buy> {a} {goods} and {c} {others}",
                ),
            ),
        )
        if len(facts) == 3 and not facts[0].startswith("@") and r.random() < 0.35:
            facts.pop()
            ask = Ask(
                "[how [much|many {money}] do {a} {goods} and {c} {others} cost|what do {a} "
                "{goods} and {c} "
                "{others} cost|what is the price of {a} {goods} and {c} {others}]",
                "how much {a} {goods} and {c} {others} cost",
                "the [price|cost|total cost] of {a} {goods} and {c} {others}",
            )
    elif family < 0.82:
        steps = [
            (a, "*", b, f"The {a} {goods} cost {{}} {money}."),
            (a * b, "+", d, f"Together that is {{}} {money}."),
        ]
        facts = _fill_facts(
            story,
            (
                ("@ <buy> {a} {goods} [at|for] {pb} each", "[one|{a2}] {other} [at|for] {pd}"),
                ("@ <buy> {a} {goods} that cost {pb} each", "{a2} {other} that <-cost> {pd}"),
                ("@ <buy> {a2} {other} for {pd}", "{a} {goods} [at|for] {pb} each"),
            ),
            (
                (
                    "{a1} {good} <-cost> {pb}",
                    "{a2} {other} <-cost> {pd}",
                    "@ <buy> {a} {goods} and [one|{a2}] {other}",
                ),
            ),
        )
    else:
        b, d = number(r) % 1_000 + 2, number(r) % 1_000 + 2
        story.numbers(b=b, d=d)
        steps = [(b, "+", d, f"Together that is {{}} {money}.")]
        facts = _fill_facts(
            story,
            (
                ("@ <buy> {a1} {good} for {pb}", "{a2} {other} for {pd}"),
                ("@ <spend> {pb} on {a1} {good}", "{pd} on {a2} {other}"),
                ("@ <pay> {pb} for {goods}", "{pd} for {others}"),
            ),
            (("{a1} {good} <-cost> {pb}", "{a2} {other} <-cost> {pd}"),),
        )
        if not facts[0].startswith("@"):
            ask = Ask(
                "[how [much|many {money}] do they cost together|how much do both cost|what do they "
                "cost together|how much are both[| together]]",
                "how much [both cost|they cost together]",
                "the total[| cost| price]",
            )
    if ask is _PAYS and r.random() < 0.3:
        ask = _COSTS
    return problem("shopping", story.tell(facts, ask), *steps)


def change_from_a_bill(r: random.Random) -> Problem:
    story = Story(r)
    _draw_goods(story)
    bill = r.choice(
        (10, 20, 20, 50, 50, 100, 100, 200, 500, r.randint(20, 99), r.randint(100, 999))
    )
    family = r.random()
    while True:
        a, b, c = r.randint(2, 12), r.randint(2, 15), r.randint(2, 40)
        if family >= 0.78:
            c = r.randint(1, bill)
        if (family >= 0.78 or a * b < bill) and (family >= 0.5 or a * b + c < bill) and c < bill:
            break
        bill = r.choice((bill, 100, 200))
    story.numbers(a=a, b=b, d=c, e=bill)
    money, goods, other = (story.words[name] for name in ("money", "goods", "other"))
    pays = story.pick(
        "@ <pay> with {pe}",
        "@ <give> the [cashier|seller|shopkeeper] {pe}",
        "@ <pay> with a {e} {unit} [bill|note]",
        "@ <hand over> {pe}",
        "@ <have> {pe}",
        "@ <pay> {pe}",
        "@ <start> with {pe}",
    )
    left = f"Of {bill} {money} {{}} are left."
    steps: list[Step]
    if family < 0.5:
        buys = _fill_facts(
            story,
            (
                ("@ <buy> {a} {goods} [at|for] {pb} each", "[one|{a2}] {other} [for|at] {pd}"),
                ("@ <buy> {a} {goods} that cost {pb} each", "{a2} {other} that <-cost> {pd}"),
            ),
            (
                (
                    "{a1} {good} <-cost> {pb}",
                    "{a2} {other} <-cost> {pd}",
                    "@ <buy> {a} {goods} and [one|{a2}] {other}",
                ),
            ),
        )
        steps = [
            (a, "*", b, f"The {a} {goods} cost {{}} {money}."),
            (a * b, "+", c, f"With the {other} that is {{}} {money}."),
            (bill, "-", a * b + c, left),
        ]
    elif family < 0.78:
        buys = _fill_facts(
            story,
            (
                ("@ <buy> {a} {goods} [at|for] {pb} each",),
                ("@ <buy> {a} {goods} that cost {pb} each",),
            ),
            (
                ("{a1} {good} <-cost> {pb}", "@ <buy> {a} {goods}"),
                ("@ <buy> {a} {goods}", "[each|every|one] {good} <-cost> {pb}"),
            ),
        )
        steps = [
            (a, "*", b, f"The {a} {goods} cost {{}} {money}."),
            (bill, "-", a * b, left),
        ]
    else:
        buys = _fill_facts(
            story,
            (
                ("@ <buy> {a2} {other} [for|at] {pd}",),
                ("@ <spend> {pd} on {a2} {other}",),
                ("@ <buy> {a2} {other} that <-cost> {pd}",),
            ),
            (
                ("{a2} {other} <-cost> {pd}", "@ <buy> one"),
                ("@ <buy> {a2} {other}", "it <-cost> {pd}"),
            ),
        )
        steps = [(bill, "-", c, left)]
    is_first = r.random() < 0.3 or "have" in pays or "start" in pays or "had" in pays
    facts = [pays, *buys] if is_first else [*buys, pays]
    return problem("change from a bill", story.tell(facts, _GETS_BACK), *steps)


def _draw_goods(story: Story) -> None:
    """Draw two sorts of goods, and the money that they are paid with."""
    good, other = story.r.sample(GOODS, 2)
    story.words |= {"good": good, "goods": plural(good), "a1": article(good)}
    story.words |= {"other": other, "others": plural(other), "a2": article(other)}
    story.words["money"] = draw_money(story.r)
    story.words["unit"] = story.words["money"][:-1]


def _fill_facts(
    story: Story, joined: tuple[tuple[str, ...], ...], apart: tuple[tuple[str, ...], ...]
) -> list[str]:
    """Return facts: of `joined` as one, of `apart` each for itself."""
    if story.r.random() < 0.6:
        return [story.fill(" and ".join(story.r.choice(joined)))]
    return [story.fill(fact) for fact in story.r.choice(apart)]
