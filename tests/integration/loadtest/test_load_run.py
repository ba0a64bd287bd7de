"""Runs with client processes, against raw servers. Those of our server: test_loadtest_server.py."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from srm.errors import ConfigError, SRMError
from srm.loadtest.client.os_limits import allow_files
from srm.loadtest.client.target import resolve
from srm.loadtest.client.workers import RunProgress, run
from srm.loadtest.recording import ERRORS, Recording
from srm.loadtest.scenario import Scenario
from tests.kit.loads.raw_server import (
    DONE,
    Handler,
    Peer,
    answering,
    event,
    make_reply,
    raw_server,
    stream,
    text_event,
)
from tests.kit.loads.run_loadtest import loaded
from tests.kit.serving import ROOT, free_port

USAGE = event(choices=[], usage={"prompt_tokens": 2, "completion_tokens": 2})
GOOD = stream(text_event("a"), text_event("b"), USAGE, DONE)
SHORT: dict[str, Any] = {"served_model_name": "m", "prompt_tokens": "2", "output_tokens": "2"}


async def silent(peer: Peer) -> None:
    """But to questions before the run."""
    while (body := await peer.request()) is not None:
        if b'"prompt"' not in body:
            await peer.send(make_reply(b"no prompt", 400))


async def run_against(
    handler: Handler,
    on_progress: Callable[[RunProgress], None] = lambda _: None,
    stop: asyncio.Event | None = None,
    **settings: Any,
) -> Recording:
    """No process may be left of it."""
    before = set(psutil.Process().children())
    async with raw_server(handler) as server:
        scenario = Scenario(url=server.url, **{"duration_s": 3600.0, **SHORT, **settings})
        try:
            return await run(scenario, on_progress, "a test", stop)
        finally:
            assert set(psutil.Process().children()) <= before


def kinds(recording: Recording) -> set[str]:
    return {ERRORS[error] for error in recording.requests["error"]}


@pytest.mark.parametrize("arrivals", ["concurrent", "poisson"])
async def test_two_processes_send_each_request_once(arrivals: str) -> None:
    load: dict[str, Any] = {"arrivals": arrivals, "rate": 400.0, "concurrency": 7, "workers": 2}
    recording = await run_against(answering(GOOD), **load, requests=201, duration_s=0.0)
    requests, events = recording.requests, recording.events
    assert requests["index"].tolist() == list(range(201))
    assert (requests["worker"] == requests["index"] % 2).all()
    assert kinds(recording) == {"none"}
    assert recording.about.stopped_by == "requests"
    assert recording.about.seconds == requests["ended"].max()
    assert (np.diff(events["time"]) >= 0).all()
    assert np.bincount(events["request"]).tolist() == [2] * 201
    assert (requests["sent"] >= requests["planned"]).all()
    assert set(recording.clients["worker"]) == {0, 1}


async def test_a_stopped_run_keeps_what_it_has_and_tells_errors_meanwhile() -> None:
    stop, reported = asyncio.Event(), list[RunProgress]()

    def on_progress(progress: RunProgress) -> None:
        reported.append(progress)
        if progress.failed:
            stop.set()

    async def refuse_or_say_nothing(peer: Peer) -> None:
        refused = make_reply(b"nobody home", 500)
        await (peer.answer_all(refused) if peer.number % 2 else silent(peer))

    recording = await run_against(refuse_or_say_nothing, on_progress, stop, workers=2)
    assert recording.about.stopped_by == "interrupt"
    assert reported[-1].last_error == "server: 500: nobody home"
    assert kinds(recording) == {"server", "cut"}


async def test_a_cancelled_run_leaves_no_process() -> None:
    running = asyncio.Event()
    task = asyncio.create_task(run_against(silent, lambda _: running.set()))
    await running.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_process_that_dies_ends_the_run() -> None:
    before = set(psutil.Process().children())

    def on_progress(_: RunProgress) -> None:
        one, *_rest = set(psutil.Process().children()) - before
        os.kill(one.pid, signal.SIGKILL)

    with pytest.raises(SRMError, match="died, exit code -9"):
        await run_against(silent, on_progress, workers=2)


def test_more_connections_than_the_system_allows() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        with pytest.raises(ConfigError, match=r"concurrency = 900000000 .* the OS allows"):
            allow_files(Scenario(concurrency=900_000_000), 0, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def test_a_failing_file_is_told_of_by_the_process_that_reads_it(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text("no JSON\n")
    with pytest.raises(ConfigError, match=r"prompts\.jsonl"):
        await run_against(answering(GOOD), prompts=tmp_path / "prompts.jsonl")


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (make_reply(b"no such page", 404), "404: no such page"),
        (make_reply(b"not allowed", 405), "405: not allowed"),
        (make_reply(b"who are you", 401), "the key is read from"),
        (b"220 smtp.example ESMTP\r\n\r\n", "no HTTP server answers"),
    ],
)
async def test_targets_that_are_none(reply: bytes, message: str) -> None:
    async with raw_server(answering(reply)) as server:
        with pytest.raises(ConfigError, match=message):
            await resolve(Scenario(url=server.url, **SHORT))


@pytest.mark.parametrize("rest", ["", "x:99999", "a@b", "127.0.0.1/?a=b"])
async def test_urls_that_are_none(rest: str) -> None:
    with pytest.raises(ConfigError, match="url"):
        await resolve(Scenario(url=f"http://{rest}"))


async def test_the_key_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "abc")
    async with raw_server(answering(make_reply(b"no prompt", 400))) as server:
        target = await resolve(Scenario(url=server.url, api_key_env="SOME_KEY", **SHORT))
    assert b"authorization: Bearer abc\r\n" in target.head


CONNECTIONS = 20_000


@pytest.mark.slow
def test_twenty_thousand_connections_at_once() -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < CONNECTIONS // 2 + 2_000:
        pytest.skip("the system allows too few open files")
    port = free_port()
    command = (sys.executable, "-m", "tests.kit.loads.canned", f"--port={port}", "--seconds=60")
    with ExitStack() as stack:
        for _ in range(2):
            server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
            stack.enter_context(server)
            stack.callback(server.terminate)
            assert server.stdout is not None and server.stdout.readline().startswith("Serving")
        url, limits = f"http://127.0.0.1:{port}", {"duration_s": 0.0, "grace_s": 300.0}
        load = {"concurrency": CONNECTIONS, "requests": CONNECTIONS, "workers": 2}
        run = loaded(url, **load, **limits, served_model_name="canned")
    requests, clients = run.recording.requests, run.recording.clients
    assert run.summary.errors == {}
    connected, first_end = np.nanmax(requests["first_byte"]), requests["ended"].min()
    print(
        f"connected within {connected:.2f} s; ended in {requests['ended'].max() - first_end:.2f} s;"
        f" CPU of clients {clients['cpu_s'].sum():.2f} s; worst lag {clients['lag_s'].max():.3f} s"
    )
    assert np.count_nonzero(requests["first_byte"] <= first_end) == CONNECTIONS
    assert (requests["usage_output_tokens"] == requests["output_tokens"]).all()
