"""A batch on one server whose lines other servers answer too: each once, whatever happens."""

from __future__ import annotations

import json
import shutil
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from srm.server.batch.worker_answers import Expected
from srm.server.schema.worker import LineAnswer, Url
from tests.chaos.jobs import completion_line, results, submit, wait_for
from tests.kit.engines.held_engine import hold, release
from tests.kit.serving import SERVER_FLAGS, Server, error_of, wait_until

NUM_LINES = 300
WITHIN_S = 600  # of a busy machine
HELD = "tests.kit.engines.held_engine"
KEY = "sk-wwwwwwwwwwwwwwww"


def some_lines() -> list[dict[str, Any]]:
    """Every fiftieth is at fault; some have more samples than others."""
    return [
        completion_line(number, n=1 + number % 3, top_p=2 if number % 50 == 7 else 1)
        for number in range(NUM_LINES)
    ]


def copied(model: Path, folder: Path) -> Path:
    """The same model in another folder of its name, to be held by itself."""
    return shutil.copytree(model, folder / model.name)


def owner(model: Path, data: Path, *flags: str, engine_module: str = HELD) -> Server:
    settings = (*SERVER_FLAGS, f"--data-dir={data}", "--batch-fsync-s=0", *flags)
    return Server(model, *settings, engine_module=engine_module)


def remote(server: Server, outcome: str) -> float:
    return server.metric("srm_batch_remote_lines_total", outcome)


def sequences(server: Server) -> float:
    """How many the engine has, of which few have a slot while it is held."""
    return sum(server.metric(f"srm_engine_{name}_sequences") for name in ("running", "waiting"))


def test_a_fleet_changes_no_byte_though_one_server_is_killed(
    text_model: Path, tmp_path: Path
) -> None:
    data, here, there = tmp_path / "data", tmp_path / "here", tmp_path / "there"
    batch = submit(data, some_lines())
    alone = shutil.copytree(data, tmp_path / "alone")
    with owner(text_model, alone):
        wanted = wait_for(alone, batch, WITHIN_S)
    assert (wanted.status, wanted.completed, wanted.failed) == ("completed", 294, 6)
    model, stuck = copied(text_model, here), copied(text_model, there)
    hold(stuck)
    with ExitStack() as opened:
        helper = opened.enter_context(Server(text_model, *SERVER_FLAGS))
        doomed = opened.enter_context(Server(stuck, *SERVER_FLAGS, engine_module=HELD))
        hold(model, 0)  # until the others are known
        again = helper.url.replace("127.0.0.1", "localhost")
        urls = f"--batch-workers={helper.url},{doomed.url},{again}"
        first = opened.enter_context(owner(model, data, urls))
        wait_until(lambda: remote(first, "answered") >= 20)
        release(model)
        wait_until(lambda: sequences(doomed) >= 10)
        doomed.process.send_signal(signal.SIGKILL)
        doomed.wait()
        record = wait_for(data, batch, WITHIN_S)
        assert remote(first, "lost") >= 10
        assert helper.metric("srm_completion_tokens_total") > 0
        # Counted at the next look: the helper alone, though it has two addresses.
        wait_until(lambda: first.metric("srm_batch_workers") == 1)
    assert (record.completed, record.failed) == (294, 6)
    assert (record.input_tokens, record.output_tokens) == (
        wanted.input_tokens,
        wanted.output_tokens,
    )
    assert results(data, record) == results(alone, wanted)


def test_what_is_cancelled_ends_on_the_other_servers(text_model: Path, tmp_path: Path) -> None:
    """With the key that they want."""
    data, keys, key = tmp_path / "data", tmp_path / "keys", tmp_path / "key"
    keys.write_text(f"alice sk-aaaaaaaaaaaaaaaa\nworker-1 {KEY}\n")
    key.write_text(f"{KEY}\n")
    model = copied(text_model, tmp_path / "there")
    batch = submit(data, [completion_line(number, max_tokens=100) for number in range(NUM_LINES)])
    hold(model)
    settings = (*SERVER_FLAGS, f"--api-keys-file={keys}")
    with Server(model, *settings, engine_module=HELD) as helper:
        helper.http.headers["authorization"] = "Bearer sk-aaaaaaaaaaaaaaaa"
        assert error_of(helper.get("/v1/worker"), 403)["code"] == "not_permitted"
        here = copied(text_model, tmp_path / "here")
        hold(here)
        urls = (f"--batch-workers={helper.url}", f"--batch-worker-key-file={key}")
        with owner(here, data, *urls) as first:
            wait_until(lambda: sequences(helper) >= 10)
            assert first.http.post(f"/v1/batches/{batch.id}/cancel").status_code == 200
            record = wait_for(data, batch, WITHIN_S)
            assert (record.status, record.failed) == ("cancelled", NUM_LINES)
            helper.wait_until_idle()


