"""Requests whose constraints are being compiled, on a thread beside the steps."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from srm.engine.constraints.grammars import Grammar, Grammars
from srm.engine.errors import InvalidRequest
from srm.engine.messages import Request

logger = logging.getLogger(__name__)


class _Waiting(NamedTuple):
    client: bytes
    request: Request
    build: Future[Grammar]


class Compiling:
    """The requests that wait for their grammars, in the order in which they came."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compile")
        self._waiting: deque[_Waiting] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return any(request_id == waiting.request.id for waiting in self._waiting)

    def start(self, client: bytes, request: Request) -> bool:
        """Have the request's constraint compiled; False if there is nothing to do."""
        constraint = request.params.constraint
        if not constraint or self._grammars.has(constraint):
            return False
        build = self._thread.submit(self._grammars.build, constraint)
        self._waiting.append(_Waiting(client, request, build))
        return True

    def take_compiled(self, waits: bool) -> Iterator[tuple[bytes, Request, InvalidRequest | None]]:
        """Yield client and request of those that wait no more, and why the constraint is refused if
        it is; with `waits`, of all."""
        while self._waiting and (waits or self._waiting[0].build.done()):
            client, request, build = self._waiting.popleft()
            error = build.exception()
            if error is None:
                self._grammars.keep(request.params.constraint, build.result())
            elif not isinstance(error, InvalidRequest):  # a bug, here or in the library
                logger.error("a constraint could not be compiled", exc_info=error)
                error = InvalidRequest(f"constraint cannot be compiled: {error}", "constraint")
            yield client, request, error

    def drop(self, client: bytes, request_id: str | None = None) -> None:
        """Forget a client's request of this id, or all of the client's."""
        self._waiting = deque(
            waiting
            for waiting in self._waiting
            if waiting.client != client or request_id not in {None, waiting.request.id}
        )

    def drop_all(self) -> list[tuple[bytes, Request]]:
        """Forget all, and return them."""
        dropped = [(waiting.client, waiting.request) for waiting in self._waiting]
        self._waiting.clear()
        return dropped

    def close(self) -> None:
        """End the thread once it has compiled what it is at."""
        self._thread.shutdown(wait=False, cancel_futures=True)
