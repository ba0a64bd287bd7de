"""Regexes in schemas, written so that JavaScript, Python and Rust agree on what they match, and
formats as regexes.

llguidance reads Rust's regexes. What it would match and JavaScript or Python would not is written
narrower; a text that only one of them matches is never made. In two places llguidance errs. A
control character that JSON cannot have but as an escape, within a literal, matches nothing at all
instead of failing. Within a class it fails, so it is written as one. And a class of all of them is
taken to have quotation mark and backslash too, so that no class has the first one.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from srm.engine.errors import InvalidRequest

MAX_PATTERN = 5_000
"""Most characters of a pattern."""
_YEAR = r"(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP_YEAR = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = rf"^(?:{_YEAR}-(?:0[13-9]|1[0-2])-..|{_YEAR}-02-(?:[01].|2[0-8])|{_LEAP_YEAR}-02-29)"
FORMATS = {
    "date-time": _DATE + "[Tt]..:..:[0-5]",
    "date": _DATE,
    "time": "^..:..:[0-5]",
    "duration": "",
    "email": "^[^@]{1,64}@.{1,63}$",
    "hostname": "^.{1,253}$",
    "ipv4": "",
    "ipv6": "",
    "uuid": "",
    "uri": "",
}
"""Formats, each with a pattern for what llguidance does not ask of it: days that are in the
calendar, no leap seconds, which nobody knows ahead, and the lengths of names."""

_PARTS = re.compile(
    r"\[\^?(?:\\.|[^\]\\])*\]|\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\[pP](?:\{[^}]*\}|.)|\\.|\.|"
    r"[\x00-\x1f\x7f]",
    re.DOTALL,
)
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
_NUL = re.compile(r"(\\\\)|\\x00|\\u0000|\x00")
"""The first control character, as it may be written."""
_PROPERTY = re.compile(r"\\[pP](?:\{[^}]*\}|.)")
_NEVER = r"[\x01\x02]"
_SPACES = r"\t\n\f\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
"""White space of all three; of one at least are these and _MORE_SPACES."""
_MORE_SPACES = _SPACES + r"\x1c-\x1f\x85\ufeff"
_LEAST = {
    r"\s": f"[{_SPACES}]",
    r"\S": f"[^{_MORE_SPACES}]",
    r"\d": "[0-9]",
    r"\D": r"[^\p{Nd}]",
    r"\w": "[0-9A-Za-z_]",
    r"\W": r"[^\p{L}\p{M}\p{N}\p{Pc}]",
    ".": r"[^[\x00]\n\r\u2028\u2029]",
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


def _portable_part(part: str, fault: Callable[[str], InvalidRequest]) -> str:
    if _PROPERTY.fullmatch(part):
        return rf"[[^\x00]&&{part}]"
    if not part.startswith("["):
        return _NEVER if _CONTROL.fullmatch(part) else _LEAST.get(part, part)
    start = "[^" if part.startswith("[^") else "["
    inside = part[len(start) : -1]
    if not inside or _SETS.search(_ESCAPE.sub("a", inside)):
        raise fault(f"{part!r:.80}: write \\[, \\], \\&, \\- and \\~ within [ ]")
    if start == "[^":
        inside = _ESCAPE.sub(lambda escape: _MOST.get(escape[0], escape[0]), inside)
        return rf"[^[\x00]{inside}]"
    never = _NEVER if _CONTROL.search(inside) else ""
    inside = _NUL.sub(lambda nul: nul[1] or r"\x01", inside)
    written = f"[{never}{_ESCAPE.sub(lambda escape: _LEAST.get(escape[0], escape[0]), inside)}]"
    return rf"[[^\x00]&&{written}]" if _PROPERTY.search(inside) else written
