"""The constraints of requests: made and tried once each, in a process that may be killed.

Equal ones are made once, however many ask at the same time, and kept for those that come later.
A few are made at a time, one of each share, and shares have theirs made in turn. One that takes
long is stopped and made again later, behind those that were not tried yet. So whoever sends a
thousand that take too long waits for his own; who asks for none waits for nothing. What nobody
waits for any more is not begun.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b
from sys import getsizeof
from typing import NamedTuple

import msgspec

from srm.engine.constraints.share_lines import ShareLines
from srm.errors import InvalidRequest, Overloaded
from srm.limited_process import (
    CPU_S,
    FIRST_CPU_S,
    MAX_MEMORY,
    NUM_AT_ONCE,
    Died,
    Effort,
    LimitedProcess,
    ProcessFailed,
)
from srm.memory import Cache
from srm.server import metrics
from srm.server.generation.engine_request import RequestOwner
from srm.server.schema.structured_outputs import ConstraintSource, Vocabulary
from srm.server.text.text import Text

WITHIN_S = 120.0
"""Seconds that one may take, of which CPU_S on a processor: it has its share of a busy one."""
MAX_WAITING = 64
"""Most constraints of a share that wait for their turn."""
MAX_KEPT_BYTES = 32 * 1024 * 1024
"""Most bytes of constraints that are kept."""


class Made(NamedTuple):
    constraint: str = ""
    """`SamplingParams.constraint`."""
    not_enforced: tuple[str, ...] = ()
    """Places of schemas that are not held, since their sources are lenient."""
    fault: str = ""


@dataclass(slots=True, eq=False)
class _Making:
    key: bytes
    source: ConstraintSource
    """May be large: not to be kept for longer than it waits."""
    asked: float = field(default_factory=time.monotonic)
    begun: float | None = None
    made: asyncio.Future[Made] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Constraints:
    """Makes the constraints for one vocabulary. Its processes start with the first of them."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._kept = Cache[bytes, Made](
            MAX_KEPT_BYTES, metrics.CACHE_BYTES.labels("constraints").set
        )
        """By what was asked."""
        self._making: dict[bytes, _Making] = {}
        self._lines = ShareLines[_Making]()
        self._num_working = self._num_again = 0
        self._process: LimitedProcess | None = None
        self._is_closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = ThreadPoolExecutor(NUM_AT_ONCE, thread_name_prefix="constraints")

    async def make(self, source: ConstraintSource, owner: RequestOwner) -> Made:
        """Return the constraint. Raises InvalidRequest with what is wrong with the source, and
        Overloaded."""
        param = source.field.partition(".")[0]
        if not self._text.has_tokenizer:
            raise InvalidRequest(
                f"{param}: this model has no tokenizer, so there is no text", param
            )
        key = blake2b(msgspec.json.encode(source), digest_size=16).digest()
        made = self._kept.get(key) or await self._wait_for(key, source, owner)
        if made.fault:
            raise InvalidRequest(f"{source.field}: {made.fault}", param)
        return made

    async def _wait_for(self, key: bytes, source: ConstraintSource, owner: RequestOwner) -> Made:
        share = (owner.priority, owner.share)
        making = self._making.get(key)
        if making is None:
            if len(waiting := self._lines.waiting(share)) >= MAX_WAITING:
                longest = time.monotonic() - min(other.asked for other in waiting)
                raise Overloaded(
                    f"{len(waiting)} constraints are waiting to be compiled, the first of them "
                    f"for {longest:.1f} s",
                    max(1, round(longest)),
                )
            making = self._making[key] = _Making(key, source)
        self._lines.push(making, share)
        self._begin()
        try:
            return await asyncio.shield(making.made)  # whoever else waits goes on doing so
        finally:
            if self._lines.discard(making, share):
                del self._making[key]
            metrics.CONSTRAINTS_WAITING.set(len(self._making) - self._num_working)

    def _begin(self) -> None:
        """Begin as many as there are places for."""
        if self._process is None:
            vocabulary = Vocabulary(self._text.table().entries, [*self._text.model.end_ids])
            self._process = LimitedProcess("srm.server.text.constraint_process", vocabulary)
        while self._num_working < NUM_AT_ONCE and not self._is_closed:
            making = self._lines.pop(only_new=self._num_again >= NUM_AT_ONCE // 2)
            if making is None:
                break
            task = asyncio.ensure_future(self._make(making))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            self._num_working += 1
            self._num_again += making.begun is not None
        metrics.CONSTRAINTS_WAITING.set(len(self._making) - self._num_working)

    async def _make(self, making: _Making) -> None:
        is_again = making.begun is not None
        if making.begun is None:
            making.begun = time.monotonic()
            metrics.CONSTRAINT_WAIT_SECONDS.observe(making.begun - making.asked)
        try:
            made = await asyncio.get_running_loop().run_in_executor(
                self._thread, self._ask, making, is_again
            )
        except BaseException as error:
            self._end(making)
            if not isinstance(error, Exception):  # this ends
                making.made.cancel()
                raise
            making.made.set_exception(error)
            making.made.exception()  # perhaps nobody waits for it any more
        else:
            if made is not None:
                self._end(making)
                making.made.set_result(made)
                self._kept.put(making.key, made, sum(map(getsizeof, (*made, *made.not_enforced))))
            elif not self._lines.put_back(making):
                del self._making[making.key]
                making.made.cancel()
        self._num_again -= is_again
        self._num_working -= 1
        self._begin()

    def _end(self, making: _Making) -> None:
        self._lines.finish(making)
        del self._making[making.key]

    def _ask(self, making: _Making, is_again: bool) -> Made | None:
        """Return what is made of it; None if it takes longer than it may at first."""
        assert self._process is not None
        effort = Effort(CPU_S if is_again else FIRST_CPU_S, is_again)
        try:
            answered = self._process.ask_beside(making.source, effort, WITHIN_S)
            places = msgspec.json.decode(answered.data or b"[]", type=tuple[str, ...])
            return Made(answered.text, places)
        except Died as error:
            if error.is_out_of_time and not is_again:
                return None
            if not error.is_over_limit:  # the machine's fault: not to be kept
                waited = (making.begun or making.asked) - making.asked
                raise Overloaded(
                    f"a constraint was not compiled: {error}; before, it waited {waited:.1f} s "
                    "for its turn",
                    1,
                ) from None
            what = f"{CPU_S:g} s of processor time and {MAX_MEMORY // 2**30} GiB"
            return Made(fault=f"it cannot be compiled with {what}")
        except ProcessFailed as error:
            return Made(fault=str(error))

    def close(self) -> None:
        """End the process, whatever it does. Who still waits is cancelled."""
        self._is_closed = True
        for making in self._making.values():
            if making in self._lines:
                making.made.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._process is not None:
            self._process.close()
