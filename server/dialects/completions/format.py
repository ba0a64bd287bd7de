"""The reply to POST /v1/completions."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET

from srm.server.generation.detokenize import ChoicePart
from srm.server.reply.format import Format
from srm.server.reply.scores import CompletionScores
from srm.server.schema.completion_response import NULL, Choice, Completion, Packed


class CompletionFormat(Format):
    """A Completion with its Choices."""

    scores_kind = CompletionScores
    may_share_events = is_one_event = True

    def make_choice(self, part: ChoicePart, is_event: bool) -> Choice:
        request = self.request
        choice = Choice(
            index=part.index,
            text="" if request.return_packed else part.text,
            finish_reason=part.finish_reason,
            stop_reason=part.stop_reason,
            matched=UNSET if part.matched is None else part.matched,
            score=UNSET if part.score is None else part.score,
            count=UNSET if part.count is None else part.count,
            weight_versions=self.versions(part),
            state=part.state if request.save_state else UNSET,
            receipt=self.receipt(part),
            states=part.states,
        )
        place = part.index // request.n
        if request.return_packed:
            choice.packed = Packed(
                token_ids=part.token_ids,
                logprobs=UNSET if request.logprobs is None else part.tokens.logprobs,
                top_token_ids=part.tokens.top_ids if request.logprobs else UNSET,
                top_logprobs=part.tokens.top_logprobs if request.logprobs else UNSET,
            )
            if part.is_first and (request.return_token_ids or request.prompt_logprobs is not None):
                choice.packed_prompt = self.prompts[place].packed
            return choice
        is_echoed = request.echo and part.is_first and request.logprobs is not None
        choice.logprobs = self.logprobs(
            part, self.prompts[place].echoed_scores if is_echoed else None
        )
        choice.token_ids = self.token_ids(part, UNSET if is_event else None)
        if not is_event:
            choice.prompt_logprobs = choice.prompt_token_ids = NULL
        if request.prompt_logprobs is not None and part.is_first:
            choice.prompt_logprobs = self.prompts[place].logprobs
        if request.return_token_ids and part.is_first:
            choice.prompt_token_ids = self.prompts[place].token_ids
        return choice

    def events(self, parts: list[ChoicePart]) -> list[list[Any]]:
        request = self.request
        wants_tokens = self.wants_tokens or request.return_packed
        wants_scores = not (request.logprobs is None and request.prompt_logprobs is None)
        is_always_sent = wants_tokens or wants_scores
        choices = []
        for part in parts:
            if part.text or part.finish_reason or is_always_sent:
                choices.append(self.make_choice(part, is_event=True))
        return [choices] if choices else []

    def envelope(self, fields: dict[str, Any], is_event: bool) -> Completion:  # noqa: ARG002
        return Completion(**fields, forked_at=self.generation.forked_at)
