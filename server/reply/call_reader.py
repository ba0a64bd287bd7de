"""Calls of tools, read from the text of a reply as it comes."""

from __future__ import annotations

import re
from typing import NamedTuple

from srm.server.schema.tools import CALL_HEAD, Calls

_HEAD = re.compile(re.escape(CALL_HEAD.format("NAME")).replace("NAME", r"([\w-]+)") + r"(?=\{)")
_MARK = re.compile(r'\\.|["{}]', re.DOTALL)
"""What says where an object ends; but that an escape is none."""


class CallPart(NamedTuple):
    """A call that begins, and then pieces of its arguments."""

    place: int
    """Of the call among those of its reply."""
    name: str | None
    """Of the function, where it begins."""
    arguments: str


def is_whole(arguments: str) -> bool:
    """Whether the arguments of a call are a whole object."""
    reader = CallReader()
    return bool(reader.read(CALL_HEAD.format("NAME") + arguments)) and not reader.is_within


class CallReader:
    """Reads the calls of one sample from its text, as it comes."""

    def __init__(self, calls: Calls | None = None) -> None:
        """`calls`: what the reply must or may call, if that is known."""
        is_one = calls is not None and calls.is_one_function
        self.heads = [CallPart(0, calls.functions[0].name, "")] if calls and is_one else []
        """The call that begins before any text, if all of that is its arguments."""
        self._place = -1
        self._depth = 0  # of objects; 0: before a call's arguments or behind them
        self._in_string = False
        self._unread = ""

    def read(self, text: str) -> list[CallPart]:
        """Return what more text adds."""
        if self.heads:
            return [CallPart(0, None, text)] if text else []
        parts: list[CallPart] = []
        self._unread += text
        while self._unread:
            if not self._depth:
                if (head := _HEAD.search(self._unread)) is None:
                    break
                self._place += 1
                self._unread = self._unread[head.end() :]
                parts.append(CallPart(self._place, head[1], ""))
            if not (end := self._skip_arguments()):
                break
            parts.append(CallPart(self._place, None, self._unread[:end]))
            self._unread = self._unread[end:]
        return parts

    @property
    def is_within(self) -> bool:
        """Whether the arguments of a call go on."""
        return self._depth > 0

    def _skip_arguments(self) -> int:
        """Return how many characters of arguments there are; half an escape is left."""
        end = 0
        for mark in _MARK.finditer(self._unread):
            end = mark.end()
            if mark[0] == '"':
                self._in_string = not self._in_string
            elif not self._in_string:
                self._depth += 1 if mark[0] == "{" else -1
                if not self._depth:
                    return end
        return len(self._unread) - self._unread[end:].endswith("\\")
