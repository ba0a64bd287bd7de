"""Regexes from examples: some strings match, some do not, and the answer is a short regex.

A prompt is one line, "✓2024-01-15✓1999-12-31✗2024/01/15✗24-01-15→", and its answer a regex such as
"\\d{4}(-\\d\\d){2}". Each string stands behind its mark, so any printable ASCII may be in it.

A regex is drawn from a grammar that is weighted towards what people write: fields and separators,
words, optional and repeated parts. Strings that match are drawn from it; what they do not show is
left out of it. The other strings are near misses, which RE2 checks. All is a function of the seed.
A regex that hashes into the held-out class is never trained on.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain, groupby
from string import ascii_lowercase, ascii_uppercase, digits

import re2

from srm.training.problems.problem import HELD_OUT_SHARE
from srm.training.problems.words import GOODS, NAMES, THINGS

MATCHES, MISSES, ANSWER = "✓✗→"
"""Marks before a string that matches, before one that does not, and before the regex."""
MOST_STRINGS = 8
"""Most strings of either kind."""
LEAST_STRINGS = 3
MOST_PROMPT = 300
"""Most characters of a prompt."""
MOST_ANSWER = 64
"""Most characters of a regex."""
LONGEST = 2 + MOST_PROMPT + MOST_ANSWER
"""Most tokens of a task with its regex, begin and end token included."""
MOST_STRING = 48
"""Most characters of a drawn string."""
_SHORT_DROPPED = 0.8
"""Share of the regexes of one part that are left out: guesses would solve them."""
_MANY = 6
"""Most repetitions drawn where a quantifier has no upper bound."""
_NO_END = -1
"""Upper bound of a quantifier without one."""

_PROMPT = re.compile(f"((?:{MATCHES}[ -~]*)+)((?:{MISSES}[ -~]*)+){ANSWER}")
_ESCAPED = frozenset(r".+*?()[]{}|\^$")
_ONCE = (1, 1)

_TECHNICAL = (
    "id user name error warn info debug host port path file line log time date size total count "
    "key value type status code level api test main data web app server client node job task run "
    "get set add del put post new old max min in out on off true false null none yes no ok fail "
    "pass start stop open close read write http https ftp www com org net io html css json xml "
    "csv txt png jpg pdf zip tar gz log py js md kg km cm ms px em usd eur gbp am pm st nd rd th "
    "re un pre sub ing ed er ly est tion version build release feature fix docs item order ref "
    "page row col tag img src div span alpha beta rc dev prod local admin root home tmp usr var"
).split()
_NOUNS = (*_TECHNICAL, *THINGS, *GOODS, *(name.lower() for name in NAMES))
_OTHERS = ascii_lowercase + ascii_uppercase + digits + "-_./:,; #@="
_TEXT = ascii_lowercase * 3 + ascii_uppercase + digits + "    -.,:/'"
_SEPARATORS = "---...///:::,  __@#=+*|;&~%$<>!?'\""
_JOINS: tuple[str, ...] = (
    "-",
    "-",
    "-",
    ".",
    ".",
    ".",
    "/",
    "/",
    ":",
    ":",
    "_",
    "_",
    " ",
    " ",
    ",",
    ", ",
    "=",
)
_JOINS += ("@", " - ", ": ", "x", "+", "::", "->", " = ", "|", ";", "--", "&", "#", "*", "T", "//")
_OPENERS: tuple[str, ...] = (
    "()",
    "[]",
    "{}",
    "<>",
    '""',
    "''",
    "[]",
    "()",
    '""',
    "{}",
    "**",
    "``",
    "//",
    "||",
)
_OPENERS += ("  ", "__", "%%", "$$", "{{}}", "</>", "${}", "#;", "@:", "<!>", "~~")


class Characters:
    """A class of characters: how it is written, and which are drawn for it, more often those that
    stand there more often. `is_narrow` if a wider class is simpler."""

    __slots__ = ("drawn", "is_narrow", "members", "text")

    def __init__(self, text: str, drawn: str, is_narrow: bool = False) -> None:
        self.text, self.drawn, self.is_narrow = text, drawn, is_narrow
        self.members = frozenset(drawn)


DIGIT = Characters(r"\d", digits)
LOWER = Characters("[a-z]", ascii_lowercase)
UPPER = Characters("[A-Z]", ascii_uppercase)
WORD = Characters(r"\w", ascii_lowercase * 3 + ascii_uppercase + digits + "_")
LETTER = Characters("[A-Za-z]", ascii_lowercase * 2 + ascii_uppercase)
ANY = Characters(".", _TEXT)
_ALNUM = Characters(r"[a-z\d]", ascii_lowercase + digits)
_CODE = Characters(r"[A-Z\d]", ascii_uppercase + digits)
_HEX = Characters(r"[\da-f]", digits + "abcdef")
_UPPER_HEX = Characters(r"[\dA-F]", digits + "ABCDEF")
_COMMON = (
    *(DIGIT,) * 9,
    *(LOWER,) * 6,
    *(UPPER,) * 4,
    WORD,
    WORD,
    LETTER,
    _ALNUM,
    _CODE,
    _HEX,
    _UPPER_HEX,
    ANY,
)
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


@dataclass(slots=True)
class Literal:
    """A text that stands there as it is."""

    text: str


@dataclass(slots=True)
class Run:
    """Characters of a class, `least` to `most` of them."""

    of: Characters
    least: int = 1
    most: int = 1
    seen: set[int] = field(default_factory=set)
    """Lengths in the strings that match."""
    characters: set[str] = field(default_factory=set)
    """Characters in them."""


@dataclass(slots=True)
class Group:
    """One of some sequences, `least` to `most` times."""

    branches: list[Nodes]
    least: int = 1
    most: int = 1
    seen: set[int] = field(default_factory=set)
    """How often it stood in a string that matches."""
    chosen: list[int] = field(default_factory=list)
    """Branches in the strings that match, by first appearance."""


Node = Literal | Run | Group
Nodes = list[Node]
Part = tuple[str, Node]


@dataclass(frozen=True)
class RegexTask:
    """Strings that the regex to write must match, strings that it must not match, and a regex."""

    matching: tuple[str, ...]
    missing: tuple[str, ...]
    regex: str

    @property
    def prompt(self) -> str:
        return write_prompt(self.matching, self.missing)

    @property
    def is_held_out(self) -> bool:
        return is_held_out(self.regex)


def write_prompt(matching: Sequence[str], missing: Sequence[str]) -> str:
    """Return the prompt of strings that must match and strings that must not."""
    marked = (*(MATCHES + text for text in matching), *(MISSES + text for text in missing))
    return "".join(marked) + ANSWER


def parse_prompt(prompt: str) -> tuple[list[str], list[str]]:
    """Return the strings that must match and those that must not. Raises ValueError for a text that
    is no prompt."""
    match = _PROMPT.fullmatch(prompt.strip())
    if match is None:
        raise ValueError(f"no regex task: {prompt!r:.100}")
    return match[1].split(MATCHES)[1:], match[2].split(MISSES)[1:]


def is_solved(prompt: str, answer: str) -> bool:
    """Whether an answer, spaces around it left out, is a regex that matches all of each string that
    must match and of none that must not. Raises ValueError for a text that is no prompt."""
    matching, missing = parse_prompt(prompt)
    try:
        match = compiled(answer.strip()).fullmatch
    except re2.error:
        return False
    right, wrong = ([text.encode() for text in texts] for texts in (matching, missing))
    return all(map(match, right)) and not any(map(match, wrong))


def is_held_out(regex: str) -> bool:
    """Whether a regex is held out from training, with all its tasks."""
    digest = blake2b(regex.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % HELD_OUT_SHARE == 0


def tasks(seed: int | str, held_out: bool = False) -> Iterator[RegexTask]:
    """Yield tasks without end that are, or are not, held out."""
    r = random.Random(f"regexes {held_out} {seed}")
    earlier = ["x"]
    while True:
        task = _task(r, draw_regex(r), earlier, held_out)
        if task is not None:
            earlier = [*task.matching[:4], *earlier[:12]]
            yield task


def draw_regex(r: random.Random) -> Nodes:
    """Draw a regex of the grammar."""
    nodes = _whole(r)
    if r.random() < 0.08:
        return [Group([nodes, _whole(r), *([_whole(r)] if r.random() < 0.2 else [])])]
    if r.random() < 0.12:
        return _wrapped(r, nodes)
    return nodes


def write_regex(nodes: Nodes) -> str:
    """Return the shortest text of a regex."""
    first = nodes[0] if len(nodes) == 1 else None
    if isinstance(first, Group) and (first.least, first.most) == _ONCE:
        return "|".join(map(write_regex, first.branches))
    return "".join(map(_write, nodes))


# ----- the grammar


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
    join, is_alike = _join(r), r.random() < 0.55
    alike = _field(r) if r.random() < 0.3 else None
    if r.random() < 0.25:
        nodes.append(Literal(_word(r) + (r.choice(_JOINS) if r.random() < 0.6 else "")))
    elif r.random() < 0.15:
        nodes.append(_sign(r))
    for place in range(count):
        joined: Nodes = [Literal(join if is_alike else _join(r))] if place else []
        joined += [_copied(node) for node in alike] if alike else _field(r)
        if place and r.random() < 0.12:
            joined = [Group([joined], 0, 1)]
        elif place and r.random() < 0.06:
            joined = [Group([joined[:1]], 0, 1), *joined[1:]]
        nodes += joined
    if r.random() < 0.15:
        nodes.append(Literal(_word(r)) if r.random() < 0.5 else _ending(r))
    return nodes


def _repeated(r: random.Random) -> Nodes:
    """Return a field that is repeated with separators, or a group that is."""
    one, join = _field(r), [Literal(_join(r))]
    least, most = r.choice([*((1, _NO_END),) * 2, *((0, _NO_END),) * 2, *_some(r)])
    kind = r.random()
    nodes: Nodes
    if kind < 0.55:
        again = one if r.random() < 0.75 else _field(r)
        nodes = [*one, Group([[*join, *map(_copied, again)]], least, most)]
    elif kind < 0.75:
        nodes = [Group([[*one, *join]], least, most), *map(_copied, one)]
    else:
        nodes = [Group([_packed(r, 2)], max(1, least), most)]
    if r.random() < 0.2:
        nodes = [Literal(r.choice([_word(r), r.choice(_SEPARATORS)])), *nodes]
    if r.random() < 0.2:
        nodes += _joined(r, 1) if r.random() < 0.5 else [_ending(r)]
    return nodes


def _some(r: random.Random) -> list[tuple[int, int]]:
    count = r.randint(2, 5)
    return [(count, count), (count, count), (1, count), (0, count - 1), (2, _NO_END)]


def _packed(r: random.Random, count: int = 0) -> Nodes:
    """Return classes and characters without separators, as codes have them."""
    nodes: Nodes = []
    last = None
    for _ in range(count or r.randint(1, 5)):
        kind = r.random()
        if kind < 0.12:
            nodes.append(Literal(r.choice(_SEPARATORS + ascii_lowercase + ascii_uppercase)))
        elif kind < 0.17:
            nodes.append(Group([[Literal(r.choice(_SEPARATORS))]], 0, 1))
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
    affix, of = Literal(_word(r)[: r.randint(1, 4)]), r.choice([LOWER, LOWER, LOWER, WORD, DIGIT])
    least = r.randint(0, 1)
    before, after = Run(of, least, _NO_END), Run(of, r.randint(0, 1), _NO_END)
    return r.choice([[affix, after], [before, affix], [before, affix, after]])


def _wrapped(r: random.Random, nodes: Nodes) -> Nodes:
    pair = r.choice(_OPENERS)
    half = (len(pair) + 1) // 2
    around: Nodes = [Literal(pair[:half]), *nodes, Literal(pair[half:])]
    if r.random() < 0.2:
        return [Literal(_word(r)), *around]
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
        return [Run(r.choice([LOWER, LOWER, UPPER, WORD]), 1, _NO_END)]
    if kind < 0.67:
        return [Run(UPPER), Run(LOWER, 1, _NO_END)]
    if kind < 0.73:
        return [Literal(_word(r))]
    if kind < 0.8:
        return [_words(r)]
    if kind < 0.84:
        fraction: Nodes = [Literal("."), Run(DIGIT, *r.choice([_ONCE, (1, _NO_END), (2, 2)]))]
        is_there = Group([fraction], int(r.random() >= 0.7), 1)
        return [Run(DIGIT, 1, _NO_END), is_there]
    if kind < 0.87:
        return [_sign(r), Run(DIGIT, *_times(r))]
    if kind < 0.9:
        return [_bounded(r)]
    if kind < 0.94:
        mark = r.choice('"""\'])>;,:&/')
        return [Run(_not(mark), r.randint(0, 1), _NO_END)]
    if kind < 0.96:
        return [Run(ANY, 1, _NO_END)]
    return _packed(r, 2)


