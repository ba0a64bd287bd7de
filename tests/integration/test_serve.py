"""`srm serve` as processes: starting, crashing, draining, leaving nothing behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from engine.errors import EngineUnavailable
from engine.messages import Request, SamplingParams
from engine.process.snapshot import NAME
from tests.engines.held_engine import held
from tests.engines.served_engine import collect, connected
from tests.serving import NUM_SLOTS, ROOT, SERVER_FLAGS, Server

LONG = {"max_tokens": 120, "ignore_eos": True}
HELD_FLAGS = (*SERVER_FLAGS, "--stall-s=1000")


@pytest.fixture
def own_server(text_model: Path) -> Iterator[Server]:
    """One that the test may break."""
    with Server(text_model, *HELD_FLAGS, engine_module="tests.engines.held_engine") as running:
        yield running


class Asked(threading.Thread):
    """A request that runs, for as long as the engine is held."""

    def __init__(self, server: Server, **fields: object) -> None:
        super().__init__()
        self._server, self._fields = server, fields
        self.start()
        while not server.metric("srm_engine_running_sequences"):
            assert self.is_alive(), "it has ended before it ran"
            time.sleep(0.01)

    def run(self) -> None:
        self._reply = self._server.post(**{**LONG, **self._fields})

    def answer(self) -> httpx.Response:
        self.join()
        return self._reply


def children(server: Server) -> dict[str, int]:
    """Process ids of `engine`, `api` and `jobs`."""
    pids = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text()
    found = {}
    for pid in map(int, pids.split()):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):  # it has just gone
            continue
        if command == [b""]:  # the same, and nobody has waited for it yet
            continue
        (name,) = {b"api", b"jobs"} & set(command) or {b"engine"}
        found[name.decode()] = pid
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_ready(server: Server, within_s: float = 120) -> None:
    deadline = time.monotonic() + within_s
    while server.get("/ready").status_code != 200:
        assert time.monotonic() < deadline, "not ready again"
        time.sleep(0.05)


def test_it_says_where_it_serves_and_how_to_ask(server: Server) -> None:
    assert f"{server.url}/docs" in "".join(server.lines)
    start = next(i for i, line in enumerate(server.lines) if line.startswith("Serving"))
    assert re.fullmatch(r"Serving tiny on http://127\.0\.0\.1:\d+\n", server.lines[start])
    command = server.lines[start + 1].strip()
    answer = subprocess.run(["bash", "-c", command], capture_output=True, check=True, text=True)
    assert '"object":"text_completion"' in answer.stdout


def test_a_killed_engine_fails_what_ran_and_comes_back(
    own_server: Server, text_model: Path
) -> None:
    with held(text_model):
        asked = Asked(own_server)
        os.kill(children(own_server)["engine"], signal.SIGKILL)
        reply = asked.answer()
    assert reply.status_code == 503
    assert reply.json()["error"]["type"] == "service_unavailable"
    assert own_server.get("/health").status_code == 200
    refused = own_server.post()
    if refused.status_code != 200:  # unless it is back already
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
    wait_until_ready(own_server)
    assert own_server.post(max_tokens=2).status_code == 200


def test_a_killed_engine_ends_a_stream_with_an_error_event(
    own_server: Server, text_model: Path
) -> None:
    request = {"prompt": "the cat", "stream": True, **LONG}
    with (
        held(text_model, steps=9),
        own_server.http.stream("POST", "/v1/completions", json=request) as reply,
    ):
        lines = reply.iter_lines()
        assert next(lines).startswith("data: {")
        os.kill(children(own_server)["engine"], signal.SIGKILL)
        *_, error, done = (line for line in lines if line)
    assert '"type":"service_unavailable"' in error
    assert done == "data: [DONE]"


def test_a_killed_api_comes_back_on_the_same_port(own_server: Server) -> None:
    os.kill(children(own_server)["api"], signal.SIGKILL)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            wait_until_ready(own_server)
            break
        except httpx.TransportError:
            time.sleep(0.05)
    assert own_server.post(max_tokens=2).status_code == 200


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_finishes_what_runs_and_leaves_nothing(text_model: Path, signum: int) -> None:
    flags = (*HELD_FLAGS, "--drain-s=1000")
    running = Server(text_model, *flags, engine_module="tests.engines.held_engine")
    pids = children(running)
    with held(text_model):
        asked = Asked(running, n=5)
        running.process.send_signal(signum)
        until_refused(running)
    reply = asked.answer()
    assert reply.status_code == 200
    assert reply.json()["usage"]["completion_tokens"] == 5 * 120
    assert running.wait() == 0, "".join(running.lines)
    assert not any(is_running(pid) for pid in pids.values())


def test_a_stop_does_not_wait_longer_than_it_was_told(text_model: Path) -> None:
    flags = (*HELD_FLAGS, "--drain-s=0.5")
    running = Server(text_model, *flags, engine_module="tests.engines.held_engine")
    with held(text_model):
        asked = Asked(running)
        assert running.stop() == 0
        reply = asked.answer()
    assert reply.status_code == 503
    assert "shutting down" in reply.json()["error"]["message"]
    log = "".join(running.lines)
    assert "1 requests run, for 0.5 s at most" in log and "1 requests are broken off" in log
    assert "ERROR" not in log, "it was asked for"


def test_a_stop_that_waits_no_longer_ends_a_stream_with_an_error_event(text_model: Path) -> None:
    flags = (*HELD_FLAGS, "--drain-s=0.5")
    running = Server(text_model, *flags, engine_module="tests.engines.held_engine")
    request = {"prompt": "the cat", "stream": True, **LONG}
    with (
        held(text_model, steps=9),
        running.http.stream("POST", "/v1/completions", json=request) as reply,
    ):
        lines = reply.iter_lines()
        assert next(lines).startswith("data: {")
        running.process.send_signal(signal.SIGTERM)
        *_, error, done = (line for line in lines if line)
    assert running.wait() == 0
    assert error.startswith('data: {"error":')
    assert "shutting down" in error
    assert done == "data: [DONE]"
    assert "status=503" in next(line for line in running.lines if "/v1/completions status" in line)


def test_two_api_processes_serve_and_survive_a_crash_of_one(text_model: Path) -> None:
    with Server(text_model, *SERVER_FLAGS, "--api-processes=2") as server:
        until_apis(server, 2)
        first, second = apis(server)
        wait_until_connected(server, second)
        os.kill(first, signal.SIGSTOP)  # whatever is answered now, the other one answers
        assert ask(server) == 200
        os.kill(first, signal.SIGKILL)
        assert [ask(server) for _ in range(5)] == [200] * 5
        until_apis(server, 2)
        (third,) = set(apis(server)) - {second}
        wait_until_connected(server, third)
        os.kill(second, signal.SIGSTOP)
        try:
            assert ask(server) == 200
        finally:
            os.kill(second, signal.SIGCONT)
        # Of both, and of the one that is gone.
        assert server.metric("srm_request_params_n_count") == 7


def apis(server: Server) -> list[int]:
    """Process ids of the API processes."""
    pids = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text()
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids.split()}
    return [int(pid) for pid, command in commands.items() if b"api" in command.split(b"\0")]


def until_apis(server: Server, count: int) -> None:
    deadline = time.monotonic() + 120
    while len([pid for pid in apis(server) if is_running(pid)]) < count:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def wait_until_connected(server: Server, pid: int, within_s: float = 120) -> None:
    """Until an API process, which has just been started, answers for itself."""
    others = [other for other in apis(server) if other != pid]
    for other in others:
        os.kill(other, signal.SIGSTOP)
    try:
        deadline = time.monotonic() + within_s
        while True:
            try:
                if httpx.get(f"{server.url}/ready", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.05)
            assert time.monotonic() < deadline, "not ready"
    finally:
        for other in others:
            os.kill(other, signal.SIGCONT)


def ask(server: Server) -> int:
    """The status of a small request over a connection of its own."""
    body = {"prompt": "the cat", "max_tokens": 2}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).status_code


def test_children_die_with_a_killed_supervisor(text_model: Path) -> None:
    running = Server(text_model, *SERVER_FLAGS)
    pids = children(running)
    assert set(pids) == {"engine", "api", "jobs"}
    running.process.kill()
    assert running.wait() == -signal.SIGKILL
    deadline = time.monotonic() + 120
    while any(is_running(pid) for pid in pids.values()):
        assert time.monotonic() < deadline, "orphans"
        time.sleep(0.02)


def start(*flags: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """`srm serve` that is expected to fail."""
    command = [sys.executable, str(ROOT / "srm.py"), "serve", *flags]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=600, check=False
    )


def test_a_missing_checkpoint_ends_it_with_3_and_says_which(tmp_path: Path) -> None:
    failed = start(f"--model={tmp_path / 'nothing'}", "--port=0", cwd=tmp_path)
    assert failed.returncode == 3
    assert "nothing/config.json" in failed.stderr


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--nonsense=1", "unrecognized arguments: --nonsense=1"),
        ("--num-slots=-1", "num_slots must be 0 … 2**31 - 1"),
        ("--port=banana", "port = 'banana'"),
    ],
)
def test_a_bad_flag_ends_it_with_2_and_is_named(flag: str, message: str) -> None:
    failed = start(flag)
    assert failed.returncode == 2
    assert message in failed.stderr


def test_a_port_in_use_ends_it_with_2_and_is_named(server: Server, text_model: Path) -> None:
    port = server.url.rsplit(":", 1)[1]
    failed = start(f"--model={text_model}", f"--port={port}")
    assert failed.returncode == 2
    assert f"port = {port}: cannot listen: Address already in use" in failed.stderr


def test_a_stop_says_so_to_whoever_comes_until_all_is_finished(text_model: Path) -> None:
    flags = (*HELD_FLAGS, "--drain-s=1000")
    with Server(text_model, *flags, engine_module="tests.engines.held_engine") as running:
        with held(text_model):
            asked = Asked(running)
            assert running.get("/ready").status_code == 200
            running.process.send_signal(signal.SIGTERM)
            ready = until_refused(running)
            refused = running.post(max_tokens=2)
            assert running.get("/health").status_code == 200
            assert running.get("/metrics").status_code == 200
        assert asked.answer().status_code == 200
    for reply in (ready, refused):
        assert reply.status_code == 503
        assert reply.json()["error"]["message"] == "the server is shutting down"
        assert int(reply.headers["retry-after"]) >= 1


def until_refused(server: Server) -> httpx.Response:
    deadline = time.monotonic() + 120
    while (reply := server.get("/ready")).status_code == 200:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return reply


@pytest.mark.slow
def test_a_frozen_engine_is_killed_and_comes_back(text_model: Path) -> None:
    with Server(text_model, *SERVER_FLAGS, "--step-timeout-s=5") as server:
        assert ask(server) == 200
        engine = children(server)["engine"]
        os.kill(engine, signal.SIGSTOP)
        replies = []
        asking = threading.Thread(target=lambda: replies.append(ask(server)))
        asking.start()
        deadline = time.monotonic() + 120
        while is_running(engine):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        asking.join(10)
        assert replies == [503]
        wait_until_ready(server)
        assert ask(server) == 200
        log = "".join(server.lines)
    assert f"engine (process {engine}, state T) has given no sign of life" in log


async def test_a_stop_with_batches_running_takes_a_snapshot_and_is_quick(
    text_model: Path, tmp_path: Path
) -> None:
    with Server(text_model, *SERVER_FLAGS, f"--data-dir={tmp_path / 'data'}") as running:
        arguments = Path(f"/proc/{children(running)['engine']}/cmdline").read_text().split("\0")
        (endpoint,) = (one.split("=")[1] for one in arguments if one.startswith("--endpoint="))
        request = Request(
            id="batch-1",
            prompt_token_ids=b"\1\0\0\0",
            params=SamplingParams(n=2_000, max_tokens=120, ignore_eos=True),
            durable=True,
        )
        async with connected(endpoint, ready_s=20) as client:
            batch = asyncio.create_task(collect(client, request))
            while running.metric("srm_engine_decode_tokens_total") < NUM_SLOTS:
                await asyncio.sleep(0.01)
            assert not (tmp_path / "data").exists()
            assert running.stop() == 0
            with pytest.raises(EngineUnavailable):
                await batch
    assert [path.name for path in (tmp_path / "data" / "snapshots").iterdir()] == [NAME]
