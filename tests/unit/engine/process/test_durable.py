"""When snapshots are taken, what is in them, and what durable requests go on from."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from srm.engine.config import EngineConfig
from srm.engine.messages import Output, Request
from srm.engine.process.durable import REFUSED, Detail, Durable
from srm.engine.process.engine import Engine
from srm.engine.process.snapshot import NAME
from srm.errors import SnapshotError
from tests.kit.engines.making import engine_of, request_of, sample_value
from tests.kit.engines.numpy_runner import tiny_weights
from tests.kit.processes.run_engine import run, tokens

Tokens = dict[tuple[str, int], bytes]
REQUESTS = [  # more sequences than the engine's 8 slots
    request_of(f"batch-{at}", [3, at + 4], n=3, max_tokens=20 + at, seed=at, durable=True)
    for at in range(4)
]


def add(engine: Engine, requests: list[Request] = REQUESTS, durable: Durable | None = None) -> None:
    for request in requests:
        engine.add(request)
        if durable is not None:
            durable.accepted(request.id)


def begun(folder: Path | None, steps: int = 12) -> tuple[Engine, Durable]:
    """An engine in the midst of REQUESTS, with or without a folder for snapshots."""
    engine = engine_of()
    add(engine)
    run(engine, steps)
    return engine, Durable(engine, config_of(folder) if folder else EngineConfig())


def config_of(folder: Path, interval_s: float = 0.0) -> EngineConfig:
    return EngineConfig(snapshot_dir=str(folder), snapshot_interval_s=interval_s)


def take_snapshot(
    engine: Engine, durable: Durable, between: Callable[[], list[Output]] = list
) -> tuple[Detail, Tokens]:
    """A snapshot, and what is said meanwhile; `between` is called after each of its parts."""
    results: list[Detail | SnapshotError] = []
    entries: Tokens = {}
    durable.ask(results.append)
    while not results:
        durable.tick(has_requests=True)
        if durable.wants_part:
            entries |= tokens(engine.settle())
            durable.advance()
            entries |= tokens(between())
    if isinstance(results[0], SnapshotError):
        raise results[0]
    return results[0], entries


@pytest.mark.parametrize("steps_between", [0, 3])
def test_another_engine_goes_on_and_samples_the_same(
    tmp_path: Path, steps_between: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that there are several parts.
    monkeypatch.setattr("srm.engine.process.engine.READ_SLOTS", 3)
    alone, second = engine_of(), engine_of()
    add(alone)
    expected = tokens(run(alone))
    first, durable = begun(tmp_path)
    detail, message = take_snapshot(first, durable, lambda: run(first, steps_between))
    assert detail["sequences"] == 8
    assert message | tokens(run(first)) == expected  # and the first is none the worse for it
    restoring = Durable(second, config_of(tmp_path))
    restored = sample_value("srm_restored_sequences_total")
    add(second, durable=restoring)
    assert sample_value("srm_restored_sequences_total") - restored == 8
    assert tokens(run(second)) == expected
    assert second.num_steps < alone.num_steps


def test_samples_held_back_start_in_another_engine(tmp_path: Path) -> None:
    waves = [msgspec.structs.replace(request, first_wave=1) for request in REQUESTS]
    alone, first, second = engine_of(), engine_of(), engine_of()
    add(alone)
    add(first, waves)
    expected = tokens(run(alone))
    run(first, 12)
    detail, _ = take_snapshot(first, Durable(first, config_of(tmp_path)))
    assert detail["sequences"] == 4, "one of each"
    add(second, waves, Durable(second, config_of(tmp_path)))
    entries = tokens(run(second))
    for request in waves:
        second.start_below(request.id, request.params.n)
    assert entries | tokens(run(second)) == expected


@pytest.mark.parametrize("of_other_weights", [False, True])
def test_a_snapshot_that_cannot_be_used_is_set_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, of_other_weights: bool
) -> None:
    first, durable = begun(tmp_path)
    take_snapshot(first, durable)
    path = tmp_path / NAME
    if of_other_weights:
        second, message = engine_of(model=tiny_weights(1)), "fingerprint is tiny-0, expected tiny-1"
    else:
        second, message = engine_of(), f"{path}: checksum of states in chunk 0 is"
        whole = path.read_bytes()
        path.write_bytes(whole[:200] + bytes([whole[200] ^ 1]) + whole[201:])
    refused = sample_value("srm_snapshots_total", result="refused")
    durable = Durable(second, config_of(tmp_path))
    with caplog.at_level(logging.ERROR):
        assert [durable.progress(request) for request in REQUESTS] == [None] * 4
    assert message in caplog.text
    assert list(tmp_path.iterdir()) == [tmp_path / REFUSED]
    assert sample_value("srm_snapshots_total", result="refused") == refused + 1


def test_weights_that_change_meanwhile_end_a_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("srm.engine.process.engine.READ_SLOTS", 3)
    engine, durable = begun(tmp_path)
    take_snapshot(engine, durable)
    content = (tmp_path / NAME).read_bytes()

    def others_come() -> list[Output]:
        engine.load_weights(tiny_weights(1))
        return []

    with pytest.raises(SnapshotError, match="weights were changed"):
        take_snapshot(engine, durable, between=others_come)
    assert list(tmp_path.iterdir()) == [tmp_path / NAME]
    assert (tmp_path / NAME).read_bytes() == content


def test_what_other_weights_made_is_not_gone_on_with(tmp_path: Path) -> None:
    first, durable = begun(tmp_path)
    take_snapshot(first, durable)
    durable.keep([REQUESTS[0].id])
    second = engine_of()
    restoring = Durable(second, config_of(tmp_path))
    for engine, known, request in (first, durable, REQUESTS[0]), (second, restoring, REQUESTS[1]):
        assert known.progress(request) is not None
        engine.load_weights(tiny_weights(1))
        assert known.progress(request) is None


def test_what_is_kept_is_taken_up_once_or_forgotten_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone = engine_of()
    add(alone)
    expected = tokens(run(alone))
    engine, durable = begun(None, 0)
    message = tokens(run(engine, 12) + engine.settle())
    durable.keep([request.id for request in REQUESTS])
    assert not engine.has_work
    other = msgspec.structs.replace(REQUESTS[0], prompt_token_ids=b"\2\0\0\0")
    assert durable.progress(other) is None
    add(engine, REQUESTS[:2], durable)
    assert durable.progress(REQUESTS[0]) is None  # taken up
    assert durable.progress(REQUESTS[2]) is not None
    monkeypatch.setattr("time.monotonic", lambda: 10.0**9)
    durable.tick(has_requests=False)
    assert durable.progress(REQUESTS[2]) is None
    add(engine, REQUESTS[2:], durable)
    assert (
        tokens(run(engine)).items() >= {k: expected[k] for k in expected.keys() - message}.items()
    )


def test_one_is_due_only_while_there_are_durable_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("srm.engine.process.durable.time.monotonic", lambda: now)
    engine = engine_of()
    durable = Durable(engine, config_of(tmp_path, interval_s=60))
    add(engine)
    for later, has_requests, is_busy in ((1000, False, False), (59, True, False), (2, True, True)):
        now += later
        durable.tick(has_requests)
        assert durable.is_busy == is_busy


def test_the_last_one_is_given_up_when_it_takes_too_long(tmp_path: Path) -> None:
    engine, durable = begun(tmp_path)
    engine.settle()
    failed = sample_value("srm_snapshots_total", result="failed")
    durable.finish(is_late=lambda: True, alive=lambda: None)
    assert not durable.is_busy
    assert sample_value("srm_snapshots_total", result="failed") == failed + 1
    alive: list[int] = []
    durable.finish(is_late=lambda: False, alive=lambda: alive.append(1))
    assert alive and (tmp_path / NAME).exists()
