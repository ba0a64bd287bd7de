"""A run that is stopped anywhere, by anything, leaves a model that can be served."""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import signal
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from safetensors.torch import save_file
from torch import Tensor

from srm.__main__ import main
from srm.engine.config import ModelConfig
from srm.engine.weights.checkpoint import load_checkpoint, read_model
from srm.engine.weights.convert import convert
from srm.errors import ConfigError
from srm.server.text.text import Text
from srm.settings import build
from srm.training import checkpoint, loop
from srm.training.data import CountdownBatches
from srm.training.finetuning.config import SFTConfig
from srm.training.finetuning.sft import sft
from srm.training.grpo.command import grpo
from srm.training.grpo.config import GRPOConfig
from srm.training.loop import MOST_SKIPPED, Diverged, Run
from srm.training.model import SRM
from srm.training.pretrain import pretrain
from srm.training.processes import processes
from srm.training.schedule import Schedule
from srm.training.settings import PretrainConfig
from tests.unit.training.conftest import Ids, StopAt, tiny_run, write_numbers

NAMES = ("config.json", "model.safetensors", "tokenizer.json")
Train = Callable[..., Any]


class Killed(BaseException):
    """Stands for a signal that cannot be caught, where no process has to die for it."""


def pretraining(folder: Path, **changes: Any) -> PretrainConfig:
    return tiny_run(write_numbers(folder), folder / "pretrain", **changes)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model that is fine-tuned and rewarded, and rows for both."""
    folder = tmp_path_factory.mktemp("base")
    pretrain(pretraining(folder))
    rows = [json.dumps({"question": f"{n}?", "answer": "1"}) + "\n" for n in range(8)]
    (folder / "rows.jsonl").write_text("".join(rows))
    return folder


def trainer(name: str, base: Path, folder: Path) -> tuple[Path, Train]:
    """The output of a trainer, and what trains for a few updates, settings changed."""
    output, rows = folder / name, (base / "rows.jsonl",)
    if name == "pretrain":
        return output, lambda **changes: pretrain(pretraining(folder, **changes))
    started: dict[str, Any] = {"model": base / "pretrain", "output": output, "train": rows}
    started["threads"] = 1
    if name == "sft":
        return output, lambda **changes: sft(SFTConfig(**started, batch_rows=3, **changes))
    started |= {
        "questions": 1, "rollouts": 2, "group_size": 2, "max_tokens": 2, "steps": 4,
        "sampler": "torch", "evaluate_every": 0, "kl_weight": 0.0,
    }  # fmt: skip
    return output, lambda **changes: grpo(build(GRPOConfig, started | changes))


def count_updates(folder: Path) -> int:
    return len(torch.load(folder / "run.pt", weights_only=True)["losses"]["steps"])


def assert_served(folder: Path, like: Path | None = None) -> None:
    """The folder is taken by inspect, and by what servers and evaluations load it with."""
    assert main(["inspect", str(folder)]) == 0
    assert load_checkpoint(folder).config == read_model(like or folder).config
    assert Text(folder).has_tokenizer


@pytest.mark.parametrize(
    ("name", "by"),
    [
        *(("pretrain", signal.SIGTERM), ("sft", signal.SIGTERM), ("grpo", signal.SIGINT)),
        *(("pretrain", Killed), ("sft", Killed), ("grpo", Killed)),
    ],
)
def test_a_stop_after_one_step_leaves_a_model(
    name: str, by: Any, base: Path, tmp_path: Path, stop_at: StopAt
) -> None:
    """A signal and a kill, which nothing is saved for."""
    output, train = trainer(name, base, tmp_path)
    with stop_at(1, by), pytest.raises(Killed if by is Killed else KeyboardInterrupt):
        train()
    assert (output / "run.pt").exists() == (by is not Killed)
    assert_served(output)
    train()
    assert_served(output)
    assert count_updates(output) >= 4


@pytest.mark.parametrize("name", ["pretrain", "sft", "grpo"])
def test_a_full_disk_leaves_the_model_before(name: str, base: Path, tmp_path: Path) -> None:
    """A limit on files stands for it: first the state does not fit, then the model neither."""
    output, train = trainer(name, base, tmp_path)
    size = (base / "pretrain" / "model.safetensors").stat().st_size
    own = resource.getrlimit(resource.RLIMIT_FSIZE)
    for most in (2 * size, size - 1):
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, own[1]))
        try:
            with pytest.raises(ConfigError, match=f"{output / 'run.pt'} cannot be written"):
                train(save_every=1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, own)
        assert_served(output, base / "pretrain")
        assert not list(output.glob("*.partial"))


@pytest.mark.parametrize("name", ["pretrain", "sft", "grpo"])
def test_ends_a_run_by_the_clock(
    name: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This clock is a second later whenever it is looked at."""
    output, train = trainer(name, base, tmp_path)
    module = {"pretrain": "pretrain", "sft": "finetuning.sft", "grpo": "grpo.command"}[name]
    clock = map(float, count()).__next__
    monkeypatch.setattr(f"srm.training.{module}.Run", partial(Run, clock=clock))
    longest = {"pretrain": {"steps": 0}, "sft": {"epochs": 99}, "grpo": {"steps": 999}}[name]
    train(minutes=1.0, save_every=1_000, **longest)
    assert 50 < clock() < 66
    updates = count_updates(output)
    assert 2 < updates < 30
    assert_served(output)
    train(minutes=1.0, save_every=1_000, **longest)  # has had its time
    assert count_updates(output) == updates
    train(minutes=1.5, save_every=1_000, **longest)
    assert count_updates(output) > updates


