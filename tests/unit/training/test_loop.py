"""What the training loop makes of precision, and of parameters that are no matrices."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from srm.engine.config import ModelConfig
from srm.errors import ConfigError
from srm.training import precision
from srm.training.baselines.mamba2 import Mamba2, Mamba2Shape
from srm.training.loop import Run
from srm.training.model import SRM, LanguageModel
from srm.training.precision import choose_precision
from srm.training.processes import Processes, processes
from srm.training.schedule import ParameterGroup, Schedule, parameter_groups
from srm.training.settings import Precision
from tests.unit.training.conftest import Ids

SCHEDULE = Schedule(
    4, 0.01, 1, weight_decay=0.5, save_every=2, precision="float32", decay_rate_scale=0.1
)


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    choose_precision.cache_clear()
    yield
    choose_precision.cache_clear()


def names(model: LanguageModel) -> list[tuple[set[str], float, float]]:
    """Groups, by the ends of the names of their parameters."""
    by_id = {id(value): name for name, value in model.named_parameters()}

    def named(group: ParameterGroup) -> set[str]:
        return {by_id[id(value)].split("blocks.0.")[-1] for value in group.parameters}

    groups = parameter_groups(model, SCHEDULE)
    assert sum(len(group.parameters) for group in groups) == len(by_id)
    return [(named(group), group.rate_scale, group.weight_decay) for group in groups]


@pytest.mark.parametrize("mixer", ["mixed", "parallel", "diagonal", "combined"])
def test_weight_decay_pulled_at_norms_biases_and_mixers(mixer: Any) -> None:
    model = SRM(ModelConfig(8, 1, 2, 8, 5, mixer=mixer))
    (matrices, *of_matrices), (others, *of_others), (decays, *of_decays) = names(model)
    assert (of_matrices, of_others, of_decays) == ([1.0, 0.5], [1.0, 0.0], [0.1, 0.0])
    assert decays == {name for name in decays | others | matrices if "decay_value" in name}
    assert matrices and all(name.endswith("weight") for name in matrices)
    assert not any("norm" in name or "mixer_heads" in name for name in matrices)
    assert {name for name in others if "proj" in name} == {
        name for name in others if "proj" in name and name.endswith("bias")
    }


def test_models_without_decay_have_no_such_group() -> None:
    sizes = {"d_model": 8, "num_layers": 1, "num_heads": 2, "d_state": 4, "vocab_size": 5}
    groups = names(Mamba2(Mamba2Shape(num_groups=2, **sizes)))
    assert [scale for _, scale, _ in groups] == [1.0, 1.0]


def moved(schedule: Schedule, folder: Path) -> tuple[float, str]:
    """How far λ moves in training, and what the run says of λ."""
    torch.manual_seed(0)
    model = SRM(ModelConfig(8, 1, 2, 8, 5))
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith("decay_value"):
                value.fill_(0.95)
    folder.mkdir()
    with processes("cpu") as own:
        run = Run(model, schedule, folder, own, {})
        run.train(Ids(), [])
    ends = [v for name, v in run.weights().items() if name.endswith("decay_value")]
    return float((torch.cat(ends) - 0.95).abs().max()), run.decays


def test_decays_learned_at_the_models_rate(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    slow, message = moved(SCHEDULE, tmp_path / "slow")
    fast, _ = moved(replace(SCHEDULE, decay_rate_scale=1.0), tmp_path / "fast")
    assert 0 < slow < fast / 5 and fast > 0.01
    assert message.startswith(", λ 0.94") and message in capfd.readouterr().out


@pytest.mark.parametrize(
    ("flags", "asked", "taken", "messages"),
    [
        ("avx2 avx512f", "auto", "float32", ["precision = auto: float32, since this processor"]),
        ("avx512_bf16", "auto", "bfloat16", ["precision = auto: bfloat16"]),
        ("amx_bf16 amx_tile", "auto", "bfloat16", ["precision = auto: bfloat16"]),
        ("asimd bf16", "auto", "bfloat16", ["precision = auto: bfloat16"]),
        ("avx2", "bfloat16", "bfloat16", ["precision = bfloat16: this processor has no"]),
        ("avx2", "float32", "float32", []),
        ("avx2", "float16", "float16", []),
        ("avx512_bf16", "bfloat16", "bfloat16", []),
    ],
)
def test_bfloat16_was_emulated_in_silence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    flags: str, asked: Precision, taken: str, messages: list[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(Path, "read_text", lambda _: f"flags\t: fpu {flags} sse\n")
    with caplog.at_level(logging.INFO):
        assert [choose_precision(asked, "cpu") for _ in range(2)] == [taken] * 2
        assert choose_precision(asked, "cpu", is_first=False) == taken
    assert len(caplog.messages) == len(messages)
    for line, start in zip(caplog.messages, messages, strict=True):
        assert line.startswith(start)


def test_a_gpu_multiplies_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "has_bfloat16", lambda: False)
    assert choose_precision("auto", "cuda") == "bfloat16"


@pytest.mark.parametrize(("rank", "place"), [(None, "cuda:0"), ("3", "cuda:3")])
def test_training_on_a_gpu_names_it_as_torch_does(
    rank: str | None, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`torch.device("gpu")` raises: a run in one process ended there on its first GPU."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    with processes("gpu") as own:
        assert [own.device] == chosen == [torch.device(place)]


@pytest.mark.parametrize("rows", [1, 3, 5, 9])
def test_a_batch_is_cut_into_as_many_parts_in_all_processes(rows: int, tmp_path: Path) -> None:
    """`torch.chunk` cuts 5 rows into 3 parts and 4 rows into 4, where 4 parts are asked for."""
    batch = torch.zeros(rows, 8)
    run = Run(
        SRM(ModelConfig(8, 1, 2, 8, 5)),
        replace(SCHEDULE, micro_batches=4),
        tmp_path,
        Processes(0, 1, torch.device("cpu")),
        {},
    )
    sizes = []
    for rank in range(2):
        run._own = Processes(rank, 2, torch.device("cpu"))
        if rows == 1:
            with pytest.raises(ConfigError, match="a batch has 1 rows for 2 processes"):
                run._parts(batch, batch)
            return
        sizes.append([len(inputs) for inputs, _ in run._parts(batch, batch)])
    assert len(sizes[0]) == len(sizes[1]) and all(map(all, sizes))
    assert sum(map(sum, sizes)) == rows


@pytest.mark.parametrize("again", [False, True])
def test_an_update_computes_a_block_once_or_again(again: bool, tmp_path: Path) -> None:
    model, calls = SRM(ModelConfig(8, 1, 2, 8, 5)), []
    model.mixer_blocks[0].register_forward_pre_hook(
        lambda *_: calls.append(torch.is_grad_enabled())
    )
    with processes("cpu") as own:
        run = Run(model, replace(SCHEDULE, checkpoint_activations=again), tmp_path, own, {})
        run.train(Ids(), [])
    assert calls == [True] * (8 if again else 4)
