"""One run of a scenario: client processes that share a clock, and their recordings merged."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

import srm
from srm.errors import ConfigError, SRMError
from srm.loadtest.client import frames
from srm.loadtest.client.target import Target, resolve
from srm.loadtest.recording import CLIENT, EVENT, REQUEST, About, Recording, Rows
from srm.loadtest.records import new_record
from srm.loadtest.scenario import Scenario
from srm.loadtest.workload import arrivals

_ROOT = Path(srm.__file__).resolve().parents[1]
_HEAD_START_S = 0.1
"""Seconds from sending Go to second 0."""
_PROGRESS_S = 0.5


class RunProgress(frames.Counts, kw_only=True):
    """Progress of a run, over all client processes."""

    seconds: float
    first_byte_p50: float
    """Seconds from the planned time, of requests that have ended; NaN: none has."""
    first_byte_p99: float
    lateness_s: float
    """The largest lateness of requests that ended in the last half second."""
    cpu_share: float
    """Share of one core used by the busiest client process."""


async def run(
    scenario: Scenario,
    on_progress: Callable[[RunProgress], None],
    command: str,
    stop: asyncio.Event | None = None,
) -> Recording:
    """Run the scenario to its end, or until `stop` is set: requests under way are then recorded as
    cut.

    `on_progress` is called twice a second. `command` is recorded as the run's command; the server's
    /metrics are left to the caller. If the task is cancelled, client processes are killed and
    nothing is kept. Raises ConfigError if the server does not answer, refuses the key, or has no
    such model, and if this machine lacks resources; SRMError if a client process dies.
    """
    target = await resolve(scenario)
    scenario = msgspec.structs.replace(scenario, served_model_name=target.model)
    workers: list[_Worker] = []
    stopping: asyncio.Task[None] | None = None
    try:
        for number in range(num_workers(scenario)):
            workers.append(_Worker(number, await _spawn()))
        async with asyncio.TaskGroup() as group:
            for worker in workers:
                setup = frames.Setup(scenario, target, worker.number, len(workers))
                group.create_task(worker.set_up(setup))
        started = time.monotonic() + _HEAD_START_S
        started_unix = time.time() + _HEAD_START_S
        for worker in workers:
            worker.say(frames.Go(started))
        stopping = asyncio.create_task(_stop(workers, stop or asyncio.Event()))
        async with asyncio.TaskGroup() as group:
            telling = group.create_task(_tell(workers, started, on_progress))
            going = [group.create_task(worker.result()) for worker in workers]
            await asyncio.wait(going)
            telling.cancel()
        results = [task.result() for task in going]
    except* SRMError as failures:
        raise _first(failures) from None
    finally:
        stopped = stopping is not None and stopping.done()
        if stopping is not None:
            stopping.cancel()
        for worker in workers:
            await worker.end()
    return put_together(results, scenario, target, command, started_unix, stopped)


def num_workers(scenario: Scenario) -> int:
    """Return how many processes to use: at most the concurrency of a closed loop."""
    if scenario.arrivals == "synchronous":
        return 1
    return scenario.workers if scenario.open_loop else min(scenario.workers, scenario.concurrency)


class _Worker:
    """The run's handle of a client process."""

    def __init__(self, number: int, process: asyncio.subprocess.Process) -> None:
        self.number = number
        self.counts = frames.FrameCounts()
        self._process = process

    async def set_up(self, setup: frames.Setup) -> None:
        """Send the setup and wait until the process is ready."""
        self.say(setup)
        if not isinstance(await self._receive(), frames.Ready):
            raise SRMError(f"client process {self.number} did not get ready")

    async def result(self) -> frames.Result:
        """Wait until all its requests have ended."""
        while not isinstance(heard := await self._receive(), frames.Result):
            if isinstance(heard, frames.FrameCounts):
                self.counts = heard
        return heard

    def say(self, message: frames.ToWorker) -> None:
        assert self._process.stdin is not None
        if self._process.returncode is None:
            self._process.stdin.write(frames.encode(message))

    async def end(self) -> None:
        """Kill the process if it still runs."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def _receive(self) -> frames.FromWorker:
        assert self._process.stdout is not None
        heard = await frames.receive(self._process.stdout)
        if isinstance(heard, frames.Failed):
            raise (ConfigError if heard.is_outside else SRMError)(heard.message)
        if heard is None:
            code = await self._process.wait()
            raise SRMError(f"client process {self.number} died, exit code {code}: the run is void")
        return heard


async def _spawn() -> asyncio.subprocess.Process:
    places = (str(_ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "srm.loadtest.client.worker"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))},
        start_new_session=True,  # a terminal's Ctrl-C is for us
    )


async def _stop(workers: Sequence[_Worker], stop: asyncio.Event) -> None:
    await stop.wait()
    for worker in workers:
        worker.say(frames.Stop())


async def _tell(
    workers: Sequence[_Worker], started: float, on_progress: Callable[[RunProgress], None]
) -> None:
    *numbers, _last_error = frames.Counts.__struct_fields__
    while True:
        await asyncio.sleep(_PROGRESS_S)
        all_counts = [worker.counts for worker in workers]
        times = [counts.times for counts in all_counts]
        p50, p99 = frames.first_byte_percentiles(times)
        on_progress(
            RunProgress(
                seconds=time.monotonic() - started,
                **{name: sum(getattr(count, name) for count in all_counts) for name in numbers},
                last_error=next((count.last_error for count in all_counts if count.last_error), ""),
                first_byte_p50=p50,
                first_byte_p99=p99,
                lateness_s=max(duration.lateness_s for duration in times),
                cpu_share=max(duration.cpu_share for duration in times),
            )
        )


def _first(group: BaseExceptionGroup[SRMError]) -> SRMError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, SRMError)
    return error


def put_together(
    results: Sequence[frames.Result],
    scenario: Scenario,
    target: Target,
    command: str,
    started_unix: float,
    stopped: bool,
) -> Recording:
    def sorted_rows(name: str, dtype: np.dtype[np.void], by: str) -> Rows:
        rows = np.frombuffer(b"".join(getattr(result, name) for result in results), dtype)
        return rows[np.argsort(rows[by], kind="stable")]

    requests = sorted_rows("requests", REQUEST, "index")
    record = new_record(command)
    versions = {"srm": record["commit"], "python": platform.python_version()}
    for name in ("uvloop", "httptools", "msgspec", "numpy"):
        versions[name] = importlib.metadata.version(name)
    about = About(
        scenario=scenario,
        command=command,
        started_unix=started_unix,
        seconds=float(requests["ended"].max(initial=0.0)),
        stopped_by="interrupt" if stopped else _stopped_by(scenario, len(requests)),
        machine=record["machine"],
        versions=versions | {"server": target.server_version},
        server_metrics=[],
        reasons=dict(pair for result in results for pair in result.reasons.items()),
    )
    events, clients = sorted_rows("events", EVENT, "time"), sorted_rows("clients", CLIENT, "time")
    return Recording(about, requests, events, clients)


def _stopped_by(scenario: Scenario, num_requests: int) -> str:
    """Return which limit ended a run that nobody stopped."""
    if scenario.requests and num_requests >= scenario.requests:
        return "requests"
    if scenario.arrivals != "trace":
        return "duration"
    whole = arrivals.times(msgspec.structs.replace(scenario, duration_s=0.0))
    return "duration" if num_requests < len(whole) else "trace"
