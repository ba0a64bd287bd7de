"""What a run writes while it goes on: its log, the page of curves, models on the way."""

from __future__ import annotations

import math
import re
import resource
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from msgspec import structs

from srm.engine.config import ModelConfig
from srm.engine.weights.checkpoint import read_model
from srm.errors import ConfigError
from srm.training.finetuning.config import SFTConfig
from srm.training.finetuning.sft import sft
from srm.training.instruments.log import LOG, PAGE, RunLog, read_log
from srm.training.instruments.page import write_page
from srm.training.instruments.peak import measured_peak
from srm.training.instruments.record import LogLine, Sample
from srm.training.loop import Run
from srm.training.model import SRM
from srm.training.pretrain import pretrain
from srm.training.processes import processes
from srm.training.schedule import Schedule, count_factors
from srm.training.settings import PretrainConfig
from tests.kit.fake_wandb import Wandb
from tests.unit.training.conftest import StopAt, tiny_run

EACH_STEP = {
    *("loss", "learning rate", "gradient norm", "tokens per second", "FLOP per second"),
    "share of peak",
}
VARYING = {"tokens per second", "FLOP per second", "share of peak"}
EACH_SAVE = {"least λ", "largest λ", "least α", "largest α"}


def config(texts: Path, output: Path, **changes: Any) -> PretrainConfig:
    made = tiny_run(
        texts, output, steps=10, batch_tokens=128, warmup_steps=2, max_vocab_size=300,
        save_every=3, keep_every=4, evaluate_every=5, evaluation_share=0.1,
    )  # fmt: skip
    return structs.replace(made, **changes)


def values(folder: Path) -> dict[str, dict[int, float | None]]:
    """By name and step; each once."""
    logged: dict[str, dict[int, float | None]] = {}
    for line in read_log(folder / LOG):
        for name, value in line.values.items():
            assert line.step not in logged.setdefault(name, {})
            logged[name][line.step] = value
    return logged


def test_a_log_has_each_update_and_each_save_once(
    texts: Path, tmp_path: Path, stop_at: StopAt
) -> None:
    """Also of a run that was cut off after an update that it had not saved."""
    with stop_at(8), pytest.raises(KeyboardInterrupt):
        pretrain(config(texts, tmp_path))
    with (tmp_path / LOG).open("ab") as file:
        file.write(b'{"step":8,"valu')
    losses = pretrain(config(texts, tmp_path))
    logged = values(tmp_path)
    assert logged.keys() == EACH_STEP | EACH_SAVE | {"evaluation loss"}
    for name in EACH_STEP:
        assert [*logged[name]] == list(range(1, 11)), name
    for name in EACH_SAVE:
        assert [*logged[name]] == [3, 6, 9, 10], name
    assert [*logged["loss"].values()] == losses.steps
    assert [*logged["evaluation loss"].items()] == losses.evaluations
    samples = [line for line in read_log(tmp_path / LOG) if line.sample]
    assert [line.step for line in samples] == [3, 6, 9, 10]
    assert all(line.sample and line.sample.text for line in samples)
    page = (tmp_path / PAGE).read_text()
    assert "After 10 updates" in page and page.count("<figure>") == 8


def test_models_are_kept_on_the_way(texts: Path, tmp_path: Path) -> None:
    """And neither these nor samples change what is learned."""
    pretrain(config(texts, tmp_path / "kept"))
    pretrain(config(texts, tmp_path / "plain", keep_every=0, save_every=100))
    assert not [*(tmp_path / "plain").glob("step-*")]
    folders = sorted((tmp_path / "kept").glob("step-*"))
    assert [folder.name for folder in folders] == ["step-4", "step-8"]
    prints = {read_model(folder).fingerprint for folder in (*folders, tmp_path / "kept")}
    assert len(prints) == 3
    assert read_model(tmp_path / "kept").fingerprint == read_model(tmp_path / "plain").fingerprint
    for folder in folders:
        assert (folder / "tokenizer.json").read_bytes()
    pretrain(config(texts, tmp_path / "again", learning_rate=0.0, keep_every=1, steps=1))
    again = read_model(tmp_path / "again" / "step-1")
    assert again.fingerprint == read_model(tmp_path / "again").fingerprint


def test_fine_tuning_has_the_same_instruments(texts: Path, tmp_path: Path) -> None:
    pretrain(config(texts, tmp_path / "base", steps=1))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "one", "completion": "two"}\n' * 20)
    rows = (tmp_path / "rows.jsonl",)
    sft(SFTConfig(model=tmp_path / "base", output=tmp_path / "run", train=rows, epochs=1,
                  batch_rows=5, save_every=2, keep_every=2, threads=1))  # fmt: skip
    logged = values(tmp_path / "run")
    assert logged.keys() == EACH_STEP | EACH_SAVE | {"evaluation loss"}
    folders = (tmp_path / "run").glob("step-*")
    assert sorted(folder.name for folder in folders) == ["step-2", "step-4"]
    samples = [line.sample for line in read_log(tmp_path / "run" / LOG) if line.sample]
    assert samples and all(sample.prompt == "one" for sample in samples)


def test_the_norm_of_gradients_is_that_before_they_are_scaled_down(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = SRM(ModelConfig(8, 1, 2, 8, 5))
    ids = torch.tensor([[1, 2, 3]])
    wanted = torch.autograd.grad(model(ids).square().sum(), list(model.parameters()))
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in wanted))
    schedule = Schedule(1, 0.01, 1, 0.0, 1, clip_norm=norm / 10, precision="float32")
    with processes("cpu") as own:
        run = Run(model, schedule, tmp_path, own, {})
        run.update([ids], lambda part: run.logits(part).square().sum())
        run.save()
    assert values(tmp_path)["gradient norm"][1] == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("mixer", ["mixed", "parallel", "combined"])
