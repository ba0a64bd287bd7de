"""When snapshots are taken, what is in them, and what durable requests go on from."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest

from engine import metrics
from engine.config import EngineConfig
from engine.errors import SnapshotError
from engine.messages import Output, Request
from engine.process.durable import REFUSED, Detail, Durable
from engine.process.engine import Engine
from engine.process.snapshot import NAME
from tests.conftest import MakeEngine, MakeRequest
from tests.engines.numpy_runner import tiny_weights

Tokens = dict[tuple[str, int], bytes]
LATER = 10**6


def config_of(folder: Path, interval_s: float = 0.0) -> EngineConfig:
    return EngineConfig(snapshot_dir=str(folder), snapshot_interval_s=interval_s)


@pytest.fixture
def requests(make_request: MakeRequest) -> list[Request]:
    """More sequences than the 8 slots of `make_engine`, of several requests each."""
    made = [
        make_request(f"batch-{at}", [3, at + 4], n=3, max_tokens=20 + at, seed=at)
        for at in range(4)
    ]
    return [msgspec.structs.replace(one, durable=True) for one in made]


def run(engine: Engine, steps: int = LATER) -> Tokens:
    outputs: list[Output] = []
    for _ in range(steps):
        if not engine.has_work:
            break
        outputs += engine.step_overlapped()
    return tokens(outputs)


def tokens(outputs: list[Output]) -> Tokens:
    return {(one.id, one.index): one.token_ids for one in outputs}


def add(engine: Engine, requests: list[Request], durable: Durable | None = None) -> None:
    for request in requests:
        engine.add(request)
        if durable is not None:
            durable.accepted(request.id)


def take(engine: Engine, durable: Durable, steps_between: int = 0) -> tuple[Detail, Tokens]:
    """A snapshot, and what steps made meanwhile said."""
    found: list[Detail | SnapshotError] = []
    said: Tokens = {}
    durable.ask(found.append)
    while not found:
        durable.tick(has_requests=True)
        if durable.wants_part:
            said |= tokens(engine.settle())
            durable.advance()
            said |= run(engine, steps_between)
    if isinstance(found[0], SnapshotError):
        raise found[0]
    return found[0], said


@pytest.mark.parametrize("steps_between", [0, 3])
def test_another_engine_goes_on_and_samples_the_same(
    make_engine: MakeEngine,
    requests: list[Request],
    tmp_path: Path,
    steps_between: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.process.engine.READ_SLOTS", 3)  # so that there are several parts
    alone, first, second = make_engine(), make_engine(), make_engine()
    add(alone, requests)
    expected = run(alone)
    add(first, requests)
    run(first, 12)
    detail, said = take(first, Durable(first, config_of(tmp_path)), steps_between)
    assert detail["sequences"] == 8
    assert said | run(first) == expected  # and the first is none the worse for it
    restoring = Durable(second, config_of(tmp_path))
    restored = metrics.RESTORED._value.get()
    add(second, requests, restoring)
    assert metrics.RESTORED._value.get() - restored == 8
    assert run(second) == expected
    assert second.num_steps < alone.num_steps


def test_a_second_snapshot_takes_the_place_of_the_first(
    make_engine: MakeEngine, requests: list[Request], tmp_path: Path
) -> None:
    first, second = make_engine(), make_engine()
    durable = Durable(first, config_of(tmp_path))
    add(first, requests)
    run(first, 6)
    take(first, durable)
    run(first, 9)
    take(first, durable)
    found = Durable(second, config_of(tmp_path)).progress(requests[0])
    assert found is not None
    assert min(map(len, found.tokens)) > 4 * 9


def test_a_damaged_snapshot_is_set_aside(
    make_engine: MakeEngine,
    requests: list[Request],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second = make_engine(), make_engine()
    add(first, requests)
    run(first, 12)
    take(first, Durable(first, config_of(tmp_path)))
    path = tmp_path / NAME
    damaged = bytearray(path.read_bytes())
    damaged[200] ^= 1
    path.write_bytes(damaged)
    refused = metrics.SNAPSHOTS.labels("refused")._value.get()
    durable = Durable(second, config_of(tmp_path))
    with caplog.at_level(logging.ERROR):
        assert [durable.progress(request) for request in requests] == [None] * 4
    assert f"{path}: checksum of states in chunk 0 is" in caplog.text
    assert list(tmp_path.iterdir()) == [tmp_path / REFUSED]
    assert metrics.SNAPSHOTS.labels("refused")._value.get() == refused + 1
    add(second, requests, durable)
    run(second)
    assert second.num_steps > first.num_steps


def test_a_snapshot_of_other_weights_is_set_aside(
    make_engine: MakeEngine,
    requests: list[Request],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, other = make_engine(), make_engine(model=tiny_weights(1))
    add(first, requests)
    run(first, 12)
    take(first, Durable(first, config_of(tmp_path)))
    with caplog.at_level(logging.ERROR):
        assert Durable(other, config_of(tmp_path)).progress(requests[0]) is None
    assert "fingerprint is tiny-0, expected tiny-1" in caplog.text
    assert list(tmp_path.iterdir()) == [tmp_path / REFUSED]


def test_weights_that_change_meanwhile_end_a_snapshot(
    make_engine: MakeEngine,
    requests: list[Request],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.process.engine.READ_SLOTS", 3)
    engine = make_engine()
    durable = Durable(engine, config_of(tmp_path))
    add(engine, requests)
    run(engine, 12)
    take(engine, durable)
    kept = (tmp_path / NAME).read_bytes()
    found: list[Detail | SnapshotError] = []
    durable.ask(found.append)
    durable.tick(has_requests=True)
    engine.settle()
    durable.advance()
    engine._fingerprint = "others"
    while not found:
        if durable.wants_part:
            durable.advance()
        durable.tick(has_requests=True)
    assert isinstance(found[0], SnapshotError)
    assert "weights were changed" in found[0].message
    assert list(tmp_path.iterdir()) == [tmp_path / NAME]
    assert (tmp_path / NAME).read_bytes() == kept


def test_what_other_weights_made_is_not_gone_on_with(
    make_engine: MakeEngine, requests: list[Request], tmp_path: Path
) -> None:
    first, second = make_engine(), make_engine()
    add(first, requests)
    run(first, 12)
    durable = Durable(first, config_of(tmp_path))
    take(first, durable)
    durable.keep([requests[0].id])
    assert durable.progress(requests[0]) is not None
    first._fingerprint = "others"
    assert durable.progress(requests[0]) is None
    restoring = Durable(second, config_of(tmp_path))
    assert restoring.progress(requests[1]) is not None
    second._fingerprint = "others"
    assert restoring.progress(requests[1]) is None


def test_what_is_kept_is_taken_up_once_or_forgotten_after_a_while(
    make_engine: MakeEngine, requests: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, alone = make_engine(), make_engine()
    durable = Durable(engine, EngineConfig())
    add(alone, requests)
    expected = run(alone)
    add(engine, requests)
    said = run(engine, 12)
    said |= tokens(engine.settle())
    durable.keep([request.id for request in requests])
    assert not engine.has_work
    other = msgspec.structs.replace(requests[0], prompt_token_ids=b"\2\0\0\0")
    assert durable.progress(other) is None
    add(engine, requests[:2], durable)
    assert durable.progress(requests[0]) is None  # taken up
    assert durable.progress(requests[2]) is not None
    now = 10.0**9
    monkeypatch.setattr("time.monotonic", lambda: now)
    durable.tick(has_requests=False)
    assert durable.progress(requests[2]) is None
    add(engine, requests[2:], durable)
    found = run(engine)
    assert {key: found[key] for key in expected if key not in said} == {
        key: value for key, value in expected.items() if key not in said
    }


def test_one_is_due_only_while_there_are_durable_requests(
    make_engine: MakeEngine,
    requests: list[Request],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr("engine.process.durable.time.monotonic", lambda: now)
    engine = make_engine()
    durable = Durable(engine, config_of(tmp_path, interval_s=60))
    now += 1000
    durable.tick(has_requests=False)
    assert not durable.is_busy
    add(engine, requests)
    now += 59
    durable.tick(has_requests=True)
    assert not durable.is_busy
    now += 2
    durable.tick(has_requests=True)
    assert durable.is_busy


def test_the_last_one_is_given_up_when_it_takes_too_long(
    make_engine: MakeEngine, requests: list[Request], tmp_path: Path
) -> None:
    engine = make_engine()
    durable = Durable(engine, config_of(tmp_path))
    add(engine, requests)
    run(engine, 12)
    engine.settle()
    failed = metrics.SNAPSHOTS.labels("failed")._value.get()
    durable.finish(is_late=lambda: True, alive=lambda: None)
    assert not durable.is_busy
    assert metrics.SNAPSHOTS.labels("failed")._value.get() == failed + 1
    alive: list[int] = []
    durable.finish(is_late=lambda: False, alive=lambda: alive.append(1))
    assert (tmp_path / NAME).exists()
    assert alive
