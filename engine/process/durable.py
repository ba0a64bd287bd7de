"""Durable requests: the progress they resume from, and when it is written to disk.

One that is sent again resumes from what was kept when its client left, else from the snapshot,
which is opened when the first durable request comes. Knows the engine and the clock, no clients.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path

import numpy as np

from srm.engine import metrics
from srm.engine.config import EngineConfig
from srm.engine.messages import Request
from srm.engine.process.capture import PARTS_AHEAD, Capture
from srm.engine.process.engine import READ_SLOTS, Engine
from srm.engine.process.snapshot import NAME, SnapshotFile, Stamp, digest
from srm.engine.process.snapshot_writer import Record
from srm.engine.state.parked import Parked, in_parts, latest
from srm.errors import SnapshotError
from srm.memory import available_memory

log = logging.getLogger(__name__)

KEPT_S = 600.0
"""Seconds for which a lost client's progress is kept in memory for whoever sends it again."""
POLL_S = 0.005  # seconds between two looks, at a stop, whether the last snapshot is written
REFUSED = NAME + ".refused"  # name that an unusable snapshot is given, for a person to look at

Detail = dict[str, str | int | float]  # facts about a snapshot, as in Done
Answer = Callable[[Detail | SnapshotError], None]
"""Called when a requested snapshot is written, or with the reason why it is not."""


