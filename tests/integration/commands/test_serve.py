"""`srm serve` as processes: starting, crashing, draining, leaving nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import pytest

from srm.engine.messages import Request, SamplingParams
from srm.engine.process.snapshot import NAME
from srm.server.loop_turns import LOOP_TIMEOUT_S
from tests.kit.engines.served_engine import RawClient
from tests.kit.processes.held_engine import held
from tests.kit.serving import (
    COMPLETIONS,
    NUM_SLOTS,
    ROOT,
    SERVER_FLAGS,
    Asked,
    Server,
    children,
    error_of,
    free_port,
    is_ready,
    processes,
    serve_command,
    wait_until,
)

STREAM = {"prompt": "the cat", "stream": True, "max_tokens": 120, "ignore_eos": True}


def held_server(model: Path, *flags: str) -> Server:
    """One that the test may hold and break."""
    return Server(model, *SERVER_FLAGS, *flags, engine_module="tests.kit.processes.held_engine")


@pytest.fixture(scope="module")
def unlucky(text_model: Path) -> Iterator[Server]:
    """Whose processes are killed; each test but the last waits until all are back."""
    with held_server(text_model, "--api-processes=2", "--stall-s=2") as running:
        yield running


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def are_gone(pids: Iterable[int]) -> bool:
    return not any(map(is_running, pids))


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """Processes that do nothing meanwhile."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def ask(server: Server) -> int:
    """The status of a small request over a connection of its own."""
    body = {"prompt": "the cat", "max_tokens": 2, "ignore_eos": True}
    return httpx.post(f"{server.url}{COMPLETIONS}", json=body, timeout=120).status_code


@contextmanager
def under_way(server: Server, model: Path) -> Iterator[tuple[Iterator[str], Asked]]:
    """A stream that has begun and a request that runs or waits, with the engine held."""
    with held(model, steps=9), server.http.stream("POST", COMPLETIONS, json=STREAM) as reply:
        lines = filter(None, reply.iter_lines())
        assert next(lines).startswith("data: {")
        yield lines, Asked(server, others=1)


def test_it_says_where_it_serves_and_how_to_ask(server: Server) -> None:
    assert f"{server.url}/docs" in "".join(server.lines)
    start = next(i for i, line in enumerate(server.lines) if line.startswith("Serving"))
    assert re.fullmatch(r"Serving tiny on http://127\.0\.0\.1:\d+\n", server.lines[start])
    command = server.lines[start + 1].strip()
    answer = subprocess.run(["bash", "-c", command], capture_output=True, check=True, text=True)
    assert '"object":"text_completion"' in answer.stdout


def test_an_engine_that_is_stopped_is_not_ready_until_it_goes_on(unlucky: Server) -> None:
    def reason() -> str:
        reply = unlucky.get("/ready")
        return "" if reply.status_code == 200 else str(error_of(reply, 503)["message"])

    with stopped(children(unlucky)["engine"]):
        wait_until(lambda: "answer" in reason())
        assert unlucky.get("/health").status_code == 200
    wait_until(lambda: is_ready(unlucky))


