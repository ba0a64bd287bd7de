"""Parses the reply to one request: tokens by choice, usage, and whether it is complete.

Reads only the fields it counts by, of a stream's events or of a whole reply.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
from msgspec import Raw

from srm.errors import UNDECODABLE
from srm.loadtest.client.event_stream import EventParser

_NOTHING = {b'""', b"null", b"false", b"{}", b"[]"}
_FINISHED = {
    *("", "stop", "length", "tool_calls", "function_call", "content_filter"),  # OpenAI's
    *("end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal"),  # Anthropic's
    *("eos", "eos_token", "model_length", "repetition", "limit", "word"),  # those of other servers
}
"""Values of `finish_reason` that servers give a choice that did not fail; with any other it did."""
_FIELDS = frozenset(
    (
        "choices error usage id object created model system_fingerprint service_tier obfuscation "
        "kv_transfer_params metadata metrics nvext prompt_filter_results prompt_progress "
        "prompt_token_ids provider sglext time_info timings weights_version x_groq"
    ).split()
)
"""Fields that an event without a choice may have: OpenAI's, and those that other servers add."""
_OBJECTS = (None, "", "text_completion", "chat.completion", "chat.completion.chunk")
MAX_BYTES = 2**28
"""Most bytes of a reply, or of an event of one, that are kept: more are a broken server's."""
MAX_REASON = 300
"""Most bytes of a refusal that are shown and recorded."""
UNKNOWN = -1
"""The server does not say, or the client cannot count."""


class BadReply(Exception):
    """The reply is not one of an OpenAI-compatible server, or reports a failure."""


class _Logprobs(msgspec.Struct, gc=False):
    tokens: list[Raw] | None = None
    """Present in completions."""
    content: list[Raw] | None = None
    """Present in chats."""


