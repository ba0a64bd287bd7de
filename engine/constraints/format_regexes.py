"""Formats of strings as regexes: what llguidance allows for each."""

from __future__ import annotations

_DATE = (
    "[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|[12][0-9]))"
)
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:(?:[0-5][0-9]|60)(?:\.[0-9]+)?(?:[zZ]|[+-]{_CLOCK})"
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
    "date-time": f"{_DATE}[tT]{_TIME}",
    "date": _DATE,
    "time": _TIME,
    "duration": f"P(?:{_DAYS}(?:{_HOURS})?|{_HOURS}|[0-9]+W)",
    "email": rf"{_LOCAL}(?:\.{_LOCAL})*@(?:{_LONG_LABEL}(?:\.{_LONG_LABEL})*|\[{_IPV4}\])",
    "hostname": rf"{_LABEL}(?:\.{_LABEL})*",
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "uri": _URI,
}