def test_an_engine_that_is_killed_comes_back_and_its_requests_are_told(
    unlucky: Server, text_model: Path
) -> None:
    wait_until(lambda: ask(unlucky) == 200)
    assert "vllm:num_requests_running{" in unlucky.get("/metrics").text
    decoded = unlucky.metric("srm_engine_decode_tokens_total")
    with under_way(unlucky, text_model) as (lines, asked):
        os.kill(children(unlucky)["engine"], signal.SIGKILL)
        # Gauges of a dead engine go and its counters stay.
        wait_until(lambda: "\nsrm_engine_free_slots" not in unlucky.get("/metrics").text)
        assert "vllm:num_requests_running{" not in unlucky.get("/metrics").text
        assert unlucky.metric("srm_engine_decode_tokens_total") >= decoded > 0
        *_, error, done = lines
        assert error_of(asked.answer(), 503)["type"] == "service_unavailable"
    assert '"type":"service_unavailable"' in error and done == "data: [DONE]"
    assert "connection to the engine was lost" in error, "it is known at once"
    assert unlucky.get("/health").status_code == 200
    refused = unlucky.post()
    if refused.status_code != 200:  # unless it is back already
        error_of(refused, 503)
        assert int(refused.headers["retry-after"]) >= 1
    wait_until(lambda: is_ready(unlucky))
    unlucky.wait_until_idle()
    decoded = unlucky.metric("srm_engine_decode_tokens_total")
    wait_until(lambda: ask(unlucky) == 200)
    assert unlucky.metric("srm_engine_decode_tokens_total") == decoded + 2
    assert unlucky.metric("srm_engine_free_slots") == NUM_SLOTS


def test_two_api_processes_serve_and_survive_a_crash_of_one(unlucky: Server) -> None:
    def apis() -> list[int]:
        return [pid for name, pid in processes(unlucky) if name == "api" and is_running(pid)]

    def wait_until_connected(pid: int) -> None:
        """Until an API process, which may just have been started, answers for itself."""
        with stopped(*(other for other in apis() if other != pid)):
            wait_until(answers)

    def answers() -> bool:
        try:
            return httpx.get(f"{unlucky.url}/ready", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    wait_until(lambda: len(apis()) == 2)
    first, second = apis()
    wait_until_connected(second)
    asked = unlucky.metric("srm_request_params_n_count")
    os.kill(first, signal.SIGSTOP)  # whatever is answered now, the other one answers
    assert ask(unlucky) == 200
    os.kill(first, signal.SIGKILL)
    assert [ask(unlucky) for _ in range(5)] == [200] * 5
    wait_until(lambda: len(apis()) == 2)
    (third,) = set(apis()) - {second}
    wait_until_connected(third)
    with stopped(second):
        assert ask(unlucky) == 200
    # Of both, and of the one that is gone.
    assert unlucky.metric("srm_request_params_n_count") == asked + 7


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "flags", "loop_timeout_s"),
    [("engine", ["--step-timeout-s=5"], LOOP_TIMEOUT_S), ("api", [], 5), ("jobs", [], 5)],
)
def test_a_frozen_process_is_killed_and_comes_back(
    text_model: Path, name: str, flags: list[str], loop_timeout_s: float
) -> None:
    """Nobody noticed: connections to it were taken and never answered."""
    with Server(text_model, *SERVER_FLAGS, *flags, loop_timeout_s=loop_timeout_s) as server:
        assert ask(server) == 200
        frozen = children(server)[name]
        os.kill(frozen, signal.SIGSTOP)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(ask, server) if name == "engine" else None
            wait_until(lambda: not is_running(frozen))
            assert asked is None or asked.result(10) == 503
        wait_until(lambda: children(server).get(name, frozen) != frozen and is_ready(server))
        assert ask(server) == 200
        log = "".join(server.lines)
    line = f"(process {frozen}, state T) has given no sign of life"
    assert (f"engine {line}" if name == "engine" else line) in log


def test_all_die_with_their_supervisor(unlucky: Server) -> None:
    names, pids = zip(*processes(unlucky), strict=True)
    assert sorted(names) == ["api", "api", "engine", "jobs"]
    unlucky.process.kill()
    assert unlucky.wait() == -signal.SIGKILL
    wait_until(lambda: are_gone(pids))


