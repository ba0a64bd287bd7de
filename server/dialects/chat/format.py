"""The reply to POST /v1/chat/completions: role, content and end of a choice are in three events, as
clients expect them."""

from __future__ import annotations

from typing import Any, ClassVar

from msgspec import UNSET

from srm.server.dialects.chat.reply import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    ChunkChoice,
)
from srm.server.generation.detokenize import ChoicePart
from srm.server.reply.format import Format
from srm.server.reply.scores import ChatScores


class ChatFormat(Format):
    """A ChatCompletion, or ChatChunks."""

    scores_kind = ChatScores
    may_share_events = True
    engine_fields: ClassVar[dict[str, str]] = {
        "prompt_token_ids": "messages",
        "logprobs": "top_logprobs",
    }
    echoed = ""
    """What each answer begins with."""

    def make_choice(self, part: ChoicePart, is_event: bool) -> ChatChoice | ChunkChoice:
        fields: dict[str, Any] = {
            "index": part.index,
            "logprobs": self.logprobs(part),
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
            "token_ids": self.token_ids(part, UNSET if is_event else None),
            "matched": UNSET if part.matched is None else part.matched,
            "score": UNSET if part.score is None else part.score,
            "weight_versions": self.versions(part),
        }
        if is_event:
            delta = ChatDelta(role="assistant", content=self.echoed + part.text)
            return ChunkChoice(delta=delta, **fields)
        count = UNSET if part.count is None else part.count
        return ChatChoice(
            message=ChatMessage(content=self.echoed + part.text),
            count=count,
            receipt=self.receipt(part),
            state=part.state if self.request.save_state else UNSET,
            states=part.states,
            **fields,
        )

    def opening(self, parts: list[ChoicePart]) -> list[Any]:
        delta = ChatDelta(role="assistant", content=self.echoed)
        return [ChunkChoice(index=part.index, delta=delta) for part in parts if part.is_first]

    def events(self, parts: list[ChoicePart]) -> list[list[Any]]:
        return [choices for choices in (self.contents(parts), self.ends(parts)) if choices]

    def contents(self, parts: list[ChoicePart]) -> list[ChunkChoice]:
        """Return the choices that have more text, or tokens where they are asked for."""
        wants_tokens = self.wants_tokens or self.request.logprobs is not None
        return [
            ChunkChoice(
                index=part.index,
                delta=ChatDelta(content=part.text),
                logprobs=self.logprobs(part),
                token_ids=self.token_ids(part, UNSET),
                weight_versions=part.versions,
            )
            for part in parts
            if part.text or (wants_tokens and part.num_tokens)
        ]

    def ends(self, parts: list[ChoicePart]) -> list[ChunkChoice]:
        """Return the choices that end with these parts, without their text."""
        return [
            ChunkChoice(
                index=part.index,
                delta=ChatDelta(),
                finish_reason=part.finish_reason,
                stop_reason=part.stop_reason,
            )
            for part in parts
            if part.finish_reason is not None
        ]

    def envelope(self, fields: dict[str, Any], is_event: bool) -> ChatChunk | ChatCompletion:
        return ChatChunk(**fields) if is_event else ChatCompletion(**fields)

    def first_fields(self) -> dict[str, Any]:
        """Return the prompt's token ids and scores, if they are asked for."""
        fields, prompt = {}, self.prompts[0]
        if self.request.return_token_ids:
            fields["prompt_token_ids"] = prompt.token_ids
        if self.request.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt.logprobs
        return fields


class ChatsFormat(ChatFormat):
    """A ChatCompletion with the answers to several chats, whose prompts it does not show."""

    def first_fields(self) -> dict[str, Any]:
        return {}