def _sign(r: random.Random) -> Node:
    if r.random() < 0.6:
        return Group([[Literal(r.choice("---+$#~@v."))]], 0, 1)
    return Run(_set(r.choice(["+-", "+-", "<>", "^~", "#@", ".-"])), r.randint(0, 1), 1)


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
    return Group([[Literal(word)] for word in words], *r.choice([_ONCE, _ONCE, _ONCE, (0, 1)]))


def _bounded(r: random.Random) -> Group:
    """Return a number of two digits with an upper bound, such as a month or an hour."""
    high = r.randint(1, 9)
    first: Nodes = [Run(_range("0", str(high - 1))) if high > 1 else Literal("0"), Run(DIGIT)]
    end = r.randint(0, 8)
    last = Run(_range("0", str(end))) if end else Literal("0")
    begin: Nodes = [Run(_range("1", "9"))] if r.random() < 0.3 else first
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
        return _range(of[first], of[r.randrange(first + 1, len(of))])
    if kind < 0.97:
        of = r.choice([ascii_lowercase, ascii_uppercase, digits, "aeiou", "ACGT", "KQRBN", "01"])
        return _set("".join(r.sample(of, r.randint(2, min(5, len(of))))))
    return _not(r.choice(["aeiou", " ", "/", "@", ",", '"']))


