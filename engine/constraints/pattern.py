"""Regexes in schemas, written so that JavaScript, Python and Rust agree on what they match, and
formats as regexes.

llguidance reads Rust's regexes. What it would match and JavaScript or Python would not is written
narrower; a text that only one of them matches is never made. Control characters that JSON has only
as \\uXXXX are never made either, so no class has them: llguidance would take a pattern that needs
one for one that can be met.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from srm.errors import InvalidRequest

MAX_PATTERN = 5_000
"""Most characters of a pattern."""
_YEAR = r"(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP_YEAR = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = rf"^(?:{_YEAR}-(?:0[13-9]|1[0-2])-..|{_YEAR}-02-(?:[01].|2[0-8])|{_LEAP_YEAR}-02-29)"
_TIME = r"..:..:[0-5].(?:\.[0-9]{3}(?:[0-9]{3})?)?(?:Z|[+-]..:..)$"
FORMATS = {
    "date-time": f"{_DATE}T{_TIME}",
    "date": _DATE,
    "time": f"^{_TIME}",
    "duration": "^(?:[PT]|[0-9]{1,4}[YMWDHS])+$",
    "email": "^[^@]{1,64}@.{1,63}$",
    "hostname": "^.{1,64}$",
    "ipv4": "",
    "ipv6": "",
    "uuid": "",
    "uri": r"^[^\[\]]{1,128}$",
}
"""Formats, each with a pattern for what llguidance does not ask of it: days that are in the
calendar, no leap seconds, which nobody knows ahead, times as `datetime.fromisoformat` reads them,
and how long a text may be."""
LONG_FORMATS = {
    "date-time": f"{_DATE}[Tt]..:..:[0-5]",
    "time": "^..:..:[0-5]",
    "duration": "",
    "hostname": "^.{1,253}$",
    "uri": "",
}
"""The advice for a format whose texts do not meet the pattern and lengths beside it."""

_PARTS = re.compile(
    r"\[\^?(?:\\.|[^\]\\])*\]|\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\[pP](?:\{[^}]*\}|.)|\\.|\.|"
    r"[\x00-\x1f\x7f]",
    re.DOTALL,
)
_GROUP = re.compile(r"\([^()]*\)")
_ENDLESS = re.compile(r"[*+]|\{[0-9]+,\}")
_ESCAPE = re.compile(r"\\.", re.DOTALL)
_SETS = re.compile(r"\[|&&|--|~~")
"""What Rust reads as sets of sets and JavaScript as characters, where nothing is escaped."""
_UNKNOWN = re.compile(r"\\[aAzZ<>GQEKXRhHeUNk]|\\[xu]\{")
_UNKNOWN_FORMS = re.compile(r"\{,|\(\?(?!:)")
"""What is not the same everywhere, and has another spelling; forms mean nothing within a class."""
_CONTROL = re.compile(
    r"\\x(?:0[0-7bBeEfF]|1.|7[fF])|\\u00(?:0[0-7bBeEfF]|1.|7[fF])|\\v|[\x00-\x07\x0b\x0e-\x1f\x7f]",
    re.DOTALL,
)
_PROPERTY = re.compile(r"\\[pP](?:\{[^}]*\}|.)")
_PRINTABLE_RANGE = re.compile(r"[ -,.-\[\]-~]-[ -,.-\[\]-~]")
_NEVER = r"[^\x00-\x{10FFFF}]"
_CONTROLS = r"\x00-\x07\x0b\x0e-\x1f\x7f"
_SPACES = r"\t\n\f\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
"""White space of all three; of one at least are these and _MORE_SPACES."""
_MORE_SPACES = _SPACES + r"\x1c-\x1f\x85\ufeff"
_LEAST = {
    r"\s": f"[{_SPACES}]",
    r"\S": f"[^[{_CONTROLS}]{_MORE_SPACES}]",
    r"\d": "[0-9]",
    r"\D": rf"[^[{_CONTROLS}]\p{{Nd}}]",
    r"\w": "[0-9A-Za-z_]",
    r"\W": rf"[^[{_CONTROLS}]\p{{L}}\p{{M}}\p{{N}}\p{{Pc}}]",
    ".": rf"[^[{_CONTROLS}]\n\r\u2028\u2029]",
}
_MOST = {
    r"\s": f"[{_MORE_SPACES}]",
    r"\S": f"[^{_SPACES}]",
    r"\d": r"\p{Nd}",
    r"\D": "[^0-9]",
    r"\w": r"\p{L}\p{M}\p{N}\p{Pc}",
    r"\W": "[^0-9A-Za-z_]",
}
"""What a class contains by every reading, and by one at least, which a negated class leaves out."""


def portable(pattern: str, fault: Callable[[str], InvalidRequest]) -> str:
    """Return the pattern for llguidance. Raises `fault(what)` for one that has no such meaning."""
    if len(pattern) > MAX_PATTERN:
        raise fault(f"the pattern has {len(pattern)} characters; at most {MAX_PATTERN} are taken")
    forms = _PARTS.sub("a", pattern)
    if part := _UNKNOWN.search(pattern.replace("\\\\", "")) or _UNKNOWN_FORMS.search(forms):
        raise fault(f"{part[0]} is not supported in a pattern: programs read it differently")
    return _PARTS.sub(lambda part: _portable_part(part[0], fault), pattern)


def is_endless(pattern: str) -> bool:
    """Whether a pattern may match texts of any length, as far as its spelling shows."""
    bare = _PARTS.sub("a", pattern)
    inner = bare
    while (shorter := _GROUP.sub("a", inner)) != inner:
        inner = shorter
    is_whole = inner.startswith("^") and inner.endswith("$") and "|" not in inner
    return not is_whole or _ENDLESS.search(bare) is not None


def _portable_part(part: str, fault: Callable[[str], InvalidRequest]) -> str:
    if _PROPERTY.fullmatch(part):
        return _without_controls(part)
    if not part.startswith("["):
        return _NEVER if _CONTROL.fullmatch(part) else _LEAST.get(part, part)
    start = "[^" if part.startswith("[^") else "["
    inside = part[len(start) : -1]
    if not inside or _SETS.search(_ESCAPE.sub("a", inside)):
        raise fault(f"{part!r:.80}: write \\[, \\], \\&, \\- and \\~ within [ ]")
    if start == "[^":
        inside = _ESCAPE.sub(lambda escape: _MOST.get(escape[0], escape[0]), inside)
        return rf"[^[{_CONTROLS}]{inside}]"
    written = f"[{_ESCAPE.sub(lambda escape: _LEAST.get(escape[0], escape[0]), inside)}]"
    has_range = "-" in _PRINTABLE_RANGE.sub("", inside).strip("-")
    may_have_controls = has_range or _CONTROL.search(inside) or _PROPERTY.search(inside)
    return _without_controls(written) if may_have_controls else written


def _without_controls(part: str) -> str:
    return rf"[[^{_CONTROLS}]&&{part}]"


_LL_DATE = (
    "[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|[12][0-9]))"
)
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_LL_TIME = rf"{_CLOCK}:(?:[0-5][0-9]|60)(?:\.[0-9]+)?(?:[zZ]|[+-]{_CLOCK})"
_DAYS = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_HOURS = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"

_LOCAL = r"[a-zA-Z0-9!#$%&'*+\-\/=?\^_`{|}~]+"
_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_LONG_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?"

_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_HEX = "[0-9a-fA-F]{1,4}"
_IPV6 = "|".join(
    (
        f"(?:{_HEX}:){{7}}{_HEX}",
        f"::(?:{_HEX}:){{0,5}}{_HEX}:{_HEX}",
        *(
            f"(?:(?:{_HEX}:){{0,{n}}}{_HEX})?::(?:{_HEX}:){{0,{4 - n}}}{_HEX}:{_HEX}"
            for n in range(5)
        ),
        f"(?:(?:{_HEX}:){{0,5}}{_HEX})?::{_HEX}",
        f"(?:(?:{_HEX}:){{0,6}}{_HEX})?::",
    )
)
_URI_IPV6 = "|".join(
    (
        f"(?:{_HEX}:){{7}}{_HEX}",
        f"(?:{_HEX}:){{1,7}}:",
        *(f"(?:{_HEX}:){{1,{n}}}(?::{_HEX}){{1,{7 - n}}}" for n in range(1, 7)),
        f":(?::{_HEX}){{1,7}}|::",
    )
)
_NAMED = r"a-zA-Z0-9\-._~!$&'()*+,;="
"""Characters of a URI that have no meaning of their own, in brackets."""


def _uri_characters(more: str) -> str:
    return f"(?:[{_NAMED}{more}]|%[0-9a-fA-F]{{2}})"


_SEGMENT = _uri_characters(":@")
_AUTHORITY = (
    rf"(?:{_uri_characters(':')}*@)?"
    rf"(?:\[(?:{_URI_IPV6}|v[0-9a-fA-F]+\.[{_NAMED}:]+)\]|{_uri_characters('')}*)(?::[0-9]*)?"
)
_SEGMENTS = rf"{_SEGMENT}+(?:\/{_SEGMENT}*)*"
_BEHIND = _uri_characters(r":@\/?")
_URI = (
    rf"[a-zA-Z][a-zA-Z0-9+\-.]*:"
    rf"(?:\/\/{_AUTHORITY}(?:\/{_SEGMENT}*)*|\/(?:{_SEGMENTS})?|{_SEGMENTS}|)"
    rf"(?:\?{_BEHIND}*)?(?:#{_BEHIND}*)?"
)

FORMAT_REGEXES = {
    "date-time": f"{_LL_DATE}[tT]{_LL_TIME}",
    "date": _LL_DATE,
    "time": _LL_TIME,
    "duration": f"P(?:{_DAYS}(?:{_HOURS})?|{_HOURS}|[0-9]+W)",
    "email": rf"{_LOCAL}(?:\.{_LOCAL})*@(?:{_LONG_LABEL}(?:\.{_LONG_LABEL})*|\[{_IPV4}\])",
    "hostname": rf"{_LABEL}(?:\.{_LABEL})*",
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "uri": _URI,
}
"""Formats as regexes: what llguidance allows for each."""
