"""What a line's reply can be, wherever it was made: another server is not believed.

A reply that is of this shape may still have other tokens in it than ours would have: to know that
would be to make it here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from srm.server.dialects.chat.reply import ChatChoice, ChatCompletion
from srm.server.dialects.chat.request import ChatRequest, parse_chat
from srm.server.dialects.responses.items import OutputCall, OutputItem
from srm.server.dialects.responses.reply import Response
from srm.server.dialects.responses.request import parse_response
from srm.server.schema.completion_request import CompletionRequest, parse_completion
from srm.server.schema.completion_response import Choice, Completion, Usage
from srm.server.schema.sampling_fields import MAX_SCORES
from srm.server.schema.tools import MOST_CALLS
from srm.server.schema.worker import Url

_ENDS = ("stop", "length")
_LEAST_BYTES = 64 * 1024
_BYTES_A_SCORE = 2048
"""Most bytes that a token takes in a reply, or another one in its place: a text, escaped, its bytes
as numbers, and a score."""
_decode_response = msgspec.json.Decoder(Response).decode
_decode_output = msgspec.json.Decoder(list[OutputItem]).decode
_DECODERS: dict[str, tuple[Callable[[bytes], Any], Callable[[Any], Any]]] = {
    "/v1/completions": (
        msgspec.json.Decoder(Completion).decode,
        msgspec.json.Decoder(Choice).decode,
    ),
    "/v1/chat/completions": (
        msgspec.json.Decoder(ChatCompletion).decode,
        msgspec.json.Decoder(ChatChoice).decode,
    ),
}
"""What decodes a reply and what each of its choices, by route."""


def _most_alternatives(wanted: int | None, named: list[int]) -> int:
    """Return how many a token has at most."""
    return len(named) or (MAX_SCORES if wanted == -1 else wanted or 0)


class Expected:
    """Bounds on the reply to one line."""

    def __init__(
        self, path: Url, body: bytes, id: str, created: int, model: str, n_ctx: int
    ) -> None:
        """`n_ctx` is the model's context. Raises the RequestError that the body is refused with."""
        request: CompletionRequest | ChatRequest
        if path == "/v1/completions":
            request = parse_completion(body)
            self._prompts, most = len(request.prompt), request.max_tokens
            shown, prompts_shown = request.logprobs, request.prompt_logprobs
        else:
            request = parse_chat(body) if path != "/v1/responses" else parse_response(body)[1]
            self._prompts = 1
            most = request.max_completion_tokens or request.max_tokens or n_ctx
            shown, prompts_shown = request.top_logprobs, request.prompt_logprobs
        self._path = path
        self._expected = request.request_id or id, created, model
        has_calls = isinstance(request, ChatRequest) and request.calls is not None
        self._has_calls = has_calls
        self._ends = (*_ENDS, "tool_calls") if has_calls else _ENDS
        self._choices = self._prompts * request.n
        self._is_counted = request.returns == "counts"
        self._may_be_fewer = request.ends_early or request.returns != "choices"
        self._prompt_tokens = self._prompts * n_ctx
        self._tokens = self._prompts * request.num_samples * min(most, n_ctx)
        shown = _most_alternatives(shown, request.logprob_token_ids)
        prompts_shown = _most_alternatives(prompts_shown, request.prompt_logprob_token_ids)
        prompts = self._choices * len(body)
        scores = self._tokens + prompts
        scores += min(self._tokens * shown + prompts * (prompts_shown + shown), MAX_SCORES)
        self.max_bytes = _LEAST_BYTES + _BYTES_A_SCORE * (scores + self._choices)
        """Most bytes of the reply."""

    def check(self, data: bytes) -> None:
        """Raise ValueError if these bytes are no reply to the line."""
        if len(data) > self.max_bytes:
            raise ValueError(f"it has {len(data)} bytes, and at most {self.max_bytes} were asked")
        if b"\n" in data:
            raise ValueError("it has several lines")
        data.decode()  # strings that are passed over are not looked at
        if self._path == "/v1/responses":
            self._check_response(_decode_response(data))
            return
        decode_reply, decode_choice = _DECODERS[self._path]
        reply = decode_reply(data)
        if (reply.id, reply.created, reply.model) != self._expected:
            raise ValueError("its id, created or model is another one's")
        choices = [*map(decode_choice, reply.choices)]
        indices = [choice.index for choice in choices]
        if self._is_counted and choices:
            raise ValueError("it has choices, and counts were asked for")
        if not self._may_be_fewer and indices != [*range(self._choices)]:
            raise ValueError(f"its choices are not those of 0 to {self._choices - 1}")
        if sorted({*indices} & {*range(self._choices)}) != indices:
            raise ValueError(f"its choices are not of 0 to {self._choices - 1} in order")
        if any(choice.finish_reason not in self._ends for choice in choices):
            raise ValueError(f"the finish_reason of a choice is none of {', '.join(self._ends)}")
        if not isinstance(reply.usage, Usage):
            raise ValueError("it has no usage")
        self._check_usage(reply.usage)

    def _check_response(self, reply: Response) -> None:
        if (reply.id, reply.created_at, reply.model) != self._expected:
            raise ValueError("its id, created_at or model is another one's")
        if reply.status not in ("completed", "incomplete"):
            raise ValueError(f"its status is {reply.status}")
        is_call = [isinstance(item, OutputCall) for item in _decode_output(reply.output)]
        if any(is_call) and not (all(is_call) and self._has_calls):
            raise ValueError("its output has calls that were not asked for")
        if len(is_call) > (MOST_CALLS if self._has_calls else 1):
            raise ValueError(f"its output has {len(is_call)} items")
        if (usage := reply.usage) is None:
            raise ValueError("it has no usage")
        self._check_usage(Usage(usage.input_tokens, usage.output_tokens, usage.total_tokens))

    def _check_usage(self, usage: Usage) -> None:
        bounds = {"prompt_tokens": self._prompt_tokens, "completion_tokens": self._tokens}
        for name, most in bounds.items():
            if not 0 <= (count := getattr(usage, name)) <= most:
                raise ValueError(f"usage.{name} = {str(count)[:40]} is not 0 … {most}")
        if usage.total_tokens != usage.prompt_tokens + usage.completion_tokens:
            raise ValueError("usage.total_tokens is not the sum of the others")
