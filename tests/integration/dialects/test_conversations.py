"""Responses that are stored, gone on from by their ids, asked for and deleted.

The test model's weights are random, so what it says is seldom how its tokenizer would spell it.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import openai
import pytest

from tests.attack.damage import Disk
from tests.integration.dialects.test_exact_chats import EOS, tokens_of
from tests.kit.serving import (
    CHAT_TEMPLATE,
    SERVER_FLAGS,
    TEXT_MODEL,
    Server,
    answer_lines,
    children,
    complete,
    error_of,
    free_port,
    is_ready,
    wait_until,
    write_text_model,
)

PATH = "/v1/responses"
SCORES = ["message.output_text.logprobs"]
ASKED: dict[str, Any] = {"max_output_tokens": 4, "seed": 5, "store": True, "include": SCORES}
UNKNOWN = f"resp_{'0' * 32}"
KEPT = ": only those made with store = true are kept"
"""What `previous_response_id` says besides."""
END = "<|end_of_text|>\nuser: the cat\nassistant:"
TOOL = {
    **{"type": "function", "name": "f"},
    "parameters": {"properties": {"x": {"enum": ["the cat"]}}, "required": ["x"]},
}


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose context has room for twenty turns."""
    folder = tmp_path_factory.mktemp("models") / "long"
    write_text_model(folder, msgspec.structs.replace(TEXT_MODEL, n_ctx=1024))
    return folder


@pytest.fixture(scope="module")
def server(long: Path) -> Iterator[Server]:
    with Server(long, *SERVER_FLAGS, "--api-processes=2") as running:
        yield running


def post(server: Server, **fields: Any) -> httpx.Response:
    return server.http.post(PATH, json={"input": "the cat", **ASKED, **fields})


def respond(server: Server, **fields: Any) -> dict[str, Any]:
    reply = post(server, **fields)
    assert reply.status_code == 200, reply.text
    response: dict[str, Any] = reply.json()
    return response


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])


def scores_of(response: dict[str, Any]) -> list[float]:
    """The log-probabilities of its tokens."""
    (item,) = response["output"]
    return [score["logprob"] for score in item["content"][0]["logprobs"]]


def cached(response: dict[str, Any]) -> int:
    """How many tokens of its input the engine was not given."""
    return int(response["usage"]["input_tokens_details"]["cached_tokens"])


def is_next(response: dict[str, Any], previous: dict[str, Any]) -> bool:
    """Whether it has gone on from the state of another, which stands before its last token."""
    before: int = previous["usage"]["total_tokens"]
    return cached(response) == before - 1


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def count_stored(folder: Path) -> int:
    with closing(sqlite3.connect(folder / "states.sqlite3")) as database:
        (count,) = database.execute("SELECT count(*) FROM states").fetchone()
    return int(count)


