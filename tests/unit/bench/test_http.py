"""Bursts beside hostile constraints: nothing is remembered, nothing left, and nothing hangs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import count, groupby
from typing import Any

import pytest

from bench.host.serving import free_port
from bench.server import http
from bench.server.http import HttpBenchConfig
from srm.engine.errors import ConfigError
from tests.loads.toy_server import ToyConfig, ToyServer

CONFIG = HttpBenchConfig(repetitions=2, hostile=3, prompt_tokens=3, max_tokens=2)


def test_bursts_take_turns_and_the_server_has_seen_none_of_them() -> None:
    numbers = count()
    with ToyServer(ToyConfig(ttft_s=0.0, itl_s=0.0)) as toy:
        for _ in range(2):  # cases
            http._bursts(toy.url, CONFIG, numbers, requests=2, n=1, stream=False)
    bodies = [served.body for served in toy.served]
    constraints = [
        json.dumps(body["structured_outputs"]) for body in bodies if is_constrained(body)
    ]
    assert len(set(constraints)) == len(constraints) > 4
    bursts = [str(body["prompt"]) for body in bodies if not is_constrained(body)]
    assert len(set(bursts[:10])) == 10, "no prompt comes twice in a case"
    kinds = (is_constrained(body) for body in bodies if not is_hostile(body))
    lengths = [len([*group]) for _, group in groupby(kinds)]
    # To warm up, alone, beside; a harmless one; beside; a harmless one; alone. Twice.
    assert lengths == [6, 1, 2, 1, 2 + 6, 1, 2, 1, 2]


def is_constrained(body: dict[str, Any]) -> bool:
    return "structured_outputs" in body


def is_hostile(body: dict[str, Any]) -> bool:
    return is_constrained(body) and "choice" not in body["structured_outputs"]


@pytest.fixture(params=["closes", "is gone"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "is gone":
        yield f"http://127.0.0.1:{free_port()}"
        return
    with ToyServer(fault=lambda _: "cut") as toy:
        yield toy.url


def test_a_server_that_does_not_answer_is_not_waited_for(url: str) -> None:
    with (
        pytest.raises(ConfigError, match="a constraint was not answered"),
        http._hostile_requests(url, 1, count(), Counter()),
    ):
        pass