def _range(first: str, last: str) -> Characters:
    members = "".join(map(chr, range(ord(first), ord(last) + 1)))
    return Characters(_class_text(members), members, is_narrow=True)


def _set(members: str) -> Characters:
    return Characters(_class_text(members), members, is_narrow=True)


def _not(members: str) -> Characters:
    left = "".join(character for character in _TEXT if character not in members)
    escaped = members.replace("]", r"\]")
    return Characters(f"[^{escaped}]", left)


def _class_text(members: str) -> str:
    """Return a class of these characters; runs of three or more are ranges."""
    codes = sorted({*map(ord, members)})
    if codes == [*map(ord, digits)]:
        return r"\d"
    text = ""
    for _, group in groupby(enumerate(codes), lambda pair: pair[1] - pair[0]):
        run = [chr(code) for _, code in group]
        text += f"{run[0]}-{run[-1]}" if len(run) > 2 else "".join(run)
    if "-" in members:  # stands last, where it is no range
        text = text.replace("-", "") + "-"
    if text[:1] == "^":
        text = text[1:] + "^"
    return f"[{text}]"


def _times(r: random.Random) -> tuple[int, int]:
    kind = r.random()
    if kind < 0.27:
        return _ONCE
    if kind < 0.55:
        return (1, _NO_END)
    if kind < 0.8:
        count = r.choice([2, 2, 2, 2, 3, 3, 3, 4, 4, 4, 5, 6, 7, 8, 10, 12])
        return count, count
    if kind < 0.84:
        return (0, 1)
    if kind < 0.88:
        return (0, _NO_END)
    least = r.choice([1, 1, 1, 1, 2, 2, 3, 4])
    return least, least + r.choice([1, 1, 1, 2, 2, 3, 4])


