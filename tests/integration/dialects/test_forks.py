"""Forks of running completions: they go on from the tokens that a sample has, as from a prompt."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.kit.processes.held_engine import held, hold, release
from tests.kit.serving import (
    CHATS,
    COMPLETIONS,
    SERVER_FLAGS,
    Server,
    complete,
    connect,
    error_of,
    free_port,
    read_all,
    tries,
    wait_until,
)

LONG: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "return_token_ids": True, "seed": 2}
FORK: dict[str, Any] = {"max_tokens": 6, "seed": 5, "n": 3, "return_token_ids": True}
STEPS = 4
"""Steps that the engines make before they are held: fewer than a fork takes."""


@pytest.fixture(scope="module")
def servers(text_model: Path) -> Iterator[tuple[Server, ...]]:
    """A server of one engine, and one of two, each with two API processes."""
    flags, module = (*SERVER_FLAGS, "--api-processes=2"), "tests.kit.processes.held_engine"
    with (
        Server(text_model, *flags, engine_module=module) as first,
        Server(text_model, *flags, "--engines=2", engine_module=module) as second,
    ):
        yield first, second


def fork(server: Server, id: str, timeout: float = 120, **fields: Any) -> httpx.Response:
    return server.http.post(f"{COMPLETIONS}/{id}/fork", json=fields, timeout=timeout)


class Stream:
    """A stream that stands still; its tokens are known when its block is left."""

    def __init__(self, id: str) -> None:
        self.id = id
        self.tokens: defaultdict[int, list[int]] = defaultdict(list)
        """All tokens of each choice."""


@contextmanager
def held_stream(
    server: Server, path: str = COMPLETIONS, count: int = 1, **fields: Any
) -> Iterator[Stream]:
    asked = {**LONG, "stream": True, **fields}
    hold(server.folder, STEPS)
    try:
        with server.http.stream("POST", path, json=asked, timeout=120) as reply:
            assert reply.status_code == 200, reply.read()
            lines = (line[6:] for line in reply.iter_lines() if line.startswith("data: {"))
            events = [json.loads(next(lines))]
            stream = Stream(events[0]["id"])
            wait_until(lambda: num_sequences(server) == count)
            yield stream
            release(server.folder)
            for event in (*events, *map(json.loads, lines)):
                for choice in event["choices"]:
                    stream.tokens[choice["index"]] += choice.get("token_ids") or []
    finally:
        release(server.folder)


def in_line(server: Server, *calls: Any) -> list[Future[httpx.Response]]:
    """Forks that the engine has, which is held."""
    threads = ThreadPoolExecutor(len(calls))
    before = num_sequences(server)
    asked = [threads.submit(call) for call in calls]
    threads.shutdown(wait=False)
    for _ in tries():
        if num_sequences(server) == before + len(calls) * FORK["n"]:
            break
        assert not [own.result().text for own in asked if own.done()]
    return asked


def num_sequences(server: Server) -> float:
    return sum(server.metric(f"srm_engine_{name}_sequences") for name in ("running", "waiting"))


def check(server: Server, reply: httpx.Response, prompt: list[int], tokens: list[int]) -> None:
    """It is what the prompt gives whose tokens the sample had by then."""
    assert reply.status_code == 200, reply.text
    body = reply.json()
    position = body["forked_at"]
    assert len(prompt) <= position < len(prompt) + len(tokens)
    whole = complete(server, prompt=[(prompt + tokens)[:position]], **FORK)
    assert body["choices"] == whole["choices"]
    assert body["usage"]["prompt_tokens"] == position


@pytest.mark.parametrize("number", [0, 1])
def test_a_stream_forks_where_it_stands(servers: tuple[Server, ...], number: int) -> None:
    server, prompt = servers[number], [5, 6, 7]
    indices = (0, 1, 15)
    with held_stream(server, count=32, prompt=[[9], prompt], n=16) as stream:
        calls = [
            lambda index=index: fork(server, stream.id, index=index, prompt_index=1, **FORK)
            for index in indices
        ]
        forks = in_line(server, *calls)
        no_number = error_of(fork(server, stream.id, index=16), 404)["message"]
        assert no_number.startswith(f"sample index = 16 of prompt_index = 0 of {stream.id!r} ")
        error_of(fork(server, stream.id, prompt_index=2), 404)
    tokens = stream.tokens
    for index, reply in zip(indices, forks, strict=True):
        check(server, reply.result(), prompt, tokens[16 + index])
    assert error_of(fork(server, stream.id), 404)["message"] == (
        f"sample index = 0 of prompt_index = 0 of {stream.id!r} does not run: there is no such "
        "completion of yours, it has fewer prompts or samples, is a search, or the sample has ended"
    )
    server.wait_until_idle()


def test_what_goes_on_feeds_what_is_new(servers: tuple[Server, ...]) -> None:
    server = servers[0]
    with held_stream(server, prompt=[5, 6, 7]) as stream:
        call = lambda: fork(server, stream.id, prompt=[[8, 9]], **FORK)  # noqa: E731
        (forked,) = in_line(server, call)
    body, tokens = forked.result().json(), stream.tokens[0]
    assert body["forked_at"] > 3
    ids = [*[5, 6, 7, *tokens][: body["forked_at"]], 8, 9]
    assert body["choices"] == complete(server, prompt=[ids], **FORK)["choices"]
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == body["forked_at"] - 1


def test_chats_and_named_requests_fork_too(servers: tuple[Server, ...], text_model: Path) -> None:
    server = servers[1]
    messages = [{"role": "user", "content": "the cat"}]
    prompt = server.http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    with held_stream(server, CHATS, messages=messages) as stream:
        (forked,) = in_line(server, lambda: fork(server, stream.id, **FORK))
    check(server, forked.result(), prompt, stream.tokens[0])
    asked = {**LONG, "prompt": [[4], [5, 6]], "request_id": "mine"}
    with ThreadPoolExecutor(1) as threads, held(text_model, STEPS):
        whole = threads.submit(server.post, **asked)
        wait_until(lambda: num_sequences(server) == 2)
        (forked,) = in_line(server, lambda: fork(server, "mine", prompt_index=1, **FORK))
    check(server, forked.result(), [5, 6], whole.result().json()["choices"][1]["token_ids"])


def test_a_fork_streams_and_its_client_may_leave(servers: tuple[Server, ...]) -> None:
    server = servers[0]
    with held_stream(server, prompt=[5, 6, 7]) as stream:
        (leaving,) = in_line(server, lambda: fork(server, stream.id, **FORK, timeout=2))
        with pytest.raises(httpx.ReadTimeout):
            leaving.result()
        wait_until(lambda: num_sequences(server) == 1)
        (forked,) = in_line(server, lambda: fork(server, stream.id, **FORK, stream=True))
    lines = [line[6:] for line in forked.result().text.splitlines() if line.startswith("data: {")]
    events = [json.loads(line) for line in lines]
    (position,) = {event["forked_at"] for event in events}
    tokens: defaultdict[int, list[int]] = defaultdict(list)
    for event in events:
        for choice in event["choices"]:
            tokens[choice["index"]] += choice["token_ids"]
    ids = [5, 6, 7, *stream.tokens[0]][:position]
    whole = complete(server, prompt=[ids], **FORK)["choices"]
    assert [tokens[index] for index in range(3)] == [choice["token_ids"] for choice in whole]
    server.wait_until_idle()


def test_a_fork_that_nobody_reads_holds_nothing(servers: tuple[Server, ...]) -> None:
    server, asked = servers[0], {**FORK, "n": 200, "max_tokens": 40, "ignore_eos": True}
    with held_stream(server, prompt=[5, 6, 7]) as stream:
        unread = connect(server, f"{COMPLETIONS}/{stream.id}/fork", prompt=[[8]], **asked)
        wait_until(lambda: num_sequences(server) == 201)
    assert len(stream.tokens[0]) == LONG["max_tokens"]  # it has gone on
    server.wait_until_idle()
    assert complete(server, max_tokens=3)["choices"]
    received = read_all(unread)
    assert received.count(b'"finish_reason":"length"') == 200
    assert received.rstrip().endswith(b"data: [DONE]\n\n\r\n0")


@pytest.mark.parametrize(
    "fields",
    [
        {"state": f"state_{'0' * 32}"},
        {"cache_salt": "x"},
        {"truncate_prompt_tokens": 2},
        {"index": -1},
        {"prompt_index": "a"},
        {"promt": "a"},
    ],
)
def test_a_wrong_field_is_refused_by_name(server: Server, fields: dict[str, Any]) -> None:
    assert error_of(fork(server, "cmpl-1", **fields))["param"] == next(iter(fields))


def test_another_key_forks_nothing(text_model: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("".join(f"{name} {name * 16}\n" for name in "ab"))
    flags = (*SERVER_FLAGS, f"--api-keys-file={keys}", f"--admin-port={free_port()}")
    module = "tests.kit.processes.held_engine"
    with Server(text_model, *flags, engine_module=module) as server:
        server.http.headers["authorization"] = f"Bearer {'a' * 16}"
        with held_stream(server, request_id="mine", prompt=[5, 6]) as stream:
            (own,) = in_line(server, lambda: fork(server, "mine", **FORK))
            path = f"{COMPLETIONS}/mine/fork"
            other = {"authorization": f"Bearer {'b' * 16}"}
            error = error_of(server.http.post(path, json=FORK, headers=other), 404)
            assert error["message"].startswith("sample index = 0 of prompt_index = 0 of 'mine' ")
        check(server, own.result(), [5, 6], stream.tokens[0])
