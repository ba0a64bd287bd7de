"""One completion as text, while its tokens arrive: bytes to characters, stop strings, offsets.

Whatever the cuts between deliveries, the pieces joined are the text of the whole. Bytes that may
still become a character, or the beginning of a stop string, are held back until they are decided.
"""

from __future__ import annotations

import codecs
import re
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from engine.messages import FinishReason, Output
from engine.steps.token_deltas import CompletionTokens
from server.text.text import BROKEN, Text

_Utf8 = codecs.getincrementaldecoder("utf-8")


class StopStrings:
    """Finds where a completion's bytes reach one of the given strings, or may be about to."""

    def __init__(self, stops: list[str]) -> None:
        """`stops` has at least one string, none empty."""
        self.all = tuple(stop.encode() for stop in stops)
        self._any = re.compile(b"|".join(map(re.escape, self.all)))
        self._beginnings = {stop[:size] for stop in self.all for size in range(1, len(stop))}
        self._longest_beginning = max(map(len, self.all)) - 1

    def search(self, data: bytes) -> tuple[int, int] | None:
        """Begin and end of the stop string that is complete first; of several, the longest."""
        if not self._any.search(data):
            return None
        found = ((data.find(stop), len(stop)) for stop in self.all)
        end, begin = min((begin + size, begin) for begin, size in found if begin >= 0)
        return begin, end

    def undecided(self, data: bytes) -> int:
        """How many of the last bytes may be the beginning of a stop string."""
        for length in range(min(self._longest_beginning, len(data)), 0, -1):
            if data[-length:] in self._beginnings:
                return length
        return 0


