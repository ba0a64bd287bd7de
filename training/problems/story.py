"""Stories: facts and a question about somebody, told in any order and manner.

Facts and questions are patterns in which `@` stands for who the story is about, `^` for "his"
and `%` for "him".
They are joined into sentences, with "if" or the question first, and `@` becomes a name where it
comes first and often a pronoun after that.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import NamedTuple

from srm.training.problems.patterns import Grammar, fill
from srm.training.problems.words import (
    ADJECTIVES,
    DAYS,
    HOLDERS,
    PLACES,
    THINGS,
    other,
    subject,
    thing,
)

_WORDS = "zero one two three four five six seven eight nine ten eleven twelve".split()
_IN_WORDS, _WITH_COMMA = 0.04, 0.15
"""Shares of numbers up to twelve that are words, and of those above 999 that have a comma."""
_POSSESSIVE = {"I": "my", "we": "our", "he": "his", "she": "her", "they": "their"}
_OBJECT = {"I": "me", "we": "us", "he": "him", "she": "her", "they": "them"}
_SENTENCE = re.compile(r"(?:^|(?<!Mr)(?<!Mrs)(?<=[.?!:]) )[a-z]")
_OPENERS = (
    "today,|this morning,|one day,|on {day},|on {day} morning,|{place},|this year,|"
    "in the afternoon,|in summer,|at the weekend,"
).split("|")
_OPENERS_OF_THE_PAST = (*_OPENERS, "yesterday,", "last week,", "last year,", "once,")
_LATER = "then |later |after that, |the next day, |afterwards, |on {day} |in the evening ".split(
    "|"
)
_ASIDES = tuple(
    "@ <like> {things} a lot.;it is a [sunny|rainy|cold|warm|windy] day.;@ <like> "
    "[numbers|counting].;"
    "the {holders} are {colour}.;@ <live> in a [small|big|little] [town|village|house|city].;"
    "@ <have> a [friend|dog|cat] [called|named] {somebody}.;it is {day}.;@ <be> [very|quite] "
    "[happy|tired|busy|careful].;{somebody} is [watching|there too|a friend].".split(";")
)
_GREETINGS = (
    "[[Hi|Hello|Hey][!|,|.] |[Please|Can you] help me[!|:|.] |Quick question: |"
    "Here is a [problem|question|riddle][:|.] |[Hi|Hello][!|,] can you help me? |Solve this[:|.] |"
    "I have a [problem|question|homework problem]: |Problem: |Math[s|] [problem|question]: ]"
)
_INNER = (
    "[[Can|Could] you [tell me|work out|calculate|find|say] {inner}?|"
    "[Find|Work out|Calculate|Tell me|Find out|Figure out|Determine|Say|Compute] {inner}.|"
    "[Please|Now] [find|work out|calculate|tell me] {inner}.|Do you know {inner}?|"
    "I [want|would like] to know {inner}.]"
)
_NOUN = (
    "[What is {noun}?|What's {noun}?|What was {noun}?|"
    "[Find|Work out|Calculate|Give|Determine|Compute] {noun}.]"
)


class Ask(NamedTuple):
    """A question, as patterns: after "how many" with "does", inside another sentence, and as a
    noun, which not all have."""

    direct: str
    inner: str
    noun: str = ""


class Story:
    """Draws the words of one problem, and tells it."""

    def __init__(self, r: random.Random, is_about_one: bool = False) -> None:
        """`is_about_one`: whether it is about a single person who is named."""
        self.r = r
        self.first, self.later, self.pronoun = subject(r)
        while is_about_one and self.pronoun not in ("he", "she"):
            self.first, self.later, self.pronoun = subject(r)
        self.pronouns = 0.6
        """Share of later mentions that are pronouns."""
        person = {"I": "I", "he": "she", "she": "she"}.get(self.pronoun, "they")
        self.grammar = Grammar(person, r.random() < 0.4)
        self.words: dict[str, str] = {}

    def draw_thing(self) -> str:
        """Draw `what` is counted, which is returned, and `some` with an adjective."""
        r, what = self.r, thing(self.r)
        self.words["what"] = self.words["some"] = what
        if r.random() < 0.18 and " " not in what:
            self.words["some"] = f"{r.choice(ADJECTIVES)} {what}"
            if r.random() < 0.3:
                self.words["what"] = self.words["some"]
        return what

    def draw_other(self, *names: str) -> None:
        """Draw somebody else under each name, of whom no two are the same."""
        taken = {self.first}
        for name in names:
            while (drawn := other(self.r)) in taken:
                pass
            taken.add(drawn)
            self.words[name] = drawn
        self.pronouns = 0.15

    def number(self, name: str, value: int) -> None:
        """Have a word stand for a number, which is written in one of several ways."""
        self.words[name] = written(self.r, value)

    def numbers(self, **values: int) -> None:
        """Have words stand for numbers and, in a story with `money`, words that begin with "p" for
        that amount of it."""
        sign = {"dollars": "$", "euros": "€", "pounds": "£"}.get(self.words.get("money", ""))
        for name, value in values.items():
            self.number(name, value)
            if "money" in self.words:
                amount, money = self.words[name], self.words["money"]
                is_sign = sign and amount[0].isdigit() and self.r.random() < 0.25
                self.words["p" + name] = f"{sign}{amount}" if is_sign else f"{amount} {money}"

    def fill(self, pattern: str) -> str:
        """Return a pattern's text, in which `@`, `^` and `%` stay."""
        return fill(self.r, pattern, self.words, self.grammar)

    def pick(self, *patterns: str) -> str:
        """Return the text of one of these patterns."""
        return self.fill(patterns[int(self.r.random() * len(patterns))])

    def tell(self, facts: Sequence[str], ask: Ask, is_sequence: bool = False) -> str:
        """Return the whole question. With `is_sequence` the facts come one after the other."""
        clauses = [self.fill(fact) for fact in facts]
        place = self.r.random() if not any(". " in fact for fact in clauses) else 1.0
        if place < 0.14:
            text = f"if {self._joined(clauses)}, {self.fill(ask.direct)}?"
        elif place < 0.28:
            mark = "," if self.r.random() < 0.15 else ""
            text = f"{self.fill(ask.direct)}{mark} if {self._joined(clauses)}?"
        elif place < 0.36 and len(clauses) > 1:
            start = self._sentences(clauses[:-1], is_sequence)
            direct = self.fill(ask.direct)
            last = (
                f"{direct} if {clauses[-1]}?"
                if self.r.random() < 0.3
                else f"if {clauses[-1]}, {direct}?"
            )
            text = f"{start} {last}"
        else:
            text = f"{self._sentences(clauses, is_sequence)} {self._asked(ask)}"
        return self.finish(text)

    def _asked(self, ask: Ask) -> str:
        place = self.r.random()
        if place < 0.74:
            return f"{self._lead()}{self.fill(ask.direct)}?"
        if place < 0.87 or not ask.noun:
            return fill(self.r, _INNER, {"inner": self.fill(ask.inner)})
        return fill(self.r, _NOUN, {"noun": self.fill(ask.noun)})

    def _lead(self) -> str:
        return self.r.choice(("so ", "now, ", "then ")) if self.r.random() < 0.1 else ""

    def _joined(self, clauses: list[str]) -> str:
        """Return facts as one sentence without its end."""
        *start, last = [clauses[0]] + [
            self._without_subject(clauses, i) for i in range(1, len(clauses))
        ]
        if not start:
            return last
        before = ", ".join(start)
        return f"{before}{self.r.choice((' and ', ' and ', ', and '))}{last}"

    def _without_subject(self, clauses: list[str], i: int) -> str:
        is_same = clauses[i].startswith("@ ") and clauses[i - 1].startswith("@ ")
        return clauses[i][2:] if is_same and self.r.random() < 0.75 else clauses[i]

    def _sentences(self, clauses: list[str], is_sequence: bool) -> str:
        r = self.r
        text = clauses[0]
        if r.random() < 0.12:
            openers = _OPENERS_OF_THE_PAST if self.grammar.is_past else _OPENERS
            text = f"{self._dated(r.choice(openers))} {text}"
        for i in range(1, len(clauses)):
            if r.random() < 0.5:
                then = self._dated(r.choice(_LATER)) if is_sequence and r.random() < 0.5 else ""
                text += f". {then}{clauses[i]}"
            else:
                joint = (" and ", " and ", ", and ", ", ", "; ", " and then ", ", then ", ", but ")
                options = joint if is_sequence else joint[:5]
                between = r.choice(options)
                is_and = "and" in between or "then" in between
                text += between + (self._without_subject(clauses, i) if is_and else clauses[i])
        text += "."
        if r.random() < 0.07:
            aside = self._aside()
            text = f"{aside} {text}" if r.random() < 0.5 else f"{text} {aside}"
        return text

    def _dated(self, words: str) -> str:
        return words.replace("{day}", self.r.choice(DAYS)).replace("{place}", self.r.choice(PLACES))

    def _aside(self) -> str:
        r = self.r
        drawn = {
            "things": r.choice(THINGS),
            "holders": r.choice(HOLDERS),
            "colour": r.choice(ADJECTIVES[:7]),
        }
        drawn |= {"somebody": other(r), "day": r.choice(DAYS)}
        return fill(r, r.choice(_ASIDES), drawn, self.grammar)

    def finish(self, text: str) -> str:
        """Name who it is about, begin sentences with capitals, and draw a manner of typing."""
        r = self.r
        if "@" in text:
            before, *after = text.split("@")
            text = before + self.first + after[0]
            for part in after[1:]:
                text += (self.pronoun if r.random() < self.pronouns else self.later) + part
        text = text.replace("^", _POSSESSIVE[self.pronoun]).replace("%", _OBJECT[self.pronoun])
        return dress(r, text)


