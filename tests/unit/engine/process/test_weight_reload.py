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
from engine.messages import PROMPT, LoadWeights, Output, join
from engine.process.engine import Engine
from engine.process.weight_reload import Swaps, first_weights, load_weights
from engine.weights.checkpoint import load_checkpoint
from engine.weights.random_model import write_random_model
from engine.weights.weights import Weights
from tests.conftest import MakeEngine, MakeRequest
from tests.engines.numpy_engine import load
from tests.engines.numpy_runner import TINY, feed, tiny_weights

NEW = tiny_weights(seed=1)
HEADER = np.random.default_rng(2).integers(2, 31, 30).tolist()


def run(engine: Engine) -> dict[tuple[str, int], Output]:
    """All that is said from here on, by request and sample."""
    said: defaultdict[tuple[str, int], list[Output]] = defaultdict(list)
    while engine.has_work:
        for output in engine.step():
            said[output.id, output.index].append(output)
    return {key: join(outputs) for key, outputs in said.items()}


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
def test_what_runs_goes_on_from_its_state(
    make_engine: MakeEngine, make_request: MakeRequest, weights: Weights, before: int
) -> None:
    engine = make_engine()
    engine.add(make_request(prompt=[5, 6, 7], max_tokens=10, temperature=0))
    for _ in range(before + 1):  # a step for the prompt
        engine.step()
    engine.load_weights(NEW)
    (output,) = run(engine).values()
    tokens = np.frombuffer(output.token_ids, "<i4").tolist()
    assert tokens == greedy([(weights, before), (NEW, 10 - before)], [5, 6, 7])
    assert tokens != greedy([(weights, 10)], [5, 6, 7])
    assert output.first_version == 1


def test_what_is_under_way_is_completed_by_the_weights_before(
    make_engine: MakeEngine, make_request: MakeRequest, weights: Weights
) -> None:
    engine = make_engine()
    engine.add(make_request(prompt=[5, 6, 7], max_tokens=6, temperature=0, emit="delta"))
    early = [output for _ in range(4) for output in engine.step_overlapped()]
    early += engine.settle()
    engine.load_weights(NEW)
    late = [output for outputs in iter(engine.step_overlapped, []) for output in outputs]
    while engine.has_work:
        late += engine.step_overlapped()
    tokens = [np.frombuffer(output.token_ids, "<i4").tolist() for output in early + late]
    switched = greedy([(weights, len(early)), (NEW, 6 - len(early))], [5, 6, 7])
    assert list(chain(*tokens)) == switched
    assert len(early) == 3


