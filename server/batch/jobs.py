"""`python -m srm.server jobs`: the process that runs batches, beside engine and API processes.

One process at a time has the batches of a model in a data folder, whichever server it belongs to.
It polls the store for unfinished batches and runs them together. No process notifies it, so none
that dies can mislead it. Knows batches, and no lines.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec
import uvloop

from srm import logs
from srm.engine.client.client import ENGINE_TIMEOUT_S, EngineClient
from srm.engine.messages import MAX_WEIGHT, MIN_WEIGHT
from srm.errors import StoreError
from srm.memory import collect_rarely
from srm.server import metrics
from srm.server.batch.concurrency_limiter import ConcurrencyLimiter
from srm.server.batch.engine_retry import EngineRetry
from srm.server.batch.job import BatchJob, Workplace
from srm.server.batch.lines import Answerer
from srm.server.batch.starts import MAX_ALONE, Starts
from srm.server.generation.states import States
from srm.server.loop_turns import show_turns
from srm.server.model_identity import as_started, digest
from srm.server.routes.services import answering
from srm.server.storage.clock import Clock
from srm.server.storage.records import BatchRecord
from srm.server.storage.states import StateStore
from srm.server.storage.store import Store
from srm.server.text.text import Text
from srm.server.text.tokenizer_files import use_defaults
from srm.server.wiring import ServerWiring
from srm.settings import load
from srm.tasks import beside, task_group, vital

log = logging.getLogger(__name__)

MAX_RUNNING = 16
"""Batches that run at the same time; beyond that, only an owner with none running may start one."""
_LOOK_EVERY_S = 0.5
_TIDY_EVERY_S = 60.0
_AGAIN_AFTER_S = 10.0
"""Seconds until a job that could not go on is tried again."""
MAX_FAILURES = 3
"""Failures after which a job is marked failed, if the last was a bug of ours or the batch has
expired."""


class BatchServices:
    """Answers request bodies, with text, chat template and a connection to the engine."""

    def __init__(self, config: ServerWiring) -> None:
        """Loads the tokenizer. Raises CheckpointError."""
        timeout_s = max(ENGINE_TIMEOUT_S, 2 * config.stall_s)
        self.client = EngineClient(config.endpoint, engine_timeout_s=timeout_s)
        self._stack = ExitStack()
        own = config.model_name, config.chat_template, config.special_tokens_in_messages
        use_defaults(config.model, config.sampling_defaults)
        store = self._stack.enter_context(closing(StateStore(config.data_folder)))
        threads = self._stack.enter_context(ThreadPoolExecutor(4, "states"))
        text = Text(config.model)
        states = States(store, self.client, text.model, threads)
        services = self._stack.enter_context(
            answering(self.client, text, config.model, *own, states)
        )
        self.answerers: dict[str, Answerer] = {service.path: service for service in services}
        self.sending = EngineRetry(self.client)

    async def close(self) -> None:
        """Close without cancelling requests in flight: whoever sends them again goes on with
        them."""
        await self.client.close()
        self._stack.close()


class _Stopped(Exception):
    """Stopped by SIGTERM or SIGINT."""


class Jobs:
    """The batches of one data folder."""

    _group: asyncio.TaskGroup
    """Tasks of the running jobs."""

    def __init__(self, config: ServerWiring, clock: Clock | None = None) -> None:
        self._config = config
        self._store = Store(config.data_folder)
        self._states = StateStore(config.data_folder)
        self._clock = clock or Clock(self._store.folder / "clock.json")
        self.limiter = ConcurrencyLimiter(1, config.max_batch_lines_in_flight)
        """The room that all batches share."""
        self._answering: BatchServices | None = None
        name = lock_name(config.model_id).replace(".lock", ".starts")
        self._starts = Starts(self._store.folder / name, self._store)
        self._running: dict[str, BatchJob] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._failures: Counter[str] = Counter()
        self._foreign: dict[str, int] = {}
        """Locks of other models, by the batch that each is held for."""

    async def run(self) -> None:
        """Run batches until SIGTERM or SIGINT."""
        stopped = asyncio.Event()
        for signum in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signum, stopped.set)
        try:
            turns = show_turns(self._config.heartbeat_fd)
            async with task_group() as self._group, beside(self._look_forever(), turns):
                await stopped.wait()
                if self._answering is not None:
                    await self._answering.close()
                raise _Stopped
        except _Stopped:
            self._starts.take_back()
        finally:
            self._store.close()
            self._states.close()

    async def _look_forever(self) -> None:
        while not self._store.folder.exists():  # nothing was ever put into it
            await asyncio.sleep(_LOOK_EVERY_S)
        await self._lock()
        await asyncio.to_thread(self._starts.load)
        tidy_at = 0.0
        while True:
            try:
                if time.monotonic() >= tidy_at:
                    tidy_at = time.monotonic() + _TIDY_EVERY_S
                    await self._tidy()
                records = await asyncio.to_thread(self._store.runnable_batches)
                await self._look(records)
            except StoreError as error:
                log.error("%s", error.message)
                await asyncio.sleep(_AGAIN_AFTER_S)
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _tidy(self) -> None:
        try:
            await asyncio.to_thread(self._store.expire, int(self._clock.now()))
            await asyncio.to_thread(self._states.expire)
        except StoreError as error:
            log.error("%s", error.message)
        except Exception:  # a bug of ours in what deletes must not stop batches
            log.exception("files are not tidied up")
        await asyncio.to_thread(self._clock.keep)

    async def _lock(self) -> None:
        """Wait for the lock on the model's batches, and hold it until this process ends."""
        path = self._lock_of(self._config.model_id)
        logged = ""
        while isinstance(why := _locked(path), str):
            if why != logged:
                log.warning("%s: waiting for it: %s", path, why)
            logged = why
            await asyncio.sleep(_LOOK_EVERY_S)
        if logged:
            log.info("%s: this server runs the batches now", path)

    def _lock_of(self, model_id: str) -> Path:
        return self._store.folder / lock_name(model_id)

    def _may_run(self, record: BatchRecord) -> bool:
        """Return whether this process may run a batch. One of another model is only ended here,
        once it is cancelled or expired, and only if no server of that model holds its lock."""
        if record.id in self._running or record.id in self._foreign:
            return True
        if record.is_of(self._config.model_id, self._config.model_name):
            return True
        if self._is_over(record) and isinstance(
            lock := _locked(self._lock_of(record.model_id or "")), int
        ):
            self._foreign[record.id] = lock
            return True
        return False

    def _is_over(self, record: BatchRecord) -> bool:
        return record.status == "cancelling" or self._clock.now() >= record.expires_at

    async def _look(self, records: list[BatchRecord]) -> None:
        """Start batches that may start, and give running ones their current records and weights."""
        unfinished = {record.id for record in records}
        records = [record for record in records if self._may_run(record)]
        if records and self._answering is None:
            self._answering = await asyncio.to_thread(BatchServices, self._config)
            await self._answering.client.connect()
            collect_rarely()
        if self._answering is not None and (status := self._answering.client.status) is not None:
            # As many wait as run, so that slots that become free find somebody, and at least half
            # of the queue is left to those who ask over HTTP.
            self.limiter.resize(status.num_slots + min(status.num_slots, status.max_waiting // 2))
            startable = records
        else:  # nothing runs without an engine, and no start counts that brought none about
            startable = [record for record in records if self._is_over(record)]
        if chosen := await self._choose(startable):
            await asyncio.to_thread(self._starts.begin, chosen, unfinished)
            for record in chosen:
                self._start(record)
        weights = weigh([record for record in records if record.id in self._running])
        for record in records:
            if record.id in self._running:
                self._running[record.id].see(record, weights[record.id])
        metrics.BATCH_LINES_IN_FLIGHT.set(self.limiter.lines)

    async def _choose(self, records: list[BatchRecord]) -> list[BatchRecord]:
        """Return the batches that start now. While there are any that may have killed this process,
        these run alone, one after the other, and the others wait."""
        suspects = await asyncio.to_thread(self._starts.suspects, records)
        if suspects:
            for id, task in self._tasks.items():
                if id not in suspects and not task.cancelling():
                    task.cancel()  # it is run again when the suspects have been
            if self._running:
                return []
            first = next(record for record in records if record.id in suspects)
            log.warning("%s: may be what kills this process: run alone", first.id)
            return [first]
        owners = Counter(job.owner for job in self._running.values())
        chosen: list[BatchRecord] = []
        for record in sort_by_turn(records, owners):
            has_room = len(self._running) + len(chosen) < MAX_RUNNING or not owners[record.owner]
            if record.id not in self._running and has_room:
                chosen.append(record)
                owners[record.owner] += 1
        return chosen

    def _start(self, record: BatchRecord) -> None:
        assert self._answering is not None
        share = self.limiter.share(record.owner, record.priority)
        answering = self._answering
        place = Workplace(
            *(self._config, self._store, self._clock), answering.answerers, answering.sending
        )
        job = BatchJob(record, place, share)
        self._running[record.id] = job
        self._tasks[record.id] = task = self._group.create_task(self._run(job))
        task.add_done_callback(lambda _: self._forget(job.id))

    def _forget(self, id: str) -> None:
        del self._running[id], self._tasks[id]
        if id in self._foreign:
            os.close(self._foreign.pop(id))

    async def _run(self, job: BatchJob) -> None:
        try:
            if self._starts.is_hopeless(job.id):
                why = f"what runs batches died {MAX_ALONE} times while it ran alone"
                await asyncio.to_thread(job.fail, f"it could not be run: {why}")
            else:
                await job.run()
        except (StoreError, OSError) as error:
            await self._rest(job, _why(error), may_pass=True)
        except Exception as error:
            # A bug of ours that one batch meets must not stop the others, nor be met for ever.
            log.exception("%s", job.id)
            await self._rest(job, f"{type(error).__name__}: {error}", may_pass=False)
        else:
            del self._failures[job.id]

    async def _rest(self, job: BatchJob, why: str, may_pass: bool) -> None:
        if not self._starts.is_hopeless(job.id):
            await asyncio.to_thread(self._starts.clear, job.id)
        self._failures[job.id] += 1
        if self._failures[job.id] >= MAX_FAILURES and (not may_pass or job.is_late):
            try:
                await asyncio.to_thread(job.fail, f"it could not be run: {why}")
                del self._failures[job.id]
                return
            except (StoreError, OSError) as error:
                why = _why(error)
            except Exception as error:  # as above
                log.exception("%s", job.id)
                why = f"{type(error).__name__}: {error}"
        log.error("%s: cannot go on, tried again in %g s: %s", job.id, _AGAIN_AFTER_S, why)
        await asyncio.sleep(_AGAIN_AFTER_S)


def lock_name(model_id: str) -> str:
    """Return the name of the lock file held by whoever runs the batches of a model."""
    return f"jobs-{digest([model_id.encode()])}.lock"


def _locked(path: Path) -> int | str:
    """Lock a file until the returned descriptor is closed; or return why that cannot be done."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        return error.strerror or str(error)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        is_held = isinstance(error, BlockingIOError)
        return "another server runs its batches" if is_held else error.strerror or str(error)
    return file


def _why(error: StoreError | OSError) -> str:
    return (error.strerror if isinstance(error, OSError) else error.message) or str(error)


def weigh(records: list[BatchRecord]) -> dict[str, float]:
    """Return each batch's weight. An owner's batches share a total that is the same for every
    owner: those of its highest priority do, and the others have what these leave."""
    highest: dict[str, int] = {}
    for record in records:
        highest[record.owner] = max(record.priority, highest.get(record.owner, record.priority))
    # Records of earlier versions may have other weights.
    given = {
        record.id: min(max(record.weight, MIN_WEIGHT), MAX_WEIGHT)
        if record.priority == highest[record.owner]
        else 0.0
        for record in records
    }
    totals: defaultdict[str, float] = defaultdict(float)
    for record in records:
        totals[record.owner] += given[record.id]
    return {
        record.id: max(given[record.id] / totals[record.owner], MIN_WEIGHT) for record in records
    }


def sort_by_turn(records: list[BatchRecord], running: Counter[str]) -> list[BatchRecord]:
    """Sort by how many batches of the owner run or come before, then by age, oldest first; of one
    owner's, those of higher priority come before."""
    before, ages = Counter(running), {record.id: age for age, record in enumerate(records)}
    ranked = []
    for record in sorted(records, key=lambda record: -record.priority):
        ranked.append((before[record.owner], ages[record.id], record))
        before[record.owner] += 1
    return [record for *_, record in sorted(ranked, key=lambda rank: rank[:2])]


def main(argv: list[str]) -> int:
    """Run batches until told to stop."""
    config = load(ServerWiring, argv, prog="python -m srm.server jobs")
    logs.configure(config.log_level, config.log_format)
    folder = as_started(config.model, config.kept_model)
    config = msgspec.structs.replace(config, model=folder)
    uvloop.run(vital(Jobs(config).run, "what runs batches"))
    return 0
