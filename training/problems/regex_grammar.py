"""The grammar that regexes are drawn from, weighted towards what people write."""

from __future__ import annotations

import random
from string import ascii_lowercase, ascii_uppercase, digits

from srm.training.problems.regex_nodes import (
    NO_END,
    ONCE,
    Characters,
    Group,
    Literal,
    Node,
    Nodes,
    Run,
    class_of,
    copied,
    range_of,
)
from srm.training.problems.words import GOODS, NAMES, THINGS

_TECHNICAL = (
    "id user name error warn info debug host port path file line log time date size total count "
    "key value type status code level api test main data web app server client node job task run "
    "get set add del put post new old max min in out on off true false null none yes no ok fail "
    "pass start stop open close read write http https ftp www com org net io html css json xml "
    "csv txt png jpg pdf zip tar gz log py js md kg km cm ms px em usd eur gbp am pm st nd rd th "
    "re un pre sub ing ed er ly est tion version build release feature fix docs item order ref "
    "page row col tag img src div span alpha beta rc dev prod local admin root home tmp usr var"
).split()
NOUNS = (*_TECHNICAL, *THINGS, *GOODS, *(name.lower() for name in NAMES))
_TEXT = ascii_lowercase * 3 + ascii_uppercase + digits + "    -.,:/'"
SEPARATORS = "---...///:::,  __@#=+*|;&~%$<>!?'\""
JOINS: tuple[str, ...] = (
    *"---...//::__  ,=@x+|;&#*T",
    ", ",
    " - ",
    ": ",
    "::",
    "->",
    " = ",
    "--",
    "//",
)
_OPENERS = '() () [] [] {} {} <> "" "" \'\' ** `` // || __ %% $$ {{}} </> ${} #; @: <!> ~~'.split()
"""What stands around a regex; the first half before it."""

DIGIT = Characters(r"\d", digits)
LOWER = Characters("[a-z]", ascii_lowercase)
UPPER = Characters("[A-Z]", ascii_uppercase)
WORD = Characters(r"\w", ascii_lowercase * 3 + ascii_uppercase + digits + "_")
LETTER = Characters("[A-Za-z]", ascii_lowercase * 2 + ascii_uppercase)
ANY = Characters(".", _TEXT)
_ALNUM = Characters(r"[a-z\d]", ascii_lowercase + digits)
CODE = Characters(r"[A-Z\d]", ascii_uppercase + digits)
_HEX = Characters(r"[\da-f]", digits + "abcdef")
_UPPER_HEX = Characters(r"[\dA-F]", digits + "ABCDEF")
_COMMON: tuple[Characters, ...] = (*(DIGIT,) * 9, *(LOWER,) * 6, *(UPPER,) * 4, WORD, WORD, LETTER)
_COMMON += (_ALNUM, CODE, _HEX, _UPPER_HEX, ANY)
_RARE = (
    Characters("[a-z_]", ascii_lowercase * 2 + "__"),
    Characters("[a-z-]", ascii_lowercase * 2 + "--"),
    Characters("[a-z ]", ascii_lowercase * 2 + "   "),
    Characters("[A-Z_]", ascii_uppercase * 2 + "__"),
    Characters(r"[\w-]", ascii_lowercase * 2 + ascii_uppercase + digits + "_--"),
    Characters(r"[\w.]", ascii_lowercase * 2 + digits + "_.."),
    Characters(r"[\w.-]", ascii_lowercase * 2 + digits + "_.-"),
    Characters(r"[a-z.]", ascii_lowercase * 2 + ".."),
    Characters(r"[\d.]", digits + ".."),
    Characters(r"[A-Za-z\d]", ascii_lowercase + ascii_uppercase + digits),
    Characters(r"\S", _TEXT.replace(" ", "") + "#_"),
)


def draw_regex(r: random.Random) -> Nodes:
    """Draw a regex of the grammar."""
    nodes = _whole(r)
    if r.random() < 0.08:
        return [Group([nodes, _whole(r), *([_whole(r)] if r.random() < 0.2 else [])])]
    if r.random() < 0.12:
        return _wrapped(r, nodes)
    return nodes


def _whole(r: random.Random) -> Nodes:
    kind = r.random()
    if kind < 0.5:
        return _joined(r, 1 + int(r.random() ** 1.5 * 5))
    if kind < 0.72:
        return _repeated(r)
    if kind < 0.9:
        return _packed(r)
    return _affixed(r)


