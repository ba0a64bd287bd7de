"""Regexes from examples: some strings match, some do not, and the answer is a short regex.

A prompt is one line, "✓2024-01-15✓1999-12-31→", and what is learned is a regex such as
"\\d{4}(-\\d\\d){2}". Strings that must not match, "✗2024/01/15✗24-01-15", are read by the checker
alone: most of a near miss says what the strings that match say. Each string stands behind its mark,
so any printable ASCII may be in it.

A regex is drawn from the grammar. Strings that match are drawn from it; what they do not show is
left out of it. The other strings are near misses, which RE2 checks. All is a function of the seed.
A regex that hashes into the held-out class is never trained on.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from string import ascii_lowercase, ascii_uppercase, digits

import re2

from srm.regex_examples import fits
from srm.training.problems.problem import HELD_OUT_SHARE
from srm.training.problems.regex_grammar import (
    ANY,
    CODE,
    DIGIT,
    JOINS,
    LOWER,
    NOUNS,
    SEPARATORS,
    UPPER,
    draw_regex,
    draw_word,
)
from srm.training.problems.regex_nodes import (
    NO_END,
    ONCE,
    Group,
    Literal,
    Node,
    Nodes,
    Run,
    class_of,
    write_regex,
)

MATCHES, MISSES, ANSWER = "✓✗→"
"""Marks before a string that matches, before one that does not, and before the regex."""
MOST_STRINGS = 8
"""Most strings of either kind."""
LEAST_STRINGS = 3
MOST_PROMPT = 182
"""Most characters of a prompt."""
_MOST_STRINGS = 300
"""Most characters of all strings, with their marks."""
MOST_ANSWER = 64
"""Most characters of a regex."""
LONGEST = 2 + MOST_PROMPT + MOST_ANSWER
"""Most tokens of a task with its regex, begin and end token included."""
MOST_STRING = 48
"""Most characters of a drawn string."""
_MOST_MATCHING = MOST_PROMPT - 2
"""Most characters of all strings that match, with their marks."""
_SHORT_DROPPED = 0.8
"""Share of the regexes of one part that are left out: guesses would solve them."""
_MANY = 6
"""Most repetitions drawn where a quantifier has no upper bound."""

_PROMPT = re.compile(f"((?:{MATCHES}[ -~]*)+){ANSWER}")
_MISSES = re.compile(f"(?:{MISSES}[ -~]*)*")
_OTHERS = ascii_lowercase + ascii_uppercase + digits + "-_./:,; #@="


Part = tuple[str, Node]


@dataclass(frozen=True)
class RegexTask:
    """Strings that the regex to write must match, strings that it must not match, and a regex."""

    matching: tuple[str, ...]
    missing: tuple[str, ...]
    regex: str

    @property
    def prompt(self) -> str:
        return write_prompt(self.matching)

    @property
    def misses(self) -> str:
        return "".join(MISSES + text for text in self.missing)

    @property
    def is_held_out(self) -> bool:
        return is_held_out(self.regex)


def write_prompt(matching: Sequence[str]) -> str:
    """Return the prompt of strings that must match."""
    return "".join(MATCHES + text for text in matching) + ANSWER


def parse_task(prompt: str, misses: str) -> tuple[list[str], list[str]]:
    """Return the strings that must match, behind ✓ in a prompt, and those that must not, behind ✗.
    Raises ValueError for texts that are no task."""
    match = _PROMPT.fullmatch(prompt.strip())
    if match is None:
        raise ValueError(f"no regex task: {prompt!r:.100}")
    if not _MISSES.fullmatch(misses):
        raise ValueError(f"no strings that must not match: {misses!r:.100}")
    return match[1].split(MATCHES)[1:], misses.split(MISSES)[1:]


def is_solved(prompt: str, misses: str, answer: str) -> bool:
    """Whether an answer is a regex that fits a task's strings, as the server's `verify` checks it.
    Raises ValueError for texts that are no task."""
    return fits(
        answer, *([text.encode() for text in texts] for texts in parse_task(prompt, misses))
    )


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
            if most == NO_END:
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
    if run.most == NO_END and count and not of.is_narrow and r.random() < 0.6:
        word = r.choice(NOUNS)
        if of is UPPER or of is CODE:
            word = word.upper()
        elif of is ANY or of.text[:2] == "[^":
            word = " ".join([word, *r.choices(NOUNS, k=r.randint(0, 2))])
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
        if least < most and node.most == NO_END:
            least, most = min(node.least, least), NO_END
        if isinstance(node, Run):
            of = node.of
            if of.is_narrow and len(of.members) <= 5 and node.characters < of.members:
                if len(node.characters) == 1:
                    pruned.append(Group([[Literal(*node.characters)]], least, most))
                    continue
                of = class_of("".join(node.characters))
            for plain in (DIGIT, LOWER, UPPER):
                if node.characters <= plain.members < of.members:
                    of = plain
            if pruned and isinstance(last := pruned[-1], Run) and last.of is of:
                least += last.least
                most = NO_END if NO_END in (most, last.most) else most + last.most
                pruned.pop()
            pruned.append(Run(of, least, most))
            continue
        branches = [_pruned(node.branches[branch]) for branch in node.chosen]
        written = {write_regex(branch): branch for branch in branches}
        branches = [branch for branch in written.values() if branch]
        if len(branches) < len(written):
            least = 0
        if len(branches) == 1 and (least, most) == ONCE:
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
    left = _MOST_MATCHING
    for _ in range(2 * wanted):
        drawing = _Drawing(r, nodes)
        text = drawing.text
        if text and len(text) <= min(MOST_STRING, left - 1) and text not in matching:
            drawing.remember()
            matching[text] = drawing
            left -= len(text) + 1
            if len(matching) == wanted:
                break
    if len(matching) < LEAST_STRINGS:
        return None
    nodes = _pruned(nodes)
    regex = write_regex(nodes)
    if len(regex) > MOST_ANSWER or not any(isinstance(node, Run | Group) for node in nodes):
        return None
    pattern = compiled(regex)
    missing: dict[str, None] = {}
    wanted = r.choice([4, 5, 6, 6, 7, 7, 8, 8, 3])
    left += _MOST_STRINGS - _MOST_MATCHING - 1
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

    def still_fits() -> bool:
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
                    node.of = wide if still_fits() else narrow
        if node.least < node.most and (node.least, node.most) != (0, 1):
            bounds = node.least, node.most
            node.least, node.most = min(1, node.least), NO_END
            if not still_fits():
                node.least, node.most = bounds
        if isinstance(node, Group):
            for branch in node.branches[:] if len(node.branches) > 1 else ():
                branches = node.branches
                node.branches = [other for other in branches if other is not branch] or branches
                if not still_fits():
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
            return r.choice(JOINS)
        if kind < 0.65 and text.isalpha():
            return text.swapcase() if kind < 0.58 else text.capitalize()
        return (
            _mutated(r, text) if kind < 0.8 else draw_word(r) if text.isalpha() else r.choice(JOINS)
        )
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
    return text + r.choice(SEPARATORS) if kind < 0.97 else r.choice(SEPARATORS) + text