def test_a_stop_finishes_what_runs_and_leaves_batches_to_a_snapshot(
    text_model: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    server = held_server(text_model, "--drain-s=1000", f"--data-dir={data}")
    pids = children(server)
    arguments = Path(f"/proc/{pids['engine']}/cmdline").read_text().split("\0")
    (endpoint,) = (
        argument.split("=")[1] for argument in arguments if argument.startswith("--endpoint=")
    )
    params = SamplingParams(n=2_000, max_tokens=120, ignore_eos=True)
    batch = Request("batch-1", b"\1\0\0\0", params, durable=True)
    with closing(RawClient(endpoint)) as jobs, held(text_model):
        asked = Asked(server, n=5)
        jobs.send(batch)
        wait_until(lambda: server.metric("srm_engine_waiting_sequences") > 0)
        assert not (data / "snapshots").exists()
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not is_ready(server))
        for reply in (server.get("/ready"), server.post(max_tokens=2)):
            assert error_of(reply, 503)["message"] == "the server is shutting down"
            assert int(reply.headers["retry-after"]) >= 1
        assert server.get("/health").status_code == 200
        assert server.get("/metrics").status_code == 200
    reply = asked.answer()
    assert reply.status_code == 200
    assert reply.json()["usage"]["completion_tokens"] == 5 * 120
    assert server.wait() == 0, "".join(server.lines)
    assert are_gone(pids.values())
    assert [path.name for path in (data / "snapshots").iterdir()] == [NAME]


def test_a_stop_by_ctrl_c_does_not_wait_longer_than_it_was_told(text_model: Path) -> None:
    server = held_server(text_model, "--drain-s=0.5")
    pids = children(server).values()
    with under_way(server, text_model) as (lines, asked):
        server.process.send_signal(signal.SIGINT)
        *_, error, done = lines
        whole = asked.answer()
    assert server.wait() == 0
    assert error.startswith('data: {"error":') and "shutting down" in error
    assert done == "data: [DONE]"
    assert "shutting down" in error_of(whole, 503)["message"]
    log = "".join(server.lines)
    assert "requests run, for 0.5 s at most" in log  # maybe a reading of the metrics besides
    assert "2 requests are broken off" in log
    assert "ERROR" not in log, "it was asked for"
    results = [line for line in server.lines if f"{COMPLETIONS} status" in line]
    assert len(results) == 2 and all("status=503" in line for line in results)
    assert are_gone(pids)


def test_what_it_cannot_begin_with_ends_it_and_is_named(
    server: Server, text_model: Path, tmp_path: Path
) -> None:
    port = server.url.rsplit(":", 1)[1]
    for code, message, flags in (
        (3, "there is no folder", [f"--model={tmp_path / 'nothing'}", "--port=0"]),
        (2, f"port = {port}: cannot listen: Address already in use",
         [f"--model={text_model}", f"--port={port}"]),
    ):  # fmt: skip
        command = [sys.executable, "-m", "srm", "serve", *flags]
        failed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert (failed.returncode, message in failed.stderr) == (code, True), failed.stderr


def test_a_unix_socket_is_served_and_gone_afterwards(text_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "srm.sock"
    flags = f"--uds={path}", f"--data-dir={tmp_path}", f"--admin-port={free_port()}"
    command = serve_command(text_model, "tests.kit.processes.numpy_engine", *SERVER_FLAGS, *flags)
    output = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().endswith(f" on {path}\n")
            assert f"curl --unix-socket {path} http://localhost/" in process.stdout.readline()
            transport = httpx.HTTPTransport(uds=str(path))
            with httpx.Client(
                transport=transport, base_url="http://localhost", timeout=600
            ) as http:
                fields = {"prompt": "the cat", "n": 500, "max_tokens": 20, "seed": 1}
                reply = http.post(COMPLETIONS, json=fields)
                assert len(reply.json()["choices"]) == 500
                events = http.post(COMPLETIONS, json={**fields, "stream": True}).text
                assert events.endswith("data: [DONE]\n\n")
                assert http.get("/metrics").status_code == 404  # on admin_port alone
                assert http.get("/health", headers={"host": "stranger.example"}).status_code == 200
                stranger = {"host": "stranger.example"}
                assert http.get("/v1/models", headers=stranger).status_code in {400, 403}
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate()
    assert process.returncode == 0
    assert not path.exists()
