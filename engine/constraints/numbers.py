"""JSON's numbers, as llguidance spells them: regexes of those between two, and multiples."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

from srm.engine.constraints.byte_automaton import Nfa, NotCompiled, Piece

_FRACTION = r"(?:\.[0-9]+)?"
_EXACT, _EXACT_EXPONENT = 2**53, 22
"""Digits as an integer and exponent of ten up to which llguidance reads a decimal as it is; others
may become a neighbour."""


def integer_regex(schema: dict[str, Any]) -> str | None:
    """Return the regex of the integers that a schema allows; None: there are none."""
    (low, excludes_low), (high, excludes_high) = _bounds(schema)
    low = low + 1 if excludes_low and low.is_integer() else math.ceil(low)
    high = high - 1 if excludes_high and high.is_integer() else math.floor(high)
    return _signed(int(low), int(high))


def number_regex(schema: dict[str, Any]) -> str | None:
    """Return the regex of the numbers that a schema allows; None: there are none."""
    (low, excludes_low), (high, excludes_high) = _bounds(schema)
    is_point = low == high and (excludes_low or excludes_high)
    if low > high or is_point:
        return None
    return _decimal(low, high, not excludes_low, not excludes_high)


def spell_number(value: float) -> str:
    """Spell a number that is one value of a schema. Raises NotCompiled."""
    _check(value)
    return _spell(value)


def _check(value: float) -> None:
    if isinstance(value, float):
        _, digits, exponent = Decimal(repr(value)).as_tuple()
        if int("".join(map(str, digits))) > _EXACT or abs(int(exponent)) > _EXACT_EXPONENT:
            raise NotCompiled("it has a number of too many digits")


def _spell(value: float) -> str:
    text = format(Decimal(repr(value)), "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def multiples(divisor: float) -> Piece:
    """Read decimals that are multiples, with no more digits behind the point than the divisor."""
    most_decimals = 0
    while divisor % 1:  # as llguidance finds the digits of a double
        divisor, most_decimals = divisor * 10, most_decimals + 1
    divisor = int(divisor)

    def build(nfa: Nfa, node: int) -> int:
        start, end = nfa.add(), nfa.add()
        nfa.skip(node, start)
        nfa.skip(nfa.read(node, 1 << ord("-")), start)
        nodes = {(0, -1): start}
        for rest, decimals in (waiting := list(nodes)):  # which grows meanwhile

            def read(byte: str, rest: int, decimals: int, place: int) -> None:
                if (rest, decimals) not in nodes:
                    nodes[rest, decimals] = nfa.add()
                    waiting.append((rest, decimals))
                nfa.read(place, 1 << ord(byte), nodes[rest, decimals])

            place = nodes[rest, decimals]
            if rest * 10 ** (most_decimals - max(0, decimals)) % divisor == 0:
                nfa.skip(place, end)
            if decimals < 0 < most_decimals:
                read(".", rest, 0, place)
            if decimals < most_decimals:
                for digit in range(10):
                    behind = decimals + (decimals >= 0)
                    read(str(digit), (10 * rest + digit) % divisor, behind, place)
        return end

    return build


def _bounds(schema: dict[str, Any]) -> tuple[tuple[float, bool], tuple[float, bool]]:
    """Return the lowest and the highest number, and whether each is left out itself."""
    low, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    high, below = schema.get("maximum"), schema.get("exclusiveMaximum")
    for bound in (low, above, high, below):
        _check(bound or 0)
    excludes_low = above is not None and (low is None or above >= low)
    excludes_high = below is not None and (high is None or below <= high)
    low, high = (above if excludes_low else low), (below if excludes_high else high)
    if low is None or high is None:
        raise NotCompiled("it has a number without bounds")
    return (float(low), excludes_low), (float(high), excludes_high)


def _signed(low: int, high: int) -> str | None:
    if low > high:
        return None
    if low >= 0:
        return _natural(low, high)
    if high < 0:
        return f"-{_natural(-high, -low)}"
    return f"(?:-{_natural(0, -low)}|{_natural(0, high)})"  # -0 is one of them


def _natural(low: int, high: int) -> str:
    """Return the regex of the numbers from `low` to `high`, neither below 0."""
    parts, digits = [], len(str(low))
    while digits < len(str(high)):
        parts.append(_of_one_length(str(low), "9" * digits))
        low, digits = 10**digits, digits + 1
    parts.append(_of_one_length(str(low), str(high)))
    return f"(?:{'|'.join(parts)})"


def _of_one_length(low: str, high: str) -> str:
    if not low:
        return ""
    if not low.strip("0") and not high.strip("9"):
        return f"[0-9]{{{len(low)}}}"
    if low[0] == high[0]:
        return low[0] + _of_one_length(low[1:], high[1:])
    rest = len(low) - 1
    parts = [low[0] + _of_one_length(low[1:], "9" * rest)]
    if int(low[0]) + 1 < int(high[0]):
        parts.append(f"[{int(low[0]) + 1}-{int(high[0]) - 1}][0-9]{{{rest}}}")
    parts.append(high[0] + _of_one_length("0" * rest, high[1:]))
    return f"(?:{'|'.join(parts)})"


def _decimal(low: float, high: float, with_low: bool, with_high: bool) -> str:
    """Return the regex of the numbers between two, which are none or all of what is meant to be
    below 0 behind a minus. There is no exponent."""
    if low == high:
        return _spell(low).replace(".", r"\.")
    if low >= 0:
        return _between(_spell(low), _spell(high), with_low, with_high)
    if high < 0:
        return f"-{_decimal(-high, -low, with_high, with_low)}"
    parts = [f"-{_decimal(0.0, -low, False, with_low)}"]
    if high > 0 or with_high:
        parts.append(_decimal(0.0, high, True, with_high))
    return f"(?:{'|'.join(parts)})"


def _between(low: str, high: str, with_low: bool, with_high: bool) -> str:
    """Return the regex of decimals from `low` to `high`, which is larger, neither below 0."""
    (least, _, low), (most, _, high) = low.partition("."), high.partition(".")
    if least == most:
        length = max(len(low), len(high))
        low, high = low.ljust(length, "0"), high.ljust(length, "0")
        behind = _fraction_between(low, high, with_low, with_high)
        return f"{least}(?:\\.{behind})" + ("" if low.strip("0") else "?")
    parts = []
    first = int(least)
    if low or not with_low:
        parts.append(f"{first}\\.{_fraction_from(low, with_low)}")
        first += 1
    if first < int(most):
        parts.append(f"{_natural(first, int(most) - 1)}{_FRACTION}")
    if high:
        parts.append(f"{most}(?:\\.{_fraction_to(high, with_high)})?")
    elif with_high:
        parts.append(f"{most}(?:\\.0+)?")
    return f"(?:{'|'.join(parts)})"


def _fraction_from(low: str, inclusive: bool) -> str:
    parts = [
        f"{low[:place]}[{int(digit) + 1}-9][0-9]*" for place, digit in enumerate(low) if digit < "9"
    ]
    parts.append(low + ("[0-9]*" if inclusive else "[0-9]*[1-9]"))
    return f"(?:{'|'.join(parts)})"


def _fraction_to(high: str, inclusive: bool) -> str:
    parts = [
        f"{high[:place]}[0-{int(digit) - 1}][0-9]*"
        for place, digit in enumerate(high)
        if digit > "0"
    ]
    return f"(?:{'|'.join([*parts, high] if inclusive else parts)})"


def _fraction_between(low: str, high: str, with_low: bool, with_high: bool) -> str:
    place = next(i for i in range(len(low)) if low[i] != high[i])
    parts = [low[place] + _fraction_from(low[place + 1 :].rstrip("0"), with_low)]
    if int(low[place]) + 1 < int(high[place]):
        parts.append(f"[{int(low[place]) + 1}-{int(high[place]) - 1}][0-9]*")
    if (rest := high[place + 1 :].rstrip("0")) or with_high:
        parts.append(high[place] + _fraction_to(rest, with_high))
    return f"{low[:place]}(?:{'|'.join(parts)})"
