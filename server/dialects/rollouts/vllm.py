"""vLLM's native routes: token ids in and out, and what its trainers do between two steps."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from srm.errors import InvalidRequest
from srm.server.dialects.rollouts.control import Nothing, TrainerControl, add_actions
from srm.server.dialects.rollouts.requests import (
    TOKENS_NEUTRAL,
    TokensRequest,
    parse_tokens,
)
from srm.server.generation.detokenize import ChoicePart
from srm.server.generation.engine_request import RequestOwner
from srm.server.generation.generation import Generation
from srm.server.http.bodies import parsed
from srm.server.reply.format import Format
from srm.server.reply.responder import Endpoint, Responder
from srm.server.reply.scores import TokenIdScores
from srm.server.schema.completion_request import CompletionRequest
from srm.server.schema.completion_response import (
    PromptLogprob,
    PromptLogprobsJson,
    Usage,
    VersionSpan,
)
from srm.server.schema.json_parts import ID_FORMS
from srm.server.schema.openapi import BodySchema, Operation, Router, reference
from srm.server.schema.validation import Fields, naming

StartGeneration = Callable[[str, CompletionRequest, RequestOwner], Awaitable[Generation]]
"""Makes a checked request ready to run."""


class TopTokenId(msgspec.Struct):
    token: str
    """`token_id:` and the id."""
    token_id: int
    logprob: float


class ScoredTokenId(TopTokenId):
    top_logprobs: list[TopTokenId]
    """The likeliest tokens in its place, the likeliest first."""


class TokenIdLogprobs(msgspec.Struct):
    content: list[ScoredTokenId]


class TokensChoice(msgspec.Struct, kw_only=True):
    index: int
    token_ids: list[int]
    logprobs: TokenIdLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token that ended it, if one did."""
    weight_versions: list[VersionSpan]
    """Which weights made which of its tokens; in an event, of those that come with it."""


class TokensReply(msgspec.Struct, kw_only=True):
    """The reply, and every event of a stream."""

    request_id: str
    choices: list[Annotated[Raw, Meta(extra_json_schema=reference(TokensChoice))]]
    """Each a TokensChoice."""
    prompt_logprobs: PromptLogprobsJson | UnsetType = UNSET
    """Null, then for each further prompt token an object of PromptLogprobs by token id."""
    usage: Usage | UnsetType | None = UNSET
    weights_version: int | None = None
    """Version of the weights that made the last token."""
    first_weights_version: int | UnsetType = UNSET
    """Version of the weights that were fed the prompts, in a whole reply, if it is another one."""
    system_fingerprint: str | None = None
    """Fingerprint of these weights."""


class PauseQuery(Fields, frozen=True, kw_only=True):
    """The query of POST /pause."""

    mode: str = "keep"
    """`keep`: what runs goes on after /resume; `abort`: it ends, with its tokens so far; `wait`: it
    ends by itself first."""
    wait_for_inflight_requests: bool = False
    """Older name of mode = wait."""
    clear_cache: bool = True
    """No effect: kept states of prompts are dropped whenever weights change."""

    def check(self) -> None:
        if self.mode not in {"keep", "abort", "wait"}:
            raise InvalidRequest(
                f"mode must be keep, abort or wait, got {self.mode[:80]!r}", "mode"
            )


class DropQuery(Fields, frozen=True, kw_only=True):
    """Query or body of POST /reset_prefix_cache."""

    reset_running_requests: bool = False
    """Refused if true: POST /abort_requests ends requests."""
    reset_external: bool = False
    """No effect: there is no other cache."""

    def check(self) -> None:
        if self.reset_running_requests:
            raise InvalidRequest(
                "reset_running_requests must be false, got true: end requests with POST "
                "/abort_requests, or have them fed again with POST /v1/admin/weights",
                "reset_running_requests",
            )


class PauseState(msgspec.Struct):
    status: Literal["paused", "resumed"]
    """What the engines are now."""


class IsPaused(msgspec.Struct):
    is_paused: bool


class FolderRequest(Fields, frozen=True, kw_only=True):
    """Body of POST /update_weights, checked."""

    weight_dir: Annotated[
        str, Meta(min_length=1, max_length=4096, description="a folder's path")
    ] = ""
    """Model folder on the server's machine."""
    update_info: dict[str, Any] | None = None
    """Refused: tensors over NCCL or IPC."""


class FolderInUse(msgspec.Struct):
    message: str
    weights_version: int


class AbortRequests(Fields, frozen=True, kw_only=True):
    """Body of POST /abort_requests, checked."""

    request_ids: (
        Annotated[
            list[Annotated[str, Meta(min_length=1, max_length=128)]],
            Meta(max_length=4096, description="a list of at most 4096 ids"),
        ]
        | None
    ) = None
    """Values of `request_id`; without this field, all requests but those of batches are ended."""


class Aborted(msgspec.Struct):
    aborted: int
    """How many prompts have been ended. One whose samples several engines have counts for each of
    them; unknown and ended ones do not count."""


class PrefixesDropped(msgspec.Struct):
    success: bool
    """Always true: no prompt begins from a state that was kept before."""


