"""`srm serve` on two GPUs: an engine on each, and one of them lost while both serve."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from srm.engine.config import ModelConfig
from srm.engine.weights.random_model import write_random_model
from tests.kit.fake_driver.driver import RUN_S, Call, FakeDriver, launches_of, read_log
from tests.kit.serving import Server, wait_until, write_text_model

MODEL = ModelConfig(d_model=512, num_layers=8, num_heads=4, n_ctx=512, vocab_size=8_192)
SLOTS = 256
FLAGS = ("--device=gpu", "--engines=2", f"--num-slots={SLOTS}", "--stall-s=1000")
SAMPLES = 64
"""Of a request: enough for both engines."""


@pytest.fixture
def where(tmp_path: Path) -> Path:
    (tmp_path / "log").touch()
    (tmp_path / "lost").mkdir()
    write_text_model(tmp_path / "model", MODEL)
    write_random_model(tmp_path / "model", MODEL)
    return tmp_path


@pytest.fixture
def server(
    where: Path, fake: FakeDriver, graphs: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Server]:
    settings = fake.environment(where / "log", devices=2, lost=where / "lost")
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with Server(
        where / "model", *FLAGS, f"--cache-dir={graphs}", engine_module="srm.engine", start_s=RUN_S
    ) as started:
        yield started


def launches(log: Path) -> dict[int, list[Call]]:
    """By device."""
    entries: dict[int, list[Call]] = {0: [], 1: []}
    for launch in launches_of(read_log(log)):
        entries[launch["device"]].append(launch)
    return entries


def ask(server: Server, seed: int) -> int:
    """Ask for many samples; return how many tokens came."""
    reply = server.post(n=SAMPLES, max_tokens=8, ignore_eos=True, seed=seed, prompt=[5, 6, 7])
    assert reply.status_code == 200, reply.text
    usage: dict[str, int] = reply.json()["usage"]
    return usage["completion_tokens"]


def test_a_lost_device_ends_its_engine_and_the_server_goes_on_with_the_other(
    server: Server, where: Path
) -> None:
    def both_run() -> bool:
        assert ask(server, 0) == 8 * SAMPLES
        return all(launches(where / "log").values())

    def one_has_ended() -> bool:
        assert ask(server, 2) == 8 * SAMPLES
        return any("engine 1 ended" in line for line in server.lines)

    wait_until(both_run, RUN_S)
    by_device = launches(where / "log")
    of_processes = {
        device: {item["process"] for item in result} for device, result in by_device.items()
    }
    assert all(len(process) == 1 for process in of_processes.values())
    assert of_processes[0].isdisjoint(of_processes[1])

    (where / "lost" / "lost-1").touch()
    assert ask(server, 1) == 8 * SAMPLES
    wait_until(one_has_ended, RUN_S)
    text = "".join(server.lines)
    assert "CUDA_ERROR_LAUNCH_FAILED" in text
    before = len(launches(where / "log")[0])
    assert ask(server, 3) == 8 * SAMPLES
    assert len(launches(where / "log")[0]) > before
