"""Keeps child processes running, and takes them along when it goes.

A child that crashes is started again, after a pause if it has not come to work before; one that
says that its settings or files are wrong, or that keeps crashing like that, ends the whole, unless
the others can do without it, as an engine's can while one of them serves. While a disk that it
writes to is full, or the like, it is never given up. One that has a heartbeat is killed when it
falls silent. A stop is in order: first the API, which lets running
requests finish, and whoever else asks the engine, then the engine they need.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from srm.engine.process.watchdog import Heartbeat
from srm.errors import CheckpointError, ConfigError, DeviceRefused
from srm.logs import PROCESS_NAME
from srm.memory import write_text
from srm.metrics_memory import Region
from srm.server.supervise.ends import describe_exit, passing_cause
from srm.tasks import dispensable, task_group

log = logging.getLogger(__name__)

FATAL_CODES = {ConfigError.exit_code, CheckpointError.exit_code, DeviceRefused.exit_code}
"""Exit codes after which a restart would end in the same way."""
MAX_FAILURES = 6
"""Crashes in a row, each before the child came to work, after which we give up."""
_STEADY_S = 60.0
"""Seconds after which a child without a heartbeat counts as having come to work."""
_LONGEST_PAUSE_S = 10.0
_HOPELESS_FACTOR = 6
"""How much longer pauses may be once the others are left to do without it."""
_KILL_AFTER_S = 10.0
"""Seconds a child may take to leave, beyond the time its requests may take."""
_TICK_S = 0.25
_STOPPED = "T"
"""State of a process that SIGSTOP has stopped."""
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


_BEAT = struct.Struct("dd")


class _Beat(NamedTuple):
    """The numbers that `Heartbeat` wrote last."""

    at: float
    steps: float


@dataclass
class Child:
    """A process to be kept running. `listeners` are the sockets it inherits."""

    name: str
    command: list[str]
    environment: dict[str, str]
    metrics: Region | None = None
    """Where it has its metrics, as had those before it; None: nobody reads them."""
    listeners: Sequence[socket.socket] = ()
    fds: Sequence[int] = ()
    """Further files it inherits."""
    heartbeat_fd: int = -1
    """Memory of its heartbeat; -1: it has none."""
    silence_s: float = 0.0
    """Seconds it may go without a beat; 0: no limit."""
    stall_s: float = 0.0
    """Seconds without a beat after which that is said; 0: never."""
    works_in_time: bool = False
    """Whether it has come to work once it has lived for a while, whatever its heartbeat says."""
    why_away_fd: int = -1
    """Memory of the text that says why it cannot run, while it cannot: the others go on without
    it; -1: they cannot."""
    folders: Sequence[Path] = ()
    """What it writes to: while there is no room there, its ends are no fault of its own."""
    substitutes: Sequence[Child] = ()
    """Others that do the same work: while one of them serves or may yet, this one may be away, once
    it has served at all or where its device is refused."""
    process: asyncio.subprocess.Process | None = None
    failures: int = 0
    """How often it has crashed without coming to work, since it last did."""
    has_served: bool = False
    """Whether it ever came so far as to beat."""
    is_hopeless: bool = False
    """Whether a restart has no point, by its last end."""

    async def keep_running(self) -> int:
        """Keep it running, for ever if the others can do without it; else returns an exit code once
        restarting it has no point."""
        while True:
            started, refused = time.monotonic(), None
            try:
                code = await self.run_once()
            except OSError as error:
                log.error("%s cannot be started: %s", self.name, error)
                code, refused = 1, error
            has_worked = self._has_worked(code, time.monotonic() - started)
            self.failures = 0 if has_worked else self.failures + 1
            end, cause = describe_exit(code), await passing_cause(self.folders, refused)
            if cause:
                end = f"{end}; {cause}"
            waits = bool(cause) and self.why_away_fd < 0
            if waits:
                self.failures = min(self.failures, MAX_FAILURES - 1)
            self.is_hopeless = not waits and (code in FATAL_CODES or self.failures >= MAX_FAILURES)
            if self.is_hopeless:
                often = f" {self.failures} times" if self.failures > 1 else ""
                why = f"{self.name} ended{often} ({end})"
                if self.why_away_fd >= 0:
                    write_text(self.why_away_fd, f"{why}; the server's log says why")
                elif not (self.has_served or code == DeviceRefused.exit_code) or not any(
                    substitute.may_serve for substitute in self.substitutes
                ):
                    log.error("%s: giving up", why)
                    return code if code in FATAL_CODES else 1
            longest = _LONGEST_PAUSE_S * (_HOPELESS_FACTOR if self.is_hopeless else 1)
            pause = min(0.25 * 2 ** min(self.failures, 10), longest)
            log.warning("%s ended (%s): restart in %g s", self.name, end, pause)
            await asyncio.sleep(pause)

    async def run_once(self) -> int:
        """Start it and wait until it ends; returns its exit code."""
        if self.heartbeat_fd >= 0:
            os.pwrite(self.heartbeat_fd, bytes(Heartbeat.BYTES), 0)
        starting = asyncio.create_task(self._start())
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            with contextlib.suppress(OSError):
                await starting  # or whoever stops us would not know of the process
            raise
        assert self.process is not None
        watch = asyncio.create_task(dispensable(self._watch, f"the watch over {self.name}"))
        try:
            code = await self.process.wait()
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
        if self.metrics is not None:
            self.metrics.forget_gauges()
        return code

    async def _start(self) -> None:
        shown = self.metrics.environment if self.metrics is not None else {}
        fds = [*self.fds] if self.metrics is None else [*self.fds, self.metrics.fd]
        fds += [self.heartbeat_fd] if self.heartbeat_fd >= 0 else []
        self.process = await asyncio.create_subprocess_exec(
            *self.command,
            env={**self.environment, **shown, PROCESS_NAME: self.name},
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # a terminal's Ctrl-C is for us, who stop them in order
            pass_fds=[*(listener.fileno() for listener in self.listeners), *fds],
            preexec_fn=_die_with(os.getpid()),
        )

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

    @property
    def may_serve(self) -> bool:
        """Whether it serves, or may yet: it is started or restarted."""
        is_running = self.process is not None and self.process.returncode is None
        is_up = is_running and self._look() is not None
        return is_up or not self.is_hopeless

    def _has_worked(self, code: int, lived_s: float) -> bool:
        """Return whether its end may have come from outside, so that it makes sense to go on."""
        beat = self._look()
        if self.heartbeat_fd < 0 or self.works_in_time:
            return lived_s > _STEADY_S or code == -signal.SIGKILL
        return beat is not None and (beat.steps > 0 or code == -signal.SIGKILL)

    def _look(self) -> _Beat | None:
        """Return its last beat, if it serves, and remember that it does."""
        if self.heartbeat_fd < 0:
            return None
        beat = _Beat(*_BEAT.unpack(os.pread(self.heartbeat_fd, _BEAT.size, 0)))
        self.has_served |= beat.at > 0
        return beat if beat.at > 0 else None

    async def _watch(self) -> None:
        async with task_group() as group:
            group.create_task(self._note_steady())
            group.create_task(self._watch_heartbeat())

    async def _note_steady(self) -> None:
        """Empty the text that says why it is away, once it runs steadily."""
        if self.why_away_fd >= 0:
            await asyncio.sleep(_STEADY_S)
            write_text(self.why_away_fd, "")

    async def _watch_heartbeat(self) -> None:
        """Remember that it serves; kill it when it falls silent, after it was made to write its
        stacks to the log."""
        if self.heartbeat_fd < 0:
            return
        assert self.process is not None
        silent_s, last, is_stalled = 0.0, None, False
        while not self.silence_s or silent_s <= self.silence_s:
            await asyncio.sleep(_TICK_S)
            beat = self._look()
            if beat is None:  # it starts, and may take its time unless it is stopped
                is_silent, last = _state(self.process.pid) == _STOPPED, None
            else:
                is_silent, last = beat.at == last, beat.at
            # Counted in our own ticks: where the whole machine slept, so did we.
            silent_s = silent_s + _TICK_S if is_silent else 0.0
            if is_stalled and not is_silent:
                log.warning("%s goes on", self.name)
            elif not is_stalled and 0 < self.stall_s < silent_s:
                log.warning(
                    "%s (process %d, state %s) is stalled: no sign of life for %g s",
                    *(self.name, self.process.pid, _state(self.process.pid), silent_s),
                )
            is_stalled = 0 < self.stall_s < silent_s
        log.error(
            "%s (process %d, state %s) has given no sign of life for %g s: killed",
            *(self.name, self.process.pid, _state(self.process.pid), silent_s),
        )
        self.send(signal.SIGUSR1)  # one that is stopped, or waits for a disk, cannot
        await asyncio.sleep(_TICK_S)
        self.kill()

    def kill(self) -> None:
        self.send(signal.SIGKILL)

    def send(self, signum: signal.Signals) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signum)


def _state(pid: int) -> str:
    """Return a letter as in `ps`: T is stopped, D waits for a disk or the like, R and S run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "unknown"