_EXAMPLES = {
    "Four tokens": {"token_ids": [0, 5], "sampling_params": {"max_tokens": 4, "logprobs": 1}},
}
OPERATIONS = (
    Operation("POST", "/inference/v1/generate", "Token ids in, token ids out, as vLLM has it.",
              TokensReply, events=TokensReply, parts=(TokensChoice, PromptLogprob),
              body=BodySchema(TokensRequest, {"token_ids": ID_FORMS}, TOKENS_NEUTRAL, _EXAMPLES),
              errors=(404, 409, 504)),
    Operation("POST", "/pause", "Let all sequences stand still where they are.", PauseState,
              query=PauseQuery, errors=(400, 403, 404)),
    Operation("POST", "/resume", "Let them go on.", PauseState, errors=(403, 404)),
    Operation("GET", "/is_paused", "Whether they stand still.", IsPaused),
    Operation("POST", "/update_weights", "Go on with the weights in a folder, at once.",
              FolderInUse, body=BodySchema(FolderRequest), errors=(403, 404, 409, 507)),
    Operation("POST", "/abort_requests", "End requests, each with its tokens so far.",
              Aborted, body=BodySchema(AbortRequests), errors=(403, 404)),
    Operation("POST", "/reset_prefix_cache", "Forget the kept states of prompts.",
              PrefixesDropped, query=DropQuery, body=BodySchema(DropQuery),
              errors=(403, 404)),
)  # fmt: skip


class TokensFormat(Format):
    """A TokensReply with its TokensChoices."""

    scores_kind = TokenIdScores
    may_share_events = True
    engine_fields: ClassVar[dict[str, str]] = {"prompt_token_ids": "token_ids"}

    def make_choice(self, part: ChoicePart, is_event: bool) -> TokensChoice:  # noqa: ARG002
        num_top = self.request.logprobs
        return TokensChoice(
            index=part.index,
            token_ids=memoryview(part.token_ids).cast("i").tolist(),
            logprobs=None if num_top is None else self.scores.render(part.tokens, num_top, []),  # type: ignore[arg-type]  # its JSON
            finish_reason=part.finish_reason,
            stop_reason=part.stop_reason,
            weight_versions=part.versions or [],
        )

    def events(self, parts: list[ChoicePart]) -> list[list[Any]]:
        shown = [part for part in parts if part.token_ids or part.finish_reason]
        return [[self.make_choice(part, is_event=True) for part in shown]] if shown else []

    def envelope(self, fields: dict[str, Any], is_event: bool) -> TokensReply:  # noqa: ARG002
        return TokensReply(
            request_id=fields["id"],
            choices=fields["choices"],
            usage=fields["usage"],
            weights_version=fields["weights_version"],
            first_weights_version=fields.get("first_weights_version", UNSET),
            system_fingerprint=fields["system_fingerprint"],
            prompt_logprobs=fields.get("prompt_logprobs", UNSET),
        )

    def first_fields(self) -> dict[str, Any]:
        is_asked = self.request.prompt_logprobs is not None
        return {"prompt_logprobs": self.prompts[0].logprobs} if is_asked else {}


class TokensEndpoint(Endpoint):
    """Answers token ids with token ids, for one model."""

    path = "/inference/v1/generate"
    id_prefix = "gen-"

    def __init__(self, start: StartGeneration, responder: Responder) -> None:
        super().__init__(responder)
        self._start = start

    async def begin(self, body: bytes, id: str, owner: RequestOwner) -> TokensFormat:
        request = await parsed(parse_tokens, body)
        with naming({"prompt": "token_ids"}):
            generation = await self._start(id, request, owner)
        return TokensFormat(generation)


def folder_of(request: FolderRequest) -> str:
    """The folder of new weights. Raises InvalidRequest where they are to come another way."""
    if not request.weight_dir or request.update_info is not None:
        raise InvalidRequest(
            "weight_dir is required, a model folder on the server's machine: weights are read from "
            "folders, and not received over NCCL or IPC",
            "weight_dir" if not request.weight_dir else "update_info",
        )
    return request.weight_dir


def add_routes(router: Router, control: TrainerControl) -> None:
    """Add the routes of this module but for the one that generates."""

    async def pause(query: PauseQuery) -> PauseState:
        await control.pause(waits=query.mode == "wait" or query.wait_for_inflight_requests)
        if query.mode == "abort":
            await control.end()
        return PauseState("paused")

    async def resume(_: Nothing) -> PauseState:
        await control.resume()
        return PauseState("resumed")

    async def is_paused(_: Nothing) -> IsPaused:
        return IsPaused((await control.status()).paused)

    async def update_weights(asked: FolderRequest) -> FolderInUse:
        with naming({"path": "weight_dir"}):
            version = await control.change(folder_of(asked), "continue", "")
        return FolderInUse("weights updated", version)

    async def abort_requests(asked: AbortRequests) -> Aborted:
        return Aborted(await control.end(asked.request_ids))

    async def reset_prefix_cache(_: DropQuery) -> PrefixesDropped:
        await control.drop_prefixes()
        return PrefixesDropped(success=True)

    actions = (pause, resume, is_paused, update_weights, abort_requests, reset_prefix_cache)
    add_actions(router, OPERATIONS, {f"/{action.__name__}": action for action in actions})