def dress(r: random.Random, text: str) -> str:
    """Begin sentences with capitals; greet, type without capitals or leave the last mark out, each
    seldom."""
    text = _SENTENCE.sub(lambda match: match[0].upper(), text)
    place = r.random()
    if place < 0.03:
        return fill(r, _GREETINGS, {}) + text
    if place < 0.05:
        return text + r.choice((" Please help.", " Thanks!", " Thank you.", " Please answer."))
    if place < 0.075:
        return text.lower()
    if place < 0.09:
        return text.rstrip(".?!")
    return text


def written(r: random.Random, value: int) -> str:
    """Return a number in digits, seldom in words or with a comma."""
    if value <= 12 and r.random() < _IN_WORDS:
        return _WORDS[value]
    return f"{value:,}" if value > 999 and r.random() < _WITH_COMMA else str(value)


def in_digits(text: str) -> str:
    """Return a text whose numbers are all in digits, without commas."""
    digits = {word: str(value) for value, word in enumerate(_WORDS)}
    match = re.sub(
        rf"\b({'|'.join(_WORDS)})\b", lambda word: digits[word[0].lower()], text, flags=re.I
    )
    return re.sub(r"(?<=\d),(?=\d{3}\b)", "", match)


def number(r: random.Random, least: int = 2) -> int:
    """Draw a number, of one digit to four, each often."""
    place = r.random()
    if place < 0.25:
        return r.randint(least, 9)
    if place < 0.65:
        return r.randint(10, 99)
    return r.randint(100, 999) if place < 0.96 else r.randint(1_000, 9_999)


def factors(r: random.Random) -> tuple[int, int]:
    """Draw two numbers to multiply: the first is seldom above twelve."""
    place = r.random()
    if place < 0.35:
        return r.randint(2, 10), r.randint(2, 10)
    if place < 0.75:
        return r.randint(2, 12), r.randint(10, 60)
    if place < 0.88:
        return r.randint(2, 12), r.randint(60, 250)
    return r.randint(11, 40), r.randint(2, 40)
