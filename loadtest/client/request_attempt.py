"""One request of the plan from its sending to its row in the recording, over all its tries.

Judges replies: which kind of error each is, and whether to retry.
"""

from __future__ import annotations

import email.utils
import math
import time
from typing import NamedTuple

from srm.loadtest.client.connection import ClientConnection
from srm.loadtest.client.reply import MAX_REASON, UNKNOWN, BadReply, Reply, TokenCounts
from srm.loadtest.recording import ERRORS
from srm.loadtest.workload.workload import RequestPlan

RETRIED = (429, 503)
_RETRY_AFTER_S = 1.0
"""Used if a refusal has no Retry-After."""


class Verdict(NamedTuple):
    """How a try ended."""

    kind: str
    """One of ERRORS."""
    message: str = ""
    retry_after_s: float = math.nan
    """Seconds until a retry; NaN unless the server asks for one."""


_GOOD = Verdict("none")


class RequestAttempt:
    """The state of one request. Times are seconds since the start of the run."""

    __slots__ = tuple(
        "asked connection first_byte index is_over is_resent num_bytes planned refusal reply "
        "retries sent status".split()
    )

    def __init__(self, index: int, planned: float, asked: RequestPlan) -> None:
        self.index, self.planned, self.asked = index, planned, asked
        self.connection: ClientConnection | None = None
        """The connection on which it waits for a reply."""
        self.is_over = False
        self.is_resent = False
        """Whether it was resent, at most once, because the server had closed the connection."""
        self.sent = math.nan
        self.retries = 0
        self.begin()

    def begin(self) -> None:
        """Reset the state of the reply; called at the start of each try."""
        self.reply: Reply | None = None
        self.refusal = b""
        self.status = 0
        self.first_byte = math.nan
        self.num_bytes = 0

    def receive(
        self, data: bytes, connection: ClientConnection, stream: bool, keep_text: bool
    ) -> TokenCounts:
        """Take a piece of the body. Raises BadReply."""
        self.num_bytes += len(data)
        if self.reply is None:
            self.status = connection.status
            if not 200 <= self.status < 300:
                self.refusal = (self.refusal + data)[:MAX_REASON]
                return []
            self.reply = Reply(stream, keep_text)
        return self.reply.read(data)

    def finish(self, connection: ClientConnection) -> tuple[Verdict, TokenCounts]:
        """Judge the reply at the end of its body."""
        self.status = status = connection.status
        if 200 <= status < 300:
            try:
                if self.reply is None:
                    raise BadReply("an empty reply")
                counts = self.reply.finish()
            except BadReply as error:
                return Verdict("protocol", str(error)), []
            has_hidden = self.reply.has_empty_choice and self.reply.usage_output_tokens > 0
            is_good = self.reply.tokens or has_hidden
            return _GOOD if is_good else Verdict("empty", "a whole reply without a token"), counts
        message = f"{status}: {self.refusal.decode(errors='replace').strip()}"
        if status in RETRIED:
            wait = retry_after(connection.headers.get(b"retry-after", b""))
            return Verdict("rejected", message, wait), []
        kind = "server" if status >= 500 else "client" if status >= 400 else "protocol"
        return Verdict(kind, message), []

    def row(self, worker: int, ended: float, kind: str, queue_s: float) -> tuple[float, ...]:
        """Return the fields of recording.REQUEST."""
        reply, asked = self.reply, self.asked
        tokens: tuple[int, ...] = (UNKNOWN,) * 4
        if reply is not None:
            counted = reply.tokens if reply.is_counted else UNKNOWN
            tokens = (
                *(counted, reply.usage_prompt_tokens),
                *(reply.usage_output_tokens, reply.usage_cached_tokens),
            )
        return (
            *(self.index, worker, self.planned, self.sent, self.first_byte, ended),
            *(ERRORS.index(kind), self.status, self.retries),
            *(asked.n, asked.prompt_tokens, asked.max_tokens),
            *(*tokens, queue_s, self.num_bytes),
        )


def queue_seconds(headers: dict[bytes, bytes]) -> float:
    """Return the queue time that text-generation-inference sends in milliseconds; NaN without."""
    try:
        return float(headers[b"x-queue-time"]) / 1e3
    except (KeyError, ValueError):
        return math.nan


def retry_after(value: bytes) -> float:
    """Parse a Retry-After header, which has seconds or a date, to seconds."""
    text = value.decode("latin-1").strip()
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
        except ValueError:
            return _RETRY_AFTER_S
    return max(seconds, 0.0) if math.isfinite(seconds) else _RETRY_AFTER_S
