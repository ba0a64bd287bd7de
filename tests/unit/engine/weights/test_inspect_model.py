"""`srm inspect` counts what is there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import srm
from engine.config import ModelConfig
from engine.errors import CheckpointError
from engine.weights.checkpoint import load_checkpoint
from engine.weights.inspect_model import inspect_model
from engine.weights.random_model import write_random_model
from training.checkpoint import save_model
from training.model import SRM

CONFIG = ModelConfig(d_model=8, num_layers=2, num_heads=4, n_ctx=16, vocab_size=11)


def test_sizes_are_counted(tmp_path: Path) -> None:
    write_random_model(tmp_path, CONFIG)
    found = inspect_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert found["parameters"] == f"{sum(value.size for value in tensors.values()):,}"
    assert found["variant"] == "mixed, 4 heads, projections, decay, c = 1"
    assert found["state"] == "64 bytes a sequence, in float32"
    assert found["slots"] == f"{10**9 // 68:,} per GB (10^9 bytes)"
    assert found["work"] == f"{CONFIG.flops_per_token:,} FLOP a token"
    assert found["stored as"] == f"F32 {len(tensors)}"
    assert found["tokenizer"] == "no: token ids only"
    assert found["fingerprint"] == load_checkpoint(tmp_path).fingerprint
    (tmp_path / "tokenizer.json").write_text("{}")
    assert inspect_model(tmp_path)["tokenizer"] == "yes"


@pytest.mark.parametrize(
    ("changes", "variant", "state"),
    [
        ({"mixer": "combined"}, "combined, 4 heads, projections, decay, c = 1", 128),
        (
            {"mixer": "kernel", "num_heads": 1, "kernel_size": 3, "use_projections": False},
            "kernel, kernel_size 3, decay, c = 1",
            64,
        ),
        (
            {"mixer": "row", "num_heads": 1, "use_projections": False, "decay": False},
            "row, no decay",
            64,
        ),
        (
            {"mixer": "combined", "decay_constant": 2, "combined_row_quirk": True},
            "combined, 4 heads, projections, decay, c = 2, combined_row_quirk",
            128,
        ),
    ],
)
def test_variants_are_told_apart(
    changes: dict[str, object], variant: str, state: int, tmp_path: Path
) -> None:
    fields = {name: getattr(CONFIG, name) for name in CONFIG.__struct_fields__}
    write_random_model(tmp_path, ModelConfig(**{**fields, **changes}))
    found = inspect_model(tmp_path)
    assert found["variant"] == variant
    assert found["state"] == f"{state} bytes a sequence, in float32"
    assert (found["decays"] == "none") == ("no decay" in variant)


def test_dtypes_and_decays_out_of_range_are_told(tmp_path: Path) -> None:
    model = SRM(CONFIG)
    save_model(model, tmp_path)
    assert inspect_model(tmp_path)["stored as"] == "BF16 38, F32 24"
    tensors = {name: value.detach().numpy() for name, value in model.state_dict().items()}
    decays = [name for name in tensors if name.endswith("decay_value")]
    for name in decays:
        tensors[name] = np.array([0.9], np.float32)
    tensors[decays[0]], tensors[decays[1]] = np.array([[0.5], [1.06]], np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    assert inspect_model(tmp_path)["decays"] == "8 from 0.5 to 1.06, 2 of them used as 0.9 or 1.0"


def test_what_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot read .*config\.json"):
        inspect_model(tmp_path)
    write_random_model(tmp_path, CONFIG)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["output_layer.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"output_layer\.weight \[11, 8\].* is missing"):
        inspect_model(tmp_path)
    (tmp_path / "config.json").write_text('{"mixer": "serial"}')
    with pytest.raises(CheckpointError, match=r"config\.json: "):
        inspect_model(tmp_path)


def test_the_command_prints_a_line_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_random_model(tmp_path, CONFIG)
    assert srm.main(["inspect", str(tmp_path)]) == 0
    said = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert said["d_model"] == "8" and said["layers"] == "2"
    assert srm.main(["inspect", str(tmp_path / "nowhere")]) == CheckpointError.exit_code
