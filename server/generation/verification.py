"""Verifier: gives samples a score by the rules of `verify`, which are data and never code.

Numbers are decimal and compared exactly as they are written, so 0.1 is 0.1 and 2**53 + 1 is not
2**53. Texts and patterns are bounded as in `matching.py`, and so is the work on the event loop.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction
from typing import Any, Final, NamedTuple

from msgspec import UNSET, Raw

from srm.errors import InvalidRequest
from srm.regex_examples import fits, reading_work
from srm.server.generation.arithmetic import evaluate
from srm.server.generation.matching import MAX_PROGRAM, Pattern, in_parts
from srm.server.schema.json_parts import first_byte
from srm.server.schema.validation import show
from srm.server.schema.verify import MAX_RULES, Rule

MAX_READINGS = 8
"""Most rules of a prompt that read a text as a pattern."""
MAX_DEPTH = 8
"""Most rules in each other."""
MAX_CHECKED = 4_096
"""Most rules of a request, those in others included."""
MAX_PATTERNS = 64
"""Most different regular expressions of a request, since each may take a megabyte."""
MAX_INSTRUCTIONS = 4 * MAX_PROGRAM
"""Most instructions of all of them."""
MAX_EXPONENT = 1_000
"""A rule's number is 0, or at least 1e-1000 and less than 1e1001 in size."""
MAX_DIGITS = 100
MAX_NESTED = 100
"""Most lists and objects of a value to compare with."""

_EXACT = Context(prec=4_000)
"""Digits enough for a number and a tolerance of any size, added up."""
_NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,6})?")
_LEFT_OUT = re.compile(r"[\s$,]+")
_POINTER = re.compile(r"(?:/(?:[^/~]|~[01])*)*")
_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")
_ABSENT: Final = object()
"""What is not there, since None is JSON's null."""
_CHECK_WORK = 400
"""Work of a check of a short text, in instructions x characters of a pattern."""
_READ_WORK = 20
"""Work for each character that is read as JSON, or as a number."""

Score = Callable[[str], float]
Find = Callable[[str], Any]
"""Returns what is to be checked of a text, or _ABSENT."""


class _Compiled(NamedTuple):
    score: Score
    work: int
    """Instructions x characters for each character of a text."""
    num_checks: int
    num_readings: int = 0
    """How often the text is read as a pattern."""


