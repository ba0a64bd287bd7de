"""Other weights between two steps: what becomes of what runs and waits; the folder; the note."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from srm.engine.messages import PROMPT, Done, LoadWeights, Running
from srm.engine.process.engine import Engine
from srm.engine.process.weight_reload import WeightReload, load_weights
from srm.engine.process.weights_note import LoadFolder, SharedNote
from srm.engine.weights.checkpoint import load_checkpoint
from srm.engine.weights.random_model import write_random_model
from srm.engine.weights.weights import Weights
from srm.errors import EngineUnavailable, InvalidRequest, NotFound, SRMError, SwapInProgress
from tests.kit.engines.making import engine_of, ints, request_of
from tests.kit.engines.numpy_runner import TINY, feed, tiny_weights
from tests.kit.processes.numpy_engine import load, seed_folder
from tests.kit.processes.run_engine import run, tokens
from tests.kit.serving import wait_until

NEW = tiny_weights(seed=1)
HEADER = np.random.default_rng(2).integers(2, 31, 30).tolist()


def greedy(parts: list[tuple[Weights, int]], prompt: list[int]) -> list[int]:
    """The likeliest tokens, so many from each of these weights in turn, on one state."""
    sampled: list[int] = []
    state = np.zeros(TINY.state_width)
    for position, token in enumerate(prompt[:-1]):
        _, state = feed(parts[0][0], token, position, state)
    token = prompt[-1]
    for weights, count in parts:
        for _ in range(count):
            logits, state = feed(weights, token, len(prompt) - 1 + len(sampled), state)
            token = int(logits.argmax())
            sampled.append(token)
    return sampled


@pytest.mark.parametrize("is_overlapped", [False, True])
@pytest.mark.parametrize("steps", [2, 5, 10])
def test_what_runs_goes_on_from_its_state_and_what_is_under_way_is_completed_first(
    weights: Weights, steps: int, is_overlapped: bool
) -> None:
    engine = engine_of()
    step = engine.step_overlapped if is_overlapped else engine.step
    engine.add(request_of(max_tokens=10, temperature=0, emit="delta"))
    early = [output for _ in range(steps) for output in step()] + engine.settle()
    assert len(early) == steps - 1  # one was for the prompt
    assert (engine.status().weights_version, engine.status().fingerprint) == (1, "tiny-0")
    engine.load_weights(NEW)
    assert (engine.status().weights_version, engine.status().fingerprint) == (2, "tiny-1")
    late = run(engine)
    sampled = [token for output in early + late for token in ints(output.token_ids)]
    assert sampled == greedy([(weights, len(early)), (NEW, 10 - len(early))], [5, 6, 7])
    assert sampled != greedy([(weights, 10)], [5, 6, 7])
    assert late[-1].first_version == 1


def test_samples_that_start_later_owe_the_weights_before_nothing() -> None:
    """`tests/property/test_weight_reload.py` compares them with an engine that never had others."""
    engine = engine_of(num_slots=4)
    engine.add(request_of("many", HEADER, n=10, max_tokens=5, prompt_logprobs=2))
    early = [*engine.step(), *engine.step()]
    engine.scheduler.is_held = True
    engine.add(request_of("waiting"))
    early += [output for _ in range(20) for output in engine.step()]
    assert sorted(tokens(early)) == [("many", index) for index in (PROMPT, 0, 1, 2, 3)]
    assert engine.scheduler.is_quiet and engine.scheduler.num_waiting == 6 + 1
    engine.load_weights(NEW)
    engine.scheduler.is_held = False
    later = run(engine)
    many = [array for array in later if array.id == "many"]
    assert sorted(tokens(many)) == [("many", index) for index in range(4, 10)], "nothing twice"
    assert {waiting.first_version for waiting in many} == {1}, "the request began before"
    assert engine.scheduler.prefixes.num_used <= 2


@pytest.fixture
def new(tmp_path: Path) -> Path:
    """A folder with other weights."""
    return seed_folder(tmp_path / "new", 1)


def swap_once(
    engine: Engine, folder: Path, how: LoadFolder = load, running: Running = "finish"
) -> Done:
    reload = WeightReload(engine, how, SharedNote(), "")
    reload.begin(LoadWeights("a", str(folder), running))
    try:
        with pytest.raises(SwapInProgress, match=str(folder)):
            reload.begin(LoadWeights("b", str(folder)))
        while not reload.is_due():
            pass
        return reload.make()
    finally:
        assert reload.current is None and not engine.scheduler.is_held
        reload.close()


def test_weights_are_bound_beside_the_steps(new: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, goes_on = engine_of(), threading.Event()
    bind, is_binding = engine.runner.bind_weights, threading.Event()

    def bind_late(weights: Weights) -> Weights:
        is_binding.set()
        assert goes_on.wait(60)
        bound: Weights = bind(weights)
        return bound

    monkeypatch.setattr(engine.runner, "bind_weights", bind_late)
    reload = WeightReload(engine, load, SharedNote(), "")
    reload.begin(LoadWeights("a", str(new), "continue"))
    engine.add(request_of(max_tokens=5))
    assert len(run(engine)) == 1 and not reload.is_due()
    assert is_binding.wait(60)
    goes_on.set()
    monkeypatch.setattr(engine.runner, "bind_weights", None)  # nothing is bound in the pause
    wait_until(reload.is_due)
    assert reload.make().detail["weights_version"] == 2
    reload.close()


def test_a_change_that_was_given_up_is_not_bound(
    new: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, goes_on = engine_of(), threading.Event()
    loaded, bound, bind = threading.Event(), [], engine.runner.bind_weights

    def load_late(path: Path) -> Weights:
        loaded.set()
        assert goes_on.wait(60)
        return load(path)

    def bind_noted(weights: Weights) -> Weights:
        bound.append(threading.current_thread().name)
        own: Weights = bind(weights)
        return own

    monkeypatch.setattr(engine.runner, "bind_weights", bind_noted)
    reload = WeightReload(engine, load_late, SharedNote(), "")
    reload.begin(LoadWeights("a", str(new), "continue"))
    assert loaded.wait(60)
    with pytest.raises(EngineUnavailable, match="draining"):
        reload.check_wanted(has_owner=True, is_draining=True)
    reload.begin(LoadWeights("b", str(new), "continue"))
    goes_on.set()
    wait_until(reload.is_due)
    assert reload.make().detail["weights_version"] == 2
    reload.close()
    assert len(bound) == 1


@pytest.mark.parametrize(
    ("how", "message"),
    [("bind_weights", r"new' cannot be bound"), ("use_weights", r"new'.* cannot be put to use")],
)
def test_a_fault_of_the_runner_ends_the_change_alone(
    new: Path, monkeypatch: pytest.MonkeyPatch, how: str, message: str
) -> None:
    engine = engine_of()
    engine.add(request_of(max_tokens=10, temperature=0))
    expected = greedy([(tiny_weights(), 10)], [5, 6, 7])

    def fail(_weights: Weights) -> Weights:
        raise ValueError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(engine.runner, how, fail)
        with pytest.raises(SRMError, match=rf"{message}: ValueError\('out of memory'"):
            swap_once(engine, new, running="continue")
    assert (engine.status().fingerprint, engine.status().weights_version) == ("tiny-0", 1)
    assert [ints(output.token_ids) for output in run(engine)] == [expected]
    assert swap_once(engine, new).detail["weights_version"] == 2


def test_a_hanging_disk_holds_up_other_changes_and_no_step(new: Path) -> None:
    answers = threading.Event()

    def hang(folder: Path) -> Weights:
        assert answers.wait(120)
        return load(folder)

    engine = engine_of()
    reload = WeightReload(engine, hang, SharedNote(), "")
    reload.begin(LoadWeights("a", str(new)))
    try:
        engine.add(request_of())
        assert run(engine)
        assert not reload.is_due()
        with pytest.raises(SwapInProgress):
            reload.begin(LoadWeights("b", str(new)))
    finally:
        answers.set()
    wait_until(reload.is_due)
    assert reload.make().detail["weights_version"] == 2
    reload.begin(LoadWeights("b", str(new)))
    reload.close()


def raising(error: Exception) -> LoadFolder:
    def broken(_folder: Path) -> Weights:
        raise error

    return broken


def not_utf8(folder: Path) -> None:
    write_random_model(folder, TINY)
    (folder / "config.json").write_bytes(b'{"mixer": "\xff"}')


def larger_than_the_memory(folder: Path) -> None:
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(2**41)


def endless(folder: Path) -> None:
    """More layers than can be listed."""
    text, number = (folder / "config.json").read_text(), f'"num_layers":{TINY.num_layers}'
    assert number in text
    (folder / "config.json").write_text(text.replace(number, '"num_layers":2147483648'))


@pytest.mark.parametrize(
    ("spoil", "how", "message"),
    [
        (lambda f: (f / "config.json").write_text("{"), load, r"new/config\.json"),
        (not_utf8, load_checkpoint, r"new/config\.json.*utf-8"),
        (larger_than_the_memory, load_checkpoint, r"safetensors: it is larger than the memory"),
        (endless, load_checkpoint, r"num_layers \* num_heads must be at most 65536"),
        (lambda _: None, raising(MemoryError()), "new' cannot be loaded: MemoryError"),
        (lambda _: None, raising(ValueError("a bug")), "new' cannot be loaded: ValueError"),
    ],
)
def test_a_fault_of_the_folder_ends_the_change_alone(
    new: Path, spoil: Callable[[Path], object], how: LoadFolder, message: str
) -> None:
    engine = engine_of()
    spoil(new)
    with pytest.raises(InvalidRequest, match=message) as error:
        swap_once(engine, new, how=how)
    assert error.value.param == "path"
    assert (engine.status().fingerprint, engine.status().weights_version) == ("tiny-0", 1)


def test_a_folder_must_be_there_and_of_the_same_architecture(new: Path, tmp_path: Path) -> None:
    other = seed_folder(tmp_path / "other", 1, msgspec.structs.replace(TINY, n_ctx=32))
    assert load_weights(load, new, TINY).fingerprint == "tiny-1"
    for folder, kind, message in (
        (new / "nowhere", NotFound, r"nowhere.*no such folder"),
        (other, InvalidRequest, r"n_ctx = 32 .* served has 64"),
        (Path("models"), InvalidRequest, "absolute"),
    ):
        with pytest.raises(kind, match=message) as error:
            load_weights(load, folder, TINY)
        assert error.value.param == "path"
