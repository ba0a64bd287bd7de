"""An engine of several that does not come back: what batches would have it run others run."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

import pytest

from srm.engine.client import client as client_module
from srm.engine.client.client import EngineClient
from srm.engine.weights.weights import Weights
from srm.errors import StepFailed
from srm.server.batch.engine_retry import EngineRetry
from tests.kit.engines.making import request_of
from tests.kit.engines.served_engine import (
    Serve,
    breaks_at,
    collect,
    connected,
    endpoint_of,
    num_away,
    until,
)
from tests.kit.processes.run_engine import alone

LINES = [
    request_of(f"line {seed}", seed=seed, n=2, max_tokens=5, durable=True) for seed in range(20)
]


@pytest.fixture(autouse=True)
def _no_wait_for_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "ENGINE_TIMEOUT_S", 0.0)


def two_of(endpoint: str) -> str:
    return f"{endpoint},{endpoint_of(endpoint, 1)}"


async def assert_all_answered(client: EngineClient, weights: Weights) -> None:
    sending = EngineRetry(client)
    async with asyncio.timeout(120):
        result = await asyncio.gather(
            *(sending.until_answered(partial(collect, client, line)) for line in LINES)
        )
    for line, outputs in zip(LINES, result, strict=True):
        expected = alone(line, weights)
        assert sorted(output.index for output in outputs) == [0, 1], "each sample once"
        assert {output.index: output.token_ids for output in outputs} == {
            index: output.token_ids for index, output in expected.items()
        }


async def test_lines_of_an_engine_that_never_starts_are_run_by_the_other(
    serve: Serve, endpoint: str, weights: Weights, caplog: pytest.LogCaptureFixture
) -> None:
    serve()
    with caplog.at_level(logging.WARNING):
        async with connected(two_of(endpoint), heartbeat_s=0.02, away_s=0.2) as client:
            assert num_away(client) == 1
            await assert_all_answered(client, weights)
            late = serve(number=1)
            await until(lambda: num_away(client) == 0)
            assert late.engine.scheduler.num_requests == late.engine.num_steps == 0, "none twice"
            await asyncio.gather(*(collect(client, line) for line in LINES))
            assert late.engine.num_steps, "it has its share again"
    (message,) = [
        record.message for record in caplog.records if "has not been there for" in record.message
    ]
    assert message.startswith("engine 1 has not been there for 0.2 s")


async def test_lines_of_an_engine_that_is_lost_for_good_are_run_by_the_other(
    serve: Serve, endpoint: str, weights: Weights
) -> None:
    broken, _ = serve(breaks_at(3)), serve(number=1)
    async with connected(two_of(endpoint), heartbeat_s=0.02, away_s=0.2) as client:
        await until(lambda: not num_away(client))
        await assert_all_answered(client, weights)
        assert broken.join() == StepFailed.exit_code
        assert num_away(client) == client.losses == 1


async def test_an_engine_that_is_back_in_time_goes_on_with_its_lines(
    serve: Serve, endpoint: str
) -> None:
    serve()
    async with connected(two_of(endpoint), heartbeat_s=0.02) as client:
        asked = [asyncio.create_task(collect(client, line)) for line in LINES]
        await until(lambda: sum(reply.done() for reply in asked) > 5)
        late = serve(number=1)
        await asyncio.gather(*asked)
        assert late.engine.num_steps


async def test_an_engine_that_is_lost_and_given_up_at_once_leaves_no_socket(
    serve: Serve, endpoint: str
) -> None:
    serve(), serve(number=1)
    async with connected(two_of(endpoint), heartbeat_s=0.02) as client:
        await until(lambda: not num_away(client))
        one = client.engines[0]
        one.give_up("first")
        between = one._socket
        one.give_up("at once")
        assert between.closed and not one._socket.closed
        await until(lambda: not num_away(client))
