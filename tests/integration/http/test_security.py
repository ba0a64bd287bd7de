"""Keys, limits, origins, ports and logs of a server that strangers can reach."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.kit.serving import (
    SERVER_FLAGS,
    Server,
    children,
    error_of,
    free_port,
    tries,
    wait_until,
)

ALICE, BOB, CAROL = "alice-0123456789abcdef", "bob-0123456789abcdef", "carol-0123456789abcdef"
SECRET_PROMPT = "the cat that nobody may know of"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the keys."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"alice {ALICE}\nbob {BOB}\n")
    return file


@pytest.fixture(scope="module")
def guarded(text_model: Path, file: Path) -> Iterator[Server]:
    flags = (
        *SERVER_FLAGS,
        "--api-processes=2",
        f"--api-keys-file={file}",
        "--requests-per-minute=20",
        "--tokens-per-minute=5000",
        f"--admin-port={free_port()}",
        "--log-format=json",
        "--log-level=debug",
    )
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SRM_API_KEYS", f"carol {CAROL}")
        running = Server(text_model, *flags)
    with running:
        yield running


def read_log(server: Server, part: str) -> list[str]:
    """Lines of the log, which is read as it comes."""
    return [line for line in list(server.lines) if part in line]


def ask(server: Server, key: str | None, **fields: object) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    body = {"prompt": SECRET_PROMPT, "max_tokens": 2, **fields}
    return server.http.post("/v1/completions", json=body, headers=headers)


@pytest.mark.parametrize("key", [None, "x", ALICE[:-1], ALICE + "x", "é" * 20])
def test_without_one_of_the_keys_there_is_a_401(guarded: Server, key: str | None) -> None:
    headers = {} if key is None else {b"Authorization": f"Bearer {key}".encode()}
    for reply in (
        guarded.http.post("/v1/completions", json={"prompt": "a"}, headers=headers),
        guarded.http.get("/v1/models", headers=headers),
        guarded.http.get("/nowhere", headers=headers),
    ):
        error = error_of(reply, 401)
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        assert reply.headers["www-authenticate"] == "Bearer"


def test_a_key_that_asks_too_often_is_a_429_that_says_when(guarded: Server) -> None:
    url, headers = f"{guarded.url}/v1/completions", {"Authorization": f"Bearer {BOB}"}
    body = {"prompt": "a", "max_tokens": 1}
    began, admitted = time.monotonic(), 0
    for _ in tries():  # a connection each, so that both processes count
        refused = httpx.post(url, json=body, headers=headers)
        if refused.status_code not in {200, 503}:  # a process may not have met the engine yet
            break
        admitted += 1
    assert 20 <= admitted <= 21 + (time.monotonic() - began) / 3, "it fills meanwhile"
    assert error_of(refused, 429)["type"] == "rate_limit_error"
    assert 1 <= int(refused.headers["retry-after"]) <= 120
    assert ask(guarded, ALICE).status_code == 200, "another key's limit is its own"


def test_tokens_are_limited_too(guarded: Server) -> None:
    many = {"n": 100, "max_tokens": 51, "ignore_eos": True}
    assert ask(guarded, CAROL, **many).status_code == 200
    refused = ask(guarded, CAROL)
    assert "tokens a minute" in error_of(refused, 429)["message"]
    assert int(refused.headers["retry-after"]) <= 120


def read_again(server: Server, message: str) -> None:
    """Its keys, by both API processes, which then say so in the log."""
    before = len(read_log(server, message))
    server.process.send_signal(signal.SIGHUP)
    wait_until(lambda: len(read_log(server, message)) >= before + 2)


def test_a_key_that_is_taken_back_ends_without_a_restart(guarded: Server, file: Path) -> None:
    dave = "dave-0123456789abcdef"
    text, pids = file.read_text(), children(guarded)
    assert ask(guarded, dave).status_code == 401
    file.write_text(f"{text}dave {dave}\n")
    read_again(guarded, "have been read again")
    assert ask(guarded, dave).status_code == 200
    file.write_text("dave short\n")
    read_again(guarded, "line 1: a key must have at least 16")
    assert ask(guarded, dave).status_code == 200, "what cannot be read changes nothing"
    file.write_text(text)
    read_again(guarded, "have been read again")
    assert [ask(guarded, key).status_code for key in (dave, ALICE)] == [401, 200]
    assert children(guarded) == pids


def test_metrics_are_on_their_own_port(guarded: Server) -> None:
    headers = {"Authorization": f"Bearer {ALICE}"}
    reply = guarded.http.get("/metrics", headers=headers)
    assert error_of(reply, 404)["code"] == "not_found"
    assert "srm_engine_steps_total" in guarded.admin.get("/metrics").text
    for probed in (guarded.admin, guarded.http):
        assert probed.get("/health").status_code == probed.get("/ready").status_code == 200
    assert guarded.admin.get("/v1/models").status_code == 401
    assert guarded.admin.get("/v1/models", headers=headers).status_code == 200


def test_keys_and_prompts_are_in_no_log_and_no_list_of_processes(guarded: Server) -> None:
    asked = ask(guarded, ALICE, echo=True)
    assert asked.status_code == 200
    for name, pid in children(guarded).items():
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
        environment = Path(f"/proc/{pid}/environ").read_bytes().decode()
        assert not any(key in command for key in (ALICE, BOB, CAROL))
        assert (CAROL in environment) == (name == "api")
    log = "".join(guarded.lines)
    assert not any(secret in log for secret in (ALICE, BOB, CAROL, SECRET_PROMPT))


def test_a_request_is_one_line_of_json_in_the_log(guarded: Server) -> None:
    headers = {"Authorization": f"Bearer {ALICE}", "x-request-id": "find-me"}
    body = {"prompt": [5, 6, 7], "max_tokens": 4, "n": 2, "ignore_eos": True}
    reply = guarded.http.post("/v1/completions", json=body, headers=headers)
    wait_until(lambda: read_log(guarded, '"find-me"'))
    (line,) = map(json.loads, read_log(guarded, '"find-me"'))
    expected = {"method": "POST", "route": "/v1/completions", "status": 200, "key": "alice"}
    expected |= {"level": "info", "prompt_tokens": 3, "completion_tokens": 8}
    assert line.items() >= {**expected, "completion_id": reply.json()["id"]}.items()
    assert line["seconds"] >= line["first_token_s"] > 0
