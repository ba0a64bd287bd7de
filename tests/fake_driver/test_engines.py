"""`srm serve` with an engine on each of several GPUs, whatever becomes of one of them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from srm.engine.config import ModelConfig
from srm.engine.weights.random_model import write_random_model
from tests.kit.fake_driver.driver import RUN_S, FakeDriver
from tests.kit.serving import Server, free_port, wait_until, write_text_model

MODEL = ModelConfig(d_model=512, num_layers=8, num_heads=4, n_ctx=512, vocab_size=8_192)
FLAGS = ("--device=gpu", "--num-slots=256", "--stall-s=1000")
SAMPLES, TOKENS = 64, 2
"""Samples of a request, which are enough for each of eight engines to make steps."""
LAUNCH = rb'"process": (\d+), "thread": \d+, "device": (\d+), "call": "cuLaunch'

Serve = Callable[..., AbstractContextManager[Server]]


@pytest.fixture
def where(tmp_path: Path) -> Path:
    """A folder with a model, the driver's log, and a folder that says which cards are lost."""
    (tmp_path / "log").touch()
    (tmp_path / "lost").mkdir()
    write_text_model(tmp_path / "model", MODEL)
    write_random_model(tmp_path / "model", MODEL)
    return tmp_path


@pytest.fixture
def serve(where: Path, fake: FakeDriver, graphs: Path, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """serve(8, ecc=1, …): a server with an engine on each of so many cards of the fake driver."""

    @contextmanager
    def started(count: int, **card: int) -> Iterator[Server]:
        settings = fake.environment(where / "log", devices=count, lost=where / "lost", **card)
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        own = (f"--engines={count}", f"--cache-dir={graphs}", f"--admin-port={free_port()}")
        with Server(
            where / "model", *FLAGS, *own, engine_module="srm.engine", start_s=RUN_S
        ) as server:
            yield server

    return started


class Launches:
    """Reads on in the driver's log which processes launched on each card."""

    def __init__(self, log: Path) -> None:
        self._log, self._place = log, 0
        self._entries: defaultdict[int, list[int]] = defaultdict(list)

    def read(self) -> dict[int, list[int]]:
        """Return the processes by card, in the order of their first launch."""
        with self._log.open("rb") as file:
            file.seek(self._place)
            lines, _, _ = file.read().rpartition(b"\n")
        self._place += len(lines)
        for process, card in set(re.findall(LAUNCH, lines)) - self._seen():
            self._entries[int(card)].append(int(process))
        owners = [process for own in self._entries.values() for process in own]
        assert len(owners) == len({*owners}), "a process launches on its own card alone"
        return {card: [*own] for card, own in self._entries.items()}

    def _seen(self) -> set[tuple[bytes, bytes]]:
        items = self._entries.items()
        return {(b"%d" % process, b"%d" % card) for card, own in items for process in own}


def ask(server: Server, seed: int) -> None:
    """Ask for many samples; each must come."""
    reply = server.post(n=SAMPLES, max_tokens=TOKENS, ignore_eos=True, seed=seed, prompt=[5, 6, 7])
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["completion_tokens"] == TOKENS * SAMPLES


def lose_and_find(server: Server, where: Path, launches: Launches, number: int) -> None:
    """Lose a card while its engine has work; then have it back, and wait until its engine steps."""
    before = launches.read()
    lost = where / "lost" / f"lost-{number}"

    def has_ended() -> bool:
        ask(server, 2)
        return any(f"engine {number} ended" in line for line in server.lines)

    def is_back() -> bool:
        ask(server, 3)
        return len(launches.read()[number]) > len(before[number])

    lost.touch()
    wait_until(has_ended, RUN_S)
    lost.unlink()
    wait_until(is_back, RUN_S)
    others = {**launches.read(), number: before[number]}
    assert others == before, "no other engine was started again"


def all_step(server: Server, launches: Launches, cards: list[int]) -> bool:
    ask(server, 0)
    return sorted(launches.read()) == cards


def test_each_of_two_cards_is_lost_in_turn_and_found_again(serve: Serve, where: Path) -> None:
    launches = Launches(where / "log")
    with serve(2) as server:
        wait_until(lambda: all_step(server, launches, [0, 1]), RUN_S)
        for number in range(2):
            lose_and_find(server, where, launches, number)
        assert "CUDA_ERROR_LAUNCH_FAILED" in "".join(server.lines)


@pytest.mark.slow
def test_seven_of_eight_cards_serve_and_each_is_lost_in_turn(serve: Serve, where: Path) -> None:
    refused = 5
    cards = [card for card in range(8) if card != refused]
    launches = Launches(where / "log")
    with serve(8, ecc=1, ecc_card=refused) as server:
        wait_until(lambda: all_step(server, launches, cards), RUN_S)
        assert "7 of 8 engines" in server.get("/ready").text
        assert "uncorrectable ECC error" in "".join(server.lines)
        for number in cards:
            lose_and_find(server, where, launches, number)


@pytest.mark.slow
def test_weights_change_on_seven_cards_while_the_eighth_is_dead(serve: Serve, where: Path) -> None:
    cards = [*range(7)]
    launches = Launches(where / "log")
    with serve(8, ecc=1, ecc_card=7) as server:
        wait_until(lambda: all_step(server, launches, cards), RUN_S)

        def change() -> bool:
            reply = server.admin.post("/v1/admin/weights", json={"path": str(where / "model")})
            assert reply.status_code in (200, 503), reply.text
            assert reply.status_code == 200 or "engine 7" in reply.text
            return reply.status_code == 200

        wait_until(change, RUN_S)  # from the minute on in which engine 7 has been away
        engines = server.admin.get("/v1/admin/state").json()["engines"]
        assert [engine["weights_version"] for engine in engines[:7]] == [2] * 7
        assert engines[7] is None