class Verifier:
    """The rules of one request."""

    def __init__(self, rules: list[Rule]) -> None:
        """One rule for all prompts, or one for each. Raises InvalidRequest naming the place of what
        is wrong in them."""
        self._num_rules = 0
        self._patterns: dict[str, Pattern] = {}
        is_one = len(rules) == 1
        self._rules = [
            self._compiled(rule, "verify" if is_one else f"verify[{prompt}]", 1)
            for prompt, rule in enumerate(rules)
        ]
        if max(rule.num_readings for rule in self._rules) > MAX_READINGS:
            what = f"has more than {MAX_READINGS} rules with accepts or rejects for one prompt"
            raise InvalidRequest(f"verify {what}", "verify")

    async def scores(self, samples: list[tuple[int, str]]) -> list[float]:
        """Return the score of each sample, of which prompt and text are given, without blocking the
        event loop for long."""
        return await in_parts(self._score, samples, self._work)

    def _score(self, sample: tuple[int, str]) -> float:
        prompt, text = sample
        return self._rule(prompt).score(text)

    def _work(self, sample: tuple[int, str]) -> int:
        prompt, text = sample
        rule = self._rule(prompt)
        work = rule.work * len(text) + _CHECK_WORK * rule.num_checks
        return work + rule.num_readings * reading_work(text) if rule.num_readings else work

    def _rule(self, prompt: int) -> _Compiled:
        return self._rules[prompt if len(self._rules) > 1 else 0]

    def _compiled(self, rule: Rule, path: str, depth: int, weighs: bool = False) -> _Compiled:
        self._num_rules += 1
        if self._num_rules > MAX_CHECKED:
            raise InvalidRequest(f"verify has more than {MAX_CHECKED} rules", "verify")
        if depth > MAX_DEPTH:
            raise _refused(path, f"is inside more than {MAX_DEPTH - 1} other rules")
        if rule.weight is not None and not weighs:
            raise _refused(f"{path}.weight", "is only for a rule in a list of sum")
        asked = [name for name in ("any", "all", "not", "sum") if _of(rule, name) is not None]
        checks = [name for name in _CHECKED if _of(rule, name) not in (None, UNSET)]
        if len(asked) + bool(checks) != 1:
            if asked:
                other = (asked[1:] + checks)[0]
                raise _refused(f"{path}.{other}", f"does not go with {asked[0]} in one rule")
            known = "match, pointer, equals, number, accepts, rejects, any, all, not or sum"
            raise _refused(path, f"must have {known}")
        if checks:
            return self._check(rule, path)
        name = asked[0]
        if name == "not":
            negated = self._compiled(rule.not_, f"{path}.not", depth + 1)  # type: ignore[arg-type]
            score = negated.score
            return negated._replace(score=lambda text: 1 - score(text))
        inner = [
            self._compiled(part, f"{path}.{name}[{place}]", depth + 1, name == "sum")
            for place, part in enumerate(_of(rule, name))
        ]
        weights = [1.0 if part.weight is None else part.weight for part in _of(rule, name)]
        return _Compiled(
            _combined(name, [part.score for part in inner], weights),
            sum(part.work for part in inner),
            sum(part.num_checks for part in inner),
            sum(part.num_readings for part in inner),
        )

    def _check(self, rule: Rule, path: str) -> _Compiled:
        """Return the check of a text: what is found by `match`, in it what `pointer` names, and how
        that must be."""
        finds: list[Find] = []
        work = 0
        if rule.match is not None:
            pattern = self._pattern(rule.match, f"{path}.match")
            work += pattern.size
            finds.append(lambda text: _group(pattern, text))
        if rule.pointer is not None:
            work += _READ_WORK
            if not _POINTER.fullmatch(rule.pointer):
                what = "must be empty or a JSON Pointer such as /answer/0"
                raise _refused(f"{path}.pointer", f"{what}; got {show(rule.pointer)}")
            tokens = [
                token.replace("~1", "/").replace("~0", "~") for token in rule.pointer.split("/")[1:]
            ]
            finds.append(lambda text: _resolve(read_json(text), tokens))
        if rule.number is not None:
            work += _READ_WORK
        is_right = _condition(rule, path)
        strings = _strings(rule)
        work += sum(map(len, strings))  # a pattern has about as many instructions as characters

        def score(text: str) -> float:
            value: Any = text
            for find in finds:
                value = find(value)
                if value is _ABSENT:
                    return 0.0
            return float(is_right(value))

        return _Compiled(score, work, 1, int(bool(strings)))

    def _pattern(self, source: str, path: str) -> Pattern:
        if source not in self._patterns:
            if len(self._patterns) == MAX_PATTERNS:
                raise _refused(
                    path, f"is one more than {MAX_PATTERNS} different ones: take one, and equals"
                )
            self._patterns[source] = Pattern(source, wants_group=True, field=path)
            if sum(pattern.size for pattern in self._patterns.values()) > MAX_INSTRUCTIONS:
                raise _refused(
                    path, f"makes with those before more than {MAX_INSTRUCTIONS} instructions"
                )
        return self._patterns[source]


_OF_NUMBERS = ("tolerance", "relative_tolerance", "using")
_CHECKED = ("match", "pointer", "equals", "number", *_OF_NUMBERS, "accepts", "rejects")


def _of(rule: Rule, name: str) -> Any:
    return getattr(rule, "not_" if name == "not" else name)


