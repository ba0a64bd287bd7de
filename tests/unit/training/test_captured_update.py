"""An update that is captured once and replayed is the update that was captured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from srm.engine.config import ModelConfig
from srm.errors import ConfigError
from srm.training import captured
from srm.training.baselines.transformer import Transformer, TransformerShape
from srm.training.data import IGNORED
from srm.training.loop import Run
from srm.training.model import SRM, LanguageModel
from srm.training.pretrain import pretrain
from srm.training.processes import Processes
from srm.training.schedule import Schedule
from tests.kit.recorded_graph import RecordedGraph, install
from tests.unit.training.conftest import tiny_run

SCHEDULE = Schedule(
    8, 0.01, 3, weight_decay=0.1, save_every=100, clip_norm=0.5, precision="float32", capture=True
)
EAGER = msgspec.structs.replace(SCHEDULE, capture=False)
CPU = Processes(0, 1, torch.device("cpu"))


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> type[RecordedGraph]:
    return install(monkeypatch)


class Batches:
    """Rows of random ids, of which each batch learns another number."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        ids = torch.randint(0, 31, (4, 25), generator=torch.Generator().manual_seed(index))
        targets = ids[:, 1:].clone()
        targets[:, : 2 * index] = IGNORED
        return ids[:, :-1], targets


def make(kind: str = "mixed") -> LanguageModel:
    torch.manual_seed(0)
    if kind == "Transformer":
        return Transformer(TransformerShape(16, 2, 2, 32, 31))
    return SRM(ModelConfig(16, 2, 2, 24, 31, mixer=kind))  # type: ignore[arg-type]


