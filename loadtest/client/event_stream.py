"""Parses server-sent events from bytes in arbitrary pieces: the data of each event, in order.

Follows the `text/event-stream` section of the HTML standard, with one exception: an event at the
end of the stream counts even without the empty line.
"""

from __future__ import annotations

_BOM = b"\xef\xbb\xbf"
_DATA = b"data: "
_FIELDS = (b"", b"id", b"retry")
"""Fields beside `data` and `event`; one without a name is a comment."""
_TYPES = (b"", b"message", b"completion", b"chunk", b"data", b"delta", b"ping")
"""Types of events that servers give to parts of a reply."""


class EventParser:
    """The parser of one reply. The common event, one line of data ended by LF LF, costs a split and
    a slice.

    `named_error` is the first line that is no field of the standard, or that names a type of event
    which no part of a reply has; empty if none has come.
    """

    __slots__ = ("_after_cr", "_held", "_is_first", "named_error")

    def __init__(self) -> None:
        self._held = bytearray()  # an incomplete event
        self._after_cr = False
        self._is_first = True
        self.named_error = b""

    @property
    def num_held(self) -> int:
        """Bytes of an event that has not ended."""
        return len(self._held)

    def parse(self, data: bytes) -> list[bytes]:
        """Return the data of events that these bytes complete, an event's lines joined by LF."""
        if self._after_cr or b"\r" in data:
            data = self._with_lf(data)
        if self._held:
            seen = len(self._held) - 1
            self._held += data
            if self._held.find(b"\n\n", seen) < 0:
                return []
            data = bytes(self._held)
            self._held.clear()
        parts = data.split(b"\n\n")
        if parts[-1]:
            self._held += parts[-1]
        del parts[-1]
        events = []
        for part in parts:
            if part.startswith(_DATA) and b"\n" not in part:
                events.append(part[6:])
            elif (lines := self._lines(part)) is not None:
                events.append(lines)
            self._is_first = False
        return events

    def finish(self) -> list[bytes]:
        """Return the data of an event left unfinished at the end."""
        return self.parse(b"\n\n")

    def _with_lf(self, data: bytes) -> bytes:
        """Replace CR LF and CR by LF, a CR at the end too, though it may be half of a CR LF."""
        if not data:
            return data
        if self._after_cr and data[0] == 0x0A:
            data = data[1:]
        self._after_cr = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def _lines(self, part: bytes) -> bytes | None:
        """Return the data of any event; None if it has none, as a comment."""
        if self._is_first:
            part = part.removeprefix(_BOM)
        lines = []
        for line in part.split(b"\n"):
            name, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if name == b"data":
                lines.append(value)
            elif (value not in _TYPES) if name == b"event" else (name not in _FIELDS):
                self.named_error = self.named_error or line.strip()
        return b"\n".join(lines) if lines else None
