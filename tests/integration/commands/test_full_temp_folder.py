"""`srm serve` where what only observes finds no room: all goes on, and crashes are made good."""

from __future__ import annotations

import os
import re
import resource
import signal
from contextlib import closing
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.attack.damage import Disk
from tests.kit.serving import SERVER_FLAGS, Server, children, wait_until


def answers(server: Server) -> bool:
    """Whether a request over a connection of its own is answered."""
    body = {"prompt": "the cat", "max_tokens": 2, "ignore_eos": True}
    try:
        return httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).is_success
    except httpx.TransportError:
        return False


def is_back(server: Server, name: str, killed: int) -> bool:
    return children(server).get(name) not in (None, killed) and answers(server)


def kill_each(server: Server) -> None:
    """One after the other; what is counted goes on, and all comes back."""
    for name in ("api", "engine", "api"):
        before, killed = server.metric("http_requests_total"), children(server)[name]
        os.kill(killed, signal.SIGKILL)
        wait_until(partial(is_back, server, name, killed))
        assert server.metric("http_requests_total") > before


def test_files_that_may_not_grow_end_nothing(text_model: Path) -> None:
    """Metrics were files of 64 KiB and more: "api 0 ended 6 times: giving up"."""
    with Server(text_model, *SERVER_FLAGS, "--api-processes=1") as server:
        limit = 40_000  # what SQLite needs at a start
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (limit, limit))
        kill_each(server)


@pytest.mark.skipif(os.geteuid() != 0, reason="a disk of one's own needs root")
def test_a_full_temp_folder_ends_nothing_and_is_named_beside_a_crash(
    text_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each write of a metric was a SIGBUS, and the disk was named nowhere."""
    with closing(Disk(tmp_path / "disk", 4)) as disk:
        monkeypatch.setenv("TMPDIR", str(disk.folder))
        flags = (*SERVER_FLAGS, "--api-processes=1", f"--data-dir={tmp_path / 'data'}")
        with Server(text_model, *flags) as server:
            monkeypatch.undo()
            disk.fill()
            assert answers(server)
            kill_each(server)
            text = "".join(server.lines)
            assert re.search(r"api 0 ended \(SIGKILL: .*; the disk of \S+ is full, with 0 b", text)
            assert "giving up" not in text and "Traceback" not in text
            disk.free()
