"""Runs with client processes, against raw servers and our own."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from engine.errors import ConfigError, SRMError
from loadtest.client.os_limits import allow_files
from loadtest.client.target import resolve
from loadtest.client.workers import RunProgress, run
from loadtest.recording import ERRORS, Recording
from loadtest.scenario import Scenario
from server.routes.service import VERSION
from tests.loads.raw_server import DONE, Handler, Peer, event, raw_server, stream, text_event, whole
from tests.loads.run_loadtest import simulated
from tests.loads.toy_server import ToyServer
from tests.loads.virtual import virtually
from tests.serving import Server

USAGE = event(choices=[], usage={"prompt_tokens": 2, "completion_tokens": 2})
GOOD = stream(text_event("a"), text_event("b"), USAGE, DONE)
SHORT: dict[str, Any] = {"served_model_name": "m", "prompt_tokens": "2", "output_tokens": "2"}


def answering(reply: bytes) -> Handler:
    return lambda peer: peer.answer_all(reply)


async def silent(peer: Peer) -> None:
    """But to questions before the run."""
    while (body := await peer.request()) is not None:
        if b'"prompt"' not in body:
            await peer.send(whole(b"no prompt", 400))


async def run_against(handler: Handler, **settings: Any) -> Recording:
    async with raw_server(handler) as server:
        scenario = Scenario(url=f"http://127.0.0.1:{server.port}", **(SHORT | settings))
        return await run(scenario, lambda _: None, "a test")


def kinds(recording: Recording) -> set[str]:
    return {ERRORS[error] for error in recording.requests["error"]}


@pytest.mark.parametrize("arrivals", ["concurrent", "poisson"])
async def test_two_processes_send_each_request_once(arrivals: str) -> None:
    limits = {"requests": 201, "duration_s": 0.0, "workers": 2}
    recording = await run_against(
        answering(GOOD), arrivals=arrivals, rate=400.0, concurrency=7, **limits
    )
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


async def unanswered(**settings: Any) -> Recording:
    async with ToyServer(fault=lambda _number: "silent") as toy:
        return (await simulated(toy.url, **settings)).recording


def test_an_open_loop_does_not_wait_for_replies() -> None:
    steady: dict[str, Any] = {"arrivals": "constant", "rate": 200.0}
    recording = virtually(unanswered(**steady, requests=100, duration_s=0.0, grace_s=0.0))
    requests = recording.requests
    assert kinds(recording) == {"cut"}
    assert requests["planned"] == pytest.approx(np.arange(100) / 200.0)
    assert requests["sent"] == pytest.approx(requests["planned"], abs=1e-6)


def test_requests_under_way_are_cut_after_the_grace() -> None:
    recording = virtually(unanswered(concurrency=3, duration_s=100.0, grace_s=50.0))
    assert len(recording.requests) == 3
    assert kinds(recording) == {"cut"}
    assert recording.requests["ended"] == pytest.approx(150.0)
    assert recording.about.stopped_by == "duration"


def test_a_synchronous_run_has_one_request_at_a_time() -> None:
    async def answered() -> Recording:
        async with ToyServer() as toy:
            return (await simulated(toy.url, arrivals="synchronous", requests=20)).recording

    requests = virtually(answered()).requests
    assert requests["index"].tolist() == list(range(20))
    assert (requests["planned"][1:] >= requests["ended"][:-1]).all()


@pytest.mark.parametrize("answers", [False, True])
async def test_a_stopped_run_keeps_what_it_has_and_tells_errors_meanwhile(answers: bool) -> None:
    stop, told = asyncio.Event(), list[RunProgress]()

    def on_progress(progress: RunProgress) -> None:
        told.append(progress)
        if progress.failed or not answers:
            stop.set()

    handler = answering(whole(b"nobody home", 500)) if answers else silent
    async with raw_server(handler) as server:
        scenario = Scenario(
            url=f"http://127.0.0.1:{server.port}", workers=2, duration_s=3600.0, **SHORT
        )
        recording = await run(scenario, on_progress, "a test", stop)
    assert recording.about.stopped_by == "interrupt"
    if answers:
        assert told[-1].last_error == "server: 500: nobody home"
        assert "server" in kinds(recording)
    else:
        assert len(recording.requests) == 16
        assert kinds(recording) == {"cut"}


async def test_a_cancelled_run_leaves_no_process() -> None:
    before = set(psutil.Process().children())
    async with raw_server(silent) as server:
        scenario = Scenario(url=f"http://127.0.0.1:{server.port}", duration_s=3600.0, **SHORT)
        running = asyncio.Event()
        task = asyncio.create_task(run(scenario, lambda _: running.set(), "a test"))
        await running.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert set(psutil.Process().children()) <= before


async def test_a_process_that_dies_ends_the_run() -> None:
    before = set(psutil.Process().children())

    def on_progress(_: RunProgress) -> None:
        one, *_rest = set(psutil.Process().children()) - before
        os.kill(one.pid, signal.SIGKILL)

    async with raw_server(silent) as server:
        scenario = Scenario(
            url=f"http://127.0.0.1:{server.port}", workers=2, duration_s=3600.0, **SHORT
        )
        with pytest.raises(SRMError, match="died, exit code -9"):
            await run(scenario, on_progress, "a test")
    assert set(psutil.Process().children()) <= before


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


async def find(handler: Handler, **settings: Any) -> Any:
    async with raw_server(handler) as server:
        return await resolve(Scenario(url=f"http://127.0.0.1:{server.port}", **(SHORT | settings)))


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (whole(b"no such page", 404), "404: no such page"),
        (whole(b"not allowed", 405), "405: not allowed"),
        (whole(b"who are you", 401), "the key is read from"),
        (b"220 smtp.example ESMTP\r\n\r\n", "no HTTP server answers"),
    ],
)
async def test_targets_that_are_none(reply: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        await find(answering(reply))


async def test_nothing_listens() -> None:
    async with raw_server(answering(GOOD)) as server:
        pass
    with pytest.raises(ConfigError, match="nothing listens at"):
        await resolve(Scenario(url=f"http://127.0.0.1:{server.port}"))


@pytest.mark.parametrize(
    "url", ["http://", "http://x:99999", "http://a@b", "http://127.0.0.1/?a=b"]
)
async def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(ConfigError, match="url"):
        await resolve(Scenario(url=url))


async def test_the_key_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "abc")
    target = await find(answering(whole(b"no prompt", 400)), api_key_env="SOME_KEY")
    assert b"authorization: Bearer abc\r\n" in target.head


@pytest.mark.parametrize("stream", [True, False])
async def test_chats_of_our_server(server: Server, text_model: Path, stream: bool) -> None:
    """The counts of completions are held to its metrics in test_loadtest_server.py."""
    scenario = Scenario(
        url=server.url,
        api="chat",
        stream=stream,
        tokenizer=text_model,
        concurrency=4,
        requests=12,
        duration_s=0.0,
        prompt_tokens="uniform:3,9",
        output_tokens="5",
        n="2",
        workers=2,
    )
    recording = await run(scenario, lambda _: None, "a test")
    assert kinds(recording) == {"none"}
    assert recording.about.scenario.served_model_name == "tiny"
    assert recording.about.versions["server"] == VERSION
    assert (recording.requests["usage_output_tokens"] == 10).all()
    server.wait_until_idle()
