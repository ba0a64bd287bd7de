"""A good checkpoint is read; every broken one is a clear error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engine.config import ModelConfig
from engine.errors import CheckpointError
from engine.steps.batch import F32
from engine.weights.checkpoint import load_checkpoint
from engine.weights.random_model import write_random_model

CONFIG = ModelConfig(d_model=8, num_layers=2, num_heads=4, n_ctx=16, vocab_size=11)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_random_model(tmp_path, CONFIG)
    return tmp_path


def _rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_files_load(folder: Path, dtype: str) -> None:
    import torch  # noqa: PLC0415  # numpy cannot write bfloat16
    from safetensors.torch import load_file as load_torch  # noqa: PLC0415
    from safetensors.torch import save_file as save_torch  # noqa: PLC0415

    kind = getattr(torch, dtype)
    tensors = {k: v.to(kind) for k, v in load_torch(folder / "model.safetensors").items()}
    save_torch(tensors, folder / "model.safetensors")
    expected = tensors["input_layer.weight"].float().numpy()
    assert np.array_equal(load_checkpoint(folder).embedding, expected)


def test_the_fingerprint_changes_with_weights_and_config(folder: Path) -> None:
    first = load_checkpoint(folder).fingerprint
    assert load_checkpoint(folder).fingerprint == first
    _rewrite(folder, lambda tensors: tensors["input_layer.weight"].__setitem__((0, 0), 9.0))
    second = load_checkpoint(folder).fingerprint
    config = msgspec.structs.replace(CONFIG, decay_constant=2)
    (folder / "config.json").write_bytes(msgspec.json.encode(config))
    assert len({first, second, load_checkpoint(folder).fingerprint}) == 3


def _set_nan(tensors: dict[str, F32]) -> None:
    tensors["output_layer.weight"][3, 3] = np.nan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("mixer_blocks.1.token_norm.bias"), r"token_norm\.bias \[8\] is missing"),
        (
            lambda t: t.update({"output_layer.weight": t["output_layer.weight"].T.copy()}),
            r"output_layer\.weight has shape \[8, 11\], but config\.json asks for \[11, 8\]",
        ),
        (lambda t: t.update(extra=np.zeros(3, np.float32)), "1 tensor does not belong .* extra"),
        (_set_nan, r"output_layer\.weight has values that are not finite"),
        (
            lambda t: t.update({"output_layer.weight": t["output_layer.weight"].astype(np.int32)}),
            r"output_layer\.weight is I32; F32, F16 and BF16 can be read",
        ),
    ],
)
def test_wrong_tensors_are_named(
    folder: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    _rewrite(folder, change)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 12}, r"input_layer\.weight has shape \[11, 8\].* \[12, 8\]"),
        ({"num_layers": 3}, r"mixer_blocks\.2\..* is missing"),
        ({"num_heads": 3}, "num_heads = 3 must divide d_model = 8"),
        ({"num_heads": 1}, "num_heads must be even where mixer is mixed, got 1"),
        ({"d_model": 0}, "d_model must be at least 1"),
        ({"decay_constant": 0}, "decay_constant must be at least 1"),
        ({"n_ctx": "16"}, r"Expected `int`, got `str` - at `\$\.n_ctx`"),
        ({"eos_token_id": 11}, "eos_token_id must lie in"),
        ({"colour": "red"}, "unknown field `colour`"),
        ({"mixer": "serial"}, r"Invalid enum value 'serial' - at `\$\.mixer`"),
        ({"mixer": "row"}, "num_heads must be 1 where mixer is row, got 4"),
        ({"kernel_size": 2}, "kernel_size must be 1 where mixer is mixed, got 2"),
    ],
)
def test_wrong_configs_are_explained(folder: Path, fields: dict[str, Any], message: str) -> None:
    config = {**msgspec.to_builtins(CONFIG), **fields}
    (folder / "config.json").write_bytes(msgspec.json.encode(config))
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(folder)


def test_missing_cut_and_foreign_files_are_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for content in (whole[:-5], whole[:4], b"", b"not a checkpoint at all"):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"model\.safetensors is not a whole"):
            load_checkpoint(folder)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"cannot read .*model\.safetensors"):
        load_checkpoint(folder)
    (folder / "config.json").write_text("{")
    path.write_bytes(whole)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_checkpoint(folder)
    with pytest.raises(CheckpointError, match=r"cannot read .*config\.json"):
        load_checkpoint(folder / "nowhere")
