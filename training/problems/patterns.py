"""Patterns of English: `[a|b]` is one of several parts, which may have such parts of their own,
`{what}` a word by name, and `<buy>` a verb in the form that its subject and the tense require.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

_SIGNS = re.compile(r"[\[{<]")
_IRREGULAR = {
    base: (base if present == "-" else present, past)
    for base, present, past in (
        form.split()
        for form in (
            "have has had,do does did,buy - bought,find - found,win - won,get - got,sell - sold,"
            "lose - lost,give - gave,eat - ate,break - broke,throw - threw,go - went,put - put,"
            "make - made,read - read,run - ran,drive - drove,swim - swam,write - wrote,"
            "spend - spent,pay - paid,take - took,hold - held,keep - kept,bring - brought,"
            "leave - left,fly - flew,cost - cost,see - saw,catch - caught,draw - drew,grow - grew,"
            "cut - cut,come - came,say - said,send - sent,know - knew,fall - fell,drink - drank,"
            "split - split,ride - rode,build - built,sing - sang,learn - learned,be is was"
        ).split(",")
    )
}


class Slot(NamedTuple):
    """A word by name."""

    name: str


class Verb(NamedTuple):
    """A verb, or the name of one; `form` is "+" for a plural subject, "-" for a singular one, "!"
    for the subject of the story in the present, "" for it in the story's tense."""

    form: str
    name: str


class Choice(NamedTuple):
    """One of several sequences of parts."""

    parts: tuple[tuple[str | Slot | Verb | Choice, ...], ...]


Part = str | Slot | Verb | Choice


class Grammar(NamedTuple):
    """What verbs agree with."""

    person: str
    """Of the subject: "I", "she" or "they"."""
    is_past: bool


def fill(
    r: random.Random,
    pattern: str,
    words: Mapping[str, str],
    grammar: Grammar | None = None,
) -> str:
    """Return a pattern's text, its choices drawn; verbs are singular and present by default."""
    if not _SIGNS.search(pattern):  # what is filled already; kept patterns are few
        return pattern
    written: list[str] = []
    _write(r, _parts(pattern), words, grammar or Grammar("she", False), written)
    return "".join(written)


def _write(
    r: random.Random,
    parts: tuple[Part, ...],
    words: Mapping[str, str],
    grammar: Grammar,
    written: list[str],
) -> None:
    for part in parts:
        if isinstance(part, str):
            written.append(part)
        elif isinstance(part, Choice):
            options = part.parts
            _write(r, options[int(r.random() * len(options))], words, grammar, written)
        elif isinstance(part, Slot):
            written.append(words[part.name])
        else:
            verb = words.get(part.name, part.name)
            person = {"+": "they", "-": "she"}.get(part.form, grammar.person)
            written.append(conjugate(verb, person, grammar.is_past and part.form != "!"))


@cache
def conjugate(verb: str, person: str, is_past: bool) -> str:
    """Return the form of a verb, of which the first word changes ("give away")."""
    base, _, rest = verb.partition(" ")
    if base == "be":
        forms = {"I": ("am", "was"), "she": ("is", "was"), "they": ("are", "were")}
        form = forms[person][is_past]
    elif is_past or person == "she":
        present, past = _IRREGULAR.get(base, ("-", _past(base)))
        present = present if present not in ("-", base) else _third(base)
        form = past if is_past else present
    else:
        form = base
    return f"{form} {rest}" if rest else form


def _third(base: str) -> str:
    if base.endswith("y") and base[-2] not in "aeiou":
        return base[:-1] + "ies"
    return base + ("es" if base.endswith(("s", "sh", "ch", "x", "z", "o")) else "s")


def _past(base: str) -> str:
    if base.endswith("y") and base[-2] not in "aeiou":
        return base[:-1] + "ied"
    return base + ("d" if base.endswith("e") else "ed")


@cache
def _parts(pattern: str) -> tuple[Part, ...]:
    parts, end = _parse(pattern, 0)
    if end != len(pattern) or len(parts) != 1:
        raise ValueError(f"a bracket or bar stands alone in {pattern!r}")
    return parts[0]


def _parse(pattern: str, place: int) -> tuple[list[tuple[Part, ...]], int]:
    """Return the alternatives from a place on, and the place of the "]" that ends them."""
    alternatives: list[tuple[Part, ...]] = []
    parts: list[Part] = []
    while place < len(pattern) and pattern[place] != "]":
        sign = pattern[place]
        if sign == "[":
            inner, place = _parse(pattern, place + 1)
            parts.append(Choice(tuple(inner)))
            place += 1
        elif sign == "|":
            alternatives.append(tuple(parts))
            parts = []
            place += 1
        elif sign in "{<":
            end = pattern.index("}" if sign == "{" else ">", place)
            name = pattern[place + 1 : end]
            if sign == "{":
                parts.append(Slot(name))
            else:
                form = name[0] if name[0] in "+-!" else ""
                parts.append(Verb(form, name[len(form) :]))
            place = end + 1
        else:
            end = place
            while end < len(pattern) and pattern[end] not in "[]|{<":
                end += 1
            parts.append(pattern[place:end])
            place = end
    return [*alternatives, tuple(parts)], place