@dataclass(slots=True)
class Delta:
    """The new part of one completion."""

    index: int
    """Index of the choice."""
    is_first: bool
    text: str
    token_ids: bytes
    """int32 little-endian."""
    logprobs: bytes
    """float32 little-endian, one per token, or none."""
    top_ids: bytes
    """int32 little-endian, equally many for each token, or none."""
    top_logprobs: bytes
    """float32 little-endian, those of `top_ids`."""
    text_offset: list[int]
    """Characters before each token, those of an echoed prompt included; empty if not wanted."""
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    matched: bool | None = None
    """For a whole completion: whether its text matches, if that is asked."""
    group: str | None = None
    """Text of the pattern's group, if that is asked."""
    count: int | None = None
    """How many samples with the same text it stands for, if these are counted."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // 4


def join(deltas: list[Delta]) -> Delta:
    """Join the deltas of a completion, in order."""
    if len(deltas) == 1:
        return deltas[0]
    return Delta(
        index=deltas[0].index,
        is_first=deltas[0].is_first,
        text="".join(delta.text for delta in deltas),
        token_ids=b"".join(delta.token_ids for delta in deltas),
        logprobs=b"".join(delta.logprobs for delta in deltas),
        top_ids=b"".join(delta.top_ids for delta in deltas),
        top_logprobs=b"".join(delta.top_logprobs for delta in deltas),
        text_offset=[offset for delta in deltas for offset in delta.text_offset],
        finish_reason=deltas[-1].finish_reason,
        stop_reason=deltas[-1].stop_reason,
    )


class Sample:
    """One completion. `finished` is set once; nothing may be fed after it."""

    __slots__ = (
        "_decoder",
        "_echo",
        "_has_offsets",
        "_held",
        "_index",
        "_is_first",
        "_keeps_stop",
        "_offset_decoder",
        "_stop_token_ids",
        "_stops",
        "_table",
        "finished",
        "is_cut",
        "num_characters",
    )

    def __init__(
        self,
        index: int,
        text: Text,
        stops: StopStrings | None,
        stop_token_ids: Iterable[int],
        has_offsets: bool = False,
        echo: bytes = b"",
        with_special: bool = False,
        keeps_stop: bool = False,
    ) -> None:
        """`echo` is token ids, int32 little-endian, that the text begins with. `with_special`:
        special tokens read as their names. `keeps_stop`: what ended it is text too."""
        self._index = index
        self._has_offsets = has_offsets
        self._echo = echo
        self._table = text.table(with_special)
        self._keeps_stop = keeps_stop
        self._stops = stops
        self._stop_token_ids = stop_token_ids
        self._is_first = True
        self._decoder = _Utf8("replace")
        self._offset_decoder = _Utf8("replace")
        self.num_characters = 0
        """Complete ones before the next token, if offsets are wanted."""
        self._held = b""
        self.is_cut = False
        """Whether its text so far ends inside a character."""
        self.finished = False

    @property
    def is_free(self) -> bool:
        """Whether nothing is held back that may be the beginning of a stop string."""
        return not self._held

    def pass_on(self, token: int) -> None:
        """Note a token of whole characters, behind whole ones, whose text others send."""
        self.num_characters += self._table.num_characters[token]

    def text_of(self, token: int) -> str:
        """Return the text that a token adds which reaches no stop string, and begins none."""
        piece = self._table.entries[token]
        text = self._decoder.decode(piece)
        self.is_cut = bool(self._decoder.getstate()[0])
        if self._has_offsets:
            self.num_characters += len(self._offset_decoder.decode(piece))
        return text

    def feed(self, output: CompletionTokens | Output) -> Delta:
        """Take what the engine sent, in order. A stop string ends the completion early."""
        token_ids = spoken = output.token_ids
        finish_reason = output.finish_reason
        stop_reason: str | int | None = None
        if finish_reason == "stop":
            if not self._keeps_stop:  # the token that stopped it is not text
                spoken = token_ids[:-4]
            last = int.from_bytes(token_ids[-4:], "little")
            if last in self._stop_token_ids:
                stop_reason = last
        data = self._held + self._table.join(spoken)
        if self._stops is not None:
            found = self._stops.search(data)
            if found:
                begin, end = found
                num_tokens = self._tokens_to_reach(end - len(self._held), spoken)
                token_ids = token_ids[: 4 * num_tokens]
                finish_reason, stop_reason = "stop", data[begin:end].decode()
                data, self._held = data[: end if self._keeps_stop else begin], b""
            else:
                undecided = 0 if finish_reason else self._stops.undecided(data)
                data, self._held = data[: len(data) - undecided], data[len(data) - undecided :]
        self.finished = finish_reason is not None
        is_first, self._is_first = self._is_first, False
        echo, self._echo = self._echo, b""
        text = self._decoder.decode(self._table.join(echo) + data, self.finished)
        self.is_cut = bool(self._decoder.getstate()[0])
        num_top = len(output.top_ids) // max(len(output.token_ids), 1)  # of each token
        return Delta(
            index=self._index,
            is_first=is_first,
            text=text,
            token_ids=token_ids,
            logprobs=output.logprobs[: len(token_ids)],
            top_ids=output.top_ids[: num_top * len(token_ids)],
            top_logprobs=output.top_logprobs[: num_top * len(token_ids)],
            text_offset=self._offsets(echo + token_ids) if self._has_offsets else [],
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )

    def _tokens_to_reach(self, num_bytes: int, token_ids: bytes) -> int:
        """How many of the tokens it takes to have `num_bytes` bytes."""
        sizes = accumulate(map(len, self._table.pieces(token_ids)))
        return next(count for count, size in enumerate(sizes, 1) if size >= num_bytes)

    def _offsets(self, token_ids: bytes) -> list[int]:
        """Characters of the text that are complete before each token."""
        sizes = self._table.num_characters
        counts = [sizes[token] for token in array("i", token_ids)]
        if BROKEN in counts or self._offset_decoder.getstate()[0]:
            pieces = self._table.pieces(token_ids)
            counts = [len(self._offset_decoder.decode(piece)) for piece in pieces]
        offsets = list(accumulate(counts, initial=self.num_characters))
        self.num_characters = offsets.pop()
        return offsets
