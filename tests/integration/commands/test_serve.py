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
from collections.abc import Callable, Iterable
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
COMPLETIONS = "/v1/completions"
STREAM = {"prompt": "the cat", "stream": True, **LONG}


def held_server(model: Path, *flags: str) -> Server:
    """One that the test may hold and break."""
    return Server(model, *SERVER_FLAGS, *flags, engine_module="tests.engines.held_engine")


class Asked(threading.Thread):
    """A request that runs, for as long as the engine is held."""

    def __init__(self, server: Server, others: int = 0, **fields: object) -> None:
        """Returns when it runs, or waits behind so many others."""
        super().__init__()
        self._server, self._fields = server, fields
        self.start()
        names = ("running", "waiting") if others else ("running",)
        while sum(server.metric(f"srm_engine_{name}_sequences") for name in names) <= others:
            assert self.is_alive(), "it has ended before it ran"
            time.sleep(0.01)

    def run(self) -> None:
        self._reply = self._server.post(**{**LONG, **self._fields})

    def answer(self) -> httpx.Response:
        self.join()
        return self._reply


def processes(server: Server) -> list[tuple[str, int]]:
    """`engine`, `api` or `jobs`, and the process id of each child."""
    pids = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text()
    found = []
    for pid in map(int, pids.split()):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):  # it has just gone
            continue
        if command != [b""]:  # the same, and nobody has waited for it yet
            (name,) = {b"api", b"jobs"} & set(command) or {b"engine"}
            found.append((name.decode(), pid))
    return found


def children(server: Server) -> dict[str, int]:
    """Process ids of `engine`, `api` and `jobs`."""
    return dict(processes(server))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(is_so: Callable[[], bool], within_s: float = 120) -> None:
    deadline = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_ready(server: Server) -> bool:
    try:
        return server.get("/ready").status_code == 200
    except httpx.TransportError:
        return False


def is_gone(pids: Iterable[int]) -> bool:
    return not any(map(is_running, pids))


def test_it_says_where_it_serves_and_how_to_ask(server: Server) -> None:
    assert f"{server.url}/docs" in "".join(server.lines)
    start = next(i for i, line in enumerate(server.lines) if line.startswith("Serving"))
    assert re.fullmatch(r"Serving tiny on http://127\.0\.0\.1:\d+\n", server.lines[start])
    command = server.lines[start + 1].strip()
    answer = subprocess.run(["bash", "-c", command], capture_output=True, check=True, text=True)
    assert '"object":"text_completion"' in answer.stdout


def test_what_is_killed_comes_back_and_dies_with_its_supervisor(text_model: Path) -> None:
    server = held_server(text_model)
    with held(text_model, steps=9), server.http.stream("POST", COMPLETIONS, json=STREAM) as reply:
        lines = reply.iter_lines()
        assert next(lines).startswith("data: {")
        asked = Asked(server, others=1)
        os.kill(children(server)["engine"], signal.SIGKILL)
        *_, error, done = (line for line in lines if line)
        whole = asked.answer()
    assert '"type":"service_unavailable"' in error
    assert done == "data: [DONE]"
    assert whole.status_code == 503
    assert whole.json()["error"]["type"] == "service_unavailable"
    assert server.get("/health").status_code == 200
    refused = server.post()
    if refused.status_code != 200:  # unless it is back already
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
    wait_until(lambda: is_ready(server))
    assert server.post(max_tokens=2).status_code == 200
    os.kill(children(server)["api"], signal.SIGKILL)
    wait_until(lambda: is_ready(server))  # on the same port
    assert server.post(max_tokens=2).status_code == 200
    pids = children(server)
    assert set(pids) == {"engine", "api", "jobs"}
    server.process.kill()
    assert server.wait() == -signal.SIGKILL
    wait_until(lambda: is_gone(pids.values()))


def test_a_stop_finishes_what_runs_and_says_so_to_whoever_comes(text_model: Path) -> None:
    server = held_server(text_model, "--drain-s=1000")
    pids = children(server).values()
    with held(text_model):
        asked = Asked(server, n=5)
        assert is_ready(server)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not is_ready(server))
        for reply in (server.get("/ready"), server.post(max_tokens=2)):
            assert reply.status_code == 503
            assert reply.json()["error"]["message"] == "the server is shutting down"
            assert int(reply.headers["retry-after"]) >= 1
        assert server.get("/health").status_code == 200
        assert server.get("/metrics").status_code == 200
    reply = asked.answer()
    assert reply.status_code == 200
    assert reply.json()["usage"]["completion_tokens"] == 5 * 120
    assert server.wait() == 0, "".join(server.lines)
    assert is_gone(pids)


