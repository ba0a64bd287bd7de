"""Kinds of problems with up to four steps, and their simpler relatives."""

from __future__ import annotations

import random

from srm.training.problems.groups import draw_groups
from srm.training.problems.problem import Problem, Step, problem
from srm.training.problems.story import Ask, Story, factors, number
from srm.training.problems.words import ACTIVITIES, HOLDERS, PEOPLE, TIMES, article

_TOGETHER = Ask(
    "how many {what} [<+do> they have[ together| in all| altogether| in total| between them| "
    "combined]|<+do> {both} have[| together| in all]|are there[ in all| altogether]|is that[ "
    "altogether| in all| together]]",
    "how many {what} they have [together|in all|altogether|in total]",
    "[the total number of {what}|the total]",
)


def groups_then_change(r: random.Random) -> Problem:
    story = Story(r)
    while (pair := factors(r)) and not 4 < pair[0] * pair[1] < 2_000:
        pass
    a, b = pair
    fact, _, what = draw_groups(story, a, b, is_owned=True)
    is_spent = r.random() < 0.5
    c = r.randint(2, min(a * b - 1, 99 if r.random() < 0.6 else 999)) if is_spent else number(r)
    story.number("c", c)
    first = f"{a} with {b} each are {{}} {what}."
    if is_spent:
        story.words["lose"] = r.choice(
            (
                "give away",
                "sell",
                "lose",
                "use",
                "eat",
                "break",
                "throw away",
                "donate",
                "give away",
            )
        )
        change = story.pick(
            "@ <lose> {c}",
            "@ <lose> {c} of them",
            "@ <lose> {c} {what}",
            "{c} of them <+be lost>",
            "{c} <+be lost>",
            "@ <lose> {c} of the {what}",
            "@ <give> {c} to a friend",
        )
        ask = Ask(
            "how many[ {what}|][ <do> @ have left| are left[| over]| <!do> @ have now| remain| "
            "<do> "
            "@ still have| are there now| does that leave]",
            "how many {what} [are left|remain|@ <!have> now|@ <have> left]",
            "the number of {what} [left|that remain]",
        )
        then, sign = f"Without {c} of them {{}} {what} are left.", "-"
    else:
        story.words["gain"] = r.choice(
            ("buy", "find", "get", "win", "be given", "add", "receive", "collect")
        )
        change = story.pick(
            "@ <gain> {c} more",
            "@ <gain> {c} more {what}",
            "@ <gain> another {c}",
            "@ <gain> {c} other {what}",
            "@ also <have> {c} [single|loose|more|other|extra] {what}",
            "there <+be> {c} more {what} [on the table|on the floor|outside]",
        )
        ask = Ask(
            "how many[ {what}|][ <!do> @ have now| <do> @ have[ in all| altogether| in total|| "
            "then| "
            "in the end]| are there[ now| in all| altogether]| is that[ in all| altogether|]]",
            "how many {what} [@ <!have> now|there are in all|@ <have> in all]",
            "the total number of {what}",
        )
        then, sign = f"With {c} more that is {{}} {what}.", "+"
    text = story.tell([fact, change], ask, is_sequence="also" not in change)
    return problem("groups then change", text, (a, "*", b, first), (a * b, sign, c, then))


