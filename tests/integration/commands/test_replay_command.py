"""`srm replay`: receipts of a server's mixed load, in other batches, and what is said of others."""

from __future__ import annotations

import base64
import json
import re
import shlex
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from srm import __main__ as srm
from srm.engine.config import DEMO_MODEL, GRPO_MODEL
from srm.engine.python.replay import main
from srm.engine.receipt import sha256
from srm.engine.weights.checkpoint import load_checkpoint
from srm.errors import ConfigError
from tests.kit.serving import (
    CHATS,
    COMPLETIONS,
    ROOT,
    Asked,
    Server,
    complete,
    error_of,
    free_port,
    wait_until,
)

WEIGHTS = [DEMO_MODEL, GRPO_MODEL]
"""Of the same shape."""
EDITS: dict[str, Any] = {
    "presence_penalty": 1, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "min_tokens": 9,
    "logit_bias": {"7": 3.5}, "bad_words": ["the"], "allowed_token_ids": [*range(1, 300)],
}  # fmt: skip
BODIES: list[dict[str, Any]] = [
    {"n": 40, "seed": 2**64 - 1, "ignore_eos": True},
    {"prompt": ["the cat", "sat on the mat"], "n": 3, "logprobs": 5, "top_k": 50, "top_p": 0.9},
    {"n": 3, "temperature": 0.3, "min_p": 0.05, "prompt_logprobs": 2, "logprob_token_ids": [5],
     "logprobs": 1},
    {"temperature": 0, **EDITS},
    {"n": 5, "best_of": 20, "ignore_eos": True, "presence_penalty": -2},
    {"n": 9, "stop": ["e", "t"], "max_tokens": 60},
    {"n": 6, "regex": "[a-z ]{3,20}: [0-9]+", "max_tokens": 40},
    {"n": 6, "response_format": {"type": "json_object"}, "max_tokens": 20},
    {"n": 30, "return": "unique", "max_tokens": 2},
    {"n": 30, "until": {"match": "a", "count": 3}},
    {"n": 2, "return_packed": True, "stop_token_ids": [9, 10, 11]},
    {"prompt": [[5]], "n": 2, "max_tokens": 1},
]  # fmt: skip


@pytest.fixture(scope="module")
def serving() -> Iterator[Server]:
    flags = ("--num-slots=24", "--max-step-rows=16", f"--admin-port={free_port()}",
             f"--weights-dir={DEMO_MODEL.parent}")  # fmt: skip
    with Server(DEMO_MODEL, *flags, engine_module="srm.engine", start_s=600) as running:
        yield running


@pytest.fixture(scope="module")
def replies(serving: Server) -> list[str]:
    """Lines with receipts: of completions, of what goes on from a state, a chat and a batch."""
    bodies = [{"prompt": "the cat", "max_tokens": 24, **body, "receipt": True} for body in BODIES]
    state = serving.http.post("/v1/states", json={"prompt": "the cat sat"}).json()["id"]
    bodies.append({"prompt": " on", "state": state, "save_state": True, "n": 2, "receipt": True})
    with ThreadPoolExecutor(6) as pool:
        answers = [*pool.map(lambda body: serving.http.post(COMPLETIONS, json=body), bodies)]
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "receipt": True}
    answers.append(serving.http.post(CHATS, json=chat))
    assert {answer.status_code for answer in answers} == {200}, [each.text for each in answers]
    line = {"custom_id": "a", "method": "POST", "url": COMPLETIONS, "body": bodies[1]}
    files = {"file": ("in.jsonl", json.dumps(line)), "purpose": (None, "batch")}
    file = serving.http.post("/v1/files", files=files).json()["id"]
    asked = {"input_file_id": file, "endpoint": COMPLETIONS, "completion_window": "24h"}
    path = f"/v1/batches/{serving.http.post('/v1/batches', json=asked).json()['id']}"
    wait_until(lambda: serving.get(path).json()["status"] == "completed")
    output = serving.get(f"/v1/files/{serving.get(path).json()['output_file_id']}/content").text
    return [answer.text for answer in answers] + output.splitlines()


def replay(
    folder: Path, lines: list[str], weights: list[Path], capsys: pytest.CaptureFixture[str]
) -> list[str]:
    """The lines that it prints."""
    file = folder / "receipts.jsonl"
    file.write_text("\n".join(lines), "utf-8-sig")
    code = main([str(file), "--weights", *map(str, weights)])
    printed = capsys.readouterr().out.splitlines()
    assert code == (len(printed) > 1)
    return printed