def _joined(r: random.Random, count: int) -> Nodes:
    """Return fields with separators between them, some of which may be absent."""
    nodes: Nodes = []
    join, is_alike = r.choice(JOINS), r.random() < 0.55
    alike = _field(r) if r.random() < 0.3 else None
    if r.random() < 0.25:
        nodes.append(Literal(draw_word(r) + (r.choice(JOINS) if r.random() < 0.6 else "")))
    elif r.random() < 0.15:
        nodes.append(_sign(r))
    for place in range(count):
        joined: Nodes = [Literal(join if is_alike else r.choice(JOINS))] if place else []
        joined += [copied(node) for node in alike] if alike else _field(r)
        if place and r.random() < 0.12:
            joined = [Group([joined], 0, 1)]
        elif place and r.random() < 0.06:
            joined = [Group([joined[:1]], 0, 1), *joined[1:]]
        nodes += joined
    if r.random() < 0.15:
        nodes.append(Literal(draw_word(r)) if r.random() < 0.5 else _ending(r))
    return nodes


def _repeated(r: random.Random) -> Nodes:
    """Return a field that is repeated with separators, or a group that is."""
    one, join = _field(r), [Literal(r.choice(JOINS))]
    least, most = r.choice([*((1, NO_END),) * 2, *((0, NO_END),) * 2, *_some(r)])
    kind = r.random()
    nodes: Nodes
    if kind < 0.55:
        again = one if r.random() < 0.75 else _field(r)
        nodes = [*one, Group([[*join, *map(copied, again)]], least, most)]
    elif kind < 0.75:
        nodes = [Group([[*one, *join]], least, most), *map(copied, one)]
    else:
        nodes = [Group([_packed(r, 2)], max(1, least), most)]
    if r.random() < 0.2:
        nodes = [Literal(r.choice([draw_word(r), r.choice(SEPARATORS)])), *nodes]
    if r.random() < 0.2:
        nodes += _joined(r, 1) if r.random() < 0.5 else [_ending(r)]
    return nodes


def _some(r: random.Random) -> list[tuple[int, int]]:
    count = r.randint(2, 5)
    return [(count, count), (count, count), (1, count), (0, count - 1), (2, NO_END)]


def _packed(r: random.Random, count: int = 0) -> Nodes:
    """Return classes and characters without separators, as codes have them."""
    nodes: Nodes = []
    last = None
    for _ in range(count or r.randint(1, 5)):
        kind = r.random()
        if kind < 0.12:
            nodes.append(Literal(r.choice(SEPARATORS + ascii_lowercase + ascii_uppercase)))
        elif kind < 0.17:
            nodes.append(Group([[Literal(r.choice(SEPARATORS))]], 0, 1))
        elif kind < 0.22:
            nodes.append(_words(r))
        else:
            of = _characters(r)
            while of is last:
                of = _characters(r)
            last = of
            nodes.append(Run(of, *_times(r)))
    return nodes


def _affixed(r: random.Random) -> Nodes:
    """Return a word's beginning, middle or end, with any letters around it."""
    affix, of = (
        Literal(draw_word(r)[: r.randint(1, 4)]),
        r.choice([LOWER, LOWER, LOWER, WORD, DIGIT]),
    )
    least = r.randint(0, 1)
    before, after = Run(of, least, NO_END), Run(of, r.randint(0, 1), NO_END)
    return r.choice([[affix, after], [before, affix], [before, affix, after]])


def _wrapped(r: random.Random, nodes: Nodes) -> Nodes:
    pair = r.choice(_OPENERS)
    half = (len(pair) + 1) // 2
    around: Nodes = [Literal(pair[:half]), *nodes, Literal(pair[half:])]
    if r.random() < 0.2:
        return [Literal(draw_word(r)), *around]
    if r.random() < 0.2:
        return [*_field(r), *([Literal(" ")] if r.random() < 0.5 else []), *around]
    return around


