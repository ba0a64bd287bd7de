"""Bursts that benchmarks of servers send, alone and beside hostile ones, and what they count."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import count, groupby
from typing import Any

import pytest

from research.bench.host.serving import free_port
from research.bench.server import against, forks, http
from research.bench.server.against import AgainstConfig, Burst, long_list, markdown
from research.bench.server.forks import ForksConfig
from research.bench.server.http import HttpBenchConfig
from srm.engine.config import DEMO_MODEL
from srm.engine.constraints.constraint import json_constraint
from srm.engine.constraints.grammars import Grammars
from srm.engine.weights.checkpoint import load_checkpoint
from srm.errors import ConfigError
from tests.kit.loads.toy_server import ToyConfig, ToyServer

CONFIG = AgainstConfig(repetitions=2, prompt_tokens=3, max_tokens=4)


@pytest.mark.parametrize("way", ["", "table", "masks"])
def test_both_servers_are_sent_the_same_bursts(way: str) -> None:
    toy = ToyConfig(ttft_s=0.0, itl_s=0.0)
    burst = Burst(requests=2, n=1, is_stream=False, way=way)  # type: ignore[arg-type]
    with ToyServer(toy) as base, ToyServer(toy) as here:
        case = against._measure(CONFIG, {"base": base.url, "here": here.url}, burst)
    sent = [sorted(json.dumps(served.body) for served in each.served) for each in (base, here)]
    assert sent[0] == sent[1] and len(sent[0]) == 2 * (1 + CONFIG.repetitions)
    schema = {"json": long_list(CONFIG.max_tokens, is_open=way == "masks")}
    asked = [json.loads(body).get("structured_outputs") for body in sent[0]]
    assert asked == [schema if way else None] * len(asked)
    (row,) = [
        line
        for line in markdown({"base": "0" * 40, "settings": vars_of(CONFIG), "cases": [case]})
        if line.startswith("| 2 × 1 |")
    ]
    assert row.startswith(f"| 2 × 1 | whole{way and ', ' + way} | ")


def vars_of(config: AgainstConfig | ForksConfig) -> dict[str, object]:
    return {name: getattr(config, name) for name in config.__struct_fields__}


def test_a_closed_list_has_a_table_and_an_open_one_has_none() -> None:
    grammars = Grammars(load_checkpoint(DEMO_MODEL).config, DEMO_MODEL / "tokenizer.json")
    for is_open in (False, True):
        grammar = grammars.build(json_constraint(long_list(128, is_open)))
        assert (grammar.automaton is None) == is_open


BESIDE = HttpBenchConfig(repetitions=2, hostile=3, prompt_tokens=3, max_tokens=2)


def test_bursts_take_turns_and_the_server_has_seen_none_of_them() -> None:
    numbers = count()
    with ToyServer(ToyConfig(ttft_s=0.0, itl_s=0.0)) as toy:
        for _ in range(2):  # cases
            http._bursts(toy.url, BESIDE, numbers, requests=2, n=1, stream=False)
    bodies = [served.body for served in toy.served]
    constraints = [
        json.dumps(body["structured_outputs"])
        for body in bodies
        if kind_of(body) in {"hostile", "new"}
    ]
    assert len(set(constraints)) == len(constraints) > 4
    bursts = [str(body["prompt"]) for body in bodies if not is_constrained(body)]
    assert len(set(bursts[:14])) == 14, "no prompt comes twice in a case"
    counts = Counter(map(kind_of, bodies))
    assert (counts["burst"], counts["new"]) == (2 * (2 + 6 * 2), 2 * 4)
    for kind in ("harmless", "hostile"):  # of which some may be given up before they come
        assert 4 <= counts[kind] <= 2 * 2 * 3
    # A burst alone ends before others come, and others end before the next burst.
    order = [kind for kind, _ in groupby(kind_of(body) for body in bodies) if kind != "new"]
    assert order[:2] == ["burst", "harmless"] and {*order} == {"burst", "harmless", "hostile"}


def is_constrained(body: dict[str, Any]) -> bool:
    return "structured_outputs" in body


def kind_of(body: dict[str, Any]) -> str:
    match body.get("structured_outputs"):
        case None:
            return "burst"
        case {"choice": ["yes", "no"]}:
            return "harmless"
        case {"choice": _}:
            return "new"
    return "hostile"


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
        http._requests_beside(url, "hostile", 1, count(), Counter()),
    ):
        pass


def test_forks_table_tells_gaps_and_what_streams_lose() -> None:
    record = {
        "settings": vars_of(ForksConfig()),
        "forks_per_s": {"small": [3.0, 1.0, 2.0], "model": [4.0], "stream": [5.0]},
        "gaps_s": {"alone": [[0.001, 0.003], [0.002]], "forked": [[0.004]]},
        "tokens_per_s": {"alone": [100.0, 200.0], "fetched": [99.0, 202.0], "fetches": [7.0]},
    }
    lines = forks.markdown(record)
    assert "| of a state in one process, d 64 with 2 layers | 2 |" in lines
    assert "| alone | 3 | 2.00 | 2.98 | 3.00 |" in lines
    assert "1.000 of it, 0.990 … 1.010." in lines[-1]