class _Message(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The same text under another name; some servers send both."""

    @property
    def text(self) -> str:
        thought = self.reasoning_content or self.reasoning
        return f"{thought}{self.content or ''}" if thought else self.content or ""


class _Choice(msgspec.Struct, gc=False):
    index: int | None = 0
    text: str | None = None
    delta: _Message | None = None
    message: _Message | None = None
    token_ids: Raw = Raw()
    """A list if the server sends token ids; counted by its commas."""
    logprobs: _Logprobs | None = None
    finish_reason: Any = None
    error: Raw = Raw()

    def check(self) -> None:
        """Raise BadReply if the choice failed."""
        reason = self.finish_reason
        if isinstance(reason, dict):  # SGLang's
            reason = str(reason.get("type"))
        elif isinstance(reason, list):
            reason = " ".join(map(str, reason))
        has_failed = isinstance(reason, str) and reason not in _FINISHED
        if has_failed or (self.error and bytes(self.error) not in _NOTHING):
            raise BadReply(f"a choice failed: {self.finish_reason}, {bytes(self.error)!r}")


class _Details(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    queue_time: float | None = None
    """Seconds, as Groq reports it."""


class _Times(msgspec.Struct, gc=False):
    queue_time: float | None = None
    """Seconds, as Cerebras reports it."""


class _Document(msgspec.Struct, gc=False):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    time_info: _Times | None = None
    error: Raw = Raw()


_decode = msgspec.json.Decoder(_Document, strict=False).decode  # 5.0 and "5" are numbers too

TokenCounts = list[tuple[int, int]]
"""New tokens: pairs of choice and count."""


class Reply:
    """The reply to one request; fed with its body as it comes."""

    __slots__ = tuple(
        "_body _events _guessed _has_counts _num_bytes has_empty_choice is_done queue_s texts "
        "tokens usage_cached_tokens usage_output_tokens usage_prompt_tokens".split()
    )

    def __init__(self, stream: bool, keep_text: bool) -> None:
        self._events = EventParser() if stream else None
        self._body: list[bytes] = []
        self._num_bytes = 0
        self._has_counts = self._guessed = self.has_empty_choice = self.is_done = False
        # An empty choice may have tokens without text; a stream with none has only usage.
        self.texts: dict[int, list[str]] | None = {} if keep_text else None
        """The text of each choice, if text is kept."""
        self.tokens = 0
        self.queue_s = math.nan
        self.usage_prompt_tokens = self.usage_output_tokens = self.usage_cached_tokens = UNKNOWN

    @property
    def is_counted(self) -> bool:
        """Whether `tokens` is exact: every part with tokens said how many."""
        return self._has_counts and not self._guessed

    def read(self, data: bytes) -> TokenCounts:
        """Take a piece of the body. Raises BadReply. Without a stream, only `finish` has counts."""
        if self._events is None:
            self._body.append(data)
            self._num_bytes += len(data)
        else:
            counts = self._take(self._events.parse(data))
            self._num_bytes = self._events.num_held
        if self._num_bytes > MAX_BYTES:
            raise BadReply(f"a reply of more than {MAX_BYTES} bytes")
        return [] if self._events is None else counts

    def finish(self) -> TokenCounts:
        """Return the counts at the body's end. Raises BadReply unless the reply is whole."""
        if self._events is None:
            return self._whole(self._read(b"".join(self._body)))
        counts = self._take(self._events.finish())
        if not self.is_done:
            raise BadReply("the stream ended without [DONE]")
        return counts

    def _take(self, events: list[bytes]) -> TokenCounts:
        assert self._events is not None
        counts: TokenCounts = []
        for data in events:
            if data == b"[DONE]":
                self.is_done = True
                continue
            for choice in self._read(data).choices or ():
                if self.is_done:  # counts no more, but may say that it failed
                    choice.check()
                elif count := self._count(choice):
                    counts.append((choice.index or 0, count))
                    self.tokens += count
                else:
                    self.has_empty_choice = True
        if line := self._events.named_error:
            last = b" ".join([*events, line])[-MAX_REASON:].decode(errors="replace")
            raise BadReply(f"a line that is no part of a reply: {last}")
        return counts

    def _read(self, data: bytes) -> _Document:
        try:
            document = _decode(data)
            is_part = document.choices or _is_part(document, data)
        except UNDECODABLE as error:
            raise BadReply(f"{error}: {data[:MAX_REASON]!r}") from None
        if not is_part or (document.error and bytes(document.error) not in _NOTHING):
            raise BadReply(f"no part of a reply: {data[:MAX_REASON].decode(errors='replace')}")
        usage, times = document.usage, document.time_info
        if usage is not None:
            if usage.completion_tokens is not None:
                self.usage_output_tokens = usage.completion_tokens
            if usage.prompt_tokens is not None:
                self.usage_prompt_tokens = usage.prompt_tokens
            if (details := usage.prompt_tokens_details) and details.cached_tokens is not None:
                self.usage_cached_tokens = details.cached_tokens
            if usage.queue_time is not None:
                self.queue_s = usage.queue_time
        if times is not None and times.queue_time is not None:
            self.queue_s = times.queue_time
        return document

    def _count(self, choice: _Choice) -> int:
        """Count new tokens: by their ids, else their logprobs, else 1 if there is text. Raises
        BadReply if the choice failed."""
        if choice.finish_reason is not None or choice.error:
            choice.check()
        count = _read_count(choice)
        if count is not None and self.texts is None:
            self._has_counts = True
            return count
        message = choice.delta or choice.message
        text = message.text if message is not None else choice.text
        if text and self.texts is not None:
            self.texts.setdefault(choice.index or 0, []).append(text)
        self._has_counts |= count is not None
        self._guessed |= count is None and bool(text)
        return int(bool(text)) if count is None else count

    def _whole(self, document: _Document) -> TokenCounts:
        """Count each choice by itself, or split the usage equally if one gives no count."""
        choices = document.choices
        if not choices:
            raise BadReply("a reply without choices")
        self.has_empty_choice = self.is_done = True
        counts = [self._count(choice) for choice in choices]
        if any(_read_count(choice) is None for choice in choices):
            self._guessed = True
            if self.usage_output_tokens >= 0:
                each, more = divmod(self.usage_output_tokens, len(choices))
                counts = [each + (place < more) for place in range(len(choices))]
        self.tokens = sum(counts)
        pairs = zip(choices, counts, strict=True)
        return [(choice.index or 0, count) for choice, count in pairs if count]


def _is_part(document: _Document, data: bytes) -> bool:
    """Return whether an event without a choice is part of a reply. Each server has its own spelling
    of an error, so only known fields are allowed."""
    decoded: dict[str, object] = msgspec.json.decode(data)
    fields = {name: value for name, value in decoded.items() if value is not None}
    return (
        not (document.choices is None and document.usage is None and document.time_info is None)
        and fields.keys() <= _FIELDS
        and fields.get("object") in _OBJECTS
        and not any(isinstance(value, dict) and value.get("error") for value in fields.values())
    )


def _read_count(choice: _Choice) -> int | None:
    """Return how many new tokens the choice reports; None if it does not say."""
    if choice.token_ids:
        ids = bytes(choice.token_ids)
        if ids[:1] == b"[":
            return ids.count(b",") + 1 if ids[1:-1].strip() else 0
    if (scores := choice.logprobs) is not None:
        if scores.tokens is not None:
            return len(scores.tokens)
        if scores.content is not None:
            return len(scores.content)
    return None
