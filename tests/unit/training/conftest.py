"""A tiny model's runs: on what they are trained, where they stop, and on two processes."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from srm.loadtest.records import ROOT
from srm.training.checkpoint import load_model
from srm.training.loop import Losses
from srm.training.problems.drawn import problems
from srm.training.schedule import Schedule
from srm.training.settings import PretrainConfig
from tests.kit import fake_wandb
from tests.kit.one_thread import one_thread  # noqa: F401 - a fixture of all below

StopAt = Callable[..., AbstractContextManager[None]]


class Ids:
    """Batches of random ids, each of which takes a second of a clock."""

    now = 0.0

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.now += 1
        ids = torch.randint(0, 5, (2, 9), generator=torch.Generator().manual_seed(index))
        return ids[:, :-1], ids[:, 1:]


def tiny_run(texts: Path, output: Path, /, **changes: Any) -> PretrainConfig:
    """Settings of a run of four updates on these texts, without evaluations."""
    made = PretrainConfig(
        output=output, texts=(texts,), d_model=16, num_layers=1, num_heads=2, n_ctx=32, steps=4,
        batch_tokens=64, warmup_steps=1, max_vocab_size=280, threads=1, evaluate_every=0,
        precision="float32",
    )  # fmt: skip
    return msgspec.structs.replace(made, **changes)


def write_numbers(folder: Path) -> Path:
    """A file of texts, which stays as it is where it is there: its time says which it is."""
    path = folder / "texts.txt"
    if not path.exists():
        path.write_text("".join(f"{n} and {n} is {2 * n}. " for n in range(300)))
    return path


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of word problems, as if they were anybody's texts."""
    path = tmp_path_factory.mktemp("texts") / "texts.txt"
    path.write_text("\n".join(p.prompt + p.solution for p in islice(problems("train", 0), 60)))
    return path


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> fake_wandb.Wandb:
    return fake_wandb.install(monkeypatch)


@pytest.fixture
def stop_at(monkeypatch: pytest.MonkeyPatch) -> StopAt:
    """`with stop_at(8)`: before update 8 (of 0 …) there is an exception, or once a signal."""

    @contextmanager
    def stopping(step: int, by: type[BaseException] | int = KeyboardInterrupt) -> Iterator[None]:
        rate, left = Schedule.rate, [by]

        def stop(schedule: Schedule, at: float) -> float:
            if at == step and left:
                cause = left.pop()
                if not isinstance(cause, int):
                    raise cause
                signal.raise_signal(cause)
            return rate(schedule, at)

        with monkeypatch.context() as patch:
            patch.setattr(Schedule, "rate", stop)
            yield

    return stopping


def run_on_two(command: str, output: Path, **settings: Any) -> None:
    """`srm train` on two processes."""
    start = ["torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    argv = [sys.executable, "-m", *start, "-m", "srm", "train", command, *flags]
    subprocess.run([*argv, f"--output={output}"], check=True, cwd=ROOT)


def assert_same_run(losses: Losses, output: Path, other: Path) -> None:
    """The other folder has the losses of the run in `output`, and its weights."""
    steps = msgspec.json.decode((other / "losses.json").read_bytes())
    assert steps == pytest.approx(losses.steps, rel=1e-5)
    evaluations = msgspec.json.decode((other / "evaluation_losses.json").read_bytes())
    assert dict(evaluations) == pytest.approx(dict(losses.evaluations), rel=1e-5)
    expected, result = (load_model(folder).state_dict() for folder in (output, other))
    for name, tensor in expected.items():
        assert torch.allclose(result[name], tensor, rtol=1e-2, atol=1e-4), name  # in bfloat16
