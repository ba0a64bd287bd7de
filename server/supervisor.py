"""Keeps child processes running, and takes them along when it goes.

A child that crashes is started again after a pause; one that says that its settings or files are
wrong, or that keeps crashing, ends the whole. A stop is in order: first the API, which lets running
requests finish, and whoever else asks the engine, then the engine they need. Knows nothing of what
the children do.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client import multiprocess

from engine.errors import CheckpointError, ConfigError

log = logging.getLogger(__name__)

_FATAL_CODES = {ConfigError.exit_code, CheckpointError.exit_code}
"""Exit codes after which starting again would end in the same way."""
_MAX_FAILURES = 6
"""Crashes in a row, each within `_STEADY_S` of its start, after which we give up."""
_STEADY_S = 60.0
_LONGEST_PAUSE_S = 10.0
_KILL_AFTER_S = 10.0
"""How long a child may take to leave, beyond the time its requests may take."""
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


@dataclass
class Child:
    """A process to be kept running. `listeners` are the sockets it inherits."""

    name: str
    command: list[str]
    environment: dict[str, str]
    metrics: Path
    """Folder of the metrics that processes leave behind."""
    listeners: Sequence[socket.socket] = ()
    process: asyncio.subprocess.Process | None = None

    async def keep_running(self) -> int:
        """Start it, and again when it ends; returns an exit code when that has no point."""
        failures = 0
        while True:
            started = time.monotonic()
            code = await self.run_once()
            if code in _FATAL_CODES:
                return code
            failures = 1 if time.monotonic() - started > _STEADY_S else failures + 1
            if failures == _MAX_FAILURES:
                log.error("%s ended %d times (exit code %d): giving up", self.name, failures, code)
                return 1
            pause = min(0.25 * 2**failures, _LONGEST_PAUSE_S)
            log.warning("%s ended (exit code %d): restart in %g s", self.name, code, pause)
            await asyncio.sleep(pause)

    async def run_once(self) -> int:
        """Start it and wait until it ends; its exit code."""
        self.process = await asyncio.create_subprocess_exec(
            *self.command,
            env=self.environment,
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # a terminal's Ctrl-C is for us, who stop them in order
            pass_fds=[listener.fileno() for listener in self.listeners],
            preexec_fn=_die_with(os.getpid()),
        )
        code = await self.process.wait()
        mark_dead = multiprocess.mark_process_dead
        mark_dead(self.process.pid, str(self.metrics))  # type: ignore[no-untyped-call]  # untyped
        return code

    async def stop(self, timeout_s: float) -> None:
        """Ask it to leave; kill it if it has not after `timeout_s`."""
        if self.process is None or self.process.returncode is not None:
            return
        self.process.terminate()
        try:
            await asyncio.wait_for(self.process.wait(), timeout_s)
        except TimeoutError:
            log.warning("%s did not leave in %g s: killed", self.name, timeout_s)
            self.kill()
            await self.process.wait()

    def kill(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()


def _die_with(parent: int) -> Callable[[], None]:
    """To be run in a child before its program: whatever ends the parent ends the child."""

    def prepare() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has gone already, before we asked
            os.kill(os.getpid(), signal.SIGKILL)

    return prepare


@dataclass
class Supervisor:
    """An engine process, API processes that share a listening socket, and others that need it."""

    engine: Child
    apis: list[Child]
    drain_s: float
    others: list[Child] = field(default_factory=list)
    """They are stopped together with the API processes, and must not need their whole `drain_s`."""

    async def run(self, meanwhile: Coroutine[None, None, None]) -> int:
        """Keep all running until SIGTERM or SIGINT (0), or until one cannot run (its code)."""
        stopped = asyncio.Event()
        for signum in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signum, self._on_signal, stopped)
        stop = asyncio.create_task(stopped.wait())
        children = (self.engine, *self.apis, *self.others)
        keepers = [asyncio.create_task(one.keep_running()) for one in children]
        beside = [stop, asyncio.create_task(meanwhile)]
        try:
            await asyncio.wait({stop, *keepers}, return_when=asyncio.FIRST_COMPLETED)
            ended = [keeper.result() for keeper in keepers if keeper.done()]
        finally:
            for task in (*keepers, *beside):
                task.cancel()
            await asyncio.gather(*keepers, *beside, return_exceptions=True)
            for listener in {one for api in self.apis for one in api.listeners}:
                listener.close()  # or new connections would wait for an answer in vain
            askers = (*self.apis, *self.others)
            await asyncio.gather(*(one.stop(self.drain_s + _KILL_AFTER_S) for one in askers))
            await self.engine.stop(_KILL_AFTER_S)
        return ended[0] if ended else 0

    def _on_signal(self, stopped: asyncio.Event) -> None:
        if stopped.is_set():  # the second one: leave at once
            for child in (*self.apis, *self.others, self.engine):
                child.kill()
        stopped.set()