def test_receipts_of_mixed_load_replay_in_other_batches(
    replies: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    choices = [choice for line in replies for choice in reply_of(line)["choices"]]
    assert len(choices) > 90 and all("receipt" in choice for choice in choices)
    samples = [choice["receipt"]["sample"] for choice in reply_of(replies[4])["choices"]]
    assert max(samples) >= 5, "the best are not the first"
    expected = [f"{len(choices)} of {len(choices)} receipts replay bit for bit"]
    assert replay(tmp_path, replies, WEIGHTS, capsys) == expected
    assert replay(tmp_path, replies[::-1], WEIGHTS[::-1], capsys) == expected


def reply_of(line: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(line)
    return value["response"]["body"] if "response" in value else value


def flipped(receipt: dict[str, Any], name: str, at: int, mask: int = 1) -> dict[str, Any]:
    """The receipt with bits of a value flipped."""
    values = np.frombuffer(base64.b64decode(receipt[name]), "<i4").copy()
    values[at] ^= mask
    return receipt | {name: base64.b64encode(values.tobytes()).decode()}


def with_prompt(receipt: dict[str, Any], prompt: list[int]) -> dict[str, Any]:
    """The receipt with another prompt, which a version read that made no token."""
    data = np.array(prompt, "<i4").tobytes()
    idle = receipt["spans"][0] | {"version": 0, "end": 0}
    return receipt | {
        "prompt_token_ids": base64.b64encode(data).decode(),
        "prompt_sha256": sha256(data),
        "spans": [idle, *receipt["spans"]],
    }


def test_what_was_changed_is_named(
    replies: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    receipt = reply_of(replies[0])["choices"][3]["receipt"]
    fifth = int(np.frombuffer(base64.b64decode(receipt["token_ids"]), "<i4")[5])
    own, other = (load_checkpoint(folder).fingerprint for folder in WEIGHTS)
    (span,), params = receipt["spans"], receipt["params"]
    bad = [
        (flipped(receipt, "token_ids", 7), "token 7 is "),
        (flipped(receipt, "logprobs", 23), "token 23 is "),
        (receipt | {"params": params | {"seed": params["seed"] - 1}}, " is "),
        (receipt | {"sample": 4}, " is "),
        (receipt | {"params": params | {"stop_token_ids": [fifth]}}, "replay has none: it ends"),
        (receipt | {"params": params | {"max_tokens": 9}}, "it has 24 tokens, and max_tokens"),
        (receipt | {"params": params | {"max_tokens": 99}}, "n_ctx = 512 allow 99"),
        (receipt | {"params": params | {"temperature": -1.0}}, "temperature must be"),
        (receipt | {"spans": [span | {"fingerprint": "0" * 16}]},
         f"in 'cpu float32': it is of weights {'0' * 16}, and those given are {own}"),
        (receipt | {"arithmetic": "cpu float8"}, "in 'cpu float8': dtype must be"),
        (receipt | {"arithmetic": "cpu float32 auto"}, "'cpu float32' here"),
        (flipped(receipt, "token_ids", 2, 2**20), "token 2 is "),
        (with_prompt(receipt, [5, 2048]), "it cannot be asked for: prompt_token_ids"),
        (with_prompt(receipt, []), "prompt_token_ids must be one or more int32"),
        (with_prompt(receipt, [5] * 513), "max_tokens and n_ctx = 512 allow 0"),
    ]  # fmt: skip
    lines = [json.dumps(line) for line, _ in bad] + [json.dumps(receipt)] * 2
    *printed, summary = replay(tmp_path, lines, WEIGHTS[:1], capsys)
    assert summary == f"2 of {len(lines)} receipts replay bit for bit"
    for number, (line, (_, expected)) in enumerate(zip(printed, bad, strict=True), 1):
        assert line.startswith(f"line {number}: ") and expected in line, line
    line = json.dumps(receipt | {"spans": [span | {"fingerprint": other}]})
    printed = replay(tmp_path, [line], WEIGHTS, capsys)
    assert f", by weights {other}: the receipt was changed" in printed[0]


def test_what_is_no_receipt_is_said_and_the_rest_goes_on(
    replies: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    receipt = reply_of(replies[0])["choices"][0]["receipt"]
    nan = base64.b64encode(np.full(24, np.nan, "<f4").tobytes()).decode()
    span = receipt["spans"][0]
    bad: list[tuple[Any, str]] = [
        ([1], "line 1: must be an object"),
        ({}, "line 2: it has no receipt"),
        ({"choices": []}, "line 3: it has no receipt"),
        ({"choices": [{"text": "a"}]}, "line 4, choice 0: it has no receipt"),
        ({"response": {"body": {"error": {}}}}, "line 5: it has no receipt"),
        (receipt | {"format": "srm-receipt-2"}, "srm-receipt-2"),
        (receipt | {"token_ids": "?"}, "base64"),
        (
            receipt | {"token_ids": receipt["token_ids"][:64]},
            "must be as many values of 4 bytes, got 48 and 96",
        ),
        (receipt | {"token_ids": "AAAA", "logprobs": "AAAA"}, "values of 4 bytes, got 3 and 3"),
        (receipt | {"prompt_token_ids": ""}, "one of them is damaged"),
        (flipped(receipt, "prompt_token_ids", 1), "one of them is damaged"),
        (receipt | {"logprobs": nan}, "logprobs must be finite"),
        (receipt | {"spans": []}, "spans must cover all 24 tokens, got 0"),
        (receipt | {"spans": [span, span]}, "spans must follow each other, got 0 … 24 behind 24"),
        (receipt | {"sample": -1}, "sample"),
        (receipt | {"params": {"top": 1}}, "top"),
        ({name: receipt[name] for name in receipt if name != "params"}, "params"),
    ]
    lines = [json.dumps(line) for line, _ in bad]
    *printed, summary = replay(tmp_path, [*lines, "{", "", replies[0]], WEIGHTS, capsys)
    assert summary == f"40 of {len(bad) + 41} receipts replay bit for bit"
    for line, (_, expected) in zip(printed, [*bad, ("", f"line {len(bad) + 1}: ")], strict=True):
        assert expected in line, line
    (tmp_path / "empty").touch()
    (tmp_path / "indented").write_text(json.dumps(receipt, indent=2))
    for name, message in (
        ("empty", "has no receipts"),
        ("nowhere", "No such file"),
        ("indented", "each receipt or reply must be one line of JSON"),
    ):
        with pytest.raises(ConfigError, match=message):
            main([str(tmp_path / name), "--weights", str(DEMO_MODEL)])


def change(server: Server, folder: Path, running: str) -> None:
    body = {"path": str(folder), "running": running}
    assert server.admin.post("/v1/admin/weights", json=body).status_code == 200


def test_changes_under_a_request_replay_with_all_folders(
    serving: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = serving.metric("srm_engine_decode_tokens_total")

    def sampled(more: int) -> bool:
        return serving.metric("srm_engine_decode_tokens_total") - before >= more

    # Most never begin: there are 24 slots, and all of them take minutes.
    asked = Asked(serving, n=400, max_tokens=500, receipt=True, frequency_penalty=0.1)
    for number, (at, running) in enumerate(((1, "continue"), (0, "continue"), (1, "refeed"))):
        wait_until(lambda most=300 * (number + 1): sampled(most))  # type: ignore[misc]
        change(serving, WEIGHTS[at], running)
    wait_until(lambda: sampled(1_200))
    assert serving.admin.post("/abort_requests", json={}).json() == {"aborted": 1}
    reply = asked.answer()
    change(serving, DEMO_MODEL, "drop")  # as other tests expect
    receipts = [choice["receipt"] for choice in reply.json()["choices"]]
    assert {receipt["finish_reason"] for receipt in receipts} >= {"abort"}
    receipt = max(receipts, key=lambda receipt: len(receipt["spans"]))
    own, other = (load_checkpoint(folder).fingerprint for folder in WEIGHTS)
    made_by = [span["fingerprint"] for span in receipt["spans"]]
    assert made_by == [own, other, own, other][: len(made_by)] and len(made_by) > 1
    expected = ["400 of 400 receipts replay bit for bit"]
    assert replay(tmp_path, [reply.text], WEIGHTS, capsys) == expected
    *_, before_last, last = receipt["spans"]
    lines = [json.dumps(flipped(receipt, "token_ids", last["start"])), json.dumps(receipt)]
    changed, *_ = replay(tmp_path, lines, WEIGHTS, capsys)
    assert (
        changed.startswith(f"line 1: token {last['start']} is ")
        and "nor one that these make" in changed
    )
    name = before_last["fingerprint"]
    *unmade, _ = replay(tmp_path, lines, [WEIGHTS[name == own]], capsys)
    first = next(span["start"] for span in receipt["spans"] if span["fingerprint"] == name)
    expected_fault = f"token {first} cannot be made in 'cpu float32': it is of weights {name}"
    assert [expected_fault in line for line in unmade] == [True, True]


def test_the_example_of_the_page_replays(
    serving: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    page = (ROOT / "docs" / "receipts.md").read_text()
    (example, command) = re.findall(r"^```(?:python test|sh)\n(.*?)^```$", page, re.M | re.S)
    monkeypatch.chdir(tmp_path)
    exec(example.replace("http://127.0.0.1:8000", serving.url), {})
    asked, _, expected = command.partition("#")
    assert srm.main(shlex.split(asked)[1:]) == 0
    assert capsys.readouterr().out.strip() == expected.strip()


def test_receipts_are_refused_where_they_are_not_made(serving: Server) -> None:
    for path, fields in (
        (COMPLETIONS, {"prompt": "a", "stream": True}),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0, "echo": True}),
        (COMPLETIONS, {"prompt": "a", "return": "counts"}),
        ("/v1/responses", {"input": "a"}),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {}}),
    ):
        reply = serving.http.post(path, json=fields | {"receipt": True})
        assert error_of(reply)["param"] == "receipt"
    assert "receipt" not in complete(serving)["choices"][0]
