"""A good checkpoint is read, and `srm inspect` counts what is there; broken ones are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file as save_torch

import srm.__main__ as srm
from srm.engine.config import ModelConfig
from srm.engine.weights.checkpoint import load_checkpoint
from srm.engine.weights.inspect_model import inspect_model
from srm.engine.weights.random_model import write_random_model
from srm.errors import CheckpointError
from srm.training.checkpoint import save_model
from srm.training.model import SRM

CONFIG = ModelConfig(d_model=8, num_layers=2, num_heads=4, n_ctx=16, vocab_size=11)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_random_model(tmp_path, CONFIG)
    return tmp_path


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_files_load(folder: Path, dtype: torch.dtype) -> None:
    path = folder / "model.safetensors"
    tensors = {name: value.to(dtype) for name, value in load_torch(path).items()}
    save_torch(tensors, path)
    expected = tensors["input_layer.weight"].float().numpy()
    assert np.array_equal(load_checkpoint(folder).embedding, expected)


def test_metadata_may_be_null(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = msgspec.json.encode(
        {"__metadata__": None} | msgspec.json.decode(content[8 : 8 + size])
    )
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :])
    assert load_checkpoint(folder).config == CONFIG


def test_the_fingerprint_changes_with_weights_and_config(folder: Path) -> None:
    first = load_checkpoint(folder).fingerprint
    assert load_checkpoint(folder).fingerprint == first == inspect_model(folder)["fingerprint"]
    tensors = load_file(folder / "model.safetensors")
    tensors["input_layer.weight"][0, 0] = 9.0
    save_file(tensors, folder / "model.safetensors")
    second = load_checkpoint(folder).fingerprint
    config = msgspec.structs.replace(CONFIG, decay_constant=2)
    (folder / "config.json").write_bytes(msgspec.json.encode(config))
    assert len({first, second, load_checkpoint(folder).fingerprint}) == 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 12}, r"input_layer\.weight has shape \[11, 8\].* \[12, 8\]"),
        ({"num_layers": 3}, r"mixer_blocks\.2\..* is missing"),
        ({"num_layers": 1}, r"tensors do not belong to the model of config\.json"),
        ({"num_heads": 3}, "num_heads = 3 must divide d_model = 8"),
        ({"num_heads": 1}, "num_heads must be even where mixer is mixed, got 1"),
        ({"d_model": 0}, "d_model must be at least 1"),
        ({"decay_constant": 0}, "decay_constant must be at least 1"),
        ({"n_ctx": "16"}, "n_ctx must be an integer; got a string"),
        ({"eos_token_id": 11}, "eos_token_id must lie in"),
        ({"colour": "red"}, "colour is not a field"),
        ({"mixer": "serial"}, r"config\.json: mixer must be one of 'mixed', .*, got 'serial'"),
        ({"format_version": 3}, r"config\.json: format_version must be one of 1, got 3"),
        ({"mixer": "row"}, "num_heads must be 1 where mixer is row, got 4"),
        ({"kernel_size": 2}, "kernel_size must be 1 where mixer is mixed, got 2"),
        ("{", r"config\.json"),
    ],
)
def test_configs_that_are_wrong_or_of_another_model_are_explained(
    folder: Path, fields: dict[str, Any] | str, message: str
) -> None:
    """What is wrong with tensors is the same as for `srm convert`: see test_convert."""
    content = (
        fields.encode()
        if isinstance(fields, str)
        else msgspec.json.encode({**msgspec.to_builtins(CONFIG), **fields})
    )
    (folder / "config.json").write_bytes(content)
    for read in (load_checkpoint, inspect_model):
        with pytest.raises(CheckpointError, match=message):
            read(folder)


def test_missing_and_cut_files_are_named(folder: Path) -> None:
    """See test_convert for more that are not whole."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a whole"):
        load_checkpoint(folder)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"cannot read .*model\.safetensors"):
        load_checkpoint(folder)
    with pytest.raises(CheckpointError, match=r"there is no folder"):
        load_checkpoint(folder / "nowhere")


