"""Responses made in the background: every state that they may be in, and whoever ends them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.integration.dialects.test_conversations import PATH, TOOL, cached, count_stored
from tests.kit.processes.held_engine import held
from tests.kit.serving import (
    SERVER_FLAGS,
    Server,
    answer_lines,
    children,
    error_of,
    is_ready,
    wait_until,
)

HELD = "tests.kit.processes.held_engine"
ASKED: dict[str, Any] = {"input": "the cat", "seed": 5, "store": True}
ENDED = {"completed", "failed", "incomplete", "cancelled"}


@pytest.fixture(scope="module")
def server(text_model: Path) -> Iterator[Server]:
    """Two processes answer, each of a connection by chance."""
    with Server(text_model, *SERVER_FLAGS, "--api-processes=2", engine_module=HELD) as running:
        yield running


def post(server: Server, **fields: Any) -> dict[str, Any]:
    body = {**ASKED, "background": True, **fields}
    reply = httpx.post(f"{server.url}{PATH}", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    response: dict[str, Any] = reply.json()
    assert (response["status"], response["background"]) == ("in_progress", True)
    return response


def get(server: Server, response: dict[str, Any]) -> dict[str, Any]:
    """It by now, of whichever process."""
    reply = httpx.get(f"{server.url}{PATH}/{response['id']}", timeout=120)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def cancel(server: Server, response: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}{PATH}/{response['id']}/cancel", timeout=120)


def ended(server: Server, response: dict[str, Any]) -> dict[str, Any]:
    wait_until(lambda: get(server, response)["status"] in ENDED)
    return get(server, response)


def test_it_is_in_progress_until_it_is_made(server: Server) -> None:
    short: dict[str, Any] = {"max_output_tokens": 9}
    calls: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required", "max_output_tokens": 40}
    with held(server.folder):
        begun = [post(server, **short), post(server, **calls)]
        for response in begun * 4:
            assert get(server, response) == response and response["output"] == []
        body = {**ASKED, "previous_response_id": begun[0]["id"]}
        error = error_of(server.http.post(PATH, json=body), 409)
        assert error["param"] == "previous_response_id" and "GET /v1/responses" in error["message"]
    made = [ended(server, response) for response in begun]
    assert [response["status"] for response in made] == ["incomplete", "completed"]
    for response, first, fields in zip(made, begun, (short, calls), strict=True):
        expected = server.http.post(PATH, json={**ASKED, **fields}).json()
        own = {"id", "created_at", "output", "background", "usage"}
        assert all(response[name] == expected[name] for name in expected.keys() - own)
        for item, other in zip(response["output"], expected["output"], strict=True):
            assert item.get("content") == other.get("content")
            assert item.get("arguments") == other.get("arguments")
        assert response.keys() == first.keys() and response["id"] == first["id"]
    after = server.http.post(PATH, json={**ASKED, "previous_response_id": made[0]["id"]}).json()
    assert cached(after) == made[0]["usage"]["total_tokens"] - 1
    assert [cancel(server, response).json() for response in made] == made  # too late


def test_any_process_cancels_or_deletes_it(server: Server) -> None:
    with held(server.folder):
        begun = [post(server) for _ in range(12)]
        for response in begun[:6]:
            expected = {**response, "status": "cancelled"}
            assert cancel(server, response).json() == expected
            assert get(server, response) == cancel(server, response).json() == expected
        for response in begun[6:]:
            path = f"{server.url}{PATH}/{response['id']}"
            assert httpx.delete(path).json()["deleted"]
            for reply in (httpx.get(path), httpx.delete(path), cancel(server, response)):
                assert error_of(reply, 404)["param"] == "response_id"
        server.wait_until_idle()  # though the engine makes no step: none holds a slot
    for response in begun[:6]:
        assert get(server, response)["status"] == "cancelled"
        body = {**ASKED, "previous_response_id": response["id"]}
        assert "was cancelled" in error_of(server.http.post(PATH, json=body), 409)["message"]
    assert [httpx.get(f"{server.url}{PATH}/{each['id']}").status_code for each in begun[6:]] == (
        [404] * 6
    )


def test_openais_client_polls_and_cancels(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    with held(server.folder):
        asked: dict[str, Any] = {"model": server.folder.name, "input": "the cat", "store": True}
        first = client.responses.create(background=True, max_output_tokens=9, **asked)
        second = client.responses.create(background=True, **asked)
        included: list[Any] = ["message.output_text.logprobs", "reasoning.encrypted_content"]
        assert client.responses.retrieve(first.id, include=included) == first
        assert client.responses.retrieve(first.id) == first and first.status == "in_progress"
        assert client.responses.cancel(second.id).status == "cancelled"
        refused = pytest.raises(openai.BadRequestError, match="stream must be false")
        with refused, client.responses.retrieve(first.id, stream=True):
            pass
    wait_until(lambda: client.responses.retrieve(first.id, stream=False).status == "incomplete")
    whole = client.responses.create(**asked)
    assert client.responses.cancel(whole.id) == whole


def test_neither_a_stream_nor_a_line_is_in_the_background(server: Server) -> None:
    reply = server.http.post(PATH, json={**ASKED, "background": True, "stream": True})
    error = error_of(reply)
    assert (error["param"], "without stream" in error["message"]) == ("background", True)
    bodies = [{**ASKED, "store": False}, {**ASKED, "background": True}]
    _, [line] = answer_lines(server, PATH, bodies)
    assert line["error"]["message"] == "store = true is not for lines of a batch"


def test_what_finds_no_room_has_failed(text_model: Path, tmp_path: Path) -> None:
    flags = ("--num-slots=1", "--max-waiting=1", f"--data-dir={tmp_path}", "--stall-s=1000")
    with Server(text_model, *flags, engine_module=HELD) as server:
        with held(server.folder):
            begun = [post(server, max_output_tokens=9) for _ in range(3)]
            failed = ended(server, begun[2])
            assert failed["error"]["type"] == "server_overloaded" and failed["output"] == []
            assert (failed["status"], failed["store"]) == ("failed", True)
            assert cancel(server, begun[2]).json() == failed
            assert [get(server, each)["status"] for each in begun[:2]] == ["in_progress"] * 2
        assert [ended(server, each)["status"] for each in begun[:2]] == ["incomplete"] * 2


def test_it_is_its_keys_own_and_in_its_limits(text_model: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("".join(f"{name} {name * 16}\n" for name in "ab"))
    flags = (f"--api-keys-file={keys}", "--max-state-bytes=2600", f"--data-dir={tmp_path / 'data'}")
    limit = ("--tokens-per-minute=20",)
    a, b = ({"authorization": f"Bearer {name * 16}"} for name in "ab")
    body = {**ASKED, "background": True, "metadata": dict.fromkeys("ab", "x" * 512)}
    with Server(text_model, *SERVER_FLAGS, *flags, *limit, engine_module=HELD) as server:

        def there() -> dict[str, Any]:
            reply: dict[str, Any] = server.http.get(path, headers=a).json()
            return reply

        with held(server.folder):
            path = f"{PATH}/{server.http.post(PATH, json=body, headers=a).json()['id']}"
            for reply in (
                server.http.get(path, headers=b),
                server.http.delete(path, headers=b),
                server.http.post(f"{path}/cancel", headers=b),
            ):
                assert "there is no response" in error_of(reply, 404)["message"]
            assert there()["status"] == "in_progress"
            full = server.http.post(PATH, json=body, headers=a)
            assert "max_state_bytes = 2600" in error_of(full, 403)["message"]
        wait_until(lambda: there()["status"] == "failed")  # with its state it is larger
        assert "max_state_bytes = 2600" in there()["error"]["message"]
        limited = server.http.post(PATH, json=body, headers=a)
        assert error_of(limited, 429)["code"] == "rate_limit_exceeded"
        assert server.http.delete(path, headers=a).is_success
        assert count_stored(tmp_path / "data") == 0


def test_it_has_failed_once_its_process_is_killed(text_model: Path, tmp_path: Path) -> None:
    flags = (*SERVER_FLAGS, f"--data-dir={tmp_path}")
    with Server(text_model, *flags, engine_module=HELD) as server, held(server.folder):
        begun = [post(server), post(server)]
        os.kill(children(server)["api"], signal.SIGKILL)
        wait_until(lambda: is_ready(server))
        failed = [get(server, response) for response in begun]
        assert "the process that made it has ended" in failed[0]["error"]["message"]
        assert failed[0] == {**begun[0], "status": "failed", "error": failed[0]["error"]}
        assert cancel(server, begun[0]).json() == failed[0]
        server.wait_until_idle()
        begun.append(post(server))
        server.process.kill()
        server.wait()
    with Server(text_model, *flags) as server:
        assert [ended(server, response)["status"] for response in begun] == ["failed"] * 3
        assert get(server, begun[0]) == failed[0]
        assert server.http.delete(f"{PATH}/{begun[0]['id']}").json()["deleted"]
        assert count_stored(tmp_path) == 2


def test_a_stop_waits_for_it_as_long_as_for_requests(text_model: Path, tmp_path: Path) -> None:
    flags = (*SERVER_FLAGS, f"--data-dir={tmp_path}")
    with Server(text_model, *flags, "--drain-s=600", engine_module=HELD) as server:
        with held(server.folder):
            made = post(server, max_output_tokens=9)
            server.process.terminate()
            wait_until(lambda: not is_ready(server))
            for _ in range(9):  # it goes on being asked
                assert get(server, made)["status"] == "in_progress"
            assert error_of(cancel(server, made), 503)["message"] == "the server is shutting down"
        assert server.wait() == 0
    with Server(text_model, *flags, "--drain-s=0", engine_module=HELD) as server:
        assert get(server, made)["status"] == "incomplete" and get(server, made)["output"]
        with held(server.folder):
            broken = post(server)
            assert server.stop() == 0
    with Server(text_model, *flags) as server:
        error = get(server, broken)["error"]
        assert error["message"] == "the server is shutting down"
        assert get(server, made)["status"] == "incomplete"
