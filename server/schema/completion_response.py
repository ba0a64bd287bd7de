"""The wire shapes of replies, whole or as events of a stream."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from srm.engine.receipt import Receipt
from srm.server.schema.openapi import reference


class Logprobs(msgspec.Struct):
    """Scores of the text's tokens; `text_offset` counts characters from the text's start."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """None of a prompt's first token, which nothing comes before."""
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(msgspec.Struct):
    """The score of a prompt token, or of another one in its place."""

    logprob: float
    rank: int | None
    """1 is the likeliest; null of others that prompt_logprob_token_ids names."""
    decoded_token: str


TokenIdsJson = Annotated[
    Raw, Meta(extra_json_schema={"type": ["array", "null"], "items": {"type": "integer"}})
]
_BY_TOKEN_ID = {
    "type": ["array", "null"],
    "items": {
        "anyOf": [
            {"type": "object", "additionalProperties": reference(PromptLogprob)},
            {"type": "null"},
        ]
    },
}


PromptLogprobsJson = Annotated[Raw, Meta(extra_json_schema=_BY_TOKEN_ID)]
NULL = Raw(b"null")
"""In place of either, where it is not asked for: msgspec decodes no Raw beside None."""


class VersionSpan(msgspec.Struct, frozen=True):
    """Tokens of a choice that the same weights made, counted from its first."""

    version: int
    start: int
    end: int
    """One behind the last of them."""


class Packed(msgspec.Struct, kw_only=True):
    """Tokens and scores as base64 of little-endian arrays."""

    token_ids: bytes
    """int32[tokens]."""
    logprobs: bytes | UnsetType = UNSET
    """float32[tokens], if they are asked for. NaN of a prompt's first token."""
    ranks: bytes | UnsetType = UNSET
    """int32[tokens], of prompts: 1 is the likeliest, 0 the first token's."""
    top_token_ids: bytes | UnsetType = UNSET
    """int32[tokens, k], if k > 0 alternatives are asked for; -1 where there is none."""
    top_logprobs: bytes | UnsetType = UNSET
    """float32[tokens, k], theirs."""


class Choice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token that ended it, if one did."""
    token_ids: list[int] | UnsetType | None = UNSET
    """Null in a whole reply, and absent from events, where it is not asked for; so are the next."""
    prompt_token_ids: TokenIdsJson | UnsetType = UNSET
    prompt_logprobs: PromptLogprobsJson | UnsetType = UNSET
    """Null, then for each further prompt token an object of PromptLogprobs by token id."""
    matched: bool | UnsetType = UNSET
    """Whether it is a match by `until`."""
    score: float | UnsetType = UNSET
    """Score by `verify`."""
    count: int | UnsetType = UNSET
    """Number of samples that this choice stands for; only with `return` = "unique"."""
    packed: Packed | UnsetType = UNSET
    """Columns that stand instead of text, logprobs and token_ids."""
    packed_prompt: Annotated[Raw, Meta(extra_json_schema=reference(Packed))] | UnsetType = UNSET
    """A Packed, instead of prompt_token_ids and prompt_logprobs."""
    weight_versions: list[VersionSpan] | UnsetType = UNSET
    """Which weights made which of its tokens, with `return_weight_versions`; in an event, of the
    tokens that come with it."""
    state: str | UnsetType | None = UNSET
    """Id of its state, with `save_state`; null where its tokens fill the context."""
    receipt: Receipt | UnsetType = UNSET
    """The record that `srm replay` needs; only with `receipt`."""
    states: dict[str, str | None] | UnsetType = UNSET
    """Ids of its states by position, with `save_at`; null behind its end."""


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int
    """Prompt tokens whose state was kept from an earlier request; they cost nothing."""


class Usage(msgspec.Struct):
    """Prompt tokens count once per prompt, completion tokens over all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    """Absent in batches: a result is the same bytes whatever was kept when it was made."""
    discarded_tokens: int | UnsetType = UNSET
    """Number of tokens made for samples that are not in the reply, which depends on timing; only
    with `until.count`."""

    @property
    def cached_tokens(self) -> int:
        """How many are said to be cached."""
        details = self.prompt_tokens_details
        return 0 if details is UNSET else details.cached_tokens


class Counted(msgspec.Struct, kw_only=True):
    """Samples of one prompt that read the same."""

    text: str | None
    """Text of the samples, or with `count_by` = "group" the text of the group; null for those
    without a group, and with `count_by` = "score"."""
    count: int
    matched: int | UnsetType = UNSET
    """Number of these samples that match."""
    score: float | UnsetType = UNSET
    """Score of each of these samples by `verify`."""


class Samples(msgspec.Struct, kw_only=True):
    """Counts of the samples drawn of one prompt."""

    requested: int
    """The request's n."""
    drawn: int
    """Number of samples that the reply covers, which are the first ones."""
    matched: int | UnsetType = UNSET
    """Number of drawn samples that match."""
    reached: bool | UnsetType = UNSET
    """Whether `until.count` of them match; if not, all n were drawn."""
    mean_score: float | UnsetType = UNSET
    """Mean score of the drawn samples; only with `verify`."""
    distinct: int | UnsetType = UNSET
    """Number of distinct texts, groups or scores; only with `return` = "unique" or "counts"."""
    finished_by: dict[str, int]
    """Number of drawn samples by finish_reason."""
    counts: list[Counted] | UnsetType = UNSET
    """Counts of equal samples, the most frequent first; only with `return` = "counts"."""


class Completion(msgspec.Struct, kw_only=True):
    """The reply, and every event of a stream."""

    id: str
    object: str = "text_completion"
    created: int
    """Unix time in seconds."""
    model: str
    choices: list[Annotated[Raw, Meta(extra_json_schema=reference(Choice))]]
    """Each a Choice, encoded when it was ready."""
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | None = None
    """Fingerprint of the weights of `weights_version`."""
    weights_version: int | None = None
    """Version of the weights that made the last token of this reply or event: 1, and one more for
    each change."""
    first_weights_version: int | UnsetType = UNSET
    """Version of the weights that made the first token of a whole reply, if it is another one."""
    samples: list[Samples] | UnsetType = UNSET
    """Counts of the samples of each prompt; only with `until`, `verify`, or another `return` than
    "choices"."""
    forked_at: int | UnsetType = UNSET
    """Of a fork: tokens that the sample had then, with its prompt's."""


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "srm"
    root: str
    """The model that this one is made of: itself."""
    parent: None = None
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[ModelCard]
