"""What a reply shows of a prompt, made once for all its choices."""

from __future__ import annotations

import math
import struct
from functools import cached_property
from typing import Any

import msgspec
from msgspec import UNSET, Raw

from srm.server.generation.prompts import Prompt
from srm.server.reply.scores import CompletionScores, ScoreWriter, render_prompt
from srm.server.schema.completion_request import CompletionRequest
from srm.server.schema.completion_response import Packed

_NOBODY = struct.pack("<i", -1)
_UNRANKED = struct.pack("<i", 0)
_NAN = struct.pack("<f", math.nan)


class ShownPrompt:
    """One prompt; its scores are there before any of its choices."""

    def __init__(self, prompt: Prompt, request: CompletionRequest, scores: ScoreWriter) -> None:
        self._prompt = prompt
        self._request = request
        self._scores = scores

    @cached_property
    def token_ids(self) -> Raw:
        """Return its token ids as a list."""
        return Raw(msgspec.json.encode(memoryview(self._prompt.token_ids).cast("i").tolist()))

    @cached_property
    def echoed_scores(self) -> list[Any]:
        """Return the entries of its scores that `echo` puts before a completion's."""
        assert isinstance(self._scores, CompletionScores)
        first = int.from_bytes(self._prompt.token_ids[:4], "little")
        return self._scores.entries_of_prompt(first, self._prompt.rest, self._request.logprobs or 0)

    @cached_property
    def logprobs(self) -> Raw:
        """Return its scores, as `prompt_logprobs` asks for them."""
        rest, num_top = self._prompt.rest, self._request.prompt_logprobs or 0
        is_ranked = not self._request.prompt_logprob_token_ids
        return render_prompt(self._prompt.num_unscored, rest, num_top, self._scores.name, is_ranked)

    @cached_property
    def packed(self) -> Raw:
        """Return it with its scores, as `return_packed` gives them."""
        token_ids, num_top = self._prompt.token_ids, self._request.prompt_logprobs
        if num_top is None:
            return Raw(msgspec.json.encode(Packed(token_ids=token_ids)))
        rest, none = self._prompt.rest, self._prompt.num_unscored
        return Raw(
            msgspec.json.encode(
                Packed(
                    token_ids=token_ids,
                    logprobs=none * _NAN + rest.logprobs,
                    ranks=none * _UNRANKED + rest.ranks,
                    top_token_ids=none * num_top * _NOBODY + rest.top_ids if num_top else UNSET,
                    top_logprobs=none * num_top * _NAN + rest.top_logprobs if num_top else UNSET,
                )
            )
        )
