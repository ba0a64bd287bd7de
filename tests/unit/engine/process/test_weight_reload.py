"""Other weights between two steps: what becomes of what runs and waits; the folder; the note."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import msgspec
import numpy as np
import pytest

from engine.config import EngineConfig
from engine.errors import CheckpointError, InvalidRequest, NotFound, SRMError, SwapInProgress
from engine.messages import PROMPT, Done, LoadWeights, Output, join
from engine.process.engine import Engine
from engine.process.weight_reload import LoadFolder, Swaps, first_weights, load_weights
from engine.weights.checkpoint import load_checkpoint
from engine.weights.random_model import write_random_model
from engine.weights.weights import Weights
from tests.engines.making import engine_of, ints, request_of
from tests.engines.numpy_engine import load
from tests.engines.numpy_runner import TINY, feed, tiny_weights

NEW = tiny_weights(seed=1)
HEADER = np.random.default_rng(2).integers(2, 31, 30).tolist()
Said = dict[tuple[str, int], Output]


def run(engine: Engine, is_over: Callable[[], bool] = lambda: False) -> Said:
    """All that is said from here on, or until then, by request and sample."""
    said: defaultdict[tuple[str, int], list[Output]] = defaultdict(list)
    while engine.has_work and not is_over():
        for output in engine.step():
            said[output.id, output.index].append(output)
    return {key: join(outputs) for key, outputs in said.items()}


def hold(engine: Engine) -> Said:
    """What is said until nothing that has begun is left."""
    engine.scheduler.is_held = True
    return run(engine, lambda: engine.scheduler.is_quiet)


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


@pytest.mark.parametrize("before", [1, 4, 9])
def test_what_runs_goes_on_from_its_state(weights: Weights, before: int) -> None:
    engine = engine_of()
    engine.add(request_of(max_tokens=10, temperature=0))
    for _ in range(before + 1):  # a step for the prompt
        engine.step()
    assert (engine.status().weights_version, engine.status().fingerprint) == (1, "tiny-0")
    engine.load_weights(NEW)
    assert (engine.status().weights_version, engine.status().fingerprint) == (2, "tiny-1")
    (output,) = run(engine).values()
    tokens = ints(output.token_ids)
    assert tokens == greedy([(weights, before), (NEW, 10 - before)], [5, 6, 7])
    assert tokens != greedy([(weights, 10)], [5, 6, 7])
    assert output.first_version == 1


def test_what_is_under_way_is_completed_by_the_weights_before(weights: Weights) -> None:
    engine = engine_of()
    engine.add(request_of(max_tokens=6, temperature=0, emit="delta"))
    early = [output for _ in range(4) for output in engine.step_overlapped()]
    early += engine.settle()
    engine.load_weights(NEW)
    late = [output for _ in range(9) for output in engine.step_overlapped()]
    tokens = chain(*(ints(output.token_ids) for output in early + late))
    assert list(tokens) == greedy([(weights, len(early)), (NEW, 6 - len(early))], [5, 6, 7])
    assert len(early) == 3


def test_samples_that_start_later_owe_the_weights_before_nothing() -> None:
    engine, fresh = engine_of(num_slots=4), engine_of(model=NEW)
    many = {"prompt": HEADER, "n": 10, "max_tokens": 5, "seed": 3}
    engine.add(request_of("many", prompt_logprobs=2, **many))
    said = run(engine, lambda: engine.scheduler.table.num_owned == 4)  # the prompt is fed, scored
    said |= hold(engine)
    assert {index for _, index in said} == {PROMPT, 0, 1, 2, 3}
    engine.load_weights(NEW)
    engine.scheduler.is_held = False
    later = run(engine)
    assert set(later) == {("many", index) for index in range(4, 10)}, "no score is sent twice"
    fresh.add(request_of("many", **many))
    expected = run(fresh)
    for key, output in later.items():
        assert output.token_ids == expected[key].token_ids
        assert output.first_version == 1, "the request began before"
    assert engine.scheduler.prefixes.num_used <= 1


def test_nothing_kept_is_begun_from() -> None:
    engine, found = engine_of(), list[Output]()
    for number in range(4):
        if number == 2:
            engine.load_weights(NEW)
        engine.add(request_of(str(number), HEADER, max_tokens=3))
        found += run(engine).values()
    assert [one.cached_tokens for one in found] == [0, 29, 0, 29]
    assert [one.first_version for one in found] == [0] * 4
    fresh = engine_of(model=NEW)
    fresh.add(request_of("2", HEADER, max_tokens=3))
    assert list(run(fresh).values()) == found[2:3]


def test_held_means_that_nothing_starts() -> None:
    engine = engine_of()
    engine.add(request_of("running", max_tokens=6))
    engine.step()
    engine.add(request_of("waiting"))
    assert set(hold(engine)) == {("running", 0)}
    assert (engine.scheduler.request_ids(), engine.scheduler.num_waiting) == (["waiting"], 1)
    engine.scheduler.is_held = False
    assert set(run(engine)) == {("waiting", 0)}


MakeFolder = Callable[..., Path]


@pytest.fixture
def make_folder(tmp_path: Path) -> MakeFolder:
    """make_folder("b", seed=1, n_ctx=32): a model folder that tests.engines.numpy_engine reads."""

    def make(name: str, seed: int = 1, **changed: int) -> Path:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        config = msgspec.structs.replace(TINY, **changed)
        (folder / "config.json").write_bytes(msgspec.json.encode(config))
        (folder / "seed").write_text(str(seed))
        return folder

    return make


def swap_once(engine: Engine, folder: Path, note: str = "", how: LoadFolder = load) -> Done:
    swaps = Swaps(engine, how, note)
    swaps.begin(LoadWeights("a", str(folder)))
    try:
        with pytest.raises(SwapInProgress, match=str(folder)):
            swaps.begin(LoadWeights("b", str(folder)))
        while not swaps.is_due():
            pass
        return swaps.make()
    finally:
        assert swaps.current is None and not engine.scheduler.is_held
        swaps.close()


def test_one_change_at_a_time(make_folder: MakeFolder) -> None:
    engine, folder = engine_of(), make_folder("new")
    done = swap_once(engine, folder)
    assert (done.id, done.detail["weights_version"], done.detail["fingerprint"]) == (
        "a",
        2,
        "tiny-1",
    )
    assert swap_once(engine, folder).detail["weights_version"] == 3


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
        (lambda f: (f / "config.json").write_text("{"), load, r"folder/config\.json"),
        (not_utf8, load_checkpoint, r"folder/config\.json.*utf-8"),
        (larger_than_the_memory, load_checkpoint, r"safetensors: it is larger than the memory"),
        (endless, load_checkpoint, r"num_layers \* num_heads must be at most 65536"),
        (lambda _: None, raising(MemoryError()), "folder' cannot be loaded: MemoryError"),
        (lambda _: None, raising(ValueError("a bug")), "folder' cannot be loaded: ValueError"),
    ],
)
def test_what_is_wrong_with_a_folder_ends_the_change_and_nothing_else(
    make_folder: MakeFolder, spoil: Callable[[Path], object], how: LoadFolder, message: str
) -> None:
    engine, folder = engine_of(), make_folder("folder")
    spoil(folder)
    with pytest.raises(InvalidRequest, match=message) as error:
        swap_once(engine, folder, how=how)
    assert error.value.param == "path"
    assert (engine.status().fingerprint, engine.status().weights_version) == ("tiny-0", 1)


def test_a_folder_must_be_there_and_of_the_same_architecture(make_folder: MakeFolder) -> None:
    good = make_folder("good")
    assert load_weights(load, good, TINY).fingerprint == "tiny-1"
    for folder, kind, message in (
        (good / "nowhere", NotFound, r"nowhere.*no such folder"),
        (make_folder("other", n_ctx=32), InvalidRequest, r"n_ctx = 32 .* served has 64"),
        (Path("models"), InvalidRequest, "absolute"),
    ):
        with pytest.raises(kind, match=message) as error:
            load_weights(load, folder, TINY)
        assert error.value.param == "path"


def test_a_successor_begins_with_what_was_in_use(make_folder: MakeFolder, tmp_path: Path) -> None:
    note, folder = tmp_path / "weights", make_folder("new")
    config = EngineConfig(model=make_folder("first", seed=0), weights_note=str(note))
    weights, version = first_weights(config, load)
    assert (weights.fingerprint, version) == ("tiny-0", 1)
    swap_once(engine_of(), folder, str(note))
    weights, version = first_weights(config, load)
    assert (weights.fingerprint, version) == ("tiny-1", 2)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["weights"]

    make_folder("new", seed=2)
    with pytest.raises(CheckpointError, match=r"version 2.*tiny-1 in .*tiny-2 now"):
        first_weights(config, load)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"version 2.*cannot be loaded again.*config\.json"):
        first_weights(config, load)
    engine = engine_of()
    with pytest.raises(SRMError, match=r"cannot write .*nowhere"):
        swap_once(engine, make_folder("new"), str(tmp_path / "nowhere" / "weights"))
    assert engine.status().weights_version == 1