@pytest.mark.parametrize(
    ("changes", "variant", "state"),
    [
        ({}, "mixed, 4 heads, projections, decay, c = 1", 64),
        (
            {
                "mixer": "kernel",
                "num_heads": 1,
                "kernel_size": 3,
                "use_projections": False,
                "decay": False,
            },
            "kernel, kernel_size 3, no decay",
            64,
        ),
        (
            {"mixer": "combined", "decay_constant": 2, "combined_row_quirk": True},
            "combined, 4 heads, projections, decay, c = 2, combined_row_quirk",
            128,
        ),
    ],
)
def test_a_model_is_described_by_one_line_for_each_fact(
    changes: dict[str, Any],
    variant: str,
    state: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = msgspec.structs.replace(CONFIG, **changes)
    write_random_model(tmp_path, config)
    result, tensors = inspect_model(tmp_path), load_file(tmp_path / "model.safetensors")
    assert result["variant"] == variant
    assert result["state"] == f"{state} bytes a sequence, in float32"
    assert result["slots"] == f"{10**9 // (state + 4 + 36):,} per GB (10^9 bytes)"
    assert result["parameters"] == f"{sum(value.size for value in tensors.values()):,}"
    assert result["work"] == f"{config.flops_per_token:,} FLOP a token"
    assert result["stored as"] == f"F32 {len(tensors)}"
    assert (result["decays"] == "none") == ("no decay" in variant)
    assert result["tokenizer"] == "no: token ids only"
    (tmp_path / "tokenizer.json").write_text("{}")
    assert srm.main(["inspect", str(tmp_path)]) == 0
    message = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert message["d_model"] == "8" and message["layers"] == "2" and message["tokenizer"] == "yes"
    assert srm.main(["inspect", str(tmp_path / "nowhere")]) == CheckpointError.exit_code


def test_what_a_gpu_holds_and_can_reach_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"d_model": 512, "num_layers": 1, "num_heads": 4, "vocab_size": 8192}
    write_random_model(tmp_path, msgspec.structs.replace(CONFIG, **changes))
    given = ["inspect", str(tmp_path), "--device=gpu"]
    assert srm.main([*given, "--device-memory-gib=1", "--tflops=100", "--tb-per-s=2"]) == 0
    out = capsys.readouterr().out
    slot, weights = 4 * 513 + 36, 2 * (10 * 512**2 + 512 * 8192)
    assert f"GPU slots    {int(0.9 * (2**30 - weights - 1024 * slot)) // slot:,} in 1 GiB" in out
    rows = 2**23 // 512  # of a step
    a_token = weights / rows + 2 * 512 + 2 * 4 * 512 + 2 * 2 * 8192
    assert f"GPU memory   {2e12 / a_token:,.0f} tok/s at most at 2 TB/s" in out
    assert f"GPU products {100e12 / weights:,.0f} tok/s at most at 100 TFLOP/s" in out
    narrow = [*given, "--dtype=float8", "--device-memory-gib=1", "--tflops=100", "--tb-per-s=2"]
    assert srm.main(narrow) == 0
    out, mixer = capsys.readouterr().out, 8 * 512**2
    assert f"{2e12 / (a_token - mixer / rows):,.0f} tok/s at most at 2 TB/s" in out
    assert f"{100e12 / (weights - mixer):,.0f} tok/s at most at 100 TFLOP/s" in out
    for refused in (
        ["--dtype=float8", "--device=cpu"],
        ["--device-memory-gib=0.01"],
        ["--device-memory-gib=0"],
        ["--device-memory-gib=141", "--device=cpu"],
    ):
        assert srm.main([*given, *refused]) == 2
        assert "device_memory_gib" in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(tmp_path))
    assert srm.main(given) == 2
    assert "device_memory_gib must be given" in capsys.readouterr().err
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 1024\n")
    program.chmod(0o755)
    assert srm.main(given) == 0
    assert "in 1 GiB" in capsys.readouterr().out


def test_dtypes_and_decays_out_of_range_are_told(tmp_path: Path) -> None:
    model = SRM(CONFIG)
    save_model(model.config, model.state_dict(), tmp_path)
    assert inspect_model(tmp_path)["stored as"] == "BF16 38, F32 24"
    tensors = {name: value.detach().numpy() for name, value in model.state_dict().items()}
    decays = [name for name in tensors if name.endswith("decay_value")]
    for name, decay in zip(decays, [0.5, 1.06, *[0.9] * (len(decays) - 2)], strict=True):
        tensors[name] = np.array([decay], np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    assert inspect_model(tmp_path)["decays"] == "8 from 0.5 to 1.06, 2 of them used as 0.9 or 1.0"
