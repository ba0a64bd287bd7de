"""A delta has what differs between two models, and makes the one into the other, to the byte."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file, save_model

import srm.__main__ as srm
from srm.engine.config import ModelConfig
from srm.engine.weights.checkpoint import load_checkpoint, read_stored
from srm.engine.weights.delta import made_whole, write_delta
from srm.engine.weights.random_model import write_random_model
from srm.engine.weights.tensor_file import DELTA_OF, encoded_tensors, read_metadata, read_tensors
from srm.errors import CheckpointError, ConfigError

CONFIG = ModelConfig(d_model=8, num_layers=2, num_heads=4, n_ctx=16, vocab_size=11)
CHANGED = ("input_layer.weight", "mixer_blocks.1.channel_norm.bias")
FILE = "model.safetensors"


def saved(folder: Path, dtypes: tuple[torch.dtype, torch.dtype], change: float) -> Path:
    """A model whose matrices and vectors have these dtypes; some tensors are larger by `change`."""
    write_random_model(folder, CONFIG)
    tensors = load_file(folder / FILE)
    for name in CHANGED:
        tensors[name] = tensors[name] + change
    tensors = {name: value.to(dtypes[value.ndim == 1]) for name, value in tensors.items()}
    save_file(tensors, folder / FILE, {"format": "pt"})
    return folder


@pytest.fixture(params=[(torch.float32,) * 2, (torch.bfloat16, torch.float16)], ids=["F32", "half"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    return saved(tmp_path / "base", request.param, 0.0), saved(tmp_path / "new", request.param, 1.0)


def test_base_and_delta_are_the_new_file(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, new = pair
    delta = tmp_path / "delta"
    fingerprint = load_checkpoint(base).fingerprint
    assert write_delta(base, new, delta) == [
        f"2 of 62 tensors, which differ from {fingerprint}",
        f"a server that takes them has weights {load_checkpoint(new).fingerprint}, "
        "which the next delta is of",
    ]
    assert read_tensors(delta / FILE).keys() == {*CHANGED}
    assert read_metadata(delta / FILE) == {"format": "pt", "delta_of": fingerprint}
    assert made_whole(delta / FILE, read_stored(base).tensors) == (new / FILE).read_bytes()
    assert (delta / "config.json").read_bytes() == (new / "config.json").read_bytes()
    with pytest.raises(CheckpointError, match=f"is a delta: .* weights '{fingerprint}'"):
        load_checkpoint(delta)


def test_equal_models_have_a_delta_that_changes_nothing(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    base, _ = pair
    notes = write_delta(base, shutil.copytree(base, tmp_path / "same"), tmp_path / "delta")
    fingerprint = load_checkpoint(base).fingerprint
    assert notes[0] == f"changes nothing: no tensor differs from {fingerprint}"
    assert fingerprint in notes[1]


def test_a_file_without_metadata_is_made_whole_to_the_bit(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    base, new = pair
    save_file(load_file(new / FILE), new / FILE)
    write_delta(base, new, tmp_path / "delta")
    whole = made_whole(tmp_path / "delta" / FILE, read_stored(base).tensors)
    assert whole == (new / FILE).read_bytes()


def test_what_was_one_tensor_may_become_two(tmp_path: Path) -> None:
    write_random_model(tmp_path / "base", CONFIG)
    tensors = load_file(tmp_path / "base" / FILE)
    module = torch.nn.Module()
    for name in ("input_layer", "output_layer"):
        module.add_module(name, torch.nn.Module())
        module.get_submodule(name).weight = torch.nn.Parameter(tensors["input_layer.weight"])
    module.output_layer.weight = module.input_layer.weight  # type: ignore[union-attr]
    save_model(module, str(tmp_path / FILE))  # as one, and the other name for it
    tied = read_tensors(tmp_path / FILE)
    assert tied["input_layer.weight"] == tied["output_layer.weight"]
    own = read_tensors(tmp_path / "base" / FILE)["output_layer.weight"]
    metadata = read_metadata(tmp_path / FILE) | {DELTA_OF: "x"}
    (tmp_path / "delta").write_bytes(
        encoded_tensors(tmp_path, {"output_layer.weight": own}, metadata)
    )
    (tmp_path / "whole.safetensors").write_bytes(made_whole(tmp_path / "delta", tied))
    whole = read_tensors(tmp_path / "whole.safetensors")
    assert whole == {**tied, "output_layer.weight": own}


def test_the_command_writes_one(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, new = map(str, pair)
    arguments = ["convert", new, "--delta-of", base, "--output", str(tmp_path / "delta")]
    assert srm.main(arguments) == 0
    assert "2 of 62 tensors" in capsys.readouterr().out
    assert srm.main([*arguments, "--to", "transformers"]) == ConfigError.exit_code
    assert "as they are" in capsys.readouterr().err
    assert srm.main(["inspect", str(tmp_path / "delta")]) == CheckpointError.exit_code
    assert "is a delta" in capsys.readouterr().err


def test_two_models_that_cannot_follow_each_other(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, new = pair
    output = tmp_path / "delta"
    for taken in (base, new):
        with pytest.raises(ConfigError, match="which stays as it is"):
            write_delta(base, new, taken)
    with pytest.raises(CheckpointError, match="missing"):
        write_delta(tmp_path / "missing", new, tmp_path)
    tensors = load_file(new / FILE)
    del tensors[CHANGED[0]]
    save_file(tensors, new / FILE)
    with pytest.raises(CheckpointError, match="do not both have tensor input_layer"):
        write_delta(base, new, output)
    other = msgspec.structs.replace(CONFIG, decay_constant=2)
    (new / "config.json").write_bytes(msgspec.json.encode(other))
    with pytest.raises(ConfigError, match="differ in their architecture"):
        write_delta(base, new, output)
    assert not output.exists()
