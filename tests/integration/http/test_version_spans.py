"""Spans of weights versions in every kind of reply, held to the model that each version is."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kit.engines.numpy_runner import feed, tiny_weights
from tests.kit.processes.held_engine import held, release
from tests.kit.serving import (
    CHATS,
    COMPLETIONS,
    SERVER_FLAGS,
    TEXT_MODEL,
    Asked,
    Server,
    complete,
    free_port,
)

IDS = [9, 21, 33, 14]
WANTED = {"return_weight_versions": True, "return_token_ids": True, "logprobs": 0}
Spans = list[dict[str, int]]


@pytest.fixture(scope="module")
def changing(folders: Path) -> Iterator[Server]:
    flags = (*SERVER_FLAGS, f"--weights-dir={folders}", f"--data-dir={folders / 'data'}",
             f"--admin-port={free_port()}")  # fmt: skip
    with Server(folders / "0", *flags, engine_module="tests.kit.processes.held_engine") as running:
        yield running


def check(spans: Spans, tokens: list[int], logprobs: list[float], seeds: tuple[int, int]) -> None:
    """Two spans that cover all tokens, whose log-probabilities the two models give."""
    (first, then) = spans
    assert first["start"] == 0 and first["end"] == then["start"] and then["end"] == len(tokens)
    assert 0 < first["end"] < len(tokens) == len(logprobs)
    assert then["version"] == first["version"] + 1
    models = [tiny_weights(seed, TEXT_MODEL) for seed in seeds]
    state = np.zeros((TEXT_MODEL.num_layers, TEXT_MODEL.d_model))
    expected = []
    for position, token in enumerate([*IDS, *tokens[:-1]]):
        place = position - len(IDS) + 1
        logits, state = feed(models[place >= then["start"]], token, position, state)
        if place >= 0:
            top = logits.max()
            expected.append(logits[tokens[place]] - top - np.log(np.exp(logits - top).sum()))
    np.testing.assert_allclose(logprobs, expected, atol=1e-4, rtol=0)


def through_a_change(
    server: Server, folders: Path, **fields: Any
) -> tuple[dict[str, Any], tuple[int, int]]:
    with held(folders / "0", steps=9):
        asked = Asked(server, prompt=IDS, max_tokens=40, **fields)
        while server.metric("srm_engine_running_sequences") < 1:
            pass
        seeds = change(server, folders)
    reply: dict[str, Any] = asked.answer().json()
    assert "choices" in reply, reply
    return reply, seeds


IN_USE = {"seed": 0}


def change(server: Server, folders: Path) -> tuple[int, int]:
    """Change to the other weights; the seeds of those before and after."""
    before, seed = IN_USE["seed"], 1 - IN_USE["seed"]
    body = {"path": str(folders / str(seed)), "running": "continue"}
    reply = server.admin.post("/v1/admin/weights", json=body)
    assert reply.status_code == 200, reply.text
    IN_USE["seed"] = seed
    return before, seed


@pytest.mark.parametrize("stop", [None, ["no such text"]], ids=["final", "columns"])
def test_a_whole_reply(changing: Server, folders: Path, stop: list[str] | None) -> None:
    reply, seeds = through_a_change(changing, folders, n=3, stop=stop, **WANTED)
    for choice in reply["choices"]:
        logprobs = choice["logprobs"]["token_logprobs"]
        check(choice["weight_versions"], choice["token_ids"], logprobs, seeds)


def test_a_packed_reply(changing: Server, folders: Path) -> None:
    fields = {"return_weight_versions": True, "return_packed": True, "logprobs": 0}
    reply, seeds = through_a_change(changing, folders, n=2, **fields)
    for choice in reply["choices"]:
        tokens = np.frombuffer(base64.b64decode(choice["packed"]["token_ids"]), "<i4")
        logprobs = np.frombuffer(base64.b64decode(choice["packed"]["logprobs"]), "<f4")
        check(choice["weight_versions"], tokens.tolist(), logprobs.tolist(), seeds)


@pytest.mark.parametrize("n", [1, 20])
@pytest.mark.parametrize("interval", [None, 5])
def test_a_stream(changing: Server, folders: Path, n: int, interval: int | None) -> None:
    body = {"prompt": IDS, "max_tokens": 40, "ignore_eos": True, "stream": True, "n": n, **WANTED,
            "stream_interval": interval}  # fmt: skip
    with held(folders / "0", steps=9), ThreadPoolExecutor() as pool:
        asked = pool.submit(lambda: changing.http.post(COMPLETIONS, json=body).text)
        while changing.metric("srm_engine_running_sequences") < n:
            pass
        seeds = change(changing, folders)
        release(folders / "0")
        events = [json.loads(line[6:]) for line in asked.result().splitlines()
                  if line.startswith("data: {")]  # fmt: skip
    choices: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        for choice in event["choices"]:
            choices.setdefault(choice["index"], []).append(choice)
    assert len(choices) == n
    for parts in choices.values():
        spans: Spans = []
        for span in [span for part in parts for span in part["weight_versions"]]:
            if spans and spans[-1]["version"] == span["version"]:
                assert spans[-1]["end"] == span["start"]
                spans[-1] = {**span, "start": spans[-1]["start"]}
            else:
                spans.append(span)
        tokens = [token for part in parts for token in part["token_ids"]]
        scores = [score for part in parts if part["logprobs"]
                  for score in part["logprobs"]["token_logprobs"]]  # fmt: skip
        check(spans, tokens, scores, seeds)


def test_who_does_not_ask_gets_none_and_one_version_is_one_span(changing: Server) -> None:
    plain = complete(changing, max_tokens=3, ignore_eos=True)
    assert "weight_versions" not in plain["choices"][0]
    asked = complete(changing, max_tokens=3, ignore_eos=True, return_weight_versions=True)
    whole = {"version": asked["weights_version"], "start": 0, "end": 3}
    assert asked["choices"][0]["weight_versions"] == [whole]
    chat = {"messages": [{"role": "user", "content": "the cat"}], "max_tokens": 3,
            "ignore_eos": True, "return_weight_versions": True}  # fmt: skip
    reply = changing.http.post(CHATS, json=chat).json()
    assert reply["choices"][0]["weight_versions"] == [whole]
    text = changing.http.post(CHATS, json=chat | {"stream": True}).text
    spans = [span for line in text.splitlines() if line.startswith("data: {")
             for choice in json.loads(line[6:])["choices"]
             for span in choice.get("weight_versions", [])]  # fmt: skip
    assert spans[0]["start"] == 0 and spans[-1]["end"] == 3
