"""Bursts that `srm bench against` sends to both servers, and what its table says of them."""

from __future__ import annotations

import json

import pytest

from research.bench.server import against
from research.bench.server.against import AgainstConfig, Burst, long_list, markdown
from srm.engine.config import DEMO_MODEL
from srm.engine.constraints.constraint import json_constraint
from srm.engine.constraints.grammars import Grammars
from srm.engine.weights.checkpoint import load_checkpoint
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


def vars_of(config: AgainstConfig) -> dict[str, object]:
    return {name: getattr(config, name) for name in config.__struct_fields__}


def test_a_closed_list_has_a_table_and_an_open_one_has_none() -> None:
    grammars = Grammars(load_checkpoint(DEMO_MODEL).config, DEMO_MODEL / "tokenizer.json")
    for is_open in (False, True):
        grammar = grammars.build(json_constraint(long_list(128, is_open)))
        assert (grammar.automaton is None) == is_open
