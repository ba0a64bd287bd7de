"""The constraints of requests: made and tried once each, in a process that may be killed.

Equal ones are made once, however many ask at the same time, and kept for those that come later. So
whoever sends a thousand that take too long waits for his own; who asks for none waits for nothing.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from srm.engine.errors import InvalidRequest, Overloaded
from srm.server.schema.structured_outputs import ConstraintSource, Vocabulary
from srm.server.text.limited_process import CPU_S, MAX_MEMORY, Died, LimitedProcess, ProcessFailed
from srm.server.text.text import Text

WITHIN_S = 60.0
"""Seconds that one may take on a machine that is busy; of processor time it gets less."""
MAX_WAITING = 64
"""Most constraints that wait for their turn."""
MAX_KEPT, MAX_KEPT_BYTES = 1_000, 32 * 1024 * 1024
"""Most constraints that are kept, and bytes of them."""


class _Made(NamedTuple):
    constraint: str = ""
    fault: str = ""


class Constraints:
    """Makes the constraints for one vocabulary. Its process starts with the first of them."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._kept: dict[bytes, asyncio.Future[_Made]] = {}
        """By what was asked, the one used longest ago first."""
        self._kept_bytes = 0
        self._waiting = 0
        self._process: LimitedProcess | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="constraints")

    async def make(self, source: ConstraintSource) -> str:
        """Return `SamplingParams.constraint`. Raises InvalidRequest with what is wrong with the
        source, and Overloaded."""
        param = source.field.partition(".")[0]
        if not self._text.has_tokenizer:
            raise InvalidRequest(
                f"{param}: this model has no tokenizer, so there is no text", param
            )
        key = blake2b(msgspec.json.encode(source), digest_size=16).digest()
        making = self._kept.pop(key, None)
        if making is None:
            if self._waiting >= MAX_WAITING:
                raise Overloaded(f"{self._waiting} constraints are waiting to be compiled", 1)
            self._waiting += 1
            making = asyncio.ensure_future(self._ask(key, source))
        self._kept[key] = making
        made = await asyncio.shield(making)  # whoever else waits for it goes on doing so
        if made.fault:
            raise InvalidRequest(f"{source.field}: {made.fault}", param)
        return made.constraint

    async def _ask(self, key: bytes, source: ConstraintSource) -> _Made:
        try:
            made = await asyncio.get_running_loop().run_in_executor(
                self._thread, self._asked, source
            )
        except BaseException:
            self._kept.pop(key, None)
            raise
        finally:
            self._waiting -= 1
        self._kept_bytes += len(made.constraint)
        for other in list(self._kept):
            if len(self._kept) <= MAX_KEPT and self._kept_bytes <= MAX_KEPT_BYTES:
                break
            if other != key and self._kept[other].done():
                self._kept_bytes -= len(self._kept.pop(other).result().constraint)
        return made

    def _asked(self, source: ConstraintSource) -> _Made:
        if self._process is None:
            vocabulary = Vocabulary(self._text.table().entries, self._text.model.eos_token_id)
            self._process = LimitedProcess("srm.server.text.constraint_process", vocabulary)
        try:
            return _Made(self._process.ask(source, WITHIN_S))
        except Died as error:
            if not error.is_over_limit:  # the machine's fault: not to be kept
                raise Overloaded(f"a constraint was not compiled: {error}", 1) from None
            what = f"{CPU_S} s of processor time and {MAX_MEMORY // 2**30} GiB"
            return _Made(fault=f"it cannot be compiled with {what}")
        except ProcessFailed as error:
            return _Made(fault=str(error))

    def close(self) -> None:
        """End the process, whatever it does."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._process is not None:
            self._process.close()