class Durable:
    """The progress hook and the snapshots of one engine."""

    def __init__(self, engine: Engine, config: EngineConfig) -> None:
        self._engine = engine
        self._config = config
        self._folder = Path(config.snapshot_dir).expanduser() if config.snapshot_dir else None
        self._file: SnapshotFile | None = None
        self._has_looked = False  # for an earlier snapshot
        self._has_written = False  # a newer snapshot
        self._kept: dict[str, tuple[float, list[Record]]] = {}  # by id, with when to drop it
        self._capture: Capture | None = None
        self._offered = ("", 0)  # by the last `progress`: request id, sequences
        self._answers: list[Answer] = []  # to call for the snapshot being taken
        self._asked: list[Answer] = []  # to call for the next one
        self._due = time.monotonic() + config.snapshot_interval_s
        self._width, self._dtype = engine.state_layout()
        self._known_under = self._stamp()
        engine.progress = self.progress

    @property
    def wants_part(self) -> bool:
        """Whether `advance` would read a part: the engine must be settled first."""
        return self._capture is not None and self._capture.wants_part

    @property
    def is_busy(self) -> bool:
        """Whether a snapshot is being taken."""
        return self._capture is not None

    def progress(self, request: Request) -> Parked | None:
        """The progress of a request that does not run; None if none has its id, prompt and
        parameters."""
        known = self._known(request)
        self._offered = (request.id, len(known) if known is not None else 0)
        return known

    def _known(self, request: Request) -> Parked | None:
        self._forget_what_other_weights_made()
        if request.id in self._kept:
            wanted = digest(request)
            _, records = self._kept[request.id]
            parkeds = [parked for known, parked in records if digest(known) == wanted]
            return latest(parkeds) if parkeds else None
        if not self._has_looked:
            self._has_looked = True
            self._open()
        try:
            return None if self._file is None else self._file.progress(request)
        except SnapshotError as error:
            self._refuse(error)
            return None

    def accepted(self, request_id: str) -> None:
        """Note that this durable request runs now, and drop what was kept for it."""
        self._kept.pop(request_id, None)
        offered_id, count = self._offered
        if offered_id == request_id and count:
            metrics.RESTORED.inc(count)
        self._offered = ("", 0)

    def keep(self, request_ids: Iterable[str]) -> None:
        """End requests that nobody waits for, and keep their progress for a while. Settle first."""
        ids = set(request_ids)
        needed = self._engine.status().running * self._row_bytes()
        if needed > (free := available_memory()):
            log.warning(
                "%d durable requests are to be made anew: keeping them takes %d bytes of memory, "
                "and %d are free",
                *(len(ids), needed, free),
            )
        else:
            until = time.monotonic() + KEPT_S
            for request, parked in self._engine.parked_of_all():
                if request.id in ids:
                    self._kept.setdefault(request.id, (until, []))[1].append((request, parked))
        for request_id in ids:
            self._engine.abort(request_id)

    def forget(self) -> None:
        """Forget all progress, which was made with other weights."""
        self._kept.clear()
        self._has_looked = True
        self._close()

    def ask(self, answer: Answer) -> None:
        """Take a snapshot as soon as possible."""
        self._asked.append(answer)

    def tick(self, has_requests: bool) -> None:
        """Begin a snapshot that is due, and conclude one that is over. Called between steps. While
        there are durable requests, one is due every `snapshot_interval_s`."""
        now = time.monotonic()
        for request_id in [name for name, (until, _) in self._kept.items() if until < now]:
            del self._kept[request_id]
        if self._capture is not None and self._capture.is_over:
            self._conclude(self._capture)
        if self._capture is not None:
            return
        interval_s = self._config.snapshot_interval_s
        is_due = bool(self._folder and interval_s and has_requests and now >= self._due)
        if not has_requests or is_due:
            self._due = now + interval_s
        if self._asked or is_due:
            self._begin()

    def advance(self) -> None:
        """Read the next part of the snapshot being taken. The engine must be settled."""
        assert self._capture is not None
        self._capture.advance()

    def finish(self, is_late: Callable[[], bool], alive: Callable[[], None]) -> None:
        """Take the last snapshot of a settled engine, and answer whoever waits for one; give it up
        when it `is_late`. Calls `alive` all the while."""
        if self._folder is not None:
            self._asked.append(lambda _: None)
        self.tick(has_requests=False)
        while self._capture is not None:
            alive()
            if is_late():
                self._asked.clear()
                self._capture.cancel(SnapshotError("a stop had no time left for a snapshot"))
                self._conclude(self._capture)
            elif self.wants_part:
                self.advance()
            else:
                time.sleep(POLL_S)
                self.tick(has_requests=False)

    def _forget_what_other_weights_made(self) -> None:
        stamp = self._stamp()
        if stamp == self._known_under:
            return
        self._known_under = stamp
        self._kept.clear()
        if self._file is not None:
            log.info("what is still to come of the snapshot is of other weights: all begins anew")
            self._close()

    def _begin(self) -> None:
        self._answers, self._asked = self._asked, []
        self._forget_what_other_weights_made()
        needed = (PARTS_AHEAD + 3) * READ_SLOTS * self._row_bytes()  # one is copied to be written
        try:
            if self._folder is None:
                raise SnapshotError("snapshot_dir is not set: there is no place for snapshots")
            if needed > (free := available_memory()):
                raise SnapshotError(
                    f"a snapshot takes {needed} bytes of memory on its way, and {free} are free"
                )
        except SnapshotError as error:
            self._fail(error)
            return
        kept_records = (record for _, records in self._kept.values() for record in records)
        parts = chain(self._engine.durable_parts(), in_parts(list(kept_records), READ_SLOTS))
        version = self._engine.weights_version
        self._capture = Capture(self._folder, self._stamp, parts, version)

    def _conclude(self, capture: Capture) -> None:
        self._capture = None
        self._due = time.monotonic() + self._config.snapshot_interval_s
        if capture.error is not None:
            self._fail(capture.error)
            return
        detail: Detail = {
            "requests": capture.num_requests,
            "sequences": capture.num_sequences,
            "bytes": capture.num_bytes,
            "seconds": round(capture.seconds, 4),
            "read_s": round(capture.read_s, 4),
            "write_s": round(capture.write_s, 4),
        }
        if capture.num_sequences:  # else there was nothing to write, and nothing was replaced
            metrics.SNAPSHOTS.labels("written").inc()
            metrics.SNAPSHOT_SECONDS.observe(capture.seconds)
            metrics.SNAPSHOT_BYTES.set(capture.num_bytes)
            detail["path"] = str(capture.path)
            self._has_written = True
        log.info("snapshot: %s", detail)
        self._answer(detail)

    def _fail(self, error: SnapshotError) -> None:
        metrics.SNAPSHOTS.labels("failed").inc()
        log.error("no snapshot was written: %s", error.message)
        self._answer(error)

    def _answer(self, result: Detail | SnapshotError) -> None:
        answers, self._answers = self._answers, []
        for answer in answers:
            answer(result)

    def _open(self) -> None:
        """Look for the snapshot that an engine before this one left."""
        if self._folder is None:
            return
        path = self._folder / NAME
        try:
            self._file = SnapshotFile(path, self._stamp())
        except FileNotFoundError:
            log.info("there is no snapshot at %s: all begins anew", path)
        except OSError as error:
            self._refuse(SnapshotError(f"{path}: cannot be read: {error.strerror}"))
        except SnapshotError as error:
            self._refuse(error)
        else:
            header = self._file.header
            log.info(
                "snapshot %s, %.0f s old, has %d sequences to go on with",
                *(path, time.time() - header.created_unix, header.num_sequences),
            )

    def _refuse(self, error: SnapshotError) -> None:
        """Go on without the snapshot; what came of it so far was right."""
        metrics.SNAPSHOTS.labels("refused").inc()
        log.error("snapshot refused, all that is still to come of it is made anew: %s", error)
        self._close()
        if self._folder is None or self._has_written:
            return
        try:
            (self._folder / NAME).replace(self._folder / REFUSED)
        except OSError as failure:
            log.warning("it stays where it is: %s", failure)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _stamp(self) -> Stamp:
        status = self._engine.status()
        return Stamp(
            fingerprint=status.fingerprint,
            arithmetic=status.arithmetic,
            state_width=self._width,
            state_dtype=self._dtype,
        )

    def _row_bytes(self) -> int:
        return self._width * np.dtype(self._dtype).itemsize