def _join(r: random.Random) -> str:
    return r.choice(_JOINS)


def _noun(r: random.Random) -> str:
    if r.random() < 0.75:
        return r.choice(_NOUNS)
    return "".join(r.choices(ascii_lowercase, k=r.randint(1, 5)))


def _word(r: random.Random) -> str:
    word = _noun(r)
    kind = r.random()
    return word if kind < 0.6 else word.upper() if kind < 0.85 else word.capitalize()


def _copied(node: Node) -> Node:
    """Return a node with nothing seen."""
    if isinstance(node, Literal):
        return node
    if isinstance(node, Run):
        return Run(node.of, node.least, node.most)
    return Group([[*map(_copied, branch)] for branch in node.branches], node.least, node.most)


# ----- its text


def _write(node: Node) -> str:
    if isinstance(node, Literal):
        return _escaped(node.text)
    if isinstance(node, Run):
        return _quantified(node.of.text, node.least, node.most)
    text = "|".join("".join(map(_write, branch)) for branch in node.branches)
    once = (node.least, node.most) == _ONCE
    if len(node.branches) == 1:
        (branch,) = node.branches
        if once:
            return text
        (first, *more) = branch
        if not more and isinstance(first, Literal) and len(first.text) == 1:
            return _quantified(text, node.least, node.most)
    return _quantified(f"({text})", node.least, node.most)