def trained(
    schedule: Schedule, folder: Path, kind: str = "mixed", steps: Iterable[int] = range(8)
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of these updates."""
    folder.mkdir(exist_ok=True)
    run = Run(make(kind), schedule, folder, CPU, {})
    for step in steps:
        inputs, targets = Batches()[step]
        run.update(
            [(*part, run._count(targets)) for part in run._parts(inputs, targets)], run._share
        )
    run.save()
    return run.losses.steps, run.weights()


def largest_difference(weights: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    return max(float((weights[name] - others[name]).abs().max()) for name in weights)


def moments_of(run: Run) -> list[Tensor]:
    """What the optimizer keeps, numbers of updates included."""
    return [value for state in run._optimizer.state.values() for value in state.values()]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("kind", "parts"), [("mixed", 1), ("mixed", 2), ("combined", 1), ("Transformer", 1)]
)
def test_replayed_updates_have_the_bits_of_those_that_run(
    kind: str, parts: int, precision: Any, graph: type[RecordedGraph], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Rates rise and fall and the number of targets changes: a graph that had its own would not."""
    schedule = msgspec.structs.replace(SCHEDULE, micro_batches=parts, precision=precision)
    losses, weights = trained(schedule, tmp_path / "replayed", kind)
    assert (graph.captures, graph.replays) == (1, 8 - captured.WARM_UP)
    monkeypatch.setattr(captured, "WARM_UP", 100)
    expected, others = trained(schedule, tmp_path / "run", kind)
    assert graph.captures == 1 and losses == expected
    assert largest_difference(weights, others) == 0
    assert largest_difference(weights, make(kind).state_dict()) > 1e-3, "nothing is learned"


def test_captured_updates_are_those_of_the_eager_loop(
    graph: type[RecordedGraph], tmp_path: Path
) -> None:
    """Within rounding: the optimizer is the fused one."""
    losses, weights = trained(SCHEDULE, tmp_path / "captured")
    expected, others = trained(EAGER, tmp_path / "eager")
    assert losses == pytest.approx(expected, rel=1e-5) and graph.replays
    assert largest_difference(weights, others) < 1e-4


def test_a_captured_update_may_compute_blocks_again(
    graph: type[RecordedGraph], tmp_path: Path
) -> None:
    again = msgspec.structs.replace(SCHEDULE, checkpoint_activations=True)
    losses, weights = trained(again, tmp_path / "again")
    expected, others = trained(SCHEDULE, tmp_path / "kept")
    assert losses == expected and largest_difference(weights, others) == 0
    assert (graph.captures, graph.replays) == (2, 2 * (8 - captured.WARM_UP))


def test_a_captured_update_that_is_not_finite_changes_nothing(
    graph: type[RecordedGraph], tmp_path: Path
) -> None:
    run = Run(make(), SCHEDULE, tmp_path, CPU, {})
    inputs, targets = Batches()[0]
    for step in range(8):
        before = {name: value.clone() for name, value in run.last_weights().items()}
        moments = [value.clone() for value in moments_of(run)]
        count = torch.tensor(0.0 if step == 5 else 96.0)
        loss = run.update([(inputs, targets, count)], run._share)
        is_same = largest_difference(before, run.last_weights()) == 0
        assert is_same == (step == 5) == (not math.isfinite(loss))
        if step == 5:
            assert moments and all(map(torch.equal, moments_of(run), moments))
    assert run.losses.skipped == 1 and graph.replays == 5


@pytest.mark.parametrize("begun", [True, False])
def test_a_run_goes_on_captured_or_not(
    begun: bool, graph: type[RecordedGraph], tmp_path: Path
) -> None:
    _, expected = trained(EAGER, tmp_path / "at once")
    first, second = (SCHEDULE, EAGER) if begun else (EAGER, SCHEDULE)
    trained(first, tmp_path / "run", steps=range(4))
    losses, weights = trained(second, tmp_path / "run", steps=range(4, 8))
    assert len(losses) == 8 and graph.captures == 1
    assert largest_difference(weights, expected) < 1e-4


def test_batches_of_other_shapes_are_refused(graph: type[RecordedGraph], tmp_path: Path) -> None:
    run = Run(make(), SCHEDULE, tmp_path, CPU, {})
    inputs, targets = Batches()[0]
    run.update([(inputs, targets, torch.tensor(96.0))], run._share)
    with pytest.raises(ConfigError, match="capture must be false where batches differ in shape"):
        run.update([(inputs[:2], targets[:2], torch.tensor(48.0))], run._share)
    assert not graph.replays


def compose(
    changed: Callable[[Tensor], Tensor], loss: Callable[[Any], Tensor]
) -> Callable[[Any], Tensor]:
    return lambda part: changed(loss(part))


def test_a_loss_that_needs_the_host_is_refused(graph: type[RecordedGraph], tmp_path: Path) -> None:
    def on_host(loss: Tensor) -> Tensor:
        return loss * float(loss > 0)

    def by_shape(loss: Tensor) -> Tensor:
        return loss * len(loss.flatten().nonzero())

    def elsewhere(loss: Tensor) -> Tensor:
        return loss + loss.detach().to("meta").shape.numel()

    for changed, operation in (
        (on_host, "_local_scalar_dense"), (by_shape, "nonzero"), (elsewhere, "_to_copy"),
    ):  # fmt: skip
        run = Run(make(), SCHEDULE, tmp_path, CPU, {})
        batch = (*Batches()[0], torch.tensor(96.0))
        with pytest.raises(ConfigError, match=f"capture must be false: .* for aten.{operation}"):
            run.update([batch], compose(changed, run._share))
    assert not graph.captures


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "cpu"}, "device must be gpu where capture is true, got cpu"),
        ({"precision": "float16"}, "precision must be another where capture is true, got float16"),
        ({"texts": ()}, "texts must be given: .* where capture is true, got"),
    ],
)
def test_what_cannot_be_captured_is_refused(
    changes: dict[str, Any], message: str, texts: Path, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"capture": True, "device": "gpu"}
    tiny_run(texts, tmp_path, **given)
    with pytest.raises(ValueError, match=message):
        tiny_run(texts, tmp_path, **(given | changes))


def test_several_processes_are_refused(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="capture must be false for 2 processes, got true"):
        pretrain(tiny_run(texts, tmp_path, capture=True, device="gpu"))