def _field(r: random.Random) -> Nodes:
    """Return what stands between separators."""
    kind = r.random()
    if kind < 0.3:
        return [Run(DIGIT, *_times(r))]
    if kind < 0.52:
        return [Run(_characters(r), *_times(r))]
    if kind < 0.6:
        return [Run(r.choice([LOWER, LOWER, UPPER, WORD]), 1, NO_END)]
    if kind < 0.67:
        return [Run(UPPER), Run(LOWER, 1, NO_END)]
    if kind < 0.73:
        return [Literal(draw_word(r))]
    if kind < 0.8:
        return [_words(r)]
    if kind < 0.84:
        fraction: Nodes = [Literal("."), Run(DIGIT, *r.choice([ONCE, (1, NO_END), (2, 2)]))]
        is_there = Group([fraction], int(r.random() >= 0.7), 1)
        return [Run(DIGIT, 1, NO_END), is_there]
    if kind < 0.87:
        return [_sign(r), Run(DIGIT, *_times(r))]
    if kind < 0.9:
        return [_bounded(r)]
    if kind < 0.94:
        mark = r.choice('"""\'])>;,:&/')
        return [Run(_not(mark), r.randint(0, 1), NO_END)]
    if kind < 0.96:
        return [Run(ANY, 1, NO_END)]
    return _packed(r, 2)


def _sign(r: random.Random) -> Node:
    if r.random() < 0.6:
        return Group([[Literal(r.choice("---+$#~@v."))]], 0, 1)
    return Run(class_of(r.choice(["+-", "+-", "<>", "^~", "#@", ".-"])), r.randint(0, 1), 1)


def _ending(r: random.Random) -> Node:
    kind = r.random()
    if kind < 0.4:
        return Literal(r.choice(";:%!?.,/)'\"+*$~|"))
    if kind < 0.7:
        return Group(
            [[Literal(r.choice(["s", "%", ";", ".", "!", "/", "?", "+", "px", "m", "h"]))]], 0, 1
        )
    return _words(r)


def _words(r: random.Random) -> Group:
    """Return one of some words, or of some short sequences."""
    case = r.choice([str.lower, str.lower, str.upper, str.capitalize])
    if r.random() < 0.15:
        return Group([_packed(r, r.randint(1, 2)), _packed(r, r.randint(1, 2))])
    words = dict.fromkeys(case(_noun(r)) for _ in range(r.choice([2, 2, 2, 3, 3, 4, 5])))
    return Group([[Literal(word)] for word in words], *r.choice([ONCE, ONCE, ONCE, (0, 1)]))


def _bounded(r: random.Random) -> Group:
    """Return a number of two digits with an upper bound, such as a month or an hour."""
    high = r.randint(1, 9)
    first: Nodes = [Run(range_of("0", str(high - 1))) if high > 1 else Literal("0"), Run(DIGIT)]
    end = r.randint(0, 8)
    last = Run(range_of("0", str(end))) if end else Literal("0")
    begin: Nodes = [Run(range_of("1", "9"))] if r.random() < 0.3 else first
    return Group([begin, [Literal(str(high)), last]])


def _characters(r: random.Random) -> Characters:
    kind = r.random()
    if kind < 0.72:
        return r.choice(_COMMON)
    if kind < 0.82:
        return r.choice(_RARE)
    if kind < 0.92:
        of = r.choice([digits, digits, ascii_lowercase, ascii_uppercase])
        first = r.choice([0, 0, 1, r.randrange(len(of) - 1)])
        return range_of(of[first], of[r.randrange(first + 1, len(of))])
    if kind < 0.97:
        of = r.choice([ascii_lowercase, ascii_uppercase, digits, "aeiou", "ACGT", "KQRBN", "01"])
        return class_of("".join(r.sample(of, r.randint(2, min(5, len(of))))))
    return _not(r.choice(["aeiou", " ", "/", "@", ",", '"']))


def _not(members: str) -> Characters:
    left = "".join(character for character in _TEXT if character not in members)
    escaped = members.replace("]", r"\]")
    return Characters(f"[^{escaped}]", left)


def _times(r: random.Random) -> tuple[int, int]:
    kind = r.random()
    if kind < 0.27:
        return ONCE
    if kind < 0.55:
        return (1, NO_END)
    if kind < 0.8:
        count = r.choice([2, 2, 2, 2, 3, 3, 3, 4, 4, 4, 5, 6, 7, 8, 10, 12])
        return count, count
    if kind < 0.84:
        return (0, 1)
    if kind < 0.88:
        return (0, NO_END)
    least = r.choice([1, 1, 1, 1, 2, 2, 3, 4])
    return least, least + r.choice([1, 1, 1, 2, 2, 3, 4])


def _noun(r: random.Random) -> str:
    if r.random() < 0.75:
        return r.choice(NOUNS)
    return "".join(r.choices(ascii_lowercase, k=r.randint(1, 5)))


def draw_word(r: random.Random) -> str:
    word = _noun(r)
    kind = r.random()
    return word if kind < 0.6 else word.upper() if kind < 0.85 else word.capitalize()
