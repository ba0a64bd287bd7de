"""Kinds of problems that are one step: something is added, taken away, or had several times."""

from __future__ import annotations

import random

from srm.training.problems.problem import Problem, problem
from srm.training.problems.story import Ask, Story, number
from srm.training.problems.words import (
    ACTIVITIES,
    CROWDS,
    DAYS,
    MONTHS,
    ROOMS,
    SORTS,
    TIMES,
    WHOLES,
    name,
)

GAINS = (
    *("buy", "find", "win", "be given", "get", "collect", "receive", "pick up", "gather", "earn"),
    *("pick", "get", "buy", "find", "borrow", "add"),
)
LOSSES = (
    *("sell", "lose", "give away", "break", "use", "throw away", "eat", "donate", "spend", "drop"),
    *("give {other}", "lend {other}", "hand out", "use up", "sell", "give away", "lose", "return"),
)
HAS_NOW = Ask(
    "how many[ {what}|][ <!do> @ have now| <!do> @ have now| <do> @ have[ in all| altogether| in "
    "total||| then| in the end]| are there now| does that make| is that[| in all| altogether]]",
    "how many[ {what}|][ @ <!have> now| @ <have>[ in all| altogether| in total|| now]| there are "
    "now]",
    "[the total number of {what}|the number of {what} @ <!have> now|the total|^ total|the new "
    "number of {what}]",
)
HAS_LEFT = Ask(
    "how many[ {what}|][ <do> @ have left| <do> @ still have| <!do> @ have now| are left[| over]| "
    "remain| <!do> @ have left| does that leave|| are there now| <do> @ have in the end]",
    "how many[ {what}|][ @ <have> left| @ still <have>| @ <!have> now| are left| remain]",
    "[the number of {what} left|what is left|the number of {what} that remain|the rest]",
)
DOES_TOGETHER = Ask(
    "how many[ {what}|][ <do> {they} have[ together| in all| altogether| in total| between them| "
    "combined]| are there[ in all| altogether| together| in total]| is that together]",
    "how many {what}[ {they} have[ together| in all| altogether| in total]| there are in all]",
    "[the total number of {what}|how many {what} there are|the sum|the total]",
)


