"""Requests whose constraints are being compiled, on threads beside the steps; their tables in a
process."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from threading import Lock
from typing import NamedTuple

import msgspec

from srm.engine.constraints.grammars import Grammar, Grammars
from srm.engine.constraints.share_lines import Share, ShareLines
from srm.engine.messages import Request, StartSamples, StopSamples
from srm.engine.process.table_process import CPU_S, OutOfTime, TableProcess
from srm.errors import InvalidRequest, Overloaded, RequestError
from srm.limited_process import FIRST_CPU_S

NUM_THREADS = 4
"""Most constraints that are compiled at a time, each of another share. Half of the threads are for
those that were not tried yet."""
logger = logging.getLogger(__name__)


class Waiting(NamedTuple):
    """A request that waits for its grammar, and what was said of it meanwhile."""

    client: bytes
    request: Request
    choices: list[StopSamples | StartSamples]
    build: _Build

    @property
    def share(self) -> Share:
        return self.request.priority, self.request.share


@dataclass(slots=True, eq=False)
class _Build:
    constraint: str
    waiting: dict[tuple[bytes, str], Waiting] = field(default_factory=dict)
    result: Grammar | BaseException | None = None  # None: not there yet, or not tried again
    is_again: bool = False
    is_done: bool = False


class Compiling:
    """The requests that wait for their grammars. Equal constraints are compiled once; shares have
    theirs compiled in turn, one at a time, and one whose table takes long is tried again behind
    others. Keeps: what a call costs does not depend on how many wait."""

    def __init__(self, grammars: Grammars, max_waiting: int) -> None:
        """`max_waiting`: most sequences of a share that wait here."""
        self._grammars = grammars
        self._max_waiting = max_waiting
        self._waiting: dict[tuple[bytes, str], Waiting] = {}  # by client and id
        self._counts = Counter[Share]()  # sequences that wait
        self._builds: dict[str, _Build] = {}  # by constraint, until they are taken
        self._lines = ShareLines[_Build]()
        self._num_again = 0  # threads that have one that takes long
        self._lock = Lock()  # of the lines
        self._built = SimpleQueue[_Build]()
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="compile")
        self._tables = TableProcess()
        grammars.beside = self._do_beside

    def __len__(self) -> int:
        return len(self._builds)

    def start(self, client: bytes, request: Request) -> bool:
        """Have the request's constraint compiled; False if there is nothing to do. Raises
        Overloaded if too many of its share wait, and InvalidRequest if its id is in use."""
        constraint, count = request.params.constraint, request.params.n
        if not constraint or self._grammars.has(constraint):
            return False
        if (client, request.id) in self._waiting:
            if not request.durable:
                raise InvalidRequest(f"id {request.id!r} is in use by a waiting request", "id")
            self.drop(client, request.id)  # sent again: this one counts
        known = self._builds.get(constraint)
        build = known or _Build(constraint)
        # A body of many prompts comes as many requests: their constraint is held once.
        params = msgspec.structs.replace(request.params, constraint=build.constraint)
        request = msgspec.structs.replace(request, params=params)
        waiting = Waiting(client, request, [], build)
        before = self._counts[waiting.share]
        if before and before + count > self._max_waiting:
            raise Overloaded(
                f"{before} of at most {self._max_waiting} sequences wait for their constraints",
                excess=before + count - self._max_waiting,
            )
        self._enter(waiting)
        self._threads.submit(self._build_all)
        return True

    def note(self, client: bytes, message: StopSamples | StartSamples) -> None:
        """Note which samples of a request are to be stopped or started, if it waits."""
        if (waiting := self._waiting.get((client, message.id))) is not None:
            waiting.choices.append(message)

    def take_compiled(self) -> Iterator[tuple[Waiting, RequestError | None]]:
        """Yield those that wait no more, and why the constraint is refused if it is."""
        while not self._built.empty():
            build = self._built.get()
            if build.result is None and build.waiting:
                continue  # who came when nobody asked for it any more had it tried again
            del self._builds[build.constraint]
            error: RequestError | None = None
            if isinstance(build.result, Grammar):
                try:
                    self._grammars.keep(build.constraint, build.result)
                except Overloaded as refused:
                    error = refused
            elif isinstance(build.result, InvalidRequest):
                error = build.result
            elif build.result is not None:  # a bug, here or in the library
                logger.error("a constraint could not be compiled", exc_info=build.result)
                error = InvalidRequest(
                    f"constraint cannot be compiled: {build.result}", "constraint"
                )
            for waiting in list(build.waiting.values()):
                self._leave(waiting)
                yield waiting, error

    def drop(self, client: bytes, request_id: str) -> bool:
        """Forget a client's request; False if it does not wait. What is being compiled is kept for
        those who come later."""
        waiting = self._waiting.get((client, request_id))
        if waiting is not None:
            self._leave(waiting)
        return waiting is not None

    def drop_client(self, client: bytes) -> None:
        """Forget all requests of a client, as `drop`."""
        for waiting in [own for own in self._waiting.values() if own.client == client]:
            self._leave(waiting)

    def drop_all(self, is_meant: Callable[[Request], bool] = lambda _: True) -> list[Waiting]:
        """Forget all that are meant, as `drop`, and return them."""
        dropped = [own for own in self._waiting.values() if is_meant(own.request)]
        for waiting in dropped:
            self._leave(waiting)
        return dropped

    def close(self) -> None:
        """End the threads, which the process's exit waits for: soon, but for what llguidance is at,
        whose own limits end that within seconds."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._tables.close()

    def _enter(self, waiting: Waiting) -> None:
        key, build = (waiting.client, waiting.request.id), waiting.build
        self._waiting[key] = build.waiting[key] = waiting
        self._counts[waiting.share] += waiting.request.params.n
        with self._lock:
            if not build.is_done:
                self._lines.push(build, waiting.share)
        self._builds[build.constraint] = build

    def _leave(self, waiting: Waiting) -> None:
        key, build = (waiting.client, waiting.request.id), waiting.build
        del self._waiting[key], build.waiting[key]
        self._counts[waiting.share] -= waiting.request.params.n
        if not self._counts[waiting.share]:
            del self._counts[waiting.share]
        with self._lock:
            is_unasked = self._lines.discard(build, waiting.share)
        if is_unasked:
            del self._builds[build.constraint]

    def _do_beside(self, work: Callable[[], object]) -> None:
        def do() -> None:
            try:
                work()
            except BaseException:  # as a panic of the library: what there was is used further
                logger.exception("a constraint could not be compiled anew")

        with suppress(RuntimeError):  # it is closed
            self._threads.submit(do)

    def _build_all(self) -> None:
        """On a thread: compile what is next until nothing is that somebody asks for."""
        while True:
            with self._lock:
                build = self._lines.pop(only_new=self._num_again >= NUM_THREADS // 2)
                if build is None:
                    return
                self._num_again += build.is_again
            cpu_s = CPU_S if build.is_again else FIRST_CPU_S
            try:
                result: Grammar | BaseException | None = self._grammars.build(
                    build.constraint, partial(self._tables.make_table, cpu_s=cpu_s)
                )
            except OutOfTime:
                result = None
            except BaseException as error:  # noqa: BLE001  a panic of the library is no Exception
                result = error
            with self._lock:
                self._num_again -= build.is_again
                build.is_again = True
                if result is None and self._lines.put_back(build):
                    continue
                if result is not None:
                    self._lines.finish(build)
                    build.is_done = True
                build.result = result
            self._built.put(build)