def _escaped(text: str) -> str:
    return "".join("\\" + letter if letter in _ESCAPED else letter for letter in text)


def _quantified(text: str, least: int, most: int) -> str:
    if least == most:
        again = f"{text}{{{least}}}"
        return text * least if len(text) * least <= len(again) else again
    if most == _NO_END:
        return text + ("*", "+")[least] if least < 2 else f"{text}{{{least},}}"
    return text + "?" if (least, most) == (0, 1) else f"{text}{{{least},{most}}}"


# ----- its strings


class _Drawing:
    """Draws one string of a regex, and remembers its parts."""

    def __init__(self, r: random.Random, nodes: Nodes) -> None:
        self._random = r
        self.parts: list[Part] = []
        self.spans: list[tuple[int, int]] = []
        """Parts of each repetition of a group."""
        self._counts: list[tuple[Run | Group, int]] = []
        self._branches: list[tuple[Group, int]] = []
        self._all(nodes)
        self.text = "".join(text for text, _ in self.parts)

    def remember(self) -> None:
        """Note in the regex what this string shows of it."""
        for node, count in self._counts:
            node.seen.add(count)
        for group, branch in self._branches:
            if branch not in group.chosen:
                group.chosen.append(branch)
        for text, drawn in self.parts:
            if isinstance(drawn, Run):
                drawn.characters.update(text)

    def _all(self, nodes: Nodes) -> None:
        for node in nodes:
            if isinstance(node, Literal):
                self.parts.append((node.text, node))
                continue
            r, most = self._random, node.most
            if most == _NO_END:
                most = node.least + min(_MANY, int(r.expovariate(0.45)))
            count = node.least if most == node.least else r.randint(node.least, most)
            if isinstance(node, Run):
                text = _draw_text(r, node, count)
                self._counts.append((node, len(text)))
                self.parts.append((text, node))
                continue
            self._counts.append((node, count))
            for _ in range(count):
                branch = r.randrange(len(node.branches)) if len(node.branches) > 1 else 0
                self._branches.append((node, branch))
                begin = len(self.parts)
                self._all(node.branches[branch])
                self.spans.append((begin, len(self.parts)))


def _draw_text(r: random.Random, run: Run, count: int) -> str:
    of = run.of
    if run.most == _NO_END and count and not of.is_narrow and r.random() < 0.6:
        word = r.choice(_NOUNS)
        if of is UPPER or of is _CODE:
            word = word.upper()
        elif of is ANY or of.text[:2] == "[^":
            word = " ".join([word, *r.choices(_NOUNS, k=r.randint(0, 2))])
            word = word.capitalize() if r.random() < 0.3 else word
        if of is not DIGIT and len(word) >= run.least and of.members.issuperset(word):
            return word
    if of is DIGIT and count == 4 and r.random() < 0.4:
        return str(r.randint(1900, 2039))
    return "".join(r.choices(of.drawn, k=count))