def gain(r: random.Random) -> Problem:
    story, a, b = Story(r), number(r), number(r)
    story.number("a", a)
    story.number("b", b)
    what = story.draw_thing()
    _befriend(story)
    family = r.random()
    is_sequence = False
    if family < 0.4:
        story.words["gain"] = r.choice(GAINS)
        is_sequence = True
        facts = [
            story.pick(
                "@ <have> {a} {some}",
                "@ <have> {a} {some}",
                "@ <own> {a} {some}",
                "@ [already|first|at first] <have> {a} {some}",
                "@ <have> {a} {some} in ^ [bag|room|house|box|collection]",
                "there <+be> {a} {some} in ^ [box|bag|basket|room]",
                "@ <start> with {a} {some}",
                "@ <collect> {a} {some}",
            ),
            story.pick(
                "@ <gain> {b} more",
                "@ <gain> {b} more",
                "@ <gain> {b} more {what}",
                "@ <gain> another {b}[| {what}]",
                "@ <gain> {b} other {what}",
                "@ <gain> {b} new {what}",
                "@ <get> {b} more from {friend}",
                "{friend} <-give> % {b} more",
            ),
        ]
        ask = HAS_NOW
    elif family < 0.52:
        verb, noun = r.choice(ACTIVITIES)
        what = story.words["what"] = story.pick(noun)
        first, second = r.choice(
            (
                ("on {day1}", "on {day2}"),
                ("in the morning", "in the afternoon"),
                ("today", "[yesterday|the day before]"),
                ("last week", "this week"),
                ("before lunch", "after lunch"),
                ("in {month1}", "in {month2}"),
                ("at school", "at home"),
            )
        )
        story.words["verb"], story.words["time"] = verb, r.choice(TIMES)
        story.words["day1"], story.words["day2"] = r.sample(DAYS, 2)
        story.words["month1"], story.words["month2"] = r.sample(MONTHS, 2)
        story.words["first"], story.words["second"] = story.pick(first), story.pick(second)
        facts = [
            story.pick(
                "@ <verb> {a} {what} {first}",
                "@ <verb> {a} {what} {first}",
                "{first} @ <verb> {a} {what}",
            ),
            story.pick(
                "{b}[ more| {what}|] {second}",
                "@ <verb> {b}[ more| more {what}| {what}|] {second}",
                "{second} @ <verb> {b}[| {what}| more]",
            ),
        ]
        if not facts[1].startswith("@"):
            facts = [f"{facts[0]} and {facts[1]}"]
        ask = Ask(
            "how many {what} <do> @ {verb}[ in all| altogether| in total|||]",
            "how many {what} @ <verb>[ in all| altogether| in total|]",
            "[the total number of {what}|the total|the number of {what} in all]",
        )
    elif family < 0.66:
        story.draw_other("other")
        story.words["they"] = "we" if story.grammar.person == "I" or story.first == "we" else "they"
        story.words["have"] = r.choice(
            ("have", "have", "have", "have", "own", "find", "collect", "pick")
        )
        facts = [
            "@ <have> {a} {some}",
            "{other} <-have> {b}[| {what}]"
            if story.words["have"] == "have"
            else "{other} <-have> {b} {what}",
        ]
        ask = DOES_TOGETHER._replace(
            direct="how many[ {what}|][ <+do> {they} {have}[ together| in all| altogether| in "
            "total| "
            "between them| combined]| are there[ in all| altogether| together| in total]| is that "
            "together]"
        )
    elif family < 0.78:
        first, second, both = r.choice(SORTS)
        story.words |= {"first": first, "second": second, "what": story.pick(both)}
        what = story.words["what"]
        story.words |= {"place": r.choice(ROOMS), "see": r.choice(("have", "have", "see", "count"))}
        if r.random() < 0.5:
            facts = ["@ <see> {a} {first} and {b} {second}[|| in the {place}]"]
            ask = Ask(
                "how many {what} [<do> @ {see}|<do> @ {see} in all|are there[| in all]|is that]",
                "how many {what} @ <see>[| in all| altogether]",
                "the [total |]number of {what}",
            )
        else:
            facts = [
                story.pick(
                    "there <+be> {a} {first} and {b} {second}[|| in the {place}| in a {place}]",
                    "a {place} <-have> {a} {first} and {b} {second}",
                    "there <+be> {a} {first} in the {place} and [also |]{b} {second}",
                )
            ]
            ask = Ask(
                "how many {what} are there[| in all| altogether| in total| together]",
                "how many {what} there are[| in all| in total| altogether]",
                "the [total |]number of {what}",
            )
    elif family < 0.9:
        what, where, comes, _ = r.choice(CROWDS)
        story.words |= {"what": what, "where": story.pick(where), "come": story.pick(comes)}
        is_sequence = True
        facts = [
            story.pick(
                "there <+be> {a} {what} {where}",
                "there <+be> {a} {what} {where}",
                "{a} {what} <+be> {where}",
            ),
            story.pick(
                "{b} more {what} <+come>",
                "{b} more <+come>",
                "another {b}[| {what}] <+come>",
                "{b} [others|other {what}] <+come>",
            ),
        ]
        ask = Ask(
            "how many {what} are[ there now| there now| {where} now| there in all| there "
            "altogether|"
            " there then| there]",
            "how many {what} [there are now|are {where} now|are there now]",
            "the [number of {what}|number of {what} now|total number of {what}]",
        )
    elif family < 0.95:
        story.number("b", b := r.randint(2, 40))
        story.number("a", a := r.randint(3, 60))
        what = "years"
        facts = ["@ <!be> {a}[| years old][| now| today]"]
        ask = Ask(
            "how old will @ be in {b} years[| from now| time]", "how old @ will be in {b} years"
        )
    else:
        story.draw_other("other", "third")
        what = story.words["what"]
        facts = [
            story.pick(
                "{other} <-have> {a} {some}",
                "@ <have> {b} more[| {what}] than {other}, who <-have> {a} {some}",
            )
        ]
        if "more" not in facts[0]:
            facts.append(
                story.pick(
                    "@ <have> {b} more[| {what}| than {other}]", "@ <have> {b} more than that"
                )
            )
        ask = Ask(
            "how many[ {what}|] <do> @ have",
            "how many {what} @ <have>",
            "the number of {what} @ <have>",
        )
    sentence = r.choice((f"Together there are {{}} {what}.", f"With {b} more that is {{}} {what}."))
    return problem("gain", story.tell(facts, ask, is_sequence), (a, "+", b, sentence))