def test_twenty_turns_are_one_long_prompt_bit_for_bit(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    asked = {**ASKED, "model": "long", "input": "the cat", "extra_body": {"seed": 5}}
    del asked["seed"]
    ids = [0, *tokens_of(server, "user: the cat\nassistant:")]
    behind = tokens_of(server, END)
    previous: str | None = None
    new = 0
    for turn in range(21):
        read = server.metric("srm_engine_prefill_tokens_total")
        made: Any
        if turn % 2:
            with client.responses.create(
                previous_response_id=previous, stream=True, **asked
            ) as stream:
                for event in stream:
                    made = getattr(event, "response", None)
        else:
            made = client.responses.create(previous_response_id=previous, **asked)
        read = server.metric("srm_engine_prefill_tokens_total") - read
        assert client.responses.retrieve(made.id) == made
        assert (made.store, made.previous_response_id) == (True, previous)
        response = made.to_dict()
        scored = {"max_tokens": 4, "seed": 5, "logprobs": 0, "return_token_ids": True}
        (expected,) = complete(server, prompt=[ids], **scored)["choices"]
        assert scores_of(response) == expected["logprobs"]["token_logprobs"]
        assert text_of(response) == expected["text"]
        assert response["usage"]["input_tokens"] == len(ids)
        if previous is not None:
            assert cached(response) == len(ids) - new - 1
            assert read <= new + 1 + len(expected["token_ids"])
        previous = made.id
        new = len(behind) - (expected["token_ids"][-1] == EOS)
        ids += [*expected["token_ids"], *behind[-new:]]
    assert len(ids) > 300


def test_what_comes_first_may_change_and_all_is_read_again(server: Server) -> None:
    first = respond(server, instructions="sat")
    again = respond(server, previous_response_id=first["id"], instructions="sat", input="on")
    assert is_next(again, first)
    turns = [user("the cat"), {"role": "assistant", "content": text_of(first)}, user("on")]
    for fields in ({}, {"instructions": "the mat"}, {"instructions": "sat", "tools": [TOOL]}):
        made = respond(server, previous_response_id=first["id"], input="on", **fields)
        expected = respond(server, input=turns, store=False, **fields)
        assert made["output"][0]["content"] == expected["output"][0]["content"]
        assert made["usage"]["input_tokens"] == expected["usage"]["input_tokens"]
        # What follows has the same beginning again.
        after = respond(server, previous_response_id=made["id"], input="on", **fields)
        assert is_next(after, made)
    assert expected["store"] is False and server.get(f"{PATH}/{expected['id']}").is_error


def test_a_call_is_answered_by_its_result(server: Server) -> None:
    fields = {"tools": [TOOL], "tool_choice": "required", "include": [], "max_output_tokens": 40}
    first = respond(server, **fields)
    (call,) = first["output"]
    assert (call["type"], call["status"]) == ("function_call", "completed")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "mat"}
    asked = {**fields, "previous_response_id": first["id"]}
    made = respond(server, input=[result], **asked)
    assert is_next(made, first)
    expected = respond(server, input=[user("the cat"), call, result], **fields)
    assert made["output"][0]["arguments"] == expected["output"][0]["arguments"]
    assert error_of(post(server, input=[{**result, "call_id": "1"}], **asked))["param"] == "input"
    # One that was cut is text, of which nothing came.
    cut = respond(server, stop="the", **fields)
    assert (cut["status"], cut["output"][0]["status"]) == ("incomplete", "incomplete")
    after = respond(server, **{**fields, "previous_response_id": cut["id"]})
    assert is_next(after, cut)


@pytest.mark.parametrize("method", ["GET", "DELETE", "POST"])
def test_what_is_not_there_is_named(server: Server, method: str) -> None:
    state = server.http.post("/v1/states", json={"prompt": "the cat"}).json()["id"]
    for id in (UNKNOWN, "resp_1", state, "é"):
        if method == "POST":
            reply, named = post(server, previous_response_id=id), "previous_response_id"
        else:
            reply, named = server.http.request(method, f"{PATH}/{id}"), "response_id"
        error = error_of(reply, 400 if method == "POST" else 404)
        assert error["code"] == ("previous_response_not_found" if method == "POST" else "not_found")
        assert (error["param"], error["message"]) == (
            *(named, f"there is no response {id!r}" + KEPT * (method == "POST")),
        )
    assert server.http.delete(f"/v1/states/{state}").is_success


def test_calls_of_openais_agents_are_refused_with_a_way(server: Server) -> None:
    for path, status, words in (
        ("/v1/conversations", 404, "previous_response_id of POST /v1/responses"),
        (f"{PATH}/compact", 405, "no turn is dropped here"),
    ):
        assert words in error_of(server.http.post(path, json={}), status)["message"]


def test_a_response_is_no_state_of_the_list(server: Server) -> None:
    id = respond(server)["id"]
    assert server.get("/v1/states").json()["data"] == []
    for reply in (server.get(f"/v1/states/{id}"), server.http.delete(f"/v1/states/{id}")):
        assert error_of(reply, 404)["message"] == f"there is no state {id!r}"
    assert server.http.delete(f"{PATH}/{id}").json() == {
        **{"id": id, "object": "response", "deleted": True},
    }
    assert error_of(server.get(f"{PATH}/{id}"), 404)["param"] == "response_id"


def test_a_wrong_method_is_told_all_that_a_path_takes(server: Server) -> None:
    for path in (f"{PATH}/x", "/v1/states/x"):
        reply = server.http.post(path, json={})
        assert error_of(reply, 405)["message"].endswith("; it takes DELETE, GET")
        assert reply.headers["allow"] == "DELETE, GET"


