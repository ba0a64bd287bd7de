"""Runs with client processes, against raw servers and our own."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from engine.errors import ConfigError, SRMError
from loadtest.client.target import resolve
from loadtest.client.workers import Progress, run
from loadtest.recording import ERRORS, Recording
from loadtest.scenario import Scenario
from server.routes.service import VERSION
from tests.loads.raw_server import DONE, Handler, Peer, event, raw_server, stream, text_event, whole
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


async def run_against(
    handler: Handler, progress: list[Progress] | None = None, **settings: Any
) -> Recording:
    async with raw_server(handler) as server:
        scenario = Scenario(url=f"http://127.0.0.1:{server.port}", **(SHORT | settings))
        return await run(scenario, ([] if progress is None else progress).append, "a test")


def kinds(recording: Recording) -> set[str]:
    return {ERRORS[error] for error in recording.requests["error"]}


@pytest.mark.parametrize("arrivals", ["concurrent", "constant", "poisson"])
async def test_two_processes_send_each_request_once(arrivals: str) -> None:
    recording = await run_against(
        answering(GOOD),
        arrivals=arrivals,
        rate=400.0,
        concurrency=7,
        requests=201,
        duration_s=0.0,
        workers=2,
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
    if arrivals == "constant":
        assert np.allclose(requests["planned"], np.arange(201) / 400.0)


async def test_an_open_loop_does_not_wait_for_replies() -> None:
    recording = await run_against(
        silent,
        arrivals="constant",
        rate=200.0,
        requests=100,
        duration_s=0.0,
        grace_s=0.0,
    )
    assert kinds(recording) == {"cut"}
    assert not np.isnan(recording.requests["sent"][:90]).any()


async def test_requests_under_way_are_cut_after_the_grace() -> None:
    recording = await run_against(silent, concurrency=3, duration_s=0.1, grace_s=0.1)
    assert len(recording.requests) == 3
    assert kinds(recording) == {"cut"}
    assert (recording.requests["ended"] >= 0.195).all()  # event loop timers have milliseconds
    assert recording.about.stopped_by == "duration"


async def test_a_synchronous_run_has_one_request_at_a_time() -> None:
    recording = await run_against(
        answering(GOOD), arrivals="synchronous", requests=20, duration_s=0.0, workers=2
    )
    requests = recording.requests
    assert requests["index"].tolist() == list(range(20))
    assert (requests["planned"][1:] >= requests["ended"][:-1]).all()


async def test_a_stopped_run_keeps_what_it_has() -> None:
    stop, told = asyncio.Event(), list[Progress]()

    def on_progress(progress: Progress) -> None:
        told.append(progress)
        stop.set()

    async with raw_server(silent) as server:
        scenario = Scenario(
            url=f"http://127.0.0.1:{server.port}", workers=2, duration_s=3600.0, **SHORT
        )
        recording = await run(scenario, on_progress, "a test", stop)
    assert recording.about.stopped_by == "interrupt"
    assert len(recording.requests) == 16
    assert kinds(recording) == {"cut"}
    assert told


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

    def on_progress(_: Progress) -> None:
        one, *_rest = set(psutil.Process().children()) - before
        os.kill(one.pid, signal.SIGKILL)

    async with raw_server(silent) as server:
        scenario = Scenario(
            url=f"http://127.0.0.1:{server.port}", workers=2, duration_s=3600.0, **SHORT
        )
        with pytest.raises(SRMError, match="died, exit code -9"):
            await run(scenario, on_progress, "a test")
    assert set(psutil.Process().children()) <= before


async def test_more_connections_than_the_system_allows() -> None:
    with pytest.raises(ConfigError, match=r"concurrency = 900000000 .* the OS allows"):
        await run_against(answering(GOOD), concurrency=900_000_000)


async def test_a_failing_file_is_told_of_by_the_process_that_reads_it(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text("no JSON\n")
    with pytest.raises(ConfigError, match=r"prompts\.jsonl"):
        await run_against(answering(GOOD), prompts=tmp_path / "prompts.jsonl")


async def test_errors_are_told_while_it_runs() -> None:
    progress: list[Progress] = []
    await run_against(
        answering(whole(b"nobody home", 500)),
        progress,
        arrivals="constant",
        rate=50.0,
        duration_s=1.5,
    )
    assert progress[-1].last_error == "server: 500: nobody home"
    assert progress[-1].failed > 0


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
@pytest.mark.parametrize("api", ["completions", "chat"])
async def test_our_server(server: Server, text_model: Path, api: Any, stream: bool) -> None:
    scenario = Scenario(
        url=server.url,
        api=api,
        stream=stream,
        tokenizer=text_model if api == "chat" else None,
        concurrency=4,
        requests=12,
        duration_s=0.0,
        prompt_tokens="uniform:3,9",
        output_tokens="5",
        n="2",
        extra_body='{"return_token_ids": true}',
        workers=2,
    )
    recording = await run(scenario, lambda _: None, "a test")
    requests = recording.requests
    assert kinds(recording) == {"none"}
    assert recording.about.scenario.served_model_name == "tiny"
    assert recording.about.versions["server"] == VERSION
    assert (requests["usage_output_tokens"] == 10).all()
    if api == "completions":
        assert (requests["output_tokens"] == 10).all()
        assert (requests["usage_prompt_tokens"] == requests["prompt_tokens"]).all()
        tokens = np.bincount(recording.events["request"], weights=recording.events["tokens"])
        assert (tokens == 10).all()
    server.wait_until_idle()