def loss(r: random.Random) -> Problem:
    story, a, b = Story(r), number(r, 3), number(r)
    a, b = max(a, b), min(a, b)
    if a == b or r.random() < 0.3:
        b = r.randint(1, a - 1)
    b = max(b, 2) if a > 2 else 1
    story.number("a", a)
    story.number("b", b)
    what = story.draw_thing()
    _befriend(story)
    family = r.random()
    is_sequence = True
    if family < 0.45:
        story.words["other"] = story.words["friend"]
        story.words["vanish"] = r.choice(
            ("be lost", "be broken", "break", "be sold", "go bad", "be eaten")
        )
        story.words["lose"] = story.fill(r.choice(LOSSES))
        facts = [
            story.pick(
                "@ <have> {a} {some}",
                "@ <have> {a} {some}",
                "@ <own> {a} {some}",
                "@ <start> with {a} {some}",
                "@ <have> {a} {some} in ^ [bag|room|house|box]",
                "there <+be> {a} {some} in ^ [box|bag|basket]",
                "@ <buy> {a} {some}",
                "@ <collect> {a} {some}",
            ),
            story.pick(
                "@ <lose> {b}",
                "@ <lose> {b} of them",
                "@ <lose> {b} of them",
                "@ <lose> {b} {what}",
                "@ <lose> {b} of these",
                "@ <give> {b}[| of them] to {friend}",
                "{b} of them <+vanish>",
                "{friend} <-take> {b}[| of them]",
            ),
        ]
        ask = HAS_LEFT
    elif family < 0.6:
        what, where, _, goes = r.choice(CROWDS)
        story.words |= {"what": what, "where": story.pick(where), "go": story.pick(goes)}
        facts = [
            story.pick(
                "there <+be> {a} {what} {where}",
                "there <+be> {a} {what} {where}",
                "{a} {what} <+be> {where}",
            ),
            story.pick("{b}[| of them] <+go>", "{b} {what} <+go>", "{b} <+go>"),
        ]
        ask = Ask(
            "how many[ {what}|][ are left[| {where}]| are there now| remain| are still there| "
            "stay| are {where} now]",
            "how many {what} [are left|remain|are there now|are still there]",
            "the number of {what} [left|that remain|that stay]",
        )
    elif family < 0.7:
        first, second, both = r.choice(SORTS)
        if r.random() < 0.5:
            first, second = second, first
        story.words |= {
            "first": first,
            "second": second,
            "all": story.pick(both),
            "place": r.choice(ROOMS),
        }
        what, is_sequence = second, False
        facts = [
            story.pick(
                "there <+be> {a} {all} in [a|the] {place}",
                "@ <have> {a} {all}",
                "there <+be> {a} {all}",
                "of {a} {all} {b} <+be> {first}",
            ),
            story.pick(
                "{b}[| of them] <+be> {first}",
                "{b} <+be> {first} [and the rest|and the others] <+be> {second}",
            ),
        ]
        if facts[0].startswith("of "):
            facts = facts[:1]
        if "the rest" not in facts[-1] and "the others" not in facts[-1] and r.random() < 0.3:
            facts.append("the [rest|others] <+be> {second}")
        ask = Ask(
            "how many[ of them|] are {second}", "how many are {second}", "the number of {second}"
        )
        if r.random() < 0.4:
            ask = ask._replace(direct="how many {second} [are there|are there in all|are there]")
    elif family < 0.8:
        story.draw_other("other")
        is_sequence = False
        facts = ["@ <have> {a} {some}", "{other} <-have> {b}[| {what}]"]
        if story.first in ("I", "we") or r.random() < 0.6:
            ask = Ask(
                "how many more {what} <do> @ have than {other}",
                "how many more {what} @ <have> than {other}",
                "the difference[| between them]",
            )
        else:
            ask = Ask(
                "how many fewer {what} [does {other} have than @|does {other} have]",
                "how many fewer {what} {other} has than @",
            )
    elif family < 0.88:
        is_sequence = False
        facts = [
            story.pick(
                "@ <need> {a} {what}",
                "@ <want> {a} {what}",
                "@ <want> to [have|collect|buy|make] {a} {what}",
                "@ <need> {a} {what} for a party",
            ),
            story.pick(
                "@ [already |only |]<have> {b}", "@ <have> {b} [already|so far]", "@ <have> {b}"
            ),
        ]
        ask = Ask(
            "how many more[ {what}|][ <do> @ need| <do> @ still need| must @ get| are missing]",
            "how many more {what} @ <need>",
            "the number of {what} that are [missing|still needed]",
        )
    elif family < 0.96:
        good, unit, use = r.choice(WHOLES)
        what = story.words["unit"] = story.pick(unit)
        story.words["good"] = good
        facts = [
            story.pick(
                "[a|^] {good} <-have> {a} {unit}",
                "there <+be> {a} {unit} in [a|^] {good}",
                "@ <have> a {good} [with|of] {a} {unit}",
            ),
            story.fill(use),
        ]
        ask = Ask(
            "how many {unit} [are left|remain|are left|does that leave|are still there]",
            "how many {unit} [are left|remain]",
            "the number of {unit} left",
        )
    else:
        story.number("a", a := r.randint(9, 90))
        story.number("b", b := r.randint(2, a - 1))
        what, is_sequence = "years", False
        story.draw_other("other")
        if r.random() < 0.5:
            facts = ["@ <!be> {a}[| years old]"]
            was = {"I": "was", "she": "was", "they": "were"}[story.grammar.person]
            ask = Ask(f"how old {was} @ {{b}} years ago", f"how old @ {was} {{b}} years ago")
        else:
            facts = ["@ <!be> {a} years old", "{other} is {b} years younger[| than that]"]
            ask = Ask("how old is {other}", "how old {other} is", "the age of {other}")
    sentence = r.choice(
        (
            f"Without the {b} that are gone {{}} {what} are left.",
            f"{b} of the {a} are gone, so {{}} {what} are left.",
        )
    )
    return problem("loss", story.tell(facts, ask, is_sequence), (a, "-", b, sentence))


def _befriend(story: Story) -> None:
    """Name a friend, and who it is that gets something."""
    story.words["friend"] = story.r.choice(
        ("a friend", "^ friend", "^ mother", "^ brother", "^ sister", name(story.r), name(story.r))
    )
