"""Receipt: all that makes the tokens and log-probabilities of a completion again, bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

from srm.engine.messages import FinishReason, SamplingParams


class ReceiptSpan(msgspec.Struct, frozen=True):
    """Tokens of a completion that the same weights made, counted from its first."""

    version: int
    """Their number in the server that made them."""
    fingerprint: str
    """Fingerprint of config and weights, hexadecimal; empty if nobody knows it any more."""
    start: Annotated[int, Meta(ge=0)]
    end: int
    """One behind the last of them; `start` where these weights made none, but may have read what
    was there."""


class Receipt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Arrays are base64 of little-endian ones."""

    format: Literal["srm-receipt-1"] = "srm-receipt-1"
    arithmetic: str
    """Device and data type, such as "cpu float32"."""
    spans: list[ReceiptSpan]
    """All versions from the one that began the prompt to the one that made the last token."""
    prompt_token_ids: bytes
    """int32[prompt]."""
    prompt_sha256: str
    """SHA-256 of these bytes, hexadecimal."""
    params: SamplingParams
    """Those of the engine that are not default, and decide on tokens."""
    sample: Annotated[int, Meta(ge=0, lt=2**31)]
    """Number of the completion, which draws from the random stream (seed, sample)."""
    token_ids: bytes
    """int32[tokens], with the one that ended it."""
    logprobs: bytes
    """float32[tokens]."""
    finish_reason: FinishReason | None

    def check(self) -> None:
        """Raise ValueError where fields do not fit each other."""
        if (digest := sha256(self.prompt_token_ids)) != self.prompt_sha256:
            raise ValueError(
                f"prompt_sha256 is {self.prompt_sha256:.64}, and prompt_token_ids have {digest}: "
                "one of them is damaged"
            )
        sizes = len(self.token_ids), len(self.logprobs)
        if sizes[0] % 4 or sizes[0] != sizes[1]:
            raise ValueError(
                "token_ids and logprobs must be as many values of 4 bytes, got {} and {} "
                "bytes".format(*sizes)
            )
        if not np.isfinite(np.frombuffer(self.logprobs, "<f4")).all():
            raise ValueError("logprobs must be finite, got NaN or an infinity")
        end = 0
        for span in self.spans:
            if span.start != end or span.end < end:
                raise ValueError(
                    f"spans must follow each other, got {span.start} … {span.end} behind {end}"
                )
            end = span.end
        if end != self.num_tokens:
            raise ValueError(f"spans must cover all {self.num_tokens} tokens, got {end}")

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // 4


def cover_versions(
    made: Iterable[tuple[int, int, int]], first: int, fingerprints: Mapping[int, str]
) -> list[ReceiptSpan]:
    """Return the spans of tokens made by (version, start, end), and of versions from `first` on
    that were in use meanwhile and made none."""
    spans = []
    for version, start, end in made:
        spans += [(idle, start, start) for idle in range(first, version)]
        spans.append((version, start, end))
        first = version + 1
    return [
        ReceiptSpan(version, fingerprints.get(version, ""), start, end)
        for version, start, end in spans
    ]


def sha256(data: bytes) -> str:
    """Return the SHA-256 of bytes, hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def params_that_decide(params: SamplingParams) -> SamplingParams:
    """Return parameters without those that say how many completions are wanted, and which scores
    besides those of their tokens."""
    return msgspec.structs.replace(
        params,
        n=1,
        logprobs=None,
        logprob_token_ids=(),
        prompt_logprobs=None,
        prompt_logprobs_start=0,
        prompt_logprob_token_ids=(),
    )
