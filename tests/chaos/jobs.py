"""Jobs straight in the store, a server that may be killed at any moment, and what became of a job.

For tests that end processes the hard way: all a batch is lies in its data folder, so a copy of the
folder, taken when the batch is new, is the same batch again.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from server.storage.records import BatchRecord, FileRecord, new_batch_id, new_file_id
from server.storage.store import Store
from tests.serving import ROOT

_DAY_S = 24 * 3600


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
    store = Store(data_dir)
    now = int(time.time())
    id = new_file_id()
    path = store.upload_path(id)
    with path.open("wb") as file:
        for line in lines:
            file.write((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n")
    size = path.stat().st_size
    store.add_upload(
        FileRecord(id=id, filename="in.jsonl", purpose="batch", num_bytes=size, created_at=now)
    )
    given = {
        "endpoint": "/v1/completions",
        "completion_window": "24h",
        "created_at": now,
        "expires_at": now + _DAY_S,
        **fields,
    }
    record = BatchRecord(id=new_batch_id(), input_file_id=id, **given)
    store.add_batch(record)
    store.close()
    return record


def copied(data_dir: Path, to: Path) -> Path:
    """The same folder again. Nobody may be writing to it."""
    shutil.copytree(data_dir, to)
    return to


def wait_for(
    data_dir: Path,
    batch: BatchRecord,
    within_s: float,
    until: Callable[[BatchRecord], bool] = lambda record: not record.is_runnable,
) -> BatchRecord:
    """The batch, as soon as it is as wanted; by default, at its end."""
    store = Store(data_dir)
    deadline = time.monotonic() + within_s
    try:
        while True:
            record = store.get_batch(batch.id)
            assert record is not None
            if until(record):
                return record
            assert time.monotonic() < deadline, record
            time.sleep(0.05)
    finally:
        store.close()


def wait_for_results(data_dir: Path, batch: BatchRecord, count: int, within_s: float = 60) -> None:
    """Until so many results are in the files of a batch that still runs."""
    store = Store(data_dir)
    deadline = time.monotonic() + within_s
    found = 0
    while found < count:
        record = store.get_batch(batch.id)
        assert record is not None and record.is_runnable, record
        assert time.monotonic() < deadline, record
        paths = [store.path_of(id) for id in (record.output_file_id, record.error_file_id) if id]
        found = sum(path.read_bytes().count(b"\n") for path in paths if path.exists())
        time.sleep(0.005)
    store.close()


def results(data_dir: Path, record: BatchRecord) -> dict[str, list[bytes]]:
    """The lines of output and error file, each sorted by custom_id; an id is there once."""
    store = Store(data_dir)
    found: dict[str, list[bytes]] = {"output": [], "error": []}
    ids: list[str] = []
    for name, file_id in (("output", record.output_file_id), ("error", record.error_file_id)):
        if file_id is not None:
            lines = store.path_of(file_id).read_bytes().splitlines()
            by_id = sorted((json.loads(line)["custom_id"], line) for line in lines)
            ids += [id for id, _ in by_id]
            found[name] = [line for _, line in by_id]
    assert len(ids) == len(set(ids)), "an id is there twice"
    store.close()
    return found


class KilledServer:
    """`srm serve` in whatever state: it may be starting, half dead or gone."""

    def __init__(
        self,
        model: Path,
        data_dir: Path,
        *flags: str,
        engine_module: str = "tests.engines.numpy_engine",
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        program = (
            "import sys; from server.supervise.launch import main; "
            f"sys.exit(main(sys.argv[1:], engine_module={engine_module!r}))"
        )
        settings = (f"--model={model}", "--port=0", f"--data-dir={data_dir}", *flags)
        self._command = [sys.executable, "-c", program, *settings]
        self._engine_module = engine_module
        self._log = log or data_dir.with_suffix(".log")
        self._environment = environment
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command,
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def find(self, who: str) -> psutil.Process | None:
        """`engine`, `api`, `jobs` or `supervisor`, if it is there now."""
        if who == "supervisor":
            return psutil.Process(self.process.pid) if self.process.poll() is None else None
        words = [self._engine_module] if who == "engine" else ["server", who]
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children():
                with suppress(psutil.NoSuchProcess):
                    if child.cmdline()[3 : 3 + len(words)] == words:
                        return child
        return None

    def kill(self, who: str) -> bool:
        """SIGKILL; whether it was there. A supervisor takes all others along, and is started
        again."""
        found = self.find(who)
        if found is None:
            return False
        with suppress(psutil.NoSuchProcess):
            found.kill()
        if who == "supervisor":
            self.process.wait()
            self.start()
        return True

    def log_text(self) -> str:
        return self._log.read_text()

    def __enter__(self) -> KilledServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