def test_a_stop_by_ctrl_c_does_not_wait_longer_than_it_was_told(text_model: Path) -> None:
    server = held_server(text_model, "--drain-s=0.5")
    pids = children(server).values()
    with held(text_model, steps=9), server.http.stream("POST", COMPLETIONS, json=STREAM) as reply:
        lines = reply.iter_lines()
        assert next(lines).startswith("data: {")
        asked = Asked(server, others=1)
        server.process.send_signal(signal.SIGINT)
        *_, error, done = (line for line in lines if line)
        whole = asked.answer()
    assert server.wait() == 0
    assert error.startswith('data: {"error":') and "shutting down" in error
    assert done == "data: [DONE]"
    assert whole.status_code == 503
    assert "shutting down" in whole.json()["error"]["message"]
    log = "".join(server.lines)
    assert "2 requests run, for 0.5 s at most" in log and "2 requests are broken off" in log
    assert "ERROR" not in log, "it was asked for"
    said = [line for line in server.lines if f"{COMPLETIONS} status" in line]
    assert len(said) == 2 and all("status=503" in line for line in said)
    assert is_gone(pids)


def test_two_api_processes_serve_and_survive_a_crash_of_one(text_model: Path) -> None:
    with Server(text_model, *SERVER_FLAGS, "--api-processes=2") as server:
        wait_until(lambda: len(apis(server)) == 2)
        first, second = apis(server)
        wait_until_connected(server, second)
        os.kill(first, signal.SIGSTOP)  # whatever is answered now, the other one answers
        assert ask(server) == 200
        os.kill(first, signal.SIGKILL)
        assert [ask(server) for _ in range(5)] == [200] * 5
        wait_until(lambda: len(apis(server)) == 2)
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
    return [pid for name, pid in processes(server) if name == "api" and is_running(pid)]


def wait_until_connected(server: Server, pid: int) -> None:
    """Until an API process, which has just been started, answers for itself."""
    others = [other for other in apis(server) if other != pid]
    for other in others:
        os.kill(other, signal.SIGSTOP)
    try:
        wait_until(lambda: answers(server))
    finally:
        for other in others:
            os.kill(other, signal.SIGCONT)


def answers(server: Server) -> bool:
    try:
        return httpx.get(f"{server.url}/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def ask(server: Server) -> int:
    """The status of a small request over a connection of its own."""
    body = {"prompt": "the cat", "max_tokens": 2}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).status_code


def start(*flags: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """`srm serve` that is expected to fail."""
    command = [sys.executable, str(ROOT / "srm.py"), "serve", *flags]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=600, check=False
    )


def test_what_it_cannot_begin_with_ends_it_and_is_named(
    server: Server, text_model: Path, tmp_path: Path
) -> None:
    port = server.url.rsplit(":", 1)[1]
    taken = f"port = {port}: cannot listen: Address already in use"
    for code, message, flags in (
        (3, "nothing/config.json", [f"--model={tmp_path / 'nothing'}", "--port=0"]),
        (2, "num_slots must be 0 … 2**31 - 1", ["--num-slots=-1"]),
        (2, taken, [f"--model={text_model}", f"--port={port}"]),
    ):
        failed = start(*flags, cwd=tmp_path)
        assert (failed.returncode, message in failed.stderr) == (code, True), failed.stderr


@pytest.mark.slow
def test_a_frozen_engine_is_killed_and_comes_back(text_model: Path) -> None:
    with Server(text_model, *SERVER_FLAGS, "--step-timeout-s=5") as server:
        assert ask(server) == 200
        engine = children(server)["engine"]
        os.kill(engine, signal.SIGSTOP)
        replies = []
        asking = threading.Thread(target=lambda: replies.append(ask(server)))
        asking.start()
        wait_until(lambda: not is_running(engine))
        asking.join(10)
        assert replies == [503]
        wait_until(lambda: is_ready(server))
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
