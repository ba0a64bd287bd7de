"""The reply to a chat whose answer calls tools: as any chat's, with calls in place of a content."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

from msgspec import UNSET

from srm.server.dialects.chat.format import ChatFormat
from srm.server.dialects.chat.reply import (
    CalledFunction,
    ChatChoice,
    ChatDelta,
    ChatMessage,
    ChunkChoice,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
)
from srm.server.generation.detokenize import ChoicePart
from srm.server.generation.generation import Generation
from srm.server.reply.call_reader import CallPart, CallReader
from srm.server.reply.format import TEXT
from srm.server.schema.tools import Calls


class ToolFormat(ChatFormat):
    """A ChatCompletion, or ChatChunks, of calls."""

    def __init__(self, generation: Generation, calls: Calls) -> None:
        super().__init__(generation)
        self._calls = calls
        self._heads = CallReader(calls).heads
        self._readers: dict[int, CallReader] = {}  # of choices that run
        self._texts: dict[int, bool] = {}
        """Whether a choice that runs is text, from its first text on, where it may be."""

    def make_choice(self, part: ChoicePart, is_event: bool) -> ChatChoice | ChunkChoice:
        choice = super().make_choice(part, is_event)
        if self._calls.is_text(part.text):
            return choice
        self._set_reason(choice)
        calls: list[Any] = []
        for piece in [*self._heads, *self._pieces(part)]:
            if piece.name is None:
                calls[-1].function.arguments += piece.arguments
            else:
                calls.append(self._delta(part.index, piece))
        if isinstance(choice, ChunkChoice):
            choice.delta = ChatDelta("assistant", None, calls or UNSET)
            return choice
        for place, call in enumerate(calls):
            called = CalledFunction(call.function.name, call.function.arguments)
            calls[place] = ToolCall(call.id, called)
        choice.message = ChatMessage(content=None, tool_calls=calls or UNSET)
        return choice

    def opening(self, parts: list[ChoicePart]) -> list[Any]:
        choices = super().opening(parts)
        for choice in [] if self._calls.may_be_text else choices:
            choice.delta = ChatDelta("assistant", None)
            if self._heads:
                choice.delta.tool_calls = [self._delta(choice.index, self._heads[0])]
        return choices

    def contents(self, parts: list[ChoicePart]) -> list[ChunkChoice]:
        return [choice for part in parts for choice in self._contents(part)]

    def ends(self, parts: list[ChoicePart]) -> list[ChunkChoice]:
        ends = super().ends(parts)
        for end in ends:
            if not self._texts.pop(end.index, self._calls.may_be_text):
                self._set_reason(end)
        return ends

    def _contents(self, part: ChoicePart) -> list[ChunkChoice]:
        """Return a choice for each piece of a call, the tokens' scores with the first."""
        if part.text is TEXT and not self._heads:  # an example, which is not sent
            raise ValueError("what a part says depends on the text before")
        may_be_text, is_text = self._calls.may_be_text, self._calls.is_text
        if may_be_text and part.text and self._texts.setdefault(part.index, is_text(part.text)):
            return super().contents([part])
        deltas = [
            ChatDelta(tool_calls=[self._delta(part.index, piece)]) for piece in self._pieces(part)
        ]
        wants_tokens = self.wants_tokens or self.request.logprobs is not None
        if not deltas and wants_tokens and part.num_tokens:
            deltas = [ChatDelta()]
        choices = [ChunkChoice(index=part.index, delta=delta) for delta in deltas]
        for choice in choices[:1]:
            choice.logprobs = self.logprobs(part)
            choice.token_ids = self.token_ids(part, UNSET)
            choice.weight_versions = part.versions
        return choices

    def _pieces(self, part: ChoicePart) -> list[CallPart]:
        reader = self._readers.pop(part.index, None) or CallReader(self._calls)
        if part.finish_reason is None:
            self._readers[part.index] = reader
        return reader.read(part.text)

    def _delta(self, index: int, piece: CallPart) -> ToolCallDelta:
        """Return a piece of a call of the choice of that index. A call's id is the same where its
        request is made again."""
        if piece.name is None:
            return ToolCallDelta(piece.place, FunctionDelta(piece.arguments))
        of_call = f"{self.generation.id}-{index}-{piece.place}".encode()
        id = f"call_{blake2b(of_call, digest_size=12).hexdigest()}"
        return ToolCallDelta(piece.place, FunctionDelta("", piece.name), id, "function")

    def _set_reason(self, choice: ChatChoice | ChunkChoice) -> None:
        """Say as OpenAI does that a call is why it ended, unless the request names the function."""
        is_whole = choice.finish_reason == "stop" and choice.stop_reason is None
        if is_whole and not self._calls.is_named:
            choice.finish_reason = "tool_calls"
