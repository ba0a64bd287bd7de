"""Packed results: tokens and scores as they came from the engine, with no text made of them.

An array of a reply is the engine's bytes in base64, so that nothing is done per token. Numbers are
as sampled: minus infinity stays what it is. Knows no tokenizer.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable

import msgspec
from msgspec import UNSET, Raw

from engine.messages import Output
from engine.steps.token_deltas import CompletionTokens
from server.schema.completion_response import Packed
from server.text.sample import Delta

_NOBODY = struct.pack("<i", -1)
_UNRANKED = struct.pack("<i", 0)
_NAN = struct.pack("<f", math.nan)


class PackedSample:
    """One completion as tokens: what `server.text.sample.Sample` is for text."""

    __slots__ = ("_index", "_is_first", "_stop_token_ids", "finished")

    def __init__(self, index: int, stop_token_ids: Iterable[int]) -> None:
        self._index = index
        self._is_first = True
        self._stop_token_ids = stop_token_ids
        self.finished = False

    def feed(self, output: CompletionTokens | Output) -> Delta:
        """Take what the engine sent, in order."""
        stop_reason: str | int | None = None
        if output.finish_reason == "stop":
            last = int.from_bytes(output.token_ids[-4:], "little")
            stop_reason = last if last in self._stop_token_ids else None
        self.finished = output.finish_reason is not None
        is_first, self._is_first = self._is_first, False
        return Delta(
            index=self._index,
            is_first=is_first,
            text="",
            token_ids=output.token_ids,
            logprobs=output.logprobs,
            top_ids=output.top_ids,
            top_logprobs=output.top_logprobs,
            text_offset=[],
            finish_reason=output.finish_reason,
            stop_reason=stop_reason,
        )


def of_delta(delta: Delta, alternatives: int | None) -> Packed:
    """Return the new part of a completion; `alternatives` None: without scores."""
    return Packed(
        token_ids=delta.token_ids,
        logprobs=UNSET if alternatives is None else delta.logprobs,
        top_token_ids=delta.top_ids if alternatives else UNSET,
        top_logprobs=delta.top_logprobs if alternatives else UNSET,
    )


def of_prompt(token_ids: bytes, rest: Output, alternatives: int | None) -> Raw:
    """A whole prompt and the scores of all its tokens but the first, as JSON."""
    if alternatives is None:
        return Raw(msgspec.json.encode(Packed(token_ids=token_ids)))
    return Raw(
        msgspec.json.encode(
            Packed(
                token_ids=token_ids,
                logprobs=_NAN + rest.logprobs,
                ranks=_UNRANKED + rest.ranks,
                top_token_ids=alternatives * _NOBODY + rest.top_ids if alternatives else UNSET,
                top_logprobs=alternatives * _NAN + rest.top_logprobs if alternatives else UNSET,
            )
        )
    )