def _refused(path: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{path} {reason}", "verify")


def _combined(name: str, scores: list[Score], weights: list[float]) -> Score:
    if name == "any":
        return lambda text: max(score(text) for score in scores)
    if name == "all":
        return lambda text: min(score(text) for score in scores)
    weighted = list(zip(weights, scores, strict=True))
    # Rounded once, so 0.1 + 0.2 + 0.7 is 1; 0.0 makes 0 of -0.
    return lambda text: math.fsum(weight * score(text) for weight, score in weighted) + 0.0


def _condition(rule: Rule, path: str) -> Callable[[Any], bool]:
    """Return how what the rule looks at must be."""
    if rule.accepts is not None or rule.rejects is not None:
        asked = "rejects" if rule.accepts is None else "accepts"
        for name in ("equals", "number", *_OF_NUMBERS):
            if _of(rule, name) not in (None, UNSET):
                raise _refused(f"{path}.{name}", f"does not go with {asked} in one rule")
        if not 0 < (count := len(_strings(rule))) <= MAX_RULES:
            what = f"and {path}.rejects must have 1 … {MAX_RULES} strings together, got {count}"
            raise _refused(f"{path}.accepts", what)
        for place, text in enumerate(rule.rejects or []):
            if text in (rule.accepts or []):
                raise _refused(f"{path}.rejects[{place}]", "is one of accepts too")
        return _is_pattern(rule.accepts or [], rule.rejects or [])
    if rule.number is UNSET:
        for name in _OF_NUMBERS:
            if _of(rule, name) is not None:
                raise _refused(f"{path}.{name}", "is allowed only with number")
    elif rule.equals is not UNSET:
        raise _refused(f"{path}.equals", "does not go with number in one rule")
    else:
        low, high = _bounds(
            rule.number, rule.tolerance or 0.0, rule.relative_tolerance or 0.0, path
        )
        if rule.using is not None:
            return _is_expression(rule.using, Fraction(low), Fraction(high))

        def is_near(value: Any) -> bool:
            number = as_number(value) if isinstance(value, str) else value
            return isinstance(number, Decimal) and low <= number <= high

        return is_near
    if rule.equals is UNSET:
        return lambda _: True
    expected = _expected(rule.equals, path, rule.pointer is not None)
    return lambda value: _is_same(value, expected)


def _is_expression(using: list[int], low: Fraction, high: Fraction) -> Callable[[Any], bool]:
    """Return whether a value is an expression of these numbers whose value is near enough."""

    def is_near(value: Any) -> bool:
        number = evaluate(value, using) if isinstance(value, str) else None
        return number is not None and low <= number <= high

    return is_near


def _strings(rule: Rule) -> list[str]:
    return [*(rule.accepts or []), *(rule.rejects or [])]


def _is_pattern(accepts: list[str], rejects: list[str]) -> Callable[[Any], bool]:
    """Return whether a value is a pattern that matches all of these strings and none of those."""
    right, wrong = ([text.encode() for text in texts] for texts in (accepts, rejects))
    return lambda value: isinstance(value, str) and fits(value, right, wrong)


def _expected(raw: Raw, path: str, may_be_json: bool) -> Any:
    if not may_be_json and first_byte(raw) != b'"':
        raise _refused(
            f"{path}.equals", f"must be a string where there is no pointer; got {show(raw)}"
        )
    data = bytes(raw)
    if data[:1] in {b"[", b"{"} and data.count(b"[") + data.count(b"{") > MAX_NESTED:
        raise _refused(f"{path}.equals", f"must have at most {MAX_NESTED} lists and objects")
    value = read_json(data.decode())
    if value is _ABSENT:  # it is JSON with a number that is none here
        raise _refused(f"{path}.equals", f"has a number that is too large; got {show(raw)}")
    return value


def _bounds(
    raw: Raw, tolerance: float, relative_tolerance: float, path: str
) -> tuple[Decimal, Decimal]:
    """Return the least and the largest number that are near enough."""
    value = read_json(bytes(raw).decode())
    if isinstance(value, str):
        value = as_number(value)
    is_sound = isinstance(value, Decimal) and (
        len(value.as_tuple().digits) <= MAX_DIGITS
        and (not value or abs(value.adjusted()) <= MAX_EXPONENT)
    )
    if not is_sound:
        what = f"must be a number of at most {MAX_DIGITS} digits and up to 1e{MAX_EXPONENT}"
        raise _refused(f"{path}.number", f"{what}, or a string that is one; got {show(raw)}")
    margins = _decimal(tolerance), _EXACT.multiply(_decimal(relative_tolerance), abs(value))
    margin = max(margins)
    return _EXACT.subtract(value, margin), _EXACT.add(value, margin)


def _decimal(number: float) -> Decimal:
    """Return the number that is written like this float."""
    return Decimal(repr(number))


def _group(pattern: Pattern, text: str) -> Any:
    group = pattern.find(text).group
    return _ABSENT if group is None else group


def as_number(text: str) -> Decimal | None:
    """Return a text's number; None if it is none. `$`, commas and whitespace are left out."""
    bare = _LEFT_OUT.sub("", text)
    return Decimal(bare) if _NUMBER.fullmatch(bare) else None


def read_json(text: str) -> Any:
    """Return a text's JSON with its numbers as Decimal; _ABSENT if it is no JSON."""
    try:
        return _decode_json(text)
    except (ValueError, RecursionError, ArithmeticError):  # the last: a number beyond Decimal's
        return _ABSENT


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_decode_json = json.JSONDecoder(
    parse_float=Decimal,
    parse_int=Decimal,
    parse_constant=_no_number,
).decode


def _resolve(value: Any, tokens: list[str]) -> Any:
    """Return the part of a JSON value that the tokens of a pointer name, or _ABSENT."""
    for token in tokens:
        if isinstance(value, dict):
            value = value.get(token, _ABSENT)
        elif isinstance(value, list) and _INDEX.fullmatch(token) and int(token) < len(value):
            value = value[int(token)]
        else:
            return _ABSENT
    return value


def _is_same(value: Any, expected: Any) -> bool:
    """Whether two JSON values are equal; true is not 1. Goes no deeper than `expected`."""
    if type(value) is not type(expected):
        return False
    if isinstance(expected, dict):
        return value.keys() == expected.keys() and all(
            _is_same(value[name], expected[name]) for name in expected
        )
    if isinstance(expected, list):
        return len(value) == len(expected) and all(map(_is_same, value, expected))
    return bool(value == expected)