def test_a_run_that_made_its_steps_has_its_time_left(tmp_path: Path) -> None:
    for steps in (2, 4):
        pretrain(pretraining(tmp_path, steps=steps, minutes=60.0))
        assert count_updates(tmp_path / "pretrain") == steps


def small_run(folder: Path, batches: Ids, **changes: Any) -> Run:
    """A run of a small model with a learning rate of 1, whose clock is that of its batches."""
    torch.manual_seed(0)
    schedule = structs.replace(
        Schedule(100, 1.0, 1, 0.0, save_every=1_000, precision="float32"), **changes
    )
    folder.mkdir(exist_ok=True)
    config = ModelConfig(8, 1, 2, 8, 5)
    with processes("cpu") as own:
        return Run(SRM(config), schedule, folder, own, {}, {}, folder, clock=lambda: batches.now)


def test_the_last_save_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes seven seconds here, an evaluation two."""
    batches, save = Ids(), checkpoint.save_model

    def slow(*args: Any) -> None:
        batches.now += 7
        save(*args)

    monkeypatch.setattr(loop, "save_model", slow)
    run = small_run(tmp_path, batches, steps=0, minutes=1.0, evaluate_every=10)
    evaluate = run.evaluate

    def slowly(held_out: list[tuple[Tensor, Tensor]]) -> float:
        batches.now += 2
        return evaluate(held_out)

    monkeypatch.setattr(run, "evaluate", slowly)
    run.train(batches, [Ids()[0]])
    assert 58 <= batches.now <= 60
    assert [done for done, _ in run.losses.evaluations] == [10, 20, 30, len(run.losses.steps)]


@pytest.mark.parametrize(
    ("steps", "warmup", "expected"),
    [
        (0, 5, {0: 0.2, 1: 0.4 * 0.98, 4: 0.92, 25: 0.5, 50: 0.0}),
        (0, 500, {1: 0.2 * 0.98, 5: 0.9, 25: 0.5}),  # a tenth of the time is shorter
        (1_000, 100, {0: 0.01, 5: 1.0, 25: 500 / 900, 50: 0.0}),  # the clock is ahead
        (25, 1, {1: 1.0, 13: 0.5, 25: 0.0}),  # the updates are ahead
    ],
)
def test_the_learning_rate_falls_by_the_clock(
    steps: int, warmup: int, expected: dict[int, float]
) -> None:
    schedule = Schedule(steps, 1.0, warmup, 0.0, 1, minutes=1.0)
    for step, rate in expected.items():
        assert schedule.rate_by_clock(step, step / 50) == pytest.approx(rate), step
    assert schedule.rate_by_clock(0, math.inf) == pytest.approx(0.0)


def update(run: Run, is_finite: bool) -> None:
    run.update([Ids()[0]], lambda part: run.logits(part[0]).sum() * (1 if is_finite else math.nan))


def test_skips_updates_that_are_not_finite(tmp_path: Path) -> None:
    run = small_run(tmp_path, Ids())
    update(run, is_finite=True)
    before = {name: value.clone() for name, value in run.last_weights().items()}
    for _ in range(MOST_SKIPPED - 1):
        update(run, is_finite=False)
    assert all(torch.equal(before[name], value) for name, value in run.last_weights().items())
    update(run, is_finite=True)
    assert not all(torch.equal(before[name], value) for name, value in run.last_weights().items())
    for _ in range(MOST_SKIPPED - 1):
        update(run, is_finite=False)
    assert run.notes.endswith(", 18 updates skipped: not finite")
    with pytest.raises(Diverged, match=r"loss of step 21 is nan.* 10 updates in a row were skip"):
        update(run, is_finite=False)


def test_a_save_waits_until_an_update_is_finite(tmp_path: Path) -> None:
    run = small_run(tmp_path, Ids(), save_every=2)
    for is_finite, is_saved in ((True, False), (False, False), (False, False), (True, True)):
        update(run, is_finite)
        assert run.save_if_due() == is_saved
    assert_taken = read_model(tmp_path).fingerprint
    for _ in range(2):
        update(run, is_finite=False)
    run.end_by_clock(0.0)
    run.is_over = True
    with pytest.raises(Diverged, match=r"step 6 is nan.* 2 updates in a row were skipped"):
        run.save_if_due()
    assert read_model(tmp_path).fingerprint == assert_taken
    assert small_run(tmp_path, Ids()).losses.skipped == 2


def test_keeps_models_within_a_bound_of_disk(tmp_path: Path) -> None:
    """And what others put beside one stays, models too."""
    size = (pretrain_once(tmp_path) / "model.safetensors").stat().st_size
    shutil.copytree(tmp_path / "pretrain", tmp_path / "other" / "step-0")
    shutil.move(tmp_path / "other" / "step-0", tmp_path / "pretrain")
    (tmp_path / "pretrain" / "step-1").mkdir()
    (tmp_path / "pretrain" / "step-1" / "notes.txt").touch()
    pretrain(pretraining(tmp_path, keep_every=1, keep_bytes=2 * size, steps=6))
    folders = sorted(path.name for path in (tmp_path / "pretrain").glob("step-*"))
    assert folders == ["step-0", "step-1", "step-5", "step-6"]
    assert_served(tmp_path / "pretrain" / "step-5")
    pretrain(pretraining(tmp_path, keep_every=1, keep_bytes=0, steps=7))
    assert_served(tmp_path / "pretrain" / "step-7")
    paths = sorted((tmp_path / "pretrain").glob("step-*/model.safetensors"))
    assert [path.parent.name for path in paths] == ["step-0", "step-7"]


def pretrain_once(folder: Path) -> Path:
    pretrain(pretraining(folder, steps=1))
    return folder / "pretrain"


def test_converts_the_state_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As one that an earlier version left, without a model beside it."""
    run = pretrain_once(tmp_path)
    whole = {name: (run / name).read_bytes() for name in NAMES}
    for name in NAMES[:2]:
        (run / name).unlink()
    given = ["convert", str(run / "run.pt"), "--output", str(tmp_path / "made")]
    with pytest.raises(ConfigError, match=rf"srm convert {run / 'run.pt'} makes one"):
        convert(run, None, tmp_path / "made")
    assert main(given) == 0
    assert "the model of 1 updates, with its tokenizer" in capsys.readouterr().out
    assert {name: (tmp_path / "made" / name).read_bytes() for name in NAMES} == whole
    assert main([*given, "--to", "transformers"]) == 2
    (run / "run.pt").write_bytes((run / "run.pt").read_bytes()[:-1])
    assert main(given) == 2
    assert "run.pt is damaged" in capsys.readouterr().err
    assert_served(tmp_path / "made")


