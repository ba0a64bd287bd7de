"""Requests whose constraints are being compiled, on a thread beside the steps."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event
from typing import NamedTuple

from srm.engine.constraints.byte_automaton import Work
from srm.engine.constraints.grammars import Grammar, Grammars
from srm.engine.errors import InvalidRequest, Overloaded
from srm.engine.messages import Request, StopSamples

logger = logging.getLogger(__name__)


class Waiting(NamedTuple):
    """A request that waits for its grammar, and what was said of it meanwhile."""

    client: bytes
    request: Request
    stops: list[StopSamples]


@dataclass(slots=True, eq=False)
class _Build:
    future: Future[Grammar]
    waiting: list[Waiting] = field(default_factory=list)


class Compiling:
    """The requests that wait for their grammars. Equal constraints are compiled once."""

    def __init__(self, grammars: Grammars, max_waiting: int) -> None:
        """`max_waiting`: most sequences that wait here."""
        self._grammars = grammars
        self._max_waiting = max_waiting
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compile")
        self._ended = Event()
        self._builds: dict[str, _Build] = {}  # by constraint, in the order in which they came

    def __len__(self) -> int:
        return len(self._builds)

    def start(self, client: bytes, request: Request) -> bool:
        """Have the request's constraint compiled; False if there is nothing to do. Raises
        Overloaded if too many wait."""
        constraint = request.params.constraint
        if not constraint or self._grammars.has(constraint):
            return False
        builds = self._builds.values()
        count = sum(own.request.params.n for build in builds for own in build.waiting)
        if count + request.params.n > self._max_waiting and count:
            raise Overloaded(f"{count} sequences wait for their constraints", excess=count)
        build = self._builds.get(constraint)
        if build is None:
            work = Work(ended=self._ended)
            future = self._thread.submit(self._grammars.build, constraint, work)
            build = self._builds[constraint] = _Build(future)
        build.waiting.append(Waiting(client, request, []))
        return True

    def stop(self, client: bytes, message: StopSamples) -> bool:
        """Note that samples of a request that waits are to be stopped; False if it does not."""
        for build in self._builds.values():
            for waiting in build.waiting:
                if (waiting.client, waiting.request.id) == (client, message.id):
                    waiting.stops.append(message)
                    return True
        return False

    def take_compiled(self) -> Iterator[tuple[Waiting, InvalidRequest | None]]:
        """Yield those that wait no more, and why the constraint is refused if it is."""
        for constraint in [key for key, build in self._builds.items() if build.future.done()]:
            build = self._builds.pop(constraint)
            error = build.future.exception()
            if error is None:
                self._grammars.keep(constraint, build.future.result())
            elif not isinstance(error, InvalidRequest):  # a bug, here or in the library
                logger.error("a constraint could not be compiled", exc_info=error)
                error = InvalidRequest(f"constraint cannot be compiled: {error}", "constraint")
            for waiting in build.waiting:
                yield waiting, error

    def drop(self, client: bytes, request_id: str | None = None) -> None:
        """Forget a client's request of this id, or all of the client's. What is being compiled is
        kept for those who come later."""
        for constraint, build in list(self._builds.items()):
            build.waiting = [
                own
                for own in build.waiting
                if own.client != client or request_id not in {None, own.request.id}
            ]
            if not build.waiting and build.future.cancel():
                del self._builds[constraint]

    def drop_all(self) -> list[Waiting]:
        """Forget all, and return them."""
        dropped = [waiting for build in self._builds.values() for waiting in build.waiting]
        for build in self._builds.values():
            build.future.cancel()
        self._builds.clear()
        return dropped

    def close(self) -> None:
        """End the thread, which the process's exit waits for: soon, but for what llguidance is at,
        whose own limits end that within seconds."""
        self._ended.set()
        self._thread.shutdown(wait=False, cancel_futures=True)
