"""Kinds of problems about equal groups: boxes of things, rates, prices, parts."""

from __future__ import annotations

import random

from srm.training.problems.problem import Problem, problem
from srm.training.problems.story import Ask, Story, factors
from srm.training.problems.words import (
    ACTIVITIES,
    GOODS,
    HOLDERS,
    MOVERS,
    PARTS,
    PEOPLE,
    TIMES,
    article,
    plural,
)


def groups(r: random.Random) -> Problem:
    story, (a, b) = Story(r), factors(r)
    fact, ask, what = draw_groups(story, a, b)
    if r.random() < 0.3:
        sentence = f"There are {a} times {b}, so that is {{}} {what}."
    else:
        sentence = f"{a} with {b} each are {{}} {what}."
    return problem("groups", story.tell([fact], ask), (a, "*", b, sentence))


def draw_groups(story: Story, a: int, b: int, is_owned: bool = False) -> tuple[str, Ask, str]:
    """Return a fact of so many groups, the question how many that is, and what is counted.

    With `is_owned` it is things that somebody has, or makes for a while.
    """
    r = story.r
    story.number("a", a)
    story.number("b", b)
    what = story.draw_thing()
    story.words["holders"] = r.choice(HOLDERS)
    story.words["holder"] = _singular(story.words["holders"])
    family = r.random() * (0.55 if is_owned else 1)
    ask = Ask(
        "how many {what}[ are there[| in all| altogether| in total]| is that[| in all]| <do> @ "
        "have[| in all| altogether| in total]]",
        "how many {what} [there are|there are in all|@ <have>|@ <have> in all]",
        "the total number of {what}",
    )
    if family < 0.4:
        fact = story.pick(
            "@ <have> {a} {holders} [with|of] {b} {what}[| each]",
            "@ <have> {a} {holders} with {b} {what} in each[| one| of them]",
            "there <+be> {a} {holders} with {b} {what}[ each| in each]",
            "[each of|in each of] the {a} {holders} there <+be> {b} {what}",
            "each of [the |^ |]{a} {holders} <-hold> {b} {what}",
            "@ <put> {b} {what} into each of {a} {holders}",
            "@ <have> {a} {holders}, and each[| {holder}| one| of them] <-hold> {b} {what}",
            "@ <buy> {a} {holders} of {b} {what}[| each]",
            "one {holder} <-hold> {b} {what} and @ <have> {a} {holders}",
            "@ <have> {a} {holders}. [Every|Each] {holder} <-have> {b} {what}",
            "there <+be> {b} {what} in [each|every|a] {holder} and there <+be> {a} {holders}",
            "@ <fill> {a} {holders} with {b} {what} each",
            "@ <have> {a} {holders} that [each contain {b} {what}|contain {b} {what} each]",
            "{a} {holders} [hold {b} {what} each|each hold {b} {what}]",
        )
    elif family < 0.6:
        verb, noun = r.choice(ACTIVITIES)
        what = story.words["what"] = story.pick(noun)
        story.words |= {"verb": verb, "time": r.choice(TIMES)}
        story.words["an"] = article(story.words["time"])
        story.words["rate"] = story.fill("{b} {what} [{an}|each|every|per] {time}")
        fact = story.fill("@ <verb> {rate} for {a} {time}s")
        if not is_owned and r.random() < 0.6:
            fact = story.pick(
                "@ <verb> {rate}", "@ <verb> {rate}", "[each|every] {time} @ <verb> {b} {what}"
            )
        ask = Ask(
            "how many {what} <do> @ {verb}[ in {a} {time}s| in {a} {time}s| over {a} {time}s| in "
            "{a} {time}s altogether]",
            "how many {what} @ <verb> in {a} {time}s",
            "the number of {what} [after|in] {a} {time}s",
        )
        if " for " in fact:
            ask = Ask(
                "how many {what} <do> @ {verb}[| in all| altogether| in total]",
                "how many {what} @ <verb>[| in all| in total]",
                "the total number of {what}",
            )
    elif family < 0.76:
        good = r.choice(GOODS)
        story.words |= {
            "good": good,
            "goods": plural(good),
            "a1": article(good),
            "money": draw_money(r),
        }
        what = story.words["money"]
        story.numbers(b=b)
        fact = story.pick(
            "{a1} {good} <-cost> {pb}",
            "one {good} <-cost> {pb}",
            "[each|every] {good} <-cost> {pb}",
            "{goods} <+cost> {pb} each",
            "@ <buy> {a} {goods} [at|for] {pb} each",
            "@ <buy> {a} {goods} that cost {pb} each",
            "@ <buy> {a} {goods}. [Each|Every|One] {good} <-cost> {pb}",
            "@ <sell> {a} {goods} [at|for] {pb} each",
        )
        if fact.startswith("@"):
            is_sold = "@ s" in fact
            ask = Ask(
                "how [much|much money|many {money}] <do> @ [get|earn|make]"
                if is_sold
                else "how [much|much money|many {money}] <do> @ [pay|spend|pay in all|need]",
                "how [much|many {money}] @ " + ("<get>" if is_sold else "<pay>"),
                "the total [price|cost|amount]",
            )
        else:
            ask = Ask(
                "[how [much|many {money}] do {a} {goods} cost|what do {a} {goods} cost|how much "
                "are {a} {goods}|how [much|many {money}] [<do> @ pay|<do> @ need] for {a} {goods}]",
                "how [much|many {money}] {a} {goods} cost",
                "the [price|cost|total price] of {a} {goods}",
            )
    elif family < 0.84:
        part, what = r.choice(PARTS)
        story.words |= {
            "part": part,
            "parts": _plural_part(part),
            "what": what,
            "a1": article(part),
        }
        fact = story.pick(
            "[{a1}|one|each|every] {part} has {b} {what}",
            "there are {b} {what} [in|on] {a1} {part}",
        )
        ask = Ask(
            "how many {what} [do {a} {parts} have|do {a} {parts} have[| in all| altogether]|are "
            "there [on|in] {a} {parts}]",
            "how many {what} {a} {parts} have",
            "the number of {what} [on|of|in] {a} {parts}",
        )
    elif family < 0.94:
        people, one = r.choice(PEOPLE)
        story.words |= {
            "people": people,
            "one": one,
            "bring": r.choice(
                ("bring", "have", "eat", "get", "make", "pick", "carry", "need", "buy", "hold")
            ),
        }
        fact = story.pick(
            "each of {a} {people} <-bring> {b} {what}",
            "{a} {people} [each <+bring> {b} {what}|<+bring> {b} {what} each]",
            "there <+be> {a} {people}, and [each|every one][| of them] <-bring> {b} {what}",
            "there <+be> {a} {people}. [Each|Every] {one} <-bring> {b} {what}",
            "[each|every] {one} <-bring> {b} {what} and there <+be> {a} {people}",
        )
        ask = Ask(
            "how many {what} [<+do> they {bring}[| in all| altogether| in total]|<+do> the "
            "{people} {bring} [in all|altogether|together]|is that[| in all]]",
            "how many {what} they <+bring> [in all|altogether|in total]",
            "the total number of {what}",
        )
    else:
        mover, units = r.choice(MOVERS)
        what = story.words["what"] = r.choice(units.split())
        story.words["mover"] = mover
        story.words["time"] = r.choice(("hour", "minute", "day"))
        story.words["an"] = article(story.words["time"])
        fact = story.pick(
            "{mover} <-travel> {b} {what} [{an}|per|each|every] {time}",
            "{mover} <-go> {b} {what} [per|each|every] {time}",
            "{mover} <-drive> [at |]{b} {what} [per|every] {time}",
        )
        ask = Ask(
            "how [far|many {what}] does it go in {a} {time}s",
            "how [far|many {what}] it goes in {a} {time}s",
            "the distance after {a} {time}s",
        )
    return fact, ask, what


def draw_money(r: random.Random) -> str:
    """Draw a currency, in the plural."""
    return r.choice(
        ("dollars", "dollars", "dollars", "dollars", "euros", "pounds", "cents", "coins")
    )


def _singular(noun: str) -> str:
    return {
        "boxes": "box",
        "shelves": "shelf",
        "crates": "crate",
        "cases": "case",
        "piles": "pile",
    }.get(noun, noun[:-1])


def _plural_part(part: str) -> str:
    return {"box": "boxes", "bus": "buses", "class": "classes", "shelf": "shelves"}.get(
        part, part + "s"
    )