def test_says_that_it_stopped_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stop = partial(signal.raise_signal, signal.SIGTERM)
    monkeypatch.setattr("srm.training.pretrain._tokenizer", lambda *_: stop())
    before = signal.getsignal(signal.SIGTERM)
    assert main(["train", "pretrain", f"--output={tmp_path}"]) == 130
    assert "interrupted; the same command goes on from the last save" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("fails", [False, True])
def test_a_folder_never_has_files_of_two_models(
    fails: bool, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new run is in the folder of a model of another shape."""
    run = pretrain_once(tmp_path)
    (run / "run.pt").unlink()
    before = {name: (run / name).read_bytes() for name in NAMES}
    save, seen = save_file, []

    def saved(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        save(tensors, path, metadata)
        seen.append({name: (run / name).read_bytes() for name in NAMES})
        if fails:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", saved)
    if fails:
        with pytest.raises(ConfigError, match="No space left"):
            pretrain(pretraining(tmp_path, d_model=32))
        assert {name: (run / name).read_bytes() for name in NAMES} == before
    else:
        pretrain(pretraining(tmp_path, d_model=32))
        assert_served(run)
        assert read_model(run).config.d_model == 32
    assert seen[0] == before


COUNTDOWN: dict[str, Any] = {"texts": (), "n_ctx": 64, "problems": "countdown"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokenizer": "models/demo"}, "has a model of another one than models/demo"),
        (COUNTDOWN, "than that of countdown"),
    ],
)
def test_a_tokenizer_is_not_put_beside_another_model(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    run = pretrain_once(tmp_path)
    (run / "run.pt").unlink()
    with pytest.raises(ConfigError, match=reason):
        pretrain(pretraining(tmp_path, **changes))
    assert_served(run)


def with_workers(folder: Path, workers: int) -> list[float]:
    """Losses of a run whose batches that many processes make."""
    folder.mkdir()
    return pretrain(pretraining(folder, data_workers=workers, **COUNTDOWN)).steps


def test_workers_make_the_same_batches(tmp_path: Path) -> None:
    assert with_workers(tmp_path / "none", 0) == with_workers(tmp_path / "two", 2)


def test_a_data_worker_that_ends_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = CountdownBatches.__getitem__

    def made(batches: CountdownBatches, index: int) -> tuple[Tensor, Tensor]:
        if index == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return make(batches, index)

    monkeypatch.setattr(CountdownBatches, "__getitem__", made)
    with pytest.raises(ConfigError, match="data_workers: A process in the process pool"):
        with_workers(tmp_path / "run", 1)


@pytest.mark.parametrize("name", ["pretrain", "sft", "grpo"])
def test_goes_on_after_an_update_that_is_not_finite(
    name: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And goes on from what it has saved then."""
    output, train = trainer(name, base, tmp_path)
    logits = Run.logits

    def broken(run: Run, inputs: Tensor) -> Tensor:
        return logits(run, inputs) * (math.nan if len(run.losses.steps) == 1 else 1)

    monkeypatch.setattr(Run, "logits", broken)
    train()
    run = torch.load(output / "run.pt", weights_only=True)
    assert run["losses"]["skipped"] == 1 and math.isnan(run["losses"]["steps"][1])
    train(**({"epochs": 8} if name == "sft" else {"steps": 6}))
    assert count_updates(output) > len(run["losses"]["steps"])
    assert_served(output)