def test_work_is_counted_as_inspection_does(mixer: Any) -> None:
    sizes = ModelConfig(16, 2, 2, 8, 5, mixer=mixer)
    assert 2 * count_factors(SRM(sizes)) == sizes.flops_per_token


def test_a_peak_is_measured_once() -> None:
    first = measured_peak("cpu", torch.float32)
    assert 0 < first == measured_peak("cpu", torch.float32) < math.inf


def test_wandb_has_the_log_and_a_resumed_run_goes_on_there(
    texts: Path, tmp_path: Path, stop_at: StopAt, wandb: Wandb
) -> None:
    """Each update once, also those that a killed run made after its last save."""
    settings = config(texts, tmp_path, wandb=True)
    with stop_at(8), pytest.raises(KeyboardInterrupt):
        pretrain(settings)
    pretrain(settings)
    logged = values(tmp_path)
    (rows,) = wandb.server.values()
    assert [run.starting_step for run in wandb.runs] == [0, 9]
    assert rows.keys() == logged["loss"].keys() == {*range(1, 11)}
    names = (EACH_STEP | EACH_SAVE | {"evaluation loss"}) - VARYING
    for name in names:
        assert {step: row[name] for step, row in rows.items() if name in row} == logged[name], name
    given = wandb.runs[0].given
    assert given["dir"] == tmp_path and {"d_model", "steps"} <= given["config"].keys()
    (tmp_path / "run.pt").unlink()
    pretrain(settings)
    assert len(wandb.server) == 2


def test_variables_of_wandb_count_for_more_than_the_folder(
    texts: Path, tmp_path: Path, wandb: Wandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretrain(config(texts, tmp_path, wandb=True, steps=1))
    own = {"WANDB_RUN_ID": "mine", "WANDB_DIR": "/elsewhere", "WANDB_RESUME": "must"}
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    pretrain(config(texts, tmp_path, wandb=True, steps=2))
    assert wandb.runs[1].id == "mine" and not {"id", "dir", "resume"} & wandb.runs[1].given.keys()


def test_a_run_goes_on_where_wandb_fails(
    texts: Path,
    tmp_path: Path,
    wandb: Wandb,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(run: Any, values: dict[str, float], step: int) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("tests.kit.fake_wandb.Run.log", fail)
    losses = pretrain(config(texts, tmp_path, wandb=True, steps=3))
    assert len(losses.steps) == 3 and [*read_log(tmp_path / LOG)][-1].step == 3
    assert caplog.text.count("_WandbRun gets no more values: BrokenPipeError()") == 1


def test_another_run_of_wandb_is_not_gone_on_with(
    texts: Path, tmp_path: Path, wandb: Wandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    pretrain(config(texts, tmp_path / "one", wandb=True, steps=2))
    with pytest.raises(ConfigError, match=r"the run mine has 3 updates, and .*two has none: unset"):
        pretrain(config(texts, tmp_path / "two", wandb=True, steps=2))


def test_what_wandb_refuses_is_said(
    texts: Path, tmp_path: Path, wandb: Wandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "nonsense")
    with pytest.raises(ConfigError, match=r"wandb = true: 1 validation error .* mode"):
        pretrain(config(texts, tmp_path, wandb=True))
    monkeypatch.delenv("WANDB_API_KEY")
    with pytest.raises(ConfigError, match="wandb = true: No API key configured"):
        pretrain(config(texts, tmp_path, wandb=True))


def test_a_disk_that_takes_no_more_log_is_named(tmp_path: Path) -> None:
    log = RunLog(tmp_path, 0)
    log.tell(1, "loss", 1.0)
    log.tell(2, "loss", 2.0)
    before = (tmp_path / LOG).read_bytes()
    own, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 5, most))
    try:
        for _ in range(2):  # a line that is half there, and none
            with pytest.raises(ConfigError, match=rf"{tmp_path}/log.jsonl cannot be written"):
                log.tell(3, "loss", 3.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (own, most))
    RunLog(tmp_path, 2)
    assert (tmp_path / LOG).read_bytes() == before


def test_a_page_needs_nothing_else_and_shows_texts_as_they_are(tmp_path: Path) -> None:
    lines = [LogLine(step, {"loss": 4 / step, "least λ": 0.9}) for step in range(1, 2_000)]
    lines += [LogLine(9, {"largest λ": 1.0, "evaluation loss": 3.0, "kl": None})]
    lines += [LogLine(step, sample=Sample("<b>", f"text {step}", 0.5)) for step in range(30)]
    write_page("a & b", lines, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert not re.search(r"https?:|<script|<link|src=|<b>", page)
    assert "<title>a &amp; b</title>" in page and "&lt;b&gt;" in page
    assert page.count("<figure>") == 2 and page.count("<path") == 4
    assert "After 1,999 updates" in page and "evaluation loss 3" in page
    paths = re.findall(r'd="M([^"]+) l0,0"', page)
    assert sorted(len(path.split(" L")) for path in paths) == [1, 1, 286, 286]
    assert page.index("text 29") < page.index("text 10") and "text 9<" not in page
    write_page("run", [], tmp_path / "empty.html")
    assert "After 0 updates" in (tmp_path / "empty.html").read_text()


def test_values_that_are_no_numbers_are_none(tmp_path: Path) -> None:
    log = RunLog(tmp_path, 0)
    log.tell(1, "gradient norm", math.inf)
    log.flush(is_last=True)
    (line,) = read_log(tmp_path / LOG)
    assert line == LogLine(1, {"gradient norm": None})
    assert msgspec.json.decode((tmp_path / LOG).read_bytes())["values"] == {"gradient norm": None}
