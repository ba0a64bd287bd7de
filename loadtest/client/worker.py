"""`python -m srm.loadtest.client.worker`: one client process of a run, controlled by stdin.

It makes its part of the requests, sends them at their times, and sends back what it recorded when
all have ended. Knows its own part alone.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
from typing import Any

import uvloop

from srm.errors import ConfigError, SRMError
from srm.loadtest import recording
from srm.loadtest.client import frames
from srm.loadtest.client.client import Client
from srm.loadtest.client.os_limits import allow_files, own_concurrency
from srm.loadtest.client.pacing import ClosedLoop, OpenLoop
from srm.loadtest.client.request_attempt import RequestAttempt
from srm.loadtest.workload import arrivals
from srm.loadtest.workload.workload import Workload

_TICK_S = 0.01
"""Seconds between two measurements of the event loop's lag."""
_TELL_S = 0.5
_ROW_S = 1.0


def main() -> None:
    """Run until the result is sent. The exit code is 1 if the run has gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run is asked, and asks us
    out = os.dup(1)
    os.dup2(2, 1)  # keeps prints out of the messages
    setup = frames.read(0)
    if not isinstance(setup, frames.Setup):
        raise SystemExit(1)
    try:
        allow_files(setup.scenario, setup.worker, setup.workers)
        workload = Workload(setup.scenario)
        loop = pace_of(setup, workload)
        gc.collect()
        gc.freeze()
        gc.set_threshold(100_000, 50, 100)  # requests leave no cycles to collect
        frames.write(out, frames.Ready())
        go = frames.read(0)
        if not isinstance(go, frames.Go):
            raise SystemExit(1)
        result = uvloop.run(WorkerPart(setup, workload, loop, go.started, out).result())
        frames.write(out, result)
    except SRMError as error:
        frames.write(out, frames.Failed(error.message, isinstance(error, ConfigError)))


def pace_of(setup: frames.Setup, workload: Workload) -> OpenLoop | ClosedLoop:
    scenario, worker, workers = setup.scenario, setup.worker, setup.workers
    if scenario.open_loop:
        return OpenLoop(arrivals.times(scenario), slice(worker, None, workers), workload)
    indices = iter(range(worker, scenario.requests or 2**62, workers))
    own = own_concurrency(scenario, worker, workers)
    return ClosedLoop(own, indices, workload, scenario.duration_s)


class WorkerPart:
    """One process's part of a run: from the start to the end of its last request."""

    def __init__(
        self,
        setup: frames.Setup,
        workload: Workload,
        loop: OpenLoop | ClosedLoop,
        started: float,
        out: int,
    ) -> None:
        self._setup = setup
        self._workload = workload
        self._pace = loop
        self._started = started
        self._out = out
        self._clients = recording.RowBuffer(recording.CLIENT)
        self._begun = self._completed = self._failed = 0
        self._since, self._cpu_s, self._lag_s = time.monotonic(), time.process_time(), 0.0
        self._fatal: SRMError | None = None

    async def result(self) -> frames.Result:
        """Run to the end. Raises ConfigError if this machine cannot go on."""
        scenario = self._setup.scenario
        self._asyncio = asyncio.get_running_loop()
        self._asyncio.set_exception_handler(self._bug)
        self._over = asyncio.Event()
        target, worker = self._setup.target, self._setup.worker
        self._client = Client(target, scenario, worker, self._started, self._ended, self._stop)
        await asyncio.sleep(self._started - time.monotonic())
        self._since, self._cpu_s = time.monotonic(), time.process_time()
        watch = asyncio.create_task(self._watch())
        self._is_beginning = True
        self._pace.start(self._started, self._send, self._finished)
        self._so_far = frames.LiveStats(self._client.requests)
        self._asyncio.add_reader(0, self._report)
        await self._over.wait()
        watch.cancel()
        self._row()
        self._tell()
        await self._client.close()
        if self._fatal is not None:
            raise self._fatal
        return self._recorded()

    def _send(self, index: int, planned: float, asked: Any) -> None:
        self._begun += 1
        self._client.send(index, planned, asked)

    def _ended(self, _attempt: RequestAttempt, kind: str) -> None:
        if kind == "none":
            self._completed += 1
        else:
            self._failed += 1
        self._pace.ended(kind)
        self._look()

    def _finished(self, until: float) -> None:
        """Begin no more requests; those under way have their grace."""
        self._is_beginning = False
        left = self._started + until + self._setup.scenario.grace_s - time.monotonic()
        self._asyncio.call_later(max(left, 0.0), self._client.cut)
        self._look()

    def _look(self) -> None:
        if not self._is_beginning and not self._client.in_flight:
            self._over.set()

    def _stop(self, error: SRMError | None = None) -> None:
        """End now, in order."""
        self._fatal = self._fatal or error
        self._pace.stop()
        self._client.cut()
        self._look()

    def _report(self) -> None:
        if frames.read(0) is None:
            os._exit(1)  # the run has gone: nobody waits for what we have
        self._stop()

    def _bug(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """End the run after an exception in a callback: the recording would have holes."""
        self._asyncio.default_exception_handler(context)
        self._stop(SRMError(f"client process {self._setup.worker}: {context.get('exception')!r}"))

    async def _watch(self) -> None:
        """Record the loop's lag and the process's CPU time, and report progress."""
        reported = self._since
        while True:
            due = time.monotonic() + _TICK_S
            await asyncio.sleep(_TICK_S)
            now = time.monotonic()
            self._lag_s = max(self._lag_s, now - due)
            if now - reported >= _TELL_S:
                reported = now
                self._tell()
            if now - self._since >= _ROW_S:
                self._row()

    def _row(self) -> None:
        now, cpu_s = time.monotonic(), time.process_time()
        worker, in_flight, used_s = self._setup.worker, self._client.in_flight, cpu_s - self._cpu_s
        self._clients.append(worker, now - self._started, used_s, self._lag_s, in_flight)
        self._since, self._cpu_s, self._lag_s = now, cpu_s, 0.0

    def _tell(self) -> None:
        counts = frames.FrameCounts(
            planned=self._pace.planned(time.monotonic() - self._started),
            sent=self._begun,
            in_flight=self._client.in_flight,
            completed=self._completed,
            failed=self._failed,
            output_tokens=self._client.output_tokens,
            last_error=self._client.last_error,
            times=self._so_far.times(),
        )
        frames.write(self._out, counts)

    def _recorded(self) -> frames.Result:
        """Return the result, with the tokens of received text counted."""
        requests = self._client.requests.array()
        if self._client.texts:
            rows = {index: row for row, index in enumerate(requests["index"].tolist())}
            for index, texts in self._client.texts.items():
                counts = [self._workload.count_tokens(text) for text in texts]
                requests["output_tokens"][rows[index]] = sum(count or 0 for count in counts)
        return frames.Result(
            requests.tobytes(),
            self._client.events.to_bytes(),
            self._clients.to_bytes(),
            self._client.reasons,
        )


if __name__ == "__main__":
    main()