def _die_with(parent: int) -> Callable[[], None]:
    """Return what to run in a child before its program, so that it ends with its parent."""

    def prepare() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until it knows what to do then
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has gone already, before we asked
            os.kill(os.getpid(), signal.SIGKILL)

    return prepare


@dataclass
class Supervisor:
    """Engine processes, API processes that share a listening socket, and others that need them."""

    engines: list[Child]
    apis: list[Child]
    drain_s: float
    snapshot_s: float = 0.0
    """Further seconds an engine may take to stop, once nobody asks it any more."""
    others: list[Child] = field(default_factory=list)
    """They are stopped together with the API processes, and must not need their whole `drain_s`."""
    passes_hangups: bool = False
    """Whether SIGHUP makes the API processes read their keys again, and ends nothing."""

    async def run(self, meanwhile: Callable[[], Coroutine[Any, Any, None]]) -> int:
        """Keep all running until SIGTERM or SIGINT (0), or until one cannot run (its exit code)."""
        stopped = asyncio.Event()
        for signum in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signum, self._on_signal, stopped)
        if self.passes_hangups:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._on_hangup)
        stop = asyncio.create_task(stopped.wait())
        children = (*self.engines, *self.apis, *self.others)
        keepers = [asyncio.create_task(child.keep_running()) for child in children]
        beside = [
            stop,
            asyncio.create_task(dispensable(meanwhile, "what goes on beside the processes")),
        ]
        try:
            await asyncio.wait({stop, *keepers}, return_when=asyncio.FIRST_COMPLETED)
            ended = [keeper.result() for keeper in keepers if keeper.done()]
        finally:
            for task in (*keepers, *beside):
                task.cancel()
            await asyncio.gather(*keepers, *beside, return_exceptions=True)
            for listener in {listener for api in self.apis for listener in api.listeners}:
                listener.close()  # or new connections would wait for an answer in vain
            askers = (*self.apis, *self.others)
            await asyncio.gather(*(asker.stop(self.drain_s + _KILL_AFTER_S) for asker in askers))
            stop_s = self.snapshot_s + _KILL_AFTER_S
            await asyncio.gather(*(engine.stop(stop_s) for engine in self.engines))
        return ended[0] if ended else 0

    def _on_hangup(self) -> None:
        for api in self.apis:
            api.send(signal.SIGHUP)

    def _on_signal(self, stopped: asyncio.Event) -> None:
        if stopped.is_set():  # the second one: leave at once
            for child in (*self.apis, *self.others, *self.engines):
                child.kill()
        else:
            log.info(
                "stopping: running requests have %g s to finish; a second signal stops at once",
                self.drain_s,
            )
        stopped.set()