def times_as_many(r: random.Random) -> Problem:
    story = Story(r)
    what = story.draw_thing()
    story.draw_other("other")
    other = story.words["other"]
    if r.random() < 0.12:
        what = story.words["what"] = story.words["some"] = r.choice(("dollars", "euros", "points"))
    k = 2 if r.random() < 0.3 else r.randint(2, 12)
    a = number(r) if k == 2 else r.randint(2, 99) if r.random() < 0.9 else r.randint(100, 300)
    story.numbers(a=a, k=k)
    words = {2: ("twice", "twice", "double"), 3: ("three times", "triple")}.get(k, ())
    story.words["times"] = (
        r.choice(words) if words and r.random() < 0.7 else f"{story.words['k']} times"
    )
    story.words["both"] = r.choice(("both", "the two", "both of them"))
    if r.random() < 0.13:
        half = number(r)
        story.number("a", 2 * half)
        facts = [
            "@ <have> {a} {some}",
            story.pick(
                "{other} <-have> half as many[| {what}]",
                "{other} <-have> half of that",
                "{other} <-have> half as many[| {what}] as @",
            ),
        ]
        if r.random() < 0.3:
            steps: list[Step] = [
                (2 * half, "/", 2, f"{_capital(other)} has {{}} {what}."),
                (2 * half, "+", half, f"Together that is {{}} {what}."),
            ]
            return problem("times as many", story.tell(facts, _together(story)), *steps)
        return problem(
            "times as many",
            story.tell(facts, _OTHER_HAS),
            (2 * half, "/", 2, f"{_capital(other)} has {{}} {what}."),
        )
    facts = [
        "@ <have> {a} {some}",
        story.pick(
            "{other} <-have> {times} as many",
            "{other} <-have> {times} as many {what}",
            "{other} <-have> {times} as many[| {what}] as @",
            "{other} <-have> {times} that[| many| number]",
            "{other} <-have> {times} as many as that",
            "{other} <-have> {times} the number[| of {what}]",
        ),
    ]
    if r.random() < 0.15:
        facts = ["{other} <-have> {times} as many {what} as @", "@ <have> {a}[| of them| {what}]"]
    if (
        "double as" in facts[-1]
        or "triple as" in facts[-1]
        or "double as" in facts[0]
        or "triple as" in facts[0]
    ):
        story.words["times"] = "twice" if k == 2 else "three times"
        facts = [fact.replace("double", "twice").replace("triple", "three times") for fact in facts]
    first: Step = (a, "*", k, f"{_capital(other)} has {{}} {what}.")
    place = r.random()
    if place < 0.4:
        return problem("times as many", story.tell(facts, _OTHER_HAS), first)
    if place < 0.5:
        ask = Ask(
            "how many more[ {what}|] <-do> {other} have than @",
            "how many more {what} {other} <-have> than @",
        )
        return problem(
            "times as many",
            story.tell(facts, ask),
            first,
            (a * k, "-", a, f"That is {{}} {what} more."),
        )
    total: Step = (a, "+", a * k, f"Together that is {{}} {what}.")
    return problem("times as many", story.tell(facts, _together(story)), first, total)


_OTHER_HAS = Ask(
    "how many[ {what}|] <-do> {other} have",
    "how many {what} {other} <-have>",
    "the number of {what} {other} <-have>",
)


def _together(story: Story) -> Ask:
    if story.pronoun in ("I", "we"):
        story.words["both"] = "we"
        return _TOGETHER._replace(
            direct="how many {what} [do we have[ together| in all| altogether| in total]|are "
            "there in all]",
            inner="how many {what} we have [together|in all|altogether]",
        )
    return _TOGETHER


def three_friends(r: random.Random) -> Problem:
    story = Story(r)
    what = story.draw_thing()
    story.draw_other("second", "third")
    story.pronouns = 0
    first, second, third = (
        _capital(name) for name in (story.first, story.words["second"], story.words["third"])
    )
    first = {"I": "You", "We": "You"}.get(first, first)
    story.words["have"] = have = r.choice(
        ("have", "have", "have", "have", "find", "collect", "pick", "own", "sell")
    )
    story.words["both"] = r.choice(("the three", "all three", "the three friends", "all of them"))
    family = r.random()
    a, b = (r.randint(2, 9) if r.random() < 0.25 else r.randint(10, 99) for _ in range(2))
    if family < 0.1:
        a, b = number(r), number(r)
    more = a + b
    c = r.randint(1, more - 1)
    story.numbers(a=a, b=b, c=c)
    start = story.pick(
        "@ <have> {a} {some}",
        "@ <have> {a} {some}",
        "there are [three|3] [friends|children]. @ <have> {a} {some}",
    )
    ask = _together_of(story, have)
    steps: list[Step]
    if family < 0.5:
        facts = [
            start,
            story.pick(
                "{second} <-have> {b} more than @",
                "{second} <-have> {b} more[| {what}]",
                "{second} <-have> {b} more {what} than @",
                "{second} <-have> {b} more than that",
            ),
            story.pick(
                "{third} <-have> {c} [fewer|less] than {second}",
                "{third} <-have> {c} fewer {what} than {second}",
                "{third} {c} [fewer|less] than {second}",
            ),
        ]
        steps = [
            (a, "+", b, f"{second} has {{}} {what}."),
            (more, "-", c, f"{third} has {{}} {what}."),
            (a, "+", more, f"The first two have {{}} {what}."),
            (a + more, "+", more - c, f"All three have {{}} {what}."),
        ]
    elif family < 0.72:
        c = r.randint(2, 99) if r.random() < 0.8 else number(r)
        story.number("c", c)
        facts = [
            "@ <have> {a} {some}",
            "{second} <-have> {b}[| {what}]",
            "{third} <-have> {c}[| {what}]",
        ]
        if have == "have" and r.random() < 0.3:
            facts = ["@ <have> {a} {some}, {second} {b} and {third} {c}"]
        steps = [
            (a, "+", b, f"The first two have {{}} {what}."),
            (a + b, "+", c, f"All three have {{}} {what}."),
        ]
    else:
        is_more = r.random() < 0.55
        if not is_more:
            a, b = max(a, b) + 1, min(a, b)
            story.numbers(a=a, b=b)
        than = r.choice(("", "", " {what}", " than @", " {what} than @", " than that"))
        sign = "+" if is_more else "-"
        facts = [
            "@ <have> {a} {some}",
            f"{{second}} <-have> {{b}} {'more' if is_more else r.choice(('fewer', 'less'))}{than}",
        ]
        story.words["both"], story.words["other"] = (
            r.choice(("the two", "both")),
            story.words["second"],
        )
        result = a + b if is_more else a - b
        steps = [(a, sign, b, f"{second} has {{}} {what}.")]
        if r.random() < 0.5:
            ask = Ask(
                "how many[ {what}|] <-do> {second} {have}", "how many {what} {second} <-have>"
            )
        else:
            steps.append((a, "+", result, f"Together that is {{}} {what}."))
            ask = _together_of(story, have)
    return problem("three friends", story.tell(facts, ask), *steps)