def _pruned(nodes: Nodes) -> Nodes:
    """Return a regex without what its strings do not show."""
    pruned: Nodes = []
    for node in nodes:
        if isinstance(node, Literal):
            pruned.append(node)
            continue
        least, most = min(node.seen, default=0), max(node.seen, default=0)
        if not most:
            continue
        if least < most and node.most == _NO_END:
            least, most = min(node.least, least), _NO_END
        if isinstance(node, Run):
            of = node.of
            if of.is_narrow and len(of.members) <= 5 and node.characters < of.members:
                if len(node.characters) == 1:
                    pruned.append(Group([[Literal(*node.characters)]], least, most))
                    continue
                of = _set("".join(node.characters))
            for plain in (DIGIT, LOWER, UPPER):
                if node.characters <= plain.members < of.members:
                    of = plain
            if pruned and isinstance(last := pruned[-1], Run) and last.of is of:
                least += last.least
                most = _NO_END if _NO_END in (most, last.most) else most + last.most
                pruned.pop()
            pruned.append(Run(of, least, most))
            continue
        branches = [_pruned(node.branches[branch]) for branch in node.chosen]
        written = {"".join(map(_write, branch)): branch for branch in branches}
        branches = [branch for branch in written.values() if branch]
        if len(branches) < len(written):
            least = 0
        if len(branches) == 1 and (least, most) == _ONCE:
            pruned += branches[0]
        elif branches:
            pruned.append(Group(branches, least, most))
    return pruned


def _task(
    r: random.Random, nodes: Nodes, earlier: Sequence[str], held_out: bool
) -> RegexTask | None:
    """Return a task of a regex, or None if it makes none that is of the wanted class."""
    wanted = r.choice([4, 4, 5, 5, 6, 6, 7, 8, 3])
    matching: dict[str, _Drawing] = {}
    for _ in range(2 * wanted):
        drawing = _Drawing(r, nodes)
        if drawing.text and len(drawing.text) <= MOST_STRING and drawing.text not in matching:
            drawing.remember()
            matching[drawing.text] = drawing
            if len(matching) == wanted:
                break
    length = len("".join(matching)) + len(matching)
    if len(matching) < LEAST_STRINGS or length > MOST_PROMPT // 2:
        return None
    nodes = _pruned(nodes)
    regex = write_regex(nodes)
    if len(regex) > MOST_ANSWER or not any(isinstance(node, Run | Group) for node in nodes):
        return None
    pattern = compiled(regex)
    missing: dict[str, None] = {}
    wanted, left = r.choice([4, 5, 6, 6, 7, 7, 8, 8, 3]), MOST_PROMPT - length - 1
    drawn = [*matching.values()]
    for _ in range(4 * wanted):
        text = _near_miss(r, r.choice(drawn), drawn, earlier)
        is_fit = len(text) <= min(MOST_STRING, left - 1) and text not in missing
        if is_fit and not pattern.fullmatch(text.encode()):
            missing[text] = None
            left -= len(text) + 1
            if len(missing) == wanted:
                break
    if len(missing) < LEAST_STRINGS:
        return None
    regex = write_regex(_simplified(nodes, matching, missing))
    if regex != regex.strip() or is_held_out(regex) != held_out:
        return None  # an answer is read without spaces around it
    if len(nodes) == 1 and r.random() < _SHORT_DROPPED:
        return None
    return RegexTask(tuple(matching), tuple(missing), regex)


def compiled(regex: str) -> re2._Regexp:
    """Return a regex that searches bytes. Raises re2.error."""
    return re2.compile(regex.encode(), _OPTIONS)


_OPTIONS = re2.Options()
_OPTIONS.log_errors = False
_OPTIONS.never_capture = True


def _simplified(nodes: Nodes, matching: Iterable[str], missing: Iterable[str]) -> Nodes:
    """Drop branches and widen bounds and narrow classes, in place, where no string gives a reason
    not to."""
    right, wrong = ([text.encode() for text in texts] for texts in (matching, missing))

    def fits() -> bool:
        match = compiled(write_regex(nodes)).fullmatch
        return all(map(match, right)) and not any(map(match, wrong))

    def simplify(node: Node) -> None:
        if isinstance(node, Literal):
            return
        if isinstance(node, Run) and node.of.is_narrow:
            narrow = node.of
            for wide in (DIGIT, LOWER, UPPER):
                if narrow.members < wide.members and len(wide.text) <= len(narrow.text):
                    node.of = wide
                    node.of = wide if fits() else narrow
        if node.least < node.most and (node.least, node.most) != (0, 1):
            bounds = node.least, node.most
            node.least, node.most = min(1, node.least), _NO_END
            if not fits():
                node.least, node.most = bounds
        if isinstance(node, Group):
            for branch in node.branches[:] if len(node.branches) > 1 else ():
                branches = node.branches
                node.branches = [other for other in branches if other is not branch] or branches
                if not fits():
                    node.branches = branches
            for inner in chain.from_iterable(node.branches):
                simplify(inner)

    for node in nodes:
        simplify(node)
    return nodes


