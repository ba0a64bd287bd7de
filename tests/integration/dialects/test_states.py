"""States over HTTP: what goes on from one is what the whole prompt gives, here and elsewhere."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load, save

from srm.engine.state_file import StateContent, to_file
from tests.kit.serving import (
    COMPLETIONS,
    SERVER_FLAGS,
    TEXT_MODEL,
    Server,
    answer_lines,
    complete,
    error_of,
    free_port,
)

STATES = "/v1/states"
SAMPLING: dict[str, Any] = {"n": 3, "max_tokens": 6, "seed": 5, "return_token_ids": True}
UNKNOWN = f"state_{'0' * 32}"


def make(server: Server, **fields: Any) -> dict[str, Any]:
    reply = server.http.post(STATES, json=fields)
    assert reply.status_code == 200, reply.text
    made: dict[str, Any] = reply.json()
    return made


def content(server: Server, id: str) -> bytes:
    reply = server.get(f"{STATES}/{id}/content")
    assert reply.status_code == 200, reply.text
    return reply.content


def put(server: Server, id: str, file: bytes) -> httpx.Response:
    return server.http.put(f"{STATES}/{id}/content", content=file)


def go_on(server: Server, id: str, **fields: Any) -> dict[str, Any]:
    reply = server.http.post(COMPLETIONS, json={"state": id, **fields})
    assert reply.status_code == 200, reply.text
    completed: dict[str, Any] = reply.json()
    return completed


def tokens(reply: dict[str, Any]) -> list[list[int]]:
    return [choice["token_ids"] for choice in reply["choices"]]


@pytest.fixture(scope="module")
def servers(text_model: Path) -> Iterator[tuple[Server, Server]]:
    """Two servers of the same weights, each with a folder of its own and two API processes."""
    flags = (*SERVER_FLAGS, "--max-state-bytes=20000", "--api-processes=2")
    with Server(text_model, *flags) as first, Server(text_model, *flags) as second:
        yield first, second


def test_a_prompt_from_a_state_feeds_what_is_new(server: Server) -> None:
    made = make(server, prompt="the cat sat", metadata={"turn": "1"}, ttl_s=60)
    assert made["metadata"] == {"turn": "1"} and made["expires_at"] - made["created_at"] == 60
    listed = server.get(f"{STATES}?limit=1").json()
    assert listed["data"] == [made] == [server.get(f"{STATES}/{made['id']}").json()]
    whole = complete(server, prompt="the cat sat on", **SAMPLING)
    before = server.metric("srm_engine_prefill_tokens_total")
    reply = go_on(server, made["id"], prompt=" on", **SAMPLING)
    assert tokens(reply) == tokens(whole)
    assert reply["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    fed = whole["usage"]["prompt_tokens"] - made["tokens"]
    assert server.metric("srm_engine_prefill_tokens_total") - before == fed
    again = go_on(server, made["id"], **SAMPLING)  # nothing is fed
    assert tokens(again) == tokens(complete(server, prompt="the cat sat", **SAMPLING))
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == made["tokens"] - 1


def test_a_sample_is_gone_on_from(server: Server) -> None:
    prompt = server.http.post("/tokenize", json={"prompt": "the cat"}).json()["tokens"]
    first = complete(server, save_state=True, ignore_eos=True, **SAMPLING)
    for choice in first["choices"]:
        rest = go_on(server, choice["state"], prompt=[[3, 4]], **SAMPLING)
        ids = [*prompt, *choice["token_ids"], 3, 4]
        assert tokens(rest) == tokens(complete(server, prompt=[ids], **SAMPLING))
    long = {"ignore_eos": True, "save_state": True, "max_tokens": TEXT_MODEL.n_ctx}
    assert complete(server, **long)["choices"][0]["state"] is None  # the context is full


def test_a_line_of_a_batch_goes_on_from_a_state(server: Server) -> None:
    id = make(server, prompt="the cat")["id"]
    bodies = [{"state": id, **SAMPLING}, {"state": UNKNOWN}, {"prompt": "a", "save_state": True}]
    (body,), errors = answer_lines(server, COMPLETIONS, bodies)
    assert tokens(body) == tokens(go_on(server, id, **SAMPLING))
    messages = {body["error"]["message"] for body in errors}
    assert messages == {
        f"there is no state {UNKNOWN!r}",
        "save_state is not for lines of a batch",
    }


def test_another_server_takes_a_state(servers: tuple[Server, Server]) -> None:
    first, second = servers
    made = make(first, prompt="the cat sat on the mat")
    file = content(first, made["id"])
    taken_over = put(second, made["id"], file)
    assert taken_over.status_code == 200, taken_over.text
    assert content(second, made["id"]) == file
    assert put(second, made["id"], file).json() == taken_over.json()  # changes nothing
    another = make(first, prompt="a")["id"]
    assert error_of(put(second, made["id"], content(first, another)), 409)["param"] == "state_id"
    replies = [go_on(server, made["id"], **SAMPLING) for server in servers]
    assert tokens(replies[0]) == tokens(replies[1])


def damaged(file: bytes, at: int) -> bytes:
    return file[:at] + bytes([file[at] ^ 1]) + file[at + 1 :]


def with_(file: bytes, **changes: Any) -> bytes:
    """The file with other arrays, or another field of what it says."""
    arrays = load(file)
    (length,) = np.frombuffer(file[:8], "<u8")
    ((name, about),) = json.loads(file[8 : 8 + int(length)])["__metadata__"].items()
    fields = json.loads(about) | {key: changes[key] for key in changes if key not in arrays}
    arrays |= {key: changes[key] for key in changes if key in arrays}
    return save(arrays, metadata={fields.pop("format", name): json.dumps(fields)})


def test_a_wrong_file_is_refused_by_name(server: Server) -> None:
    made = make(server, prompt="the cat sat")
    file = content(server, made["id"])
    state, ids = (load(file)[name] for name in ("state", "token_ids"))
    whole = StateContent(ids.tobytes(), state.tobytes())
    assert to_file(whole, made["fingerprint"], made["arithmetic"]) == file
    cases = [
        (b"", "file"),
        (file[:-1], "file"),
        (file[:20], "file"),
        (b"{}" * 40, "file"),
        (damaged(file, len(file) - 1), "file"),
        (save({str(i): np.zeros(0) for i in range(9)}), "file"),
        (with_(file, format="srm-state-2"), "file"),
        (with_(file, digest="0" * 32), "file"),
        (with_(file, state=state.astype(np.float64)), "state"),
        (with_(file, state=state[None]), "state"),
        (with_(file, token_ids=ids.astype(np.int64)), "token_ids"),
        (with_(file, fingerprint="tiny-9"), "file"),
        (to_file(whole, "tiny-9", made["arithmetic"]), "fingerprint"),
        (to_file(whole, made["fingerprint"], "gpu bfloat16"), "arithmetic"),
    ]
    for wrong, named in cases:
        status = 409 if named in {"fingerprint", "arithmetic"} else 400
        assert error_of(put(server, UNKNOWN, wrong), status)["param"] == named
    assert "there can be no state 'x'" in error_of(put(server, "x", file), 404)["message"]
    assert put(server, UNKNOWN, bytes(20_000)).status_code == 413
    form = {"content-type": "application/x-www-form-urlencoded"}
    path = f"{STATES}/{UNKNOWN}/content"
    error = error_of(server.http.put(path, content=file, headers=form), 415)
    assert "content-type must be application/octet-stream" in error["message"]
    assert server.get(f"{STATES}/{UNKNOWN}").status_code == 404


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (STATES, {}, "prompt"),
        (STATES, {"prompt": ["a", "b"]}, "prompt"),
        (STATES, {"prompt": [4, 999_999]}, "prompt"),
        (STATES, {"prompt": [1] * 200}, "prompt"),
        (STATES, {"prompt": "a", "ttl_s": 0}, "ttl_s"),
        (STATES, {"prompt": "a", "refeed": True}, "refeed"),
        (STATES, {"prompt": "a", "promt": "b"}, "promt"),
        (STATES, {"state": "state_1"}, "state"),
        (COMPLETIONS, {"state": "../x"}, "state"),
        (COMPLETIONS, {"prompt": "a", "refeed": True}, "refeed"),
        (COMPLETIONS, {"prompt": "a", "save_state": True, "stream": True}, "stream"),
        (COMPLETIONS, {"prompt": "a", "save_state": True, "return": "counts"}, "return"),
        (COMPLETIONS, {"prompt": "a", "save_state": True, "n": 1_025}, "n"),
        (COMPLETIONS, {"state": UNKNOWN, "truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
    ],
)
def test_a_wrong_field_is_refused_by_name(
    server: Server, path: str, body: dict[str, Any], named: str
) -> None:
    assert error_of(server.http.post(path, json=body))["param"] == named


def test_a_key_has_states_of_its_own_up_to_its_quota(text_model: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("".join(f"{name} {name * 16}\n" for name in "ab"))
    flags = (*SERVER_FLAGS, f"--api-keys-file={keys}", "--max-state-bytes=2500")
    limit = "--tokens-per-minute=100"
    with Server(text_model, *flags, limit) as server:
        a = {"authorization": f"Bearer {'a' * 16}"}
        read = {"prompt": [3] * 101}
        statuses = [server.http.post(STATES, json=read, headers=a).status_code for _ in "12"]
        assert statuses == [200, 429]  # what is read is charged
    with Server(text_model, *flags) as server:
        a, b = ({"authorization": f"Bearer {name * 16}"} for name in "ab")
        asked = server.http.post(STATES, json={"prompt": "the cat"}, headers=a).json()
        path, id = f"{STATES}/{asked['id']}", asked["id"]
        for reply in (
            server.http.get(path, headers=b),
            server.http.delete(path, headers=b),
            server.http.get(f"{path}/content", headers=b),
            server.http.post(COMPLETIONS, json={"state": id}, headers=b),
        ):
            error = error_of(reply, 404)
            named = "state" if reply.request.method == "POST" else "state_id"
            assert (error["message"], error["param"]) == (f"there is no state {id!r}", named)
        assert server.http.get(STATES, headers=b).json()["data"] == []
        while (reply := server.http.post(STATES, json={"prompt": "a cat"}, headers=a)).is_success:
            pass
        message = error_of(reply, 403)["message"]
        assert re.match(r"your states take \d+ bytes, this one \d+, and max_state_bytes", message)
        many = {"prompt": "a", "n": 9, "save_state": True}
        before = server.http.get(STATES, headers=b).json()
        error_of(server.http.post(COMPLETIONS, json=many, headers=b), 403)
        assert server.http.get(STATES, headers=b).json() == before  # all are made or none
        assert server.http.post(STATES, json={"prompt": "a"}, headers=b).is_success
        assert server.http.delete(path, headers=a).json()["deleted"]
        assert server.http.post(STATES, json={"prompt": "a cat"}, headers=a).is_success


def test_other_weights_refuse_a_state_or_feed_it(folders: Path, tmp_path: Path) -> None:
    flags = (*SERVER_FLAGS, f"--weights-dir={folders}", f"--admin-port={free_port()}")
    with Server(folders / "0", *flags) as server:
        id = make(server, prompt=[5, 6, 7])["id"]
        loaded = server.admin.post("/v1/admin/weights", json={"path": str(folders / "1")})
        assert loaded.status_code == 200, loaded.text
        for path in (COMPLETIONS, STATES):
            error = error_of(server.http.post(path, json={"state": id}), 409)
            assert "tiny-0" in error["message"] and "tiny-1" in error["message"]
        asked = {"max_tokens": 5, "return_token_ids": True, "seed": 1}
        reply = go_on(server, id, refeed=True, prompt=[8], **asked)
        assert tokens(reply) == tokens(complete(server, prompt=[5, 6, 7, 8], **asked))
        again = make(server, state=id, refeed=True)["id"]
        assert tokens(go_on(server, again, prompt=[8], **asked)) == tokens(reply)