def _together_of(story: Story, have: str) -> Ask:
    """Return the question how many they have together, or find, or whatever they do."""
    story.words["they"] = "we" if story.pronoun in ("I", "we") else "they"
    story.words["base"] = have
    return Ask(
        "how many[ {what}|][ <+do> {they} {base}[ together| in all| altogether| in total| "
        "combined]| "
        "<+do> {both} {base}[ together| in all|]| is that[ altogether| in all| together]| are "
        "there[ "
        "altogether| in all]]",
        "how many {what} {they} <+have> [together|in all|altogether]",
        "[the total number of {what}|the total]",
    )


def shared(r: random.Random) -> Problem:
    story = Story(r)
    what = story.draw_thing()
    people, person = r.choice(PEOPLE)
    story.words |= {"people": people, "one": person, "holders": r.choice(HOLDERS)}
    family = r.random()
    d = r.randint(2, 12)
    steps: list[Step]
    if family < 0.42:
        while True:
            a, b, c, d = r.randint(2, 12), r.randint(2, 20), r.randint(2, 30), r.randint(2, 12)
            if (a * b + c) % d == 0:
                break
        story.numbers(a=a, b=b, c=c, d=d)
        facts = [
            story.pick(
                "@ <have> {a} {holders} [with|of] {b} {what} each and {c} more[| {what}]",
                "@ <have> {a} {holders} of {b} {what} and {c} [single|loose|extra|other] ones",
                "there <+be> {a} {holders} with {b} {what} in each, and {c} more[| {what}]",
                "@ <have> {a} {holders} with {b} {what} in each and [another|also] {c} {what}",
            ),
            _shares(story),
        ]
        steps = [
            (a, "*", b, f"In the {story.words['holders']} there are {{}} {what}."),
            (a * b, "+", c, f"With {c} more that is {{}} {what}."),
            (a * b + c, "/", d, f"Each of the {d} {people} gets {{}} {what}."),
        ]
        ask = _GETS
    elif family < 0.54:
        while True:
            a, b, d = r.randint(2, 12), r.randint(2, 30), r.randint(2, 12)
            if a * b % d == 0:
                break
        story.numbers(a=a, b=b, d=d)
        facts = [
            story.pick(
                "@ <have> {a} {holders} [with|of] {b} {what}[| each]",
                "there <+be> {a} {holders} with {b} {what} in each",
                "@ <buy> {a} {holders} of {b} {what}",
            ),
            _shares(story),
        ]
        steps = [
            (a, "*", b, f"In the {story.words['holders']} there are {{}} {what}."),
            (a * b, "/", d, f"Each of the {d} {people} gets {{}} {what}."),
        ]
        ask = _GETS
    elif family < 0.8:
        each = r.randint(2, 12) if r.random() < 0.6 else r.randint(10, 60)
        story.numbers(a=d * each, d=d)
        if r.random() < 0.12:
            story.words["what"] = story.words["some"] = what = r.choice(
                ("dollars", "euros", "pounds")
            )
        facts = [
            story.pick(
                "@ <have> {a} {some}",
                "@ <have> {a} {some}",
                "there <+be> {a} {some}",
                "@ <buy> {a} {some}",
                "@ <pick> {a} {some}",
            ),
            _shares(story),
        ]
        if r.random() < 0.3:
            facts = [
                story.pick(
                    "@ <share> {a} {what} [equally |fairly |]among {d} {people}",
                    "{d} {people} <+share> {a} {what}[| equally| fairly]",
                    "{a} {what} <+be shared> [equally |]among {d} {people}",
                    "@ <divide> {a} {what} [equally |]between {d} {people}",
                )
            ]
        steps = [(d * each, "/", d, f"Each of the {d} {people} gets {{}} {what}.")]
        ask = _GETS
    elif family < 0.91:
        count = r.randint(2, 30)
        story.numbers(a=d * count, d=d)
        holders = story.words["holders"]
        facts = [
            story.pick(
                "@ <have> {a} {some}",
                "there <+be> {a} {some}",
                "@ <pack> {a} {what} into {holders} of {d}",
                "@ <put> {a} {what} into {holders}, {d} in each[| one]",
            ),
        ]
        if " into " not in facts[0]:
            facts.append(
                story.pick(
                    "@ <put> {d}[| of them] into each of ^ {holders}",
                    "@ <pack> them into {holders} of {d}",
                    "{d} [go|fit] into each of the {holders}",
                )
            )
        steps = [(d * count, "/", d, f"That makes {{}} {holders}.")]
        ask = Ask(
            "how many {holders} [<do> @ need|<do> @ fill|are there|are needed|is that|can @ fill]",
            "how many {holders} [are needed|@ <need>]",
            "the number of {holders}",
        )
    else:
        verb, noun = r.choice(ACTIVITIES)
        each = r.randint(2, 40)
        unit = story.pick(noun)
        time = r.choice(TIMES)
        story.words |= {"verb": verb, "what": unit, "time": time}
        story.words["an"] = article(time)
        story.numbers(a=d * each, d=d)
        if r.random() < 0.5:
            facts = [
                story.pick(
                    "@ <verb> {a} {what} in {d} {time}s", "@ <need> {d} {time}s for {a} {what}"
                )
            ]
            steps = [(d * each, "/", d, f"That is {{}} {unit} each {time}.")]
            ask = Ask(
                "how many {what} [is that|<do> @ {verb}] [{an}|per|each|every] {time}[|, the "
                "same each {time}]",
                "how many {what} that is [{an}|per] {time}",
            )
        else:
            facts = [story.pick("@ <verb> {d} {what} [{an}|every|each|per] {time}")]
            steps = [(d * each, "/", d, f"That takes {{}} {time}s.")]
            ask = Ask(
                "how many {time}s [<do> @ need for {a} {what}|does it take[| %] to {verb} {a} "
                "{what}|<do> @ need to {verb} {a} {what}]",
                "how many {time}s @ <need> for {a} {what}",
                "the number of {time}s for {a} {what}",
            )
    return problem("shared", story.tell(facts, ask, is_sequence=True), *steps)


_GETS = Ask(
    "how many[ {what}|][ <-do> each[| {one}| of them| person] get| <-do> every {one} get| are "
    "there "
    "for each[| of them| {one}]| <-do> each {one} [have|receive]| <+do> they each get| are for "
    "each]",
    "how many {what} each[| {one}| of them] <-get>",
    "the number of {what} [for each {one}|each {one} gets|per {one}]",
)


def _shares(story: Story) -> str:
    return story.pick(
        "@ <share> them [equally |fairly |evenly |]among {d} {people}",
        "@ <divide> them [equally |]between {d} {people}",
        "they <+be> shared [equally |fairly |]by {d} {people}",
        "@ <split> [them|all of them|everything] [equally |evenly |]among {d} {people}",
        "@ <share> all [equally |]among {d} {people}",
        "@ <give> [them all|all of them] to {d} {people}[, the same to each|, equally many to "
        "each|]",
        "{d} {people} <+share> them[| equally| fairly]",
        "@ <share> the {what} equally between {d} {people}",
        "@ <hand> them out [equally |]to {d} {people}",
    )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
