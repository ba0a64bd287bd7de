"""`python -m server jobs`: the process that runs batches, beside engine and API processes.

One process at a time has a data folder, whichever server it belongs to. It looks into the store
for batches that are not at their end, and runs them together; nothing is told to it, so whoever
dies tells no lies. Knows batches, and no lines.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
import time
from collections import Counter
from pathlib import Path

import uvloop

from engine import logs
from engine.client import ENGINE_TIMEOUT_S, EngineClient
from engine.errors import StoreError
from engine.memory import collect_rarely
from engine.settings import load
from server import metrics
from server.answers import Answers
from server.batch_job import BatchJob, Workplace
from server.batch_lines import Answerer
from server.chat import Chat
from server.chat_template import ChatTemplate
from server.completions import Completions
from server.config import ServerConfig
from server.models import Models
from server.room import Room
from server.sending import Sending
from server.store import Store
from server.store_records import BatchRecord
from server.text import Text
from server.tokenizer_files import chat_template as chat_template_source

log = logging.getLogger(__name__)

MAX_RUNNING = 16
"""Batches that run at the same time; beyond them, only one of an owner who has none."""
LOCK_NAME = "jobs.lock"
_LOOK_EVERY_S = 0.5
_TIDY_EVERY_S = 60.0
_AGAIN_AFTER_S = 10.0
"""When a job that could not go on is tried again."""


class Answering:
    """What makes answers of bodies: text, template, and a connection to the engine."""

    def __init__(self, config: ServerConfig) -> None:
        """Loads the tokenizer. Raises CheckpointError."""
        self._config = config
        timeout_s = max(ENGINE_TIMEOUT_S, 2 * config.stall_s)
        self.client = EngineClient(config.endpoint, engine_timeout_s=timeout_s)
        text = Text(config.model)
        source = chat_template_source(config.model, config.chat_template)
        self._template = None if source is None else ChatTemplate(source, text.special_tokens)
        served = Models(config.model_name, text.model.n_ctx)
        answers = Answers(self.client)
        completions = Completions(self.client, text, served, answers)
        chat = Chat(self.client, text, served, completions, self._template, answers)
        self.answerers: dict[str, Answerer] = {
            "/v1/completions": completions,
            "/v1/chat/completions": chat,
        }
        self.sending = Sending(self.client)

    async def close(self) -> None:
        """The engine is told nothing of what is in flight: who asks next goes on with it."""
        await self.client.close()
        if self._template is not None:
            self._template.close()


class Jobs:
    """The batches of one data folder."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._store = Store(config.data_dir)
        self._room = Room(1, config.max_batch_lines_in_flight)
        self._answering: Answering | None = None
        self._running: dict[str, tuple[BatchJob, asyncio.Task[None]]] = {}

    async def run(self) -> None:
        """Until SIGTERM or SIGINT."""
        stopped = asyncio.Event()
        for signum in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signum, stopped.set)
        looking = asyncio.create_task(self._look_forever())
        stop = asyncio.create_task(stopped.wait())
        await asyncio.wait({looking, stop}, return_when=asyncio.FIRST_COMPLETED)
        if looking.done():
            looking.result()
        if self._answering is not None:
            await self._answering.close()
        tasks = [looking, stop, *(task for _, task in self._running.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._store.close()

    async def _look_forever(self) -> None:
        while not self._store.folder.exists():  # nothing was ever put into it
            await asyncio.sleep(_LOOK_EVERY_S)
        await self._lock()
        tidy_at = 0.0
        while True:
            try:
                if time.monotonic() >= tidy_at:
                    tidy_at = time.monotonic() + _TIDY_EVERY_S
                    await asyncio.to_thread(self._store.expire, int(time.time()))
                records = await asyncio.to_thread(self._store.runnable_batches)
                await self._look(records)
            except StoreError as error:
                log.error("%s", error.message)
                await asyncio.sleep(_AGAIN_AFTER_S)
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _lock(self) -> None:
        """Have the folder for this process alone, until it ends."""
        path = self._store.folder / LOCK_NAME
        told = ""
        while why := _why_not_locked(path):
            if why != told:
                log.warning("%s: waiting for it: %s", path, why)
            told = why
            await asyncio.sleep(_LOOK_EVERY_S)
        if told:
            log.info("%s: this server runs the batches now", path)

    async def _look(self, records: list[BatchRecord]) -> None:
        """Start what can be started, and tell what runs how it stands."""
        if records and self._answering is None:
            self._answering = await asyncio.to_thread(Answering, self._config)
            await self._answering.client.connect()
            collect_rarely()
        if self._answering is not None and (status := self._answering.client.status) is not None:
            # As many wait as run, so that slots that become free find somebody, and at least half
            # of the queue is left to those who ask over HTTP.
            self._room.resize(status.num_slots + min(status.num_slots, status.max_waiting // 2))
        owners = Counter(job.owner for job, _ in self._running.values())
        for record in _in_turn(records, owners):
            is_running = record.id in self._running
            if not is_running and (len(self._running) < MAX_RUNNING or not owners[record.owner]):
                self._start(record)
                owners[record.owner] += 1
        weights = _weights([record for record in records if record.id in self._running])
        for record in records:
            if record.id in self._running:
                self._running[record.id][0].see(record, weights[record.id])
        metrics.BATCH_LINES_IN_FLIGHT.set(self._room.lines)

    def _start(self, record: BatchRecord) -> None:
        assert self._answering is not None
        share = self._room.share(record.priority, record.weight)
        place = Workplace(
            self._config, self._store, self._answering.answerers, self._answering.sending
        )
        job = BatchJob(record, place, share)
        self._running[record.id] = job, asyncio.create_task(self._run(job))

    async def _run(self, job: BatchJob) -> None:
        try:
            await job.run()
        except StoreError as error:
            await self._rest(job, error.message)
        except OSError as error:
            await self._rest(job, str(error))
        except Exception:
            # A bug of ours that one batch meets must not stop the others.
            log.exception("%s", job.id)
            await self._rest(job, "see above")
        finally:
            del self._running[job.id]

    async def _rest(self, job: BatchJob, why: str) -> None:
        log.error("%s: cannot go on, tried again in %g s: %s", job.id, _AGAIN_AFTER_S, why)
        await asyncio.sleep(_AGAIN_AFTER_S)


def _why_not_locked(path: Path) -> str:
    """Lock it until this process ends; empty if that is done."""
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
    return ""


def _weights(records: list[BatchRecord]) -> dict[str, float]:
    """Each batch's: those of one owner share what is the same for every owner."""
    totals: Counter[str] = Counter()
    for record in records:
        totals[record.owner] += record.weight  # type: ignore[assignment]  # floats count as well
    return {record.id: record.weight / totals[record.owner] for record in records}


def _in_turn(records: list[BatchRecord], running: Counter[str]) -> list[BatchRecord]:
    """The highest priority first; of these, whose owner has least running or before it, and of
    these the oldest."""
    before = Counter(running)
    ranked = []
    for place, record in enumerate(sorted(records, key=lambda one: -one.priority)):
        ranked.append((-record.priority, before[record.owner], place, record))
        before[record.owner] += 1
    return [record for *_, record in sorted(ranked, key=lambda one: one[:3])]


def main(argv: list[str]) -> int:
    """Run batches until told to stop."""
    config = load(ServerConfig, argv, prog="python -m server jobs")
    logs.configure(config.log_level, config.log_format)
    uvloop.run(Jobs(config).run())
    return 0
