"""The words that problems are made of: listed ones, and names and things that nobody has seen.

A made name or thing is composed of syllables, so that a model learns to copy whatever stands there.
"""

from __future__ import annotations

import random

NAMES = (
    "Ava Ben Cara Dan Ella Finn Grace Hugo Iris Jack Kate Liam Maya Noah Olive Paul Quinn Rosa "
    "Sam Tara Uma Vera Will Zoe Adam Beth Carl Dora Eric Fay Gina Hans Ida Joel Karen Leo Mona "
    "Nick Oscar Pia Ravi Sara Tom Vik Wendy Yara"
).split()
THINGS = (
    "apples pears plums lemons shells stamps coins cards pens pencils books marbles buttons "
    "stickers beads cakes muffins cookies eggs flowers pebbles candles ribbons balloons peaches "
    "cherries nuts badges posters seeds bricks tiles roses bottles photos magnets keys stones"
).split()
HOLDERS = "boxes bags baskets shelves trays jars crates drawers packs bowls".split()
GOODS = "ticket notebook lamp kite puzzle hat belt cup bell toy ball mug pillow rope".split()

_ONSETS = "b br c ch cl d dr f fr g gr h j k kl l m n p pr qu r s sh st t th tr v w y z".split()
_VOWELS = "a e i o u a e i o ai ea ee ia ie oo ou".split()
_CODAS = ["", "", "", *"l ll m n nn r rt s sh ss t th ck ce nd x".split()]
_MADE_NAMES, _MADE_THINGS = 0.5, 0.1
"""Shares of names and things that are made."""
_BAD_PARTS = "arse cock coon cum dick fuck kike nazi paki piss sex shit tit".split()
_OTHER_WORDS = set("do he me no she so the thee to we".split())
"""`_BAD_PARTS` offend and `_OTHER_WORDS` are words already: a made name or thing may contain none
of the former and be none of the latter."""


def name(r: random.Random) -> str:
    """Return a name with a capital letter."""
    if r.random() >= _MADE_NAMES:
        return r.choice(NAMES)
    first = r.choice("aeiou") + r.choice("lnrmd") if r.random() < 0.25 else ""
    made = first + "".join(_syllable(r) for _ in range(r.randint(1, 2)))
    return made.capitalize() if _is_fit(made) else "Robin"


def names(r: random.Random, count: int) -> list[str]:
    """Return `count` different names."""
    lines: set[str] = set()
    while len(lines) < count:
        lines.add(name(r))
    return r.sample(sorted(lines), count)


def thing(r: random.Random) -> str:
    """Return the plural noun of a thing to count."""
    if r.random() >= _MADE_THINGS:
        return r.choice(THINGS)
    made = "".join(_syllable(r) for _ in range(r.randint(1, 2)))
    return made + "s" if _is_fit(made) else "things"


def pronoun(r: random.Random) -> str:
    """Draw a pronoun at random."""
    return r.choice(["she", "he", "they"])


def does(who: str) -> str:
    """Return "does she" or "do they", as the pronoun requires."""
    return f"do {who}" if who == "they" else f"does {who}"


def _is_fit(made: str) -> bool:
    return made not in _OTHER_WORDS and not any(part in made for part in _BAD_PARTS)


def _syllable(r: random.Random) -> str:
    return r.choice(_ONSETS) + r.choice(_VOWELS) + r.choice(_CODAS)
