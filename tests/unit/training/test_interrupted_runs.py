"""A run that is killed goes on as if it had not been, alone in its folder; damage is noticed."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from msgspec import structs

from srm.errors import ConfigError
from srm.loadtest.records import ROOT
from srm.training.__main__ import main
from srm.training.pretrain import pretrain
from srm.training.processes import stop_asked
from srm.training.settings import PretrainConfig
from srm.training.text.tokenizer import TokenizerConfig, make_tokenizer
from srm.training.text.whole_files import is_sealed, seal
from tests.unit.training.conftest import StopAt, tiny_run
from tests.unit.training.test_stopped_runs import assert_served

KILLED = """
import signal, sys
from pathlib import Path
from tests.unit.training.test_interrupted_runs import config
from srm.training import checkpoint, loop
from srm.training.pretrain import pretrain

rate, calls = loop.Schedule.rate, 0

def reached():
    print("reached", flush=True)
    signal.pause()

def rate_of(schedule, step):
    if step == 7:
        reached()
    return rate(schedule, step)

def half_saved(save, last):
    def saved(content, path, **more):
        global calls
        save(content, path, **more)
        calls += 1
        if calls == last:
            path.write_bytes(path.read_bytes()[:100])
            reached()
    return saved

match sys.argv[1]:
    case "in a step":
        loop.Schedule.rate = rate_of
    case "in a save":
        loop.torch.save = half_saved(loop.torch.save, 2)
    case "in a model's save":
        checkpoint.save_file = half_saved(checkpoint.save_file, 3)  # the first is before any save
