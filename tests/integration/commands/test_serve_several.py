"""`srm serve --engines=2`: what one engine answers, whatever becomes of one of the two."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from srm.server.routes.health import VERSION
from tests.chaos.jobs import completion_line, results, submit, wait_for
from tests.kit.processes.held_engine import held, release
from tests.kit.serving import (
    SERVER_FLAGS,
    Server,
    complete,
    connect,
    free_port,
    processes,
    read_all,
    wait_until,
)

MANY: dict[str, Any] = {"n": 200, "max_tokens": 24, "seed": 5, "ignore_eos": True}


@pytest.fixture(scope="module")
def two(text_model: Path) -> Iterator[Server]:
    flags = (*SERVER_FLAGS, "--engines=2")
    with Server(text_model, *flags, engine_module="tests.kit.processes.held_engine") as running:
        yield running


def engine_pids(server: Server) -> list[int]:
    return [pid for name, pid in processes(server) if name == "engine"]


def labels(server: Server, name: str) -> dict[str, float]:
    """The samples of a metric of the engines, by engine."""
    matches = re.findall(
        rf'^{name}\{{.*engine="(\d)".*\}} (\S+)$', server.get("/metrics").text, re.M
    )
    return {engine: float(value) for engine, value in matches}


def both_are_up(server: Server) -> bool:
    reply = server.get("/ready").json()
    return bool(reply.get("engines") == ["ready", "ready"])


def test_two_engines_answer_what_one_does(server: Server, two: Server) -> None:
    small = {"n": 1, "max_tokens": 9, "seed": 3}
    for fields in (small, MANY, {**MANY, "logprobs": 2, "n": 20}, {**small, "echo": True, "n": 2}):
        answers = [complete(item, **fields) for item in (server, two)]
        assert answers[0]["choices"] == answers[1]["choices"]
        keys = ("prompt_tokens", "completion_tokens")
        assert [answers[0]["usage"][key] for key in keys] == [
            answers[1]["usage"][key] for key in keys
        ]
    wanted = {**MANY, "until": {"match": "a", "count": 5}}
    assert complete(server, **wanted)["choices"] == complete(two, **wanted)["choices"]


def test_each_engine_is_shown(two: Server) -> None:
    complete(two, **MANY)
    states = {"engines": ["ready", "ready"], "summary": "2 of 2 engines"}
    assert two.get("/ready").json() == {"status": "ready", **states}
    assert labels(two, "srm_engine_up") == {"0": 1, "1": 1}
    assert len(set(labels(two, "srm_weights_fingerprint").values())) == 1
    text = two.get("/metrics").text
    assert 'srm_build_info{commit="' in text and f'version="{VERSION}"' in text
    assert 0 < two.metric("srm_data_free_bytes") <= two.metric("srm_data_size_bytes")
    named = set(re.findall(r'^process_resident_memory_bytes{process="([^"]+)"}', text, re.M))
    assert named >= {"supervisor", "engine 0", "engine 1", "api 0", "jobs"}
    for name in ("srm_engine_decode_tokens_total", "vllm:generation_tokens_total"):
        tokens = labels(two, name)
        assert tokens.keys() == {"0", "1"} and all(tokens.values())
    assert labels(two, "srm_engine_num_slots") == {"0": 64, "1": 64}
    assert labels(two, "vllm:cache_config_info") == {"0": 1, "1": 1}
    assert two.metric("http_requests_total") > 0


def test_the_operator_sees_each_engine_and_changes_the_weights_of_both(
    text_model: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(text_model, tmp_path / "other")
    (other / "seed").write_text("9")
    flags = (*SERVER_FLAGS, "--engines=2", f"--admin-port={free_port()}")
    with Server(text_model, *flags) as server:
        before = complete(server, **MANY)
        state = server.admin.get("/v1/admin/state").json()
        assert state["num_slots"] == 128
        assert [engine["num_slots"] for engine in state["engines"]] == [64, 64]
        body = {"path": str(other), "running": "continue"}
        reply = server.admin.post("/v1/admin/weights", json=body)
        assert reply.status_code == 200 and reply.json()["weights_version"] == 2
        state = server.admin.get("/v1/admin/state").json()
        assert [engine["weights_version"] for engine in state["engines"]] == [2, 2]
        assert server.admin.post("/v1/admin/snapshot").json()["requests"] == 0
        after = complete(server, **MANY)
        assert before["choices"] != after["choices"]
        os.kill(engine_pids(server)[1], signal.SIGKILL)
        wait_until(lambda: server.get("/ready").json()["engines"] != ["ready", "ready"])
        wait_until(lambda: both_are_up(server))
        assert complete(server, **MANY)["choices"] == after["choices"]


@pytest.mark.parametrize("which", [0, 1])
def test_what_a_killed_engine_had_is_run_again_and_nobody_notices(
    two: Server, text_model: Path, which: int
) -> None:
    expected = [choice["text"] for choice in complete(two, **MANY)["choices"]]
    before = labels(two, "srm_engine_decode_tokens_total")
    restarts = labels(two, "srm_engine_restarts_total")
    with held(text_model, steps=6):
        stream = connect(two, **MANY, stream=True)
        wait_until(lambda: have_sampled(two, before))
        victim = engine_pids(two)[which]
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: two.get("/ready").json()["summary"] == "1 of 2 engines")
        assert two.get("/ready").status_code == 200
    lines = [line for line in read_all(stream).splitlines() if line.startswith(b"data: {")]
    events = [json.loads(line.removeprefix(b"data: ")) for line in lines]
    choices = [choice for event in events for choice in event["choices"]]
    texts = [""] * len(expected)
    for choice in choices:
        texts[choice["index"]] += choice["text"]
    assert texts == expected
    assert sum(choice["finish_reason"] is not None for choice in choices) == len(expected)
    wait_until(lambda: both_are_up(two))
    assert victim not in engine_pids(two) and len(engine_pids(two)) == 2
    assert sum(labels(two, "srm_engine_restarts_total").values()) == sum(restarts.values()) + 1
    assert [choice["text"] for choice in complete(two, **MANY)["choices"]] == expected


def test_a_batch_is_answered_as_by_one_engine_though_one_is_killed(
    text_model: Path, tmp_path: Path
) -> None:
    lines = [completion_line(number, n=1 + 40 * (number % 5 == 0)) for number in range(40)]
    alone, both = tmp_path / "alone", tmp_path / "both"
    batch = submit(alone, lines)
    shutil.copytree(alone, both)
    with Server(text_model, *SERVER_FLAGS, f"--data-dir={alone}"):
        expected = results(alone, wait_for(alone, batch, 600))
    flags = (*SERVER_FLAGS, "--engines=2", f"--data-dir={both}")
    with (
        held(text_model, steps=6),
        Server(text_model, *flags, engine_module="tests.kit.processes.held_engine") as server,
    ):
        wait_until(lambda: have_sampled(server, {"0": 0, "1": 0}))
        os.kill(engine_pids(server)[0], signal.SIGKILL)
        release(text_model)
        assert results(both, wait_for(both, batch, 600)) == expected
    assert len(expected["output"]) == len(lines) and not expected["error"]


def have_sampled(server: Server, before: dict[str, float]) -> bool:
    """Whether each engine has sampled something since."""
    now = labels(server, "srm_engine_decode_tokens_total")
    return all(now.get(engine, 0) > before[engine] for engine in before)
