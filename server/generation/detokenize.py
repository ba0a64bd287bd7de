"""Makes text of the new tokens of a request's samples.

A sample has a TextStream from its first tokens to its last ones.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from msgspec import UNSET, UnsetType

from srm.engine.messages import REASONS, FinishReason, Output
from srm.engine.messages import join as join_outputs
from srm.engine.steps.tokens import Tokens
from srm.server.generation.version_spans import join_spans, spans_of
from srm.server.schema.completion_request import CompletionRequest
from srm.server.schema.completion_response import VersionSpan
from srm.server.text.stream import StopFinder, TextStream
from srm.server.text.text import Text

_ENDED, _CUT = 1, 2


@dataclass(slots=True)
class ChoicePart:
    """Text of a choice, and its tokens as they came, without those behind a stop string."""

    index: int
    """Index of the choice."""
    is_first: bool
    text: str
    tokens: Output
    """Its tokens, and what scores of them are asked for."""
    text_offset: list[int]
    """Characters before each token, those of an echoed prompt included; empty if not wanted."""
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    """The stop string or stop token that ended it."""
    matched: bool | None = None
    """For a whole completion: whether its text matches, if that is asked."""
    group: str | None = None
    """Text of the pattern's group, if that is asked."""
    score: float | None = None
    """By the rules of `verify`, if that is asked."""
    state: str | None = None
    """Id of its state, if that is asked and there is one."""
    states: dict[str, str | None] | UnsetType = UNSET
    """The same by the positions that are asked for, if any are."""
    count: int | None = None
    """How many samples with the same text it stands for, if these are counted."""
    versions: list[VersionSpan] | UnsetType = UNSET
    """Which weights made its tokens, counted from the choice's first; none if not asked for."""

    @property
    def token_ids(self) -> bytes:
        """int32 little-endian."""
        return self.tokens.token_ids

    @property
    def num_tokens(self) -> int:
        return len(self.tokens.token_ids) // 4


def join(parts: list[ChoicePart]) -> ChoicePart:
    """Join the parts of a choice, in order."""
    if len(parts) == 1:
        return parts[0]
    return ChoicePart(
        index=parts[0].index,
        is_first=parts[0].is_first,
        text="".join(part.text for part in parts),
        tokens=join_outputs([part.tokens for part in parts]),
        text_offset=[offset for part in parts for offset in part.text_offset],
        finish_reason=parts[-1].finish_reason,
        stop_reason=parts[-1].stop_reason,
        versions=join_spans([part.versions for part in parts]),
    )


class Detokenizer:
    """All samples of one request; index = prompt x num_samples + sample."""

    def __init__(
        self,
        request: CompletionRequest,
        prompts: list[bytes],
        text: Text,
        stop_token_ids: Collection[int],
    ) -> None:
        """`prompts` are token ids, int32 little-endian."""
        size = len(prompts) * request.num_samples
        self.num_tokens = 0
        """Tokens that have come, including those of samples that were cut."""
        self._is_pending = bytearray(size)
        self.is_pending: npt.NDArray[np.bool_] = np.frombuffer(self._is_pending, np.bool_)
        """bool[samples]: whether bytes of each are held back."""
        self._request = request
        self._makes_text = request.makes_text
        self._prompts = prompts
        self._table = text.table(with_special=not request.skip_special_tokens)
        self._stop_token_ids = stop_token_ids
        self.finder: StopFinder | None = None
        """Finds the request's stop strings; None if it has none."""
        if request.stops:
            keeps_stop = request.include_stop_str_in_output
            self.finder = StopFinder(request.stops, self._table, size, keeps_stop)
        self.streams: dict[int, TextStream] = {}
        """The text of each sample that runs and has begun."""
        self._lengths: dict[int, int] = {}  # tokens so far of samples whose versions are asked for
        self._is_over = bytearray(size)  # by sample; 0: it is not

    def decode(self, tokens: Tokens) -> list[ChoicePart]:
        """Return what new tokens add to each sample; samples that are over are skipped."""
        all_ids, logprobs = tokens.token_ids.tobytes(), tokens.logprobs.tobytes()
        top_ids, top_logprobs = tokens.top_ids.tobytes(), tokens.top_logprobs.tobytes()
        request, width, parts = self._request, tokens.top_ids.shape[1], []
        has_offsets = request.logprobs is not None and not request.return_packed
        for index, begin, end, number in tokens.rows():
            if self._is_over[index]:  # ended at a stop string before this came, or not needed
                self.num_tokens += (end - begin) * (self._is_over[index] == _CUT)
                continue
            if begin == end and not number and index in self.streams:  # nothing is new
                continue
            spoken = token_ids = all_ids[4 * begin : 4 * end]
            reason, text, echo = REASONS[number], "", b""
            stop_reason: str | int | None = None
            if is_first := (stream := self.streams.get(index)) is None:
                stream, echo, text = self._begin(index)
            num_cut = 0
            if reason == "stop" and self.finder is not None and index in self.finder.ends:
                stop_reason, num_cut = self.finder.ends.pop(index)
            elif reason == "stop":
                if not request.include_stop_str_in_output:  # the token that stopped it is not text
                    spoken = token_ids[:-4]
                last = int.from_bytes(token_ids[-4:], "little")
                stop_reason = last if last in self._stop_token_ids else None
            if self._makes_text:
                is_last = reason is not None
                text += stream.finish(spoken, num_cut) if is_last else stream.add(spoken)
            at, size = 4 * begin, len(token_ids)
            self.num_tokens += size // 4
            if reason is not None:
                self._is_over[index] = _ENDED
                del self.streams[index]
            self._is_pending[index] = stream.is_pending
            offsets = stream.offsets(echo + token_ids) if has_offsets else []
            output = Output("", index, token_ids)
            if logprobs:
                own = token_ids, logprobs[at : at + size], b""
                tops = slice(width * at, width * (at + size))
                output = Output("", index, *own, top_ids[tops], top_logprobs[tops])
            part = ChoicePart(index, is_first, text, output, offsets, reason, stop_reason)
            if request.needs_versions:
                self._add_versions(part, tokens.versions[begin : begin + part.num_tokens])
            parts.append(part)
        return parts

    def _add_versions(self, part: ChoicePart, versions: npt.NDArray[np.int32]) -> None:
        start = self._lengths.pop(part.index, 0)
        part.versions = spans_of(versions, start)
        if not self._is_over[part.index]:
            self._lengths[part.index] = start + len(versions)

    def _begin(self, index: int) -> tuple[TextStream, bytes, str]:
        """Begin the text of a sample; return it, and the tokens and text of an echoed prompt."""
        request = self._request
        stream = self.streams[index] = TextStream(self._table, self.finder)
        echo = self._prompts[index // request.num_samples] if request.echo else b""
        return stream, echo, stream.echo(echo) if echo else ""

    def cut(self, begin: int, end: int, unread: int) -> None:
        """Drop samples begin … end - 1; `unread` of their tokens had come and were not fed."""
        self.num_tokens += unread
        self._is_over[begin:end] = bytes([_CUT]) * (end - begin)
        for index in range(begin, end):
            self.streams.pop(index, None)