pretrain(config(Path(sys.argv[2]), Path(sys.argv[3])))
"""
"""Is told where to stop; says so when it is there, and waits to be killed."""


def config(texts: Path, output: Path) -> PretrainConfig:
    """Ten steps on texts, saved at every third, with evaluations between."""
    return tiny_run(
        texts, output, num_layers=2, steps=10, batch_tokens=128, warmup_steps=2, save_every=3,
        max_vocab_size=300, evaluate_every=4, evaluation_share=0.1, precision="auto",
    )  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    pretrain(config(texts, folder))
    return folder


@pytest.mark.parametrize(
    ("place", "saved"), [("in a step", 6), ("in a save", 3), ("in a model's save", 3)]
)
def test_a_killed_run_goes_on_to_the_same_bits(
    place: str, saved: int, texts: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """While it lives no other run enters its folder; once it is dead nothing is in the way."""
    command = [sys.executable, "-c", KILLED, place, str(texts), str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        try:
            assert "reached\n" in iter(run.stdout.readline, "")
            with pytest.raises(ConfigError, match=f"output: another run is in {tmp_path}: wait"):
                pretrain(config(texts, tmp_path))
        finally:
            run.kill()
    loaded = torch.load(tmp_path / "run.pt", weights_only=True)
    assert len(loaded["losses"]["steps"]) == saved
    assert_served(tmp_path)
    pretrain(config(texts, tmp_path))
    for name in ("model.safetensors", "losses.json", "evaluation_losses.json", "loss.svg"):
        assert (tmp_path / name).read_bytes() == (undisturbed / name).read_bytes(), name
    one, other = (
        torch.load(folder / "run.pt", weights_only=True) for folder in (undisturbed, tmp_path)
    )
    assert one["optimizer"]["state"].keys() == other["optimizer"]["state"].keys()
    for name, state in one["optimizer"]["state"].items():
        for part, value in state.items():
            assert torch.equal(value, other["optimizer"]["state"][name][part]), (name, part)


@pytest.mark.parametrize("name", ["run.pt", "tokens.bin"])
def test_a_flipped_bit_is_noticed_and_its_file_named(
    undisturbed: Path, texts: Path, name: str
) -> None:
    path = undisturbed / name
    sound = path.read_bytes()
    try:
        for place in range(5, 8 * len(sound), 8 * len(sound) // 20 | 1):
            changed = bytearray(sound)
            changed[place // 8] ^= 1 << place % 8
            path.write_bytes(changed)
            with pytest.raises(
                ConfigError, match=rf"{path} is damaged, as its SHA-256 says: remove it"
            ):
                pretrain(config(texts, undisturbed))
    finally:
        path.write_bytes(sound)


@pytest.mark.parametrize("content", [b"", b"a", bytes(31), bytes(3_000_000)])
def test_a_seal_is_of_what_stands_before_it(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    assert not is_sealed(path)
    seal(path)
    assert is_sealed(path) and path.read_bytes()[:-32] == content
    path.write_bytes(path.read_bytes()[:-1])
    assert not is_sealed(path)


def test_unwritable_places_are_named(texts: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"output: .*texts\.txt/run: Not a directory"):
        pretrain(config(texts, texts / "run"))
    (tmp_path / "loss.svg").mkdir()
    with pytest.raises(ConfigError, match=r"loss\.svg cannot be written: Is a directory"):
        pretrain(structs.replace(config(texts, tmp_path), steps=1))


def test_events_for_tensorboard_are_those_of_the_run(
    texts: Path, tmp_path: Path, stop_at: StopAt
) -> None:
    """Steps that a killed run made after its last save are shown once."""
    read = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    settings = structs.replace(config(texts, tmp_path), tensorboard=True)
    with stop_at(7), pytest.raises(KeyboardInterrupt):
        pretrain(settings)
    losses = pretrain(settings)
    events = read.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    for name, wanted in (
        ("loss", list(enumerate(losses.steps, 1))),
        ("evaluation loss", losses.evaluations),
        ("learning rate", None),
        ("tokens per second", None),
    ):
        results = [(scalars.step, scalars.value) for scalars in events.Scalars(name)]
        steps = range(1, 11) if wanted is None else dict(wanted)
        assert [step for step, _ in results] == list(steps)
        assert wanted is None or dict(results) == pytest.approx(dict(wanted))


@pytest.mark.parametrize(
    ("name", "module", "imported"),
    [
        ("tensorboard", "torch.utils.tensorboard", None),
        ("wandb", "wandb", None),
        ("wandb", "wandb", ModuleType("wandb")),  # as of a folder of its results
    ],
)
def test_events_without_the_package_are_refused_before_any_work(
    name: str, module: str, imported: ModuleType | None,
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, module, imported)
    settings = structs.replace(config(texts, tmp_path / "run"), **{name: True})
    needed = f"{name} = true needs the package {name}: pip install {name}"
    with pytest.raises(ConfigError, match=needed):
        pretrain(settings)
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_of_other_texts_is_not_taken_for_that_of_a_new_run(
    texts: Path, tmp_path: Path
) -> None:
    settings = structs.replace(config(texts, tmp_path / "run"), steps=1)
    own = tmp_path / "run" / "tokenizer.json"
    (tmp_path / "other.txt").write_text("zwei drei vier " * 9)
    make_tokenizer(TokenizerConfig(texts=(tmp_path / "other.txt",), output=own))
    before = own.read_bytes()
    with pytest.raises(ConfigError, match="max_vocab_size = 300 make: give it as tokenizer"):
        pretrain(settings)
    assert own.read_bytes() == before
    pretrain(structs.replace(settings, tokenizer=str(own)))  # as it says
    make_tokenizer(TokenizerConfig(texts=(texts,), max_vocab_size=300, output=own))
    (tmp_path / "run" / "run.pt").unlink()  # as a run is before its first save
    assert len(pretrain(settings).steps) == 1


@pytest.mark.parametrize("name", ["run.pt", "tokens.bin", "model.safetensors"])
def test_a_disk_that_takes_no_more_ends_the_run_and_keeps_what_was_there(
    texts: Path, tmp_path: Path, name: str
) -> None:
    """A limit on this process's files stands for it; when there is room the run goes on."""
    settings = structs.replace(config(texts, tmp_path), steps=3)
    pretrain(settings)
    path = tmp_path / name
    before = path.read_bytes()
    if name == "run.pt":
        settings = structs.replace(settings, steps=6)
    elif name == "tokens.bin":
        (tmp_path / "tokens.json").unlink()  # so that they are made anew
    own, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) - 1, most))
    try:
        with pytest.raises(ConfigError, match=f"{path} cannot be written"):
            pretrain(settings)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (own, most))
    assert path.read_bytes() == before and not list(tmp_path.glob("*.partial"))
    assert len(pretrain(settings).steps) == settings.steps


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_told_to_stop_is_saved_first(
    texts: Path, undisturbed: Path, tmp_path: Path, number: int, stop_at: StopAt,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    settings = config(texts, tmp_path)
    names = "d_model num_layers num_heads n_ctx steps batch_tokens warmup_steps max_vocab_size"
    flags = [f"--{name.replace('_', '-')}={getattr(settings, name)}" for name in names.split()]
    flags += ["--save-every=100", "--evaluate-every=4", "--evaluation-share=0.1", "--threads=1"]
    command = ["train", "pretrain", f"--texts={texts}", f"--output={tmp_path}", *flags]
    handlers = [signal.getsignal(signal.SIGTERM), signal.getsignal(2)]
    with stop_at(4, number):
        assert main(command) == 130
    assert "interrupted; the same command goes on from the last save" in capsys.readouterr().err
    assert len(torch.load(tmp_path / "run.pt", weights_only=True)["losses"]["steps"]) == 5
    assert [signal.getsignal(signal.SIGTERM), signal.getsignal(2)] == handlers
    assert main(command) == 0
    for name in ("model.safetensors", "losses.json"):
        assert (tmp_path / name).read_bytes() == (undisturbed / name).read_bytes()


def test_a_second_signal_ends_a_run_at_once() -> None:
    with stop_asked() as asked:
        signal.raise_signal(signal.SIGINT)
        assert asked.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_second_sigterm_ends_none_of_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun sends one to each process that a service manager has sent one to before."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with stop_asked() as asked:
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
        assert asked.is_set()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