def test_a_response_is_deleted_while_the_next_begins(server: Server) -> None:
    first = respond(server)
    body = {"input": "on", **ASKED, "previous_response_id": first["id"], "stream": True}
    expected = respond(server, input="on", previous_response_id=first["id"])
    with server.http.stream("POST", PATH, json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert server.http.delete(f"{PATH}/{first['id']}").is_success
        *_, last = (line for line in lines if line.startswith("data: "))
    made = json.loads(last.removeprefix("data: "))["response"]
    assert scores_of(made) == scores_of(expected)
    assert server.get(f"{PATH}/{made['id']}").json() == made
    assert is_next(respond(server, previous_response_id=made["id"]), made)


def test_keys_have_responses_of_their_own_up_to_their_quota(long: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("".join(f"{name} {name * 16}\n" for name in "ab"))
    data = tmp_path / "data"
    flags = (f"--api-keys-file={keys}", "--max-state-bytes=8000", f"--data-dir={data}")
    with Server(long, *SERVER_FLAGS, *flags) as server:
        a, b = ({"authorization": f"Bearer {name * 16}"} for name in "ab")
        body = {"input": "the cat", **ASKED}
        id = server.http.post(PATH, json=body, headers=a).json()["id"]
        for reply, status in (
            (server.http.get(f"{PATH}/{id}", headers=b), 404),
            (server.http.delete(f"{PATH}/{id}", headers=b), 404),
            (server.http.post(PATH, json=body | {"previous_response_id": id}, headers=b), 400),
        ):
            message = f"there is no response {id!r}" + KEPT * (status == 400)
            assert error_of(reply, status)["message"] == message
        while (reply := server.http.post(PATH, json=body, headers=a)).is_success:
            pass
        assert "max_state_bytes = 8000" in error_of(reply, 403)["message"]
        count = count_stored(data)
        streamed = server.http.post(PATH, json=body | {"stream": True}, headers=a).text
        events = [
            json.loads(line.removeprefix("data: "))
            for line in streamed.splitlines()
            if line.startswith("data: ")
        ]
        assert [event["sequence_number"] for event in events] == [*range(len(events))]
        failed = events[-1]["response"]
        assert (events[-1]["type"], failed["store"]) == ("response.failed", False)
        assert "max_state_bytes = 8000" in failed["error"]["message"]
        assert error_of(server.http.get(f"{PATH}/{failed['id']}", headers=a), 404)
        assert count_stored(data) == count
        assert server.http.delete(f"{PATH}/{id}", headers=a).is_success
        assert server.http.post(PATH, json=body, headers=a).is_success
        server.wait_until_idle()


def test_a_client_that_leaves_a_stream_leaves_nothing(long: Path, tmp_path: Path) -> None:
    with Server(long, *SERVER_FLAGS, f"--data-dir={tmp_path}") as server:
        first = respond(server)["id"]
        body = {**ASKED, "max_output_tokens": 900, "previous_response_id": first, "stream": True}
        with server.http.stream("POST", PATH, json={"input": "on", **body}) as stream:
            next(stream.iter_lines())
        server.wait_until_idle()
        assert count_stored(tmp_path) == 1


@pytest.mark.parametrize("leaves", [True, False])
def test_who_dies_before_the_reply_leaves_no_response(
    long: Path, tmp_path: Path, leaves: bool
) -> None:
    """Its response waits for the database when the client leaves, or the process ends."""
    with Server(long, *SERVER_FLAGS, f"--data-dir={tmp_path}") as server:
        first, ended = respond(server)["id"], "srm_engine_requests_total"
        before = server.metric(ended, "finished")
        with (
            closing(sqlite3.connect(tmp_path / "states.sqlite3", isolation_level=None)) as database,
            closing(HTTPConnection(urlsplit(server.url).netloc)) as client,
        ):
            database.execute("BEGIN IMMEDIATE")
            body = {"input": "on", **ASKED, "previous_response_id": first}
            client.request("POST", PATH, json.dumps(body))
            wait_until(lambda: server.metric(ended, "finished") == before + 2)  # and its state
            if leaves:
                client.close()
                for _ in range(9):  # by then its process has seen that
                    server.get("/v1/models")
            else:
                os.kill(children(server)["api"], signal.SIGKILL)
                with pytest.raises((ConnectionError, HTTPException)):
                    client.getresponse()
            database.execute("COMMIT")
        wait_until(lambda: is_ready(server))
        server.wait_until_idle()
        made = respond(server, previous_response_id=first)
        assert server.get(f"{PATH}/{made['id']}").json() == made
        wait_until(lambda: count_stored(tmp_path) == 2)


@pytest.mark.skipif(os.geteuid() != 0, reason="a disk of one's own needs root")
def test_a_full_disk_keeps_responses_and_takes_no_more(long: Path, tmp_path: Path) -> None:
    with closing(Disk(tmp_path / "disk", 24)) as disk:
        data = disk.folder / "data"
        with Server(long, *SERVER_FLAGS, f"--data-dir={data}") as server:
            first = respond(server)
            disk.fill()
            asked = {"previous_response_id": first["id"]}
            assert "is left on the disk" in error_of(post(server, **asked), 507)["message"]
            *_, event, _ = post(server, **asked, stream=True).text.split("\n\n")
            failed = json.loads(event.partition("data: ")[2])["response"]
            assert (failed["status"], failed["store"]) == ("failed", False)
            assert "is left on the disk" in failed["error"]["message"]
            assert server.get(f"{PATH}/{first['id']}").json() == first
            assert respond(server, **asked, store=False)["status"]
            server.wait_until_idle()
            disk.free()
            made = respond(server, **asked)
            assert server.get(f"{PATH}/{made['id']}").json() == made
            assert count_stored(data) == 2
        assert "Traceback" not in "".join(server.lines)


def test_a_conversation_goes_on_at_another_server(folders: Path, tmp_path: Path) -> None:
    """After a restart, other weights, and with another tokenizer of the same model."""
    flags = (*SERVER_FLAGS, f"--data-dir={tmp_path}", f"--weights-dir={folders}")
    with Server(folders / "0", *flags) as server:
        first = respond(server)
        expected = respond(server, previous_response_id=first["id"])
    with Server(folders / "0", *flags, f"--admin-port={free_port()}") as server:
        assert server.get(f"{PATH}/{first['id']}").json() == first
        full = respond(server, max_output_tokens=None)  # which has no state
        assert full["usage"]["total_tokens"] == TEXT_MODEL.n_ctx + 1
        assert server.get(f"{PATH}/{full['id']}").json() == full
        error = error_of(post(server, previous_response_id=full["id"]))
        assert error["code"] == "context_length_exceeded" and error["param"] == "input"
        made = respond(server, previous_response_id=first["id"])
        assert made["output"][0]["content"] == expected["output"][0]["content"]
        assert is_next(made, first) and is_next(expected, first)
        loaded = server.admin.post("/v1/admin/weights", json={"path": str(folders / "1")})
        assert loaded.status_code == 200, loaded.text
        made = respond(server, previous_response_id=first["id"])
        assert made["usage"]["input_tokens"] == expected["usage"]["input_tokens"]
        assert not cached(made)
        assert scores_of(made) != scores_of(expected)
        assert is_next(respond(server, previous_response_id=made["id"]), made)
    other = tmp_path / "other"
    write_text_model(other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["c"], vocab["t"] = vocab["t"], vocab["c"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with Server(other, *flags) as server:
        made = respond(server, previous_response_id=first["id"])
        turns = [user("the cat"), {"role": "assistant", "content": text_of(first)}]
        expected = respond(server, input=[*turns, user("the cat")])
        assert made["output"][0]["content"] == expected["output"][0]["content"]


def test_a_template_that_shows_no_answers_is_rendered(long: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    shown = "{{ message.content if message.role != 'assistant' else '-' }}"
    template.write_text(CHAT_TEMPLATE.replace("{{ message.content }}", shown))
    with Server(long, *SERVER_FLAGS, f"--chat-template={template}") as server:
        first = respond(server)
        made = respond(server, previous_response_id=first["id"])
        turns = [user("the cat"), {"role": "assistant", "content": "?"}, user("the cat")]
        assert scores_of(made) == scores_of(respond(server, input=turns))


def test_a_line_goes_on_from_a_response_and_stores_none(server: Server) -> None:
    first = respond(server)["id"]
    asked = {"input": "on", **ASKED, "store": False, "previous_response_id": first}
    bodies = [asked, {**asked, "store": True}, {**asked, "previous_response_id": UNKNOWN}]
    output, errors = answer_lines(server, PATH, bodies)
    assert scores_of(output[0]) == scores_of(respond(server, **asked))
    assert {body["error"]["message"] for body in errors} == {
        "store = true is not for lines of a batch",
        f"there is no response {UNKNOWN!r}{KEPT}",
    }