def test_samples_that_start_later_owe_the_weights_before_nothing(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    engine = make_engine(num_slots=4)
    request = make_request("many", prompt=HEADER, n=10, max_tokens=5, seed=3, prompt_logprobs=2)
    engine.add(request)
    said: defaultdict[int, list[Output]] = defaultdict(list)
    while engine.scheduler.table.num_owned < 4:  # the prompt is fed, and scored
        for output in engine.step():
            said[output.index].append(output)
    engine.scheduler.is_held = True
    while not engine.scheduler.is_quiet:
        for output in engine.step():
            said[output.index].append(output)
    assert set(said) == {PROMPT, 0, 1, 2, 3}
    engine.load_weights(NEW)
    engine.scheduler.is_held = False
    later = run(engine)
    assert set(later) == {("many", index) for index in range(4, 10)}, "no score is sent twice"
    fresh = make_engine(model=NEW)
    fresh.add(make_request("many", prompt=HEADER, n=10, max_tokens=5, seed=3))
    expected = run(fresh)
    for key, output in later.items():
        assert output.token_ids == expected[key].token_ids
        assert output.first_version == 1, "the request began before"
    assert engine.scheduler.prefixes.num_used <= 1


def test_a_prompt_of_which_samples_run_goes_on_too(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    engine = make_engine(num_slots=2, max_step_rows=1)  # so one has not read its prompt's state
    engine.add(make_request(prompt=HEADER, n=3, max_tokens=4))
    while not engine.scheduler.table.num_owned:
        engine.step()
    engine.load_weights(NEW)
    assert len(run(engine)) == 3
    assert engine.scheduler.prefixes.num_pinned == 0


def test_nothing_kept_is_begun_from(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine()
    cached = []
    for number in range(4):
        if number == 2:
            engine.load_weights(NEW)
        engine.add(make_request(str(number), prompt=HEADER, max_tokens=3))
        (output,) = run(engine).values()
        cached.append(output.cached_tokens)
        assert output.first_version == 0
    assert cached == [0, 29, 0, 29]


def test_held_means_that_nothing_starts(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine()
    engine.add(make_request("running", max_tokens=6))
    engine.step()
    engine.scheduler.is_held = True
    engine.add(make_request("waiting"))
    while not engine.scheduler.is_quiet:
        engine.step()
    assert engine.scheduler.request_ids() == ["waiting"]
    assert engine.scheduler.num_waiting == 1
    engine.scheduler.is_held = False
    assert [output.id for output in run(engine).values()] == ["waiting"]


def test_version_and_fingerprint_follow(make_engine: MakeEngine) -> None:
    engine = make_engine()
    assert (engine.status().weights_version, engine.status().fingerprint) == (1, "tiny-0")
    engine.load_weights(NEW)
    assert (engine.status().weights_version, engine.status().fingerprint) == (2, "tiny-1")


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


def test_a_folder_must_be_there_and_of_the_same_architecture(make_folder: MakeFolder) -> None:
    assert load_weights(load, make_folder("good"), TINY).fingerprint == "tiny-1"
    with pytest.raises(NotFound, match=r"nowhere.*no such folder") as missing:
        load_weights(load, make_folder("good") / "nowhere", TINY)
    with pytest.raises(InvalidRequest, match=r"n_ctx = 32 .* served has 64") as other:
        load_weights(load, make_folder("other", n_ctx=32), TINY)
    with pytest.raises(InvalidRequest, match="absolute"):
        load_weights(load, Path("models"), TINY)
    (broken := make_folder("broken")).joinpath("config.json").write_text("{")
    with pytest.raises(InvalidRequest, match=r"broken/config\.json") as wrong:
        load_weights(load, broken, TINY)
    assert {one.value.param for one in (missing, other, wrong)} == {"path"}


def due(swaps: Swaps) -> None:
    while not swaps.is_due():
        pass


def test_one_change_at_a_time(make_engine: MakeEngine, make_folder: MakeFolder) -> None:
    engine = make_engine()
    swaps = Swaps(engine, load, note="")
    folder = make_folder("new")
    swaps.begin(LoadWeights("a", str(folder)))
    with pytest.raises(SwapInProgress, match=str(folder)):
        swaps.begin(LoadWeights("b", str(folder)))
    due(swaps)
    done = swaps.make()
    assert done.id == "a" and done.detail["weights_version"] == 2
    assert done.detail["fingerprint"] == "tiny-1"
    swaps.begin(LoadWeights("c", str(folder)))
    due(swaps)
    assert swaps.make().detail["weights_version"] == 3
    swaps.close()


def test_what_is_wrong_with_a_folder_ends_the_change_and_nothing_else(
    make_engine: MakeEngine, make_folder: MakeFolder
) -> None:
    engine = make_engine()
    swaps = Swaps(engine, load, note="")
    swaps.begin(LoadWeights("a", str(make_folder("other", n_ctx=32))))
    with pytest.raises(InvalidRequest, match="n_ctx"):
        due(swaps)
    assert swaps.current is None and not engine.scheduler.is_held
    assert engine.status().fingerprint == "tiny-0"
    swaps.close()


def test_a_config_that_is_no_utf8_leaves_the_weights_as_they_are(
    make_engine: MakeEngine, make_folder: MakeFolder
) -> None:
    engine, folder = make_engine(), make_folder("spoiled")
    write_random_model(folder, TINY)
    (folder / "config.json").write_bytes(b'{"mixer": "\xff"}')
    swaps = Swaps(engine, load_checkpoint, note="")
    swaps.begin(LoadWeights("a", str(folder)))
    with pytest.raises(InvalidRequest, match=r"spoiled/config\.json.*utf-8"):
        due(swaps)
    assert engine.status().fingerprint == "tiny-0" and swaps.current is None
    swaps.close()


@pytest.mark.parametrize("error", [MemoryError(), ValueError("a bug of the loader")])
def test_whatever_a_loader_raises_ends_the_change_and_not_the_engine(
    make_engine: MakeEngine, make_folder: MakeFolder, error: Exception
) -> None:
    def broken(_folder: Path) -> Weights:
        raise error

    engine = make_engine()
    swaps = Swaps(engine, broken, note="")
    swaps.begin(LoadWeights("a", str(make_folder("good"))))
    with pytest.raises(InvalidRequest, match=r"good' cannot be loaded: (Memory|Value)Error"):
        due(swaps)
    assert engine.status().fingerprint == "tiny-0" and swaps.current is None
    swaps.close()


def test_weights_larger_than_the_memory_are_refused_before_they_are_read(
    make_folder: MakeFolder,
) -> None:
    folder = make_folder("sparse")
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(2**41)
    with pytest.raises(InvalidRequest, match=r"model\.safetensors: it is larger than the memory"):
        load_weights(load_checkpoint, folder, TINY)


def test_a_config_of_endless_layers_is_refused_before_they_are_listed(
    make_folder: MakeFolder,
) -> None:
    folder = make_folder("deep", num_layers=TINY.num_layers)
    text = (folder / "config.json").read_text()
    number = f'"num_layers":{TINY.num_layers}'
    assert number in text
    (folder / "config.json").write_text(text.replace(number, '"num_layers":2147483648'))
    with pytest.raises(InvalidRequest, match=r"num_layers \* num_heads must be at most 65536"):
        load_weights(load_checkpoint, folder, TINY)


def swap_once(engine: Engine, folder: Path, note: Path) -> None:
    swaps = Swaps(engine, load, str(note))
    swaps.begin(LoadWeights("a", str(folder)))
    due(swaps)
    swaps.make()
    swaps.close()


def test_a_successor_begins_with_what_was_in_use(
    make_engine: MakeEngine, make_folder: MakeFolder, tmp_path: Path
) -> None:
    note, folder = tmp_path / "weights", make_folder("new")
    config = EngineConfig(model=make_folder("first", seed=0), weights_note=str(note))
    weights, version = first_weights(config, load)
    assert (weights.fingerprint, version) == ("tiny-0", 1)
    engine = make_engine()
    swap_once(engine, folder, note)
    weights, version = first_weights(config, load)
    assert (weights.fingerprint, version) == ("tiny-1", 2)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["weights"]

    make_folder("new", seed=2)
    with pytest.raises(CheckpointError, match=r"version 2.*tiny-1 in .*tiny-2 now"):
        first_weights(config, load)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"version 2.*cannot be loaded again.*config\.json"):
        first_weights(config, load)


def test_a_note_that_cannot_be_written_leaves_the_weights_as_they_are(
    make_engine: MakeEngine, make_folder: MakeFolder, tmp_path: Path
) -> None:
    engine = make_engine()
    with pytest.raises(SRMError, match=r"cannot write .*nowhere"):
        swap_once(engine, make_folder("new"), tmp_path / "nowhere" / "weights")
    assert engine.status().weights_version == 1


def test_what_is_parked_has_begun_and_ends_before_the_change(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    low = make_request("low", prompt=[5, 6], n=4, max_tokens=20, seed=3, priority=-1)
    late = make_request("late", prompt=[7], max_tokens=4, seed=4, priority=-1)
    high = make_request("high", prompt=[8], n=3, max_tokens=6, seed=5)
    alone = make_engine(num_slots=16)
    alone.add(low)
    alone.add(high)
    expected = run(alone)
    engine = make_engine(num_slots=4)
    engine.add(low)
    for _ in range(5):
        assert not engine.step()
    engine.add(high)
    engine.step()
    engine.add(late)
    assert engine.scheduler.parking.num_parked == 3
    engine.scheduler.is_held = True
    said: dict[tuple[str, int], Output] = {}
    while not engine.scheduler.is_quiet:
        said |= {(output.id, output.index): output for output in engine.step()}
    assert set(said) == {("low", 0), ("low", 1), ("low", 2), ("low", 3)} | {
        ("high", index) for index in range(3)
    }
    assert {key: one.token_ids for key, one in said.items()} == {
        key: one.token_ids for key, one in expected.items()
    }
    engine.load_weights(NEW)
    engine.scheduler.is_held = False
    assert set(run(engine)) == {("late", 0)}
