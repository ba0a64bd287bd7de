"""What an engine begins with: the copy of what was in use, whatever became of the folder."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from srm.engine import kept_model
from srm.engine.kept_model import FIRST, WEIGHTS, copy_model, hold_model
from srm.engine.messages import LoadWeights
from srm.engine.process import weights_note
from srm.engine.process.engine import Engine
from srm.engine.process.weight_reload import WeightReload
from srm.engine.process.weights_note import Note, SharedNote, first_weights, started_folder
from srm.engine.weights.checkpoint import load_checkpoint
from srm.engine.weights.delta import write_delta
from srm.engine.weights.random_model import write_random_model
from srm.engine.wiring import EngineWiring
from srm.errors import CheckpointError, EngineUnavailable, InvalidRequest, StoreFull
from tests.kit.engines.making import engine_of, request_of
from tests.kit.engines.numpy_runner import TINY
from tests.kit.processes.numpy_engine import load, seed_folder
from tests.kit.processes.run_engine import run
from tests.kit.serving import wait_until


def reloading(engine: Engine, config: EngineWiring) -> WeightReload:
    return WeightReload(engine, load, SharedNote(config.weights_note_fd), config.weights_copies)


def staged(engine: Engine, config: EngineWiring, folder: Path, change: str = "a") -> WeightReload:
    reload = reloading(engine, config)
    reload.begin(LoadWeights(change, str(folder)))
    wait_until(reload.is_due)
    return reload


@pytest.fixture
def config(tmp_path: Path) -> EngineWiring:
    copies = str(tmp_path / "copies")
    model = seed_folder(tmp_path / "m", 0)
    return EngineWiring(model=model, weights_note_fd=os.memfd_create("note"), weights_copies=copies)


def begun(config: EngineWiring) -> tuple[str, int]:
    weights, note = first_weights(config, load)
    assert note.fingerprint == weights.fingerprint
    return note.fingerprint, note.weights_version


def copies(config: EngineWiring) -> set[str]:
    return {path.name for path in Path(config.weights_copies).iterdir()} - {"lock"}


def remove(folder: Path) -> None:
    shutil.rmtree(folder)


def rewrite(folder: Path) -> None:
    (folder / "seed").write_text("7")


def break_off(folder: Path) -> None:
    (folder / "config.json").write_text("{")


@pytest.mark.parametrize("spoil", [remove, rewrite, break_off])
def test_what_was_put_to_use_outlives_its_folder(
    config: EngineWiring, tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    assert begun(config) == ("tiny-0", 1)
    new = seed_folder(tmp_path / "new", 1)
    staged(engine_of(), config, new).make()
    spoil(new)
    assert begun(config) == ("tiny-1", 2)
    spoil(Path(config.weights_copies) / "a")
    with pytest.raises(CheckpointError, match=r"version 2, which was put to use.*new"):
        begun(config)
    seed_folder(new, 1)  # the folder itself is as good as its copy, if it is the same
    assert begun(config) == ("tiny-1", 2)


def test_engines_begin_with_the_same_model(config: EngineWiring) -> None:
    assert begun(config) == ("tiny-0", 1)
    rewrite(config.model)
    with pytest.raises(CheckpointError, match=r"version 1.*were tiny-0, and .*m has tiny-7 now"):
        begun(config)
    seed_folder(config.model, 0)
    assert started_folder(config) == config.model
    Path(config.weights_copies).mkdir()
    hold_model(config.model, Path(config.weights_copies) / FIRST)
    rewrite(config.model)
    assert begun(config) == ("tiny-0", 1)
    assert (started_folder(config) / "seed").read_text() == "0"


def test_the_copy_before_goes_when_the_last_engine_has_changed(
    config: EngineWiring, tmp_path: Path
) -> None:
    engines = engine_of(), engine_of()
    folder = seed_folder(tmp_path / "new", 1)
    for change in ("a", "b"):
        one, other = (staged(engine, config, folder, change) for engine in engines)
        assert change in copies(config)
        one._copying.end()
        one._copying._busy.acquire()  # it is through: the other one may still need what was
        one._copying._busy.release()
        assert change in copies(config)
        one.make()
        other.make()
        wait_until(lambda change=change: copies(config) == {change})  # type: ignore[misc]
    assert begun(config) == ("tiny-1", 3)


@pytest.fixture
def real(config: EngineWiring) -> EngineWiring:
    """Wiring whose model has its weights in a file, and is in use."""
    write_random_model(config.model, TINY)
    begun(config)
    return config


def changed(base: Path, folder: Path, value: float) -> Path:
    """A model that differs from `base` in one tensor, whose first number is this."""
    shutil.copytree(base, folder)
    tensors = load_file(base / WEIGHTS)
    tensors["output_layer.weight"][0, 0] = value
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    return folder


def delta_of(base: Path, new: Path) -> Path:
    folder = new.with_name(f"{new.name}-delta")
    write_delta(base, new, folder)
    assert (folder / WEIGHTS).stat().st_size < (new / WEIGHTS).stat().st_size / 2
    return folder


def test_of_a_delta_the_whole_weights_are_kept(real: EngineWiring, tmp_path: Path) -> None:
    engine, last = engine_of(), real.model
    for version, name in ((2, "a"), (3, "b")):
        new = changed(last, tmp_path / name, version)
        delta = delta_of(last, new)
        staged(engine, real, delta, name).make()
        shutil.rmtree(delta)
        shutil.rmtree(last)
        assert engine.status().fingerprint == load_checkpoint(new).fingerprint
        assert begun(real) == (load_checkpoint(new).fingerprint, version)
        last = new


DeltaFault = Callable[[Path, EngineWiring], None]


def rewritten(
    tensors: Callable[[dict[str, Any]], object], metadata: dict[str, str] | None = None
) -> DeltaFault:
    def rewrite(delta: Path, config: EngineWiring) -> None:
        content = load_file(delta / WEIGHTS)
        tensors(content)
        base = {"delta_of": load_checkpoint(config.model).fingerprint}
        save_file(content, delta / WEIGHTS, base if metadata is None else metadata)

    return rewrite


def cut_short(delta: Path, _: EngineWiring) -> None:
    (delta / WEIGHTS).write_bytes((delta / WEIGHTS).read_bytes()[:-1])


def lose_the_base(_: Path, config: EngineWiring) -> None:
    rewrite(config.model)
    (config.model / WEIGHTS).unlink()


NAME = "output_layer.weight"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (rewritten(len, {"delta_of": "0123456789abcdef"}), "delta of weights '0123456789abcdef', "
         "and those in use are [0-9a-f]{16}: send a delta of these"),
        (rewritten(len, {"delta_of": ""}), "delta of weights '', and"),
        (rewritten(len, {"delta_of": "f" * 100_000}), "delta of weights 'f{63}…', and"),
        (rewritten(len, {"format": "pt"}), r"is missing, like \d+ more; .*a delta names its"),
        (rewritten(lambda t: t.update(other=t[NAME])), "1 tensor does not belong .* other"),
        (rewritten(lambda t: t[NAME].fill(np.nan)), f"{NAME} has values that are not finite"),
        (cut_short, "not a whole safetensors file"),
        (lose_the_base, "weights version 1, which was put to use, cannot be loaded again"),
    ],
)  # fmt: skip
def test_a_delta_that_cannot_be_used_changes_nothing(
    real: EngineWiring, tmp_path: Path, spoil: DeltaFault, message: str
) -> None:
    delta = delta_of(real.model, changed(real.model, tmp_path / "new", 2.0))
    spoil(delta, real)
    engine = engine_of()
    with pytest.raises(InvalidRequest, match=message) as raised:
        staged(engine, real, delta)
    assert raised.value.param == "path" and "partial" not in raised.value.message
    assert str(delta) in raised.value.message
    wait_until(lambda: not copies(real))
    assert engine.weights_version == 1


def test_a_delta_of_nothing_is_the_same_model(real: EngineWiring, tmp_path: Path) -> None:
    same = shutil.copytree(real.model, tmp_path / "same")
    write_delta(real.model, same, tmp_path / "delta")
    staged(engine_of(), real, tmp_path / "delta").make()
    copied = load_checkpoint(Path(real.weights_copies) / "a")
    assert np.array_equal(copied.head, load_checkpoint(real.model).head)


def test_a_delta_made_whole_leaves_room_for_results(
    real: EngineWiring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delta = delta_of(real.model, changed(real.model, tmp_path / "new", 2.0))
    size = (real.model / WEIGHTS).stat().st_size
    free = Mock(free=kept_model.SPARE_BYTES + size - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with pytest.raises(StoreFull):
        staged(engine_of(), real, delta)
    wait_until(lambda: not copies(real))


def test_a_change_that_is_dropped_leaves_no_copy(config: EngineWiring, tmp_path: Path) -> None:
    begun(config)
    reload = staged(engine_of(), config, seed_folder(tmp_path / "new", 1))
    with pytest.raises(EngineUnavailable):
        reload.check_wanted(has_owner=True, is_draining=True)
    wait_until(lambda: not copies(config))
    assert begun(config) == ("tiny-0", 1)


def test_a_bug_in_what_removes_copies_leaves_them_to_the_next_change(
    config: EngineWiring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(config)
    written: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", written.append)
    engine, folder = engine_of(), seed_folder(tmp_path / "new", 1)
    with monkeypatch.context() as broken:
        broken.setattr(weights_note, "remove", Mock(side_effect=KeyError("a bug")))
        staged(engine, config, folder, "a").make()
        wait_until(lambda: written)
    assert [args.exc_type for args in written] == [KeyError]
    assert copies(config) == {"a", "a.lock"}
    staged(engine, config, folder, "b").make()
    wait_until(lambda: copies(config) == {"b"})


def test_a_disk_that_does_not_remove_a_copy_holds_up_the_next_change_and_no_step(
    config: EngineWiring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(config)
    answers, asked, waits = (threading.Event() for _ in range(3))
    try_lock = kept_model.try_lock

    def hang(_path: Path) -> None:
        asked.set()
        answers.wait(120)

    def tell(file: int, kind: int) -> bool:
        if not (is_locked := try_lock(file, kind)):
            waits.set()
        return is_locked

    monkeypatch.setattr(weights_note, "remove", hang)
    engine, folder = engine_of(), seed_folder(tmp_path / "new", 1)
    staged(engine, config, folder, "a").make()
    try:
        assert asked.wait(120)
        monkeypatch.setattr(kept_model, "try_lock", tell)
        reload = reloading(engine, config)
        reload.begin(LoadWeights("b", str(folder)))
        assert waits.wait(120), "for the lock of what removes"
        assert not reload.is_due()
        engine.add(request_of())
        assert run(engine)
    finally:
        answers.set()
    wait_until(reload.is_due)
    assert reload.make().detail["weights_version"] == 3


def test_a_full_disk_refuses_the_change(
    config: EngineWiring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(config)
    usage = shutil.disk_usage(tmp_path)._replace(free=kept_model.SPARE_BYTES)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(kept_model, "_reflink", lambda *_: False)
    engine = engine_of()
    with pytest.raises(StoreFull, match=r"cannot keep a copy of .*new.*No space left"):
        staged(engine, config, seed_folder(tmp_path / "new", 1))
    wait_until(lambda: not copies(config))
    assert engine.weights_version == 1


def test_a_copy_that_another_process_makes_is_waited_for_while_it_is_wanted(tmp_path: Path) -> None:
    asked = 0

    def is_wanted() -> bool:
        nonlocal asked
        asked += 1
        return asked < 3

    with (tmp_path / "copy.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(EngineUnavailable):
            copy_model(seed_folder(tmp_path / "m", 1), tmp_path / "copy", is_wanted)


def test_a_process_killed_at_any_line_leaves_no_half_copy(tmp_path: Path) -> None:
    folder = seed_folder(tmp_path / "m", 1)
    expected = {file.name: file.read_bytes() for file in folder.iterdir()}
    is_over, line = False, 0
    while not is_over:
        line += 1
        place = tmp_path / "copies" / "a"
        place.parent.mkdir()
        is_over = killed_at(line, lambda place=place: copy_model(folder, place, lambda: True))  # type: ignore[misc]
        if place.exists():
            assert {file.name: file.read_bytes() for file in place.iterdir()} == expected
        copy_model(folder, place, lambda: True)
        assert {file.name: file.read_bytes() for file in place.iterdir()} == expected
        assert {path.name for path in place.parent.iterdir()} == {"a", "a.lock"}
        shutil.rmtree(place.parent)
    assert line > 30


def killed_at(line: int, work: Callable[[], object], file: str = kept_model.__file__) -> bool:
    """Do the work in a process that ends, as by SIGKILL, at this line of it; whether it was through
    before."""
    if (pid := os.fork()) == 0:
        count = 0

        def trace(frame: FrameType, event: str, _argument: object) -> Any:
            nonlocal count
            if frame.f_code.co_filename != file:
                return None
            if event == "line":
                count += 1
                if count == line:
                    os._exit(9)
            return trace

        try:
            sys.settrace(trace)
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) == 0


def test_the_note_is_written_once(config: EngineWiring) -> None:
    begun(config)
    shared = SharedNote(config.weights_note_fd)
    first = shared.read()
    assert first is not None and (first.weights_version, first.change) == (1, FIRST)
    begun(config)
    assert (shared.read(), shared.number) == (first, 1)


def test_the_first_engine_that_begins_decides_for_the_others(config: EngineWiring) -> None:
    shared = SharedNote(config.weights_note_fd)
    ours, theirs = (Note("/m", fingerprint, 1, FIRST) for fingerprint in ("tiny-0", "tiny-1"))
    assert shared.claim(theirs) == theirs
    assert shared.claim(ours) == theirs == SharedNote(config.weights_note_fd).read()


def test_a_process_killed_at_any_line_leaves_a_whole_note(config: EngineWiring) -> None:
    shared = SharedNote(config.weights_note_fd)
    shared.write(before := Note("/before", "tiny-0", 1, FIRST))
    after, is_over, line = Note("/after", "tiny-1", 2, "a"), False, 0
    while not is_over:
        line += 1
        is_over = killed_at(line, lambda: shared.write(after), weights_note.__file__)
        assert shared.read() in {before, after}
        shared.write(before)
    assert line > 5


def test_a_change_dropped_before_its_copy_begins_holds_no_lock(
    config: EngineWiring, tmp_path: Path
) -> None:
    """Another engine may refuse it before this one's thread has come to the copy."""
    begun(config)
    new, shared = seed_folder(tmp_path / "new", 1), SharedNote(config.weights_note_fd)
    dropped = weights_note.Copying(shared, config.weights_copies)
    dropped.end()
    with pytest.raises(EngineUnavailable, match="not wanted any more"):
        dropped.copy(new, "dropped")
    engine = engine_of()
    for number in range(1, 4):
        staged(engine, config, seed_folder(tmp_path / f"n{number}", number), f"{number}").make()
    wait_until(lambda: copies(config) - {FIRST} == {"3"})
