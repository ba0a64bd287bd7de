"""ChoicePart: what is new of one choice of a reply, or all of it."""

from __future__ import annotations

from dataclasses import dataclass

from engine.messages import FinishReason


@dataclass(slots=True)
class ChoicePart:
    """Text of a choice, and its tokens as they came."""

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
    """The stop string or stop token that ended it."""
    matched: bool | None = None
    """For a whole completion: whether its text matches, if that is asked."""
    group: str | None = None
    """Text of the pattern's group, if that is asked."""
    count: int | None = None
    """How many samples with the same text it stands for, if these are counted."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // 4


def join(parts: list[ChoicePart]) -> ChoicePart:
    """Join the parts of a choice, in order."""
    if len(parts) == 1:
        return parts[0]
    return ChoicePart(
        index=parts[0].index,
        is_first=parts[0].is_first,
        text="".join(part.text for part in parts),
        token_ids=b"".join(part.token_ids for part in parts),
        logprobs=b"".join(part.logprobs for part in parts),
        top_ids=b"".join(part.top_ids for part in parts),
        top_logprobs=b"".join(part.top_logprobs for part in parts),
        text_offset=[offset for part in parts for offset in part.text_offset],
        finish_reason=parts[-1].finish_reason,
        stop_reason=parts[-1].stop_reason,
    )
