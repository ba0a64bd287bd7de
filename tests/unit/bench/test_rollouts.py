"""`srm bench rollouts` says which rollouts were not answered, which tokens are off, and with
which weights they would be."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from research.bench.model.rollouts import check, fault, recompute
from research.bench.server import soak as soaks
from research.bench.server.soak import CheckedRollout, RolloutsBenchConfig, Soak
from srm.engine.config import ModelConfig
from srm.engine.weights.random_model import random_tensors
from srm.training.model import SRM
from tests.kit.loads.raw_server import Peer, make_reply, raw_server

SHAPE = ModelConfig(d_model=16, num_layers=1, num_heads=2, n_ctx=16, vocab_size=32)
CONFIG = RolloutsBenchConfig(rollouts=6, samples=3, changes=1, kills=0, seconds=0.01)


async def answer_all_but_rollouts(peer: Peer) -> None:
    changed = make_reply(b'{"weights_version": 2, "pause_seconds": 0.1, "seconds": 0.2}')
    while await peer.request() is not None:
        if "/generate" not in peer.head:
            await peer.send(changed)


def test_rollouts_without_an_answer_are_counted_and_not_waited_for_forever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soaks, "_ANSWER_S", 0.1)
    soak = Soak(CONFIG, SHAPE, tmp_path)

    async def run() -> None:
        async with raw_server(answer_all_but_rollouts) as server:
            await soak.run(0, server.url, server.url)

    asyncio.run(run())
    assert (soak.num_unanswered, soak.rollouts, len(soak.changes)) == (6, [], 1)


@pytest.mark.parametrize("wrong", [0.001, -0.001, float("nan")])
def test_tokens_that_are_off_are_counted(tmp_path: Path, wrong: float) -> None:
    soak = Soak(CONFIG, SHAPE, tmp_path)
    soak.seeds |= {2: 1}
    model = SRM(SHAPE)
    tensors = random_tensors(SHAPE, soak.seed(0))
    model.load_state_dict({name: torch.tensor(value) for name, value in tensors.items()})
    ids = np.random.default_rng(1).integers(0, SHAPE.vocab_size, 12).tolist()
    with torch.no_grad():
        logprobs = model(torch.tensor([ids]))[0].log_softmax(-1)
    given = [float(logprobs[at - 1, ids[at]]) for at in range(4, 12)]
    soak.rollouts = [CheckedRollout(ids[:4], 1, ids[4:], given, [1] * 8)] * 2
    record = {"unanswered": 0, **check(soak, SHAPE)}
    assert (record["tokens"], record["beyond"], fault(record)) == (16, 0, "")
    off = [*given[:3], given[3] + wrong, *given[4:]]
    soak.rollouts[1] = soak.rollouts[1]._replace(logprobs=off)
    record = {"unanswered": 3, **check(soak, SHAPE)}
    assert record["beyond"] == 1
    assert fault(record) == (
        "3 rollouts were not answered; 1 tokens are off by more than 0.0001 nats"
    )


@pytest.mark.parametrize("seeds", [{1: 0, 2: 1, 3: 1}, {1: 1, 2: 1, 3: 0}])
def test_the_other_weights_are_others_where_a_change_was_made_twice(seeds: dict[int, int]) -> None:
    def load(version: int) -> SRM:
        model = SRM(SHAPE)
        tensors = random_tensors(SHAPE, seeds[version])
        model.load_state_dict({name: torch.tensor(value) for name, value in tensors.items()})
        return model

    rollout = CheckedRollout([1, 2], 1, [3, 4, 5], [0.0] * 3, [1, 2, 3])
    right, wrong = recompute([rollout], load, seeds)
    assert (np.abs(right - wrong) > 1e-6).all()  # all three are compared


@pytest.mark.parametrize(("share", "is_wrong"), [(0.95, False), (0.94, True), (float("nan"), True)])
def test_a_check_that_other_weights_pass_too_shows_nothing(share: float, is_wrong: bool) -> None:
    message = fault({"unanswered": 0, "beyond": 0, "wrong_off_share": share})
    assert ("with other weights: the check shows nothing" in message) == is_wrong