def test_servers_that_answer_otherwise_are_sent_nothing(text_model: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    other = copied(text_model, tmp_path / "other")
    (other / "seed").write_text("1")
    keys = tmp_path / "keys"
    keys.write_text(f"worker {KEY}\n")
    named = (*SERVER_FLAGS, "--served-model-name=another")
    with ExitStack() as opened:
        unlike = opened.enter_context(Server(other, *SERVER_FLAGS))
        another = opened.enter_context(Server(text_model, *named))
        locked = opened.enter_context(Server(text_model, *SERVER_FLAGS, f"--api-keys-file={keys}"))
        urls = [unlike.url, another.url, locked.url, "http://127.0.0.1:1"]
        batch = submit(data, some_lines())
        held = copied(text_model, tmp_path / "here")
        hold(held, 0)
        first = opened.enter_context(owner(held, data, f"--batch-workers={','.join(urls)}"))
        reasons = ["weights is 'tiny-1' and not 'tiny-0'", "served_model_name is 'another'",
                   "401: ", "ConnectError"]  # fmt: skip
        for url, why in zip(urls, reasons, strict=True):
            wait_until(lambda: any(url in line and why in line for line in first.lines))  # noqa: B023
        release(held)
        record = wait_for(data, batch, WITHIN_S)
        assert (record.completed, record.failed) == (294, 6)
        assert remote(first, "answered") == remote(first, "lost") == 0


SHAPES: list[dict[str, Any]] = [
    {},
    {"n": 3, "max_tokens": 5, "stop": ["e", "a"]},
    {"n": 2, "best_of": 4},
    {"prompt": ["the cat", "sat", "on"], "n": 2},
    {"prompt": [[5, 6], [7]], "max_tokens": 1},
    {"echo": True, "max_tokens": 0},
    {"echo": True, "logprobs": 5, "n": 2},
    {"prompt_logprobs": 3, "logprobs": 20, "return_token_ids": True},
    {"return_packed": True, "logprobs": 2, "prompt_logprobs": 1, "n": 2},
    {"logprobs": 0, "logprob_token_ids": [*range(20)], "n": 2},
    {"prompt_logprobs": 0, "prompt_logprob_token_ids": [9, 5], "return_packed": True},
    {"until": {"match": ".", "count": 2}, "n": 20},
    {"until": {"match": "zzzzzz"}, "n": 3},
    {"return": "counts", "n": 20},
    {"return": "unique", "n": 20},
    {"verify": {"match": "[aeiou]"}, "n": 20, "return": "counts", "count_by": "score"},
    {"verify": {"match": "[aeiou]"}, "n": 9, "until": {"score": 1, "count": 2}, "logprobs": 1},
    {"verify": {"match": "[aeiou]"}, "n": 3, "return_packed": True, "stop": ["e"]},
    {"request_id": "mine", "max_tokens": 10_000, "truncate_prompt_tokens": 2},
    {"stop_token_ids": [*range(64)], "min_tokens": 1},
]
CHATS: list[dict[str, Any]] = [
    {},
    {"n": 2, "max_tokens": 5},
    {"max_completion_tokens": 3, "logprobs": True, "top_logprobs": 20},
    {"logprobs": True, "logprob_token_ids": [*range(20)]},
    {"prompt_logprobs": 2, "return_token_ids": True},
    {"return": "counts", "n": 5},
    {"verify": {"match": "[aeiou]"}, "n": 5},
]

_CALLING = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
RESPONSES: list[dict[str, Any]] = [
    {},
    {"max_output_tokens": 1, "instructions": "Count.", "metadata": {"a": "b"}},
    {"include": ["message.output_text.logprobs"], "top_logprobs": 3, "max_output_tokens": 9},
    {"tools": [_CALLING], "tool_choice": "required", "max_output_tokens": 60},
    {"text": {"format": {"type": "json_object"}}, "max_output_tokens": 9},
]


def test_every_true_reply_is_taken_for_one(server: Server) -> None:
    """Else a worker that tells the truth would be asked for nothing."""
    n_ctx = server.get("/v1/models").json()["data"][0]["max_model_len"]
    identity = server.get("/v1/worker").json()["identity"]
    chat = {"messages": [{"role": "user", "content": "the cat"}]}
    bodies = {
        "/v1/completions": [{"prompt": "the cat", **shape} for shape in SHAPES],
        "/v1/chat/completions": [chat | item for item in CHATS],
        "/v1/responses": [{"input": "the cat"} | item for item in RESPONSES],
    }
    given = {"identity": identity, "share": "batch:1", "weight": 1, "priority": -5}
    for path in get_args(Url):
        texts = {f"{path[4:8]}-{at}": json.dumps(body) for at, body in enumerate(bodies[path])}
        asked = {"lines": [{"id": id, "body": body} for id, body in texts.items()], "url": path}
        reply = server.http.post("/v1/worker/lines", json={**asked, **given, "created_unix": 7})
        events = [
            msgspec.json.decode(event.removeprefix(b"data: "), type=LineAnswer)
            for event in reply.content.split(b"\n\n")
            if event.startswith(b"data: {")
        ]
        answers = {event.id: event for event in events if event.id}
        assert answers.keys() == texts.keys()
        for id, answer in answers.items():
            assert answer.refusal is None, answer
            named = id, 7, identity["served_model_name"], n_ctx
            Expected(path, texts[id].encode(), *named).check(bytes(answer.body))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"priority": 0}, "priority"),
        ({"priority": -1001}, "priority"),
        ({"weight": 1.5}, "weight"),
        ({"lines": []}, "lines"),
        ({"lines": [{"id": f"{number}", "body": "{}"} for number in range(65)]}, "lines"),
        ({"identity": {}}, "identity"),
        ({"url": None}, "url"),
        ({"share": None}, "share"),
        ({"share": "somebody"}, "share"),
    ],
)
def test_lines_that_cannot_be_answered_here_are_refused(
    server: Server, fields: dict[str, Any], param: str
) -> None:
    asked = {
        "url": "/v1/completions",
        "identity": server.get("/v1/worker").json()["identity"],
        "share": "batch:1",
        "weight": 1,
        "priority": -5,
        "created_unix": 1,
        "lines": [{"id": "a", "body": "{}"}],
    }
    reply = server.http.post("/v1/worker/lines", json=asked)
    assert reply.status_code == 200 and "prompt is required" in reply.text
    assert error_of(server.http.post("/v1/worker/lines", json=asked | fields))["param"] == param
