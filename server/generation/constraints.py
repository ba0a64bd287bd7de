"""The constraints of requests: made and tried once each, in a process that may be killed.

Equal ones are made once, however many ask at the same time, and kept for those that come later.
Shares have theirs made in turn. So whoever sends a thousand that take too long waits for his own;
who asks for none waits for nothing. What nobody waits for any more is not begun.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from srm.engine.constraints.share_lines import ShareLines
from srm.engine.errors import InvalidRequest, Overloaded
from srm.engine.process.limited_process import (
    CPU_S,
    MAX_MEMORY,
    Died,
    LimitedProcess,
    ProcessFailed,
)
from srm.server.generation.engine_request import RequestOwner
from srm.server.schema.structured_outputs import ConstraintSource, Vocabulary
from srm.server.text.text import Text

WITHIN_S = 600.0
"""Seconds that one may take, of which CPU_S on a processor: others have these first."""
MAX_WAITING = 64
"""Most constraints of a share that wait for their turn."""
MAX_KEPT, MAX_KEPT_BYTES = 1_000, 32 * 1024 * 1024
"""Most constraints that are kept, and bytes of them."""


class _Made(NamedTuple):
    constraint: str = ""
    fault: str = ""


@dataclass(slots=True, eq=False)
class _Making:
    key: bytes
    source: ConstraintSource
    made: asyncio.Future[_Made] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Constraints:
    """Makes the constraints for one vocabulary. Its process starts with the first of them."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._kept: dict[bytes, _Making] = {}
        """By what was asked, the one used longest ago first."""
        self._kept_bytes = 0
        self._lines = ShareLines[_Making]()  # those not begun
        self._task: asyncio.Task[None] | None = None
        self._process: LimitedProcess | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="constraints")

    async def make(self, source: ConstraintSource, owner: RequestOwner) -> str:
        """Return `SamplingParams.constraint`. Raises InvalidRequest with what is wrong with the
        source, and Overloaded."""
        param = source.field.partition(".")[0]
        if not self._text.has_tokenizer:
            raise InvalidRequest(
                f"{param}: this model has no tokenizer, so there is no text", param
            )
        key = blake2b(msgspec.json.encode(source), digest_size=16).digest()
        made = await self._wait_for(key, source, owner)
        if made.fault:
            raise InvalidRequest(f"{source.field}: {made.fault}", param)
        return made.constraint

    async def _wait_for(self, key: bytes, source: ConstraintSource, owner: RequestOwner) -> _Made:
        share = (owner.priority, owner.share)
        making = self._kept.get(key)
        if making is None:
            if (waiting := self._lines.length(share)) >= MAX_WAITING:
                raise Overloaded(f"{waiting} constraints are waiting to be compiled", 1)
            making = _Making(key, source)
            self._lines.push(making, share)
            if self._task is None or self._task.done():
                self._task = asyncio.ensure_future(self._make_all())
        elif making in self._lines:
            self._lines.push(making, share)
        self._kept[key] = self._kept.pop(key, making)  # used last
        try:
            return await asyncio.shield(making.made)  # whoever else waits goes on doing so
        finally:
            if self._lines.discard(making, share):
                del self._kept[key]

    async def _make_all(self) -> None:
        while (making := self._lines.pop()) is not None:
            try:
                made = await asyncio.get_running_loop().run_in_executor(
                    self._thread, self._asked, making.source
                )
            except BaseException as error:
                del self._kept[making.key]
                if not isinstance(error, Exception):  # this ends
                    making.made.cancel()
                    raise
                making.made.set_exception(error)
            else:
                making.made.set_result(made)
                self._keep(making, made)

    def _keep(self, making: _Making, made: _Made) -> None:
        self._kept_bytes += len(made.constraint)
        for key, other in list(self._kept.items()):
            if len(self._kept) <= MAX_KEPT and self._kept_bytes <= MAX_KEPT_BYTES:
                break
            if other is not making and other.made.done():
                self._kept_bytes -= len(other.made.result().constraint)
                del self._kept[key]

    def _asked(self, source: ConstraintSource) -> _Made:
        if self._process is None:
            vocabulary = Vocabulary(self._text.table().entries, self._text.model.eos_token_id)
            self._process = LimitedProcess(
                "srm.server.text.constraint_process", vocabulary, is_restart_idle=True
            )
        try:
            return _Made(self._process.ask(source, WITHIN_S).text)
        except Died as error:
            if not error.is_over_limit:  # the machine's fault: not to be kept
                raise Overloaded(f"a constraint was not compiled: {error}", 1) from None
            what = f"{CPU_S} s of processor time and {MAX_MEMORY // 2**30} GiB"
            return _Made(fault=f"it cannot be compiled with {what}")
        except ProcessFailed as error:
            return _Made(fault=str(error))

    def close(self) -> None:
        """End the process, whatever it does. Who still waits is cancelled."""
        while (making := self._lines.pop()) is not None:
            del self._kept[making.key]
            making.made.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._process is not None:
            self._process.close()
