"""The plan for fleets follows from its unit costs and assumptions, and from nothing else."""

from __future__ import annotations

import pytest

from research.bench.server.scale import LOADS, ScaleConfig, UnitCosts, planned, simulated
from research.bench.server.scale_table import losses, plan

COSTS = UnitCosts(100, 2000, 4, 10, 40, 100, 200, 500, {})
CONFIG = ScaleConfig(stops_a_day=24, restart_s=3600, running=100, days=10)


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.name)
def test_what_is_needed_grows_with_the_gpus_and_a_token_costs_the_same(load: tuple[str]) -> None:
    one, many = (planned(load, gpus, 2e6, COSTS, CONFIG) for gpus in (1, 1000))  # type: ignore[arg-type]
    for name in ("tokens_per_s", "requests_per_s", "network_bytes_per_s", "host_cores"):
        assert many[name] == pytest.approx(1000 * one[name])
    assert one["tokens_per_s"] < 2e6, "prompts take their part"
    assert one["price"] == pytest.approx(many["price"], rel=0.2)  # but for whole cores
    gpu_alone = CONFIG.gpu_price / 3600 / one["tokens_per_s"] * 1e9
    assert one["price"] > gpu_alone


def test_replicas_that_are_away_cost_their_time_and_their_lines() -> None:
    result = simulated(LOADS[-1], 20, 1000.0, CONFIG)
    assert result["stops"] == pytest.approx(20 * 10 * 24, rel=0.05)
    assert result["away"] == pytest.approx(1.0, rel=0.05), "each hour, for an hour"
    assert 10 < result["most_away"] < 60
    once = simulated(LOADS[-1], 1, 1000.0, ScaleConfig(stops_a_day=1, days=10, running=100))
    made = 1000 * 10 * 24 * 3600
    assert once["redone"] == pytest.approx(once["stops"] * 100 * 128 / made, rel=0.1)


def test_the_tables_have_both_speeds() -> None:
    speeds = (1e6, 2e6)
    cases = [planned(LOADS[0], 8, speed, COSTS, CONFIG) for speed in speeds]
    lost = [simulated(LOADS[-1], 8, speed, CONFIG) for speed in speeds]
    settings = {"days": 10.0}
    assert "| 8 | 8 M" in "\n".join(plan({"cases": cases}))
    assert "| 8 |" in "\n".join(losses({"losses": lost, "settings": settings}))