def _near_miss(
    r: random.Random, drawing: _Drawing, drawn: Sequence[_Drawing], earlier: Sequence[str]
) -> str:
    """Return a string that is like those that match, and may match too."""
    kind = r.random()
    parts = [text for text, _ in drawing.parts]
    if kind < 0.62:
        place = r.randrange(len(parts))
        parts[place] = _changed(r, *drawing.parts[place])
        if r.random() < 0.1:
            place = r.randrange(len(parts))
            parts[place] = _changed(r, *drawing.parts[place])
    elif kind < 0.72 and drawing.spans:
        begin, end = r.choice(drawing.spans)
        parts[begin:end] = [] if r.random() < 0.5 else 2 * parts[begin:end]
    elif kind < 0.8 and len(parts) > 1:
        if r.random() < 0.5:
            i, j = r.sample(range(len(parts)), 2)
            parts[i], parts[j] = parts[j], parts[i]
        else:
            place = r.randrange(1, len(parts))
            parts = parts[:place] if r.random() < 0.5 else parts[place:]
    elif kind < 0.96:
        return _mutated(r, drawing.text)
    elif kind < 0.98:
        return r.choice(earlier)
    else:
        return "".join(parts) + r.choice(drawn).text
    return "".join(parts)


def _changed(r: random.Random, text: str, node: Node) -> str:
    """Change a part as people get it wrong: its length, its characters, its case."""
    kind = r.random()
    if isinstance(node, Literal):
        if kind < 0.3:
            return "" if kind < 0.2 else text + text
        if kind < 0.5 and not text.isalnum():
            return r.choice(_JOINS)
        if kind < 0.65 and text.isalpha():
            return text.swapcase() if kind < 0.58 else text.capitalize()
        return _mutated(r, text) if kind < 0.8 else _word(r) if text.isalpha() else r.choice(_JOINS)
    assert isinstance(node, Run)
    of = node.of
    if 1 < node.most != node.least and r.random() < 0.5:  # the reason of its bound
        return "".join(r.choices(of.drawn, k=node.most + 1))
    if kind < 0.35:
        if kind < 0.08 or not text:
            return "" if text else r.choice(of.drawn)
        return text + r.choice(text) if kind < 0.22 else text[1:]
    if kind < 0.6:
        others = {DIGIT: LOWER.drawn, LOWER: UPPER.drawn + digits, UPPER: LOWER.drawn + digits}
        wrong = others.get(of)
        if wrong is None:
            wrong = digits + ascii_lowercase + ascii_uppercase
        if of.is_narrow and text[:1].isdigit():
            wrong = digits
        place = r.randrange(len(text) + 1)
        return text[:place] + r.choice(wrong) + text[place + 1 :]
    if kind < 0.75 and text.isalpha():
        return text.upper() if kind < 0.65 else text.capitalize() if kind < 0.7 else text.lower()
    if kind < 0.85:
        return "".join(r.choices(of.drawn, k=max(0, len(text) + r.choice([-2, -1, 1, 2, 3]))))
    return _mutated(r, text)


def _mutated(r: random.Random, text: str) -> str:
    """Delete, insert, replace or exchange characters, or cut a text."""
    kind, place = r.random(), r.randrange(len(text) + 1)
    if kind < 0.25:
        return text[:place] + text[place + 1 :]
    if kind < 0.5:
        return text[:place] + r.choice(_OTHERS) + text[place:]
    if kind < 0.75:
        return text[:place] + r.choice(_OTHERS) + text[place + 1 :]
    if kind < 0.85:
        return (
            text[:place] + text[place + 1 : place + 2] + text[place : place + 1] + text[place + 2 :]
        )
    if kind < 0.92:
        return text.swapcase() if kind < 0.88 else text.upper()
    return text + r.choice(_SEPARATORS) if kind < 0.97 else r.choice(_SEPARATORS) + text
