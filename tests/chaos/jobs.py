"""Jobs straight in the store, a server that may be killed at any moment, and what became of a job.

For tests that end processes the hard way: all a batch is lies in its data folder, so a copy of the
folder, taken when the batch is new, is the same batch again.
"""

from __future__ import annotations

import json
import random
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil

from srm.server.storage.records import BatchRecord, FileRecord, new_batch_id, new_file_id
from srm.server.storage.store import Store
from tests.kit.serving import ROOT, serve_command

_DAY_S = 24 * 3600
WHO = ("engine", "api", "jobs", "supervisor")


def table(rows: Mapping[str, object]) -> str:
    """A table of two columns in Markdown."""
    return "\n".join(["| | |", "|---|---|", *(f"| {k} | {v} |" for k, v in rows.items())]) + "\n"


def completion_line(number: int, **body: Any) -> dict[str, Any]:
    """A line whose result tells much: two samples of some length, with a seed made from its id."""
    return {
        "custom_id": f"line {number:07}",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": f"the cat sat {number}", "max_tokens": 4 + number % 13, "n": 2, **body},
    }


def submit(data_dir: Path, lines: Iterable[dict[str, Any] | bytes], **fields: Any) -> BatchRecord:
    """Put a file and a batch of it into the store of a folder."""
    now = int(time.time())
    id = new_file_id()
    given = {
        "endpoint": "/v1/completions",
        "completion_window": "24h",
        "created_at": now,
        "expires_at": now + _DAY_S,
        **fields,
    }
    record = BatchRecord(id=new_batch_id(), input_file_id=id, **given)
    with closing(Store(data_dir)) as store:
        path = store.upload_path(id)
        with path.open("wb") as file:
            for line in lines:
                file.write((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n")
        size = path.stat().st_size
        store.add_upload(
            FileRecord(id=id, filename="in.jsonl", purpose="batch", num_bytes=size, created_at=now)
        )
        store.add_batch(record)
    return record


def wait_for(
    data_dir: Path,
    batch: BatchRecord,
    within_s: float,
    until: Callable[[BatchRecord], bool] = lambda record: not record.is_runnable,
) -> BatchRecord:
    """The batch, as soon as it is as wanted; by default, at its end."""
    deadline = time.monotonic() + within_s
    with closing(Store(data_dir)) as store:
        while True:
            record = store.get_batch(batch.id)
            assert record is not None
            if until(record):
                return record
            assert time.monotonic() < deadline, record
            time.sleep(0.005)


def wait_for_results(data_dir: Path, batch: BatchRecord, count: int, within_s: float = 600) -> None:
    """Until so many results are in the files of a batch that still runs."""

    def are_there(record: BatchRecord) -> bool:
        assert record.is_runnable, record
        paths = [path for path in _paths(store, record) if path is not None and path.exists()]
        return sum(path.read_bytes().count(b"\n") for path in paths) >= count

    with closing(Store(data_dir)) as store:
        wait_for(data_dir, batch, within_s, are_there)


def results(data_dir: Path, record: BatchRecord) -> dict[str, list[bytes]]:
    """The lines of output and error file, each sorted by custom_id; an id is there once."""
    entries: dict[str, list[bytes]] = {}
    ids: list[str] = []
    with closing(Store(data_dir)) as store:
        for name, path in zip(("output", "error"), _paths(store, record), strict=True):
            lines = path.read_bytes().splitlines() if path is not None else []
            by_id = sorted((json.loads(line)["custom_id"], line) for line in lines)
            ids += [id for id, _ in by_id]
            entries[name] = [line for _, line in by_id]
    assert len(ids) == len(set(ids)), "an id is there twice"
    return entries


def _paths(store: Store, record: BatchRecord) -> list[Path | None]:
    """Return the paths of its output file and its error file; None for one that it lacks."""
    ids = (record.output_file_id, record.error_file_id)
    return [store.path_of(id) if id is not None else None for id in ids]


class KilledServer:
    """`srm serve` in whatever state: it may be starting, half dead or gone."""

    def __init__(
        self,
        model: Path,
        data_dir: Path,
        *flags: str,
        engine_module: str = "tests.kit.processes.numpy_engine",
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        settings = ("--port=0", f"--data-dir={data_dir}", *flags)
        self._command = serve_command(model, engine_module, *settings)
        self._engine_module = engine_module
        self._log = log or data_dir.with_suffix(".log")
        self._environment = environment
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, cwd=ROOT, env=self._environment, stdout=log, stderr=log
            )

    def find(self, who: str, rng: random.Random | None = None) -> psutil.Process | None:
        """`engine`, `api`, `jobs` or `supervisor`, if it is there now: the first of several, or
        any with `rng`."""
        if who == "supervisor":
            return psutil.Process(self.process.pid) if self.process.poll() is None else None
        words = [self._engine_module] if who == "engine" else ["srm.server", who]
        listed = []
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children():
                with suppress(psutil.NoSuchProcess):
                    if child.cmdline()[3 : 3 + len(words)] == words:
                        listed.append(child)
        if not listed:
            return None
        return listed[0] if rng is None else rng.choice(listed)

    def kill(self, who: str) -> bool:
        """SIGKILL; whether it was there. A supervisor takes all others along, and is started
        again."""
        result = self.find(who)
        if result is None:
            return False
        with suppress(psutil.NoSuchProcess):
            result.kill()
        if who == "supervisor":
            self.process.wait()
            self.start()
        return True

    def log_text(self) -> str:
        return self._log.read_text()

    def __enter__(self) -> KilledServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
