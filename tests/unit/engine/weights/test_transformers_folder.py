"""Folders as `transformers` writes and reads them; itself it is asked in `tests/clients/`."""

from __future__ import annotations

import ast
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch

import srm.__main__ as srm
from srm.engine.config import DEMO_MODEL, ModelConfig
from srm.engine.kept_model import INDEX, WEIGHTS, copy_model, hold_model
from srm.engine.weights.checkpoint import load_checkpoint, read_model
from srm.engine.weights.convert import convert
from srm.engine.weights.random_model import random_tensors, write_random_model
from srm.engine.weights.transformers_folder import CLASS_FILES, CLASSES
from srm.errors import CheckpointError, ConfigError
from srm.server.model_identity import as_started, model_id
from srm.server.text.text import Text

CONFIG = ModelConfig(d_model=8, num_layers=2, num_heads=4, n_ctx=16, vocab_size=11)
ADDED = {
    "architectures": ["SRMForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_srm.SRMForCausalLM"},
    "chunk_size_feed_forward": 0,
    "dtype": "bfloat16",
    "id2label": {"0": "LABEL_0"},
    "is_encoder_decoder": False,
    "label2id": {"LABEL_0": 0},
    "model_type": "srm",
    "output_attentions": False,
    "output_hidden_states": False,
    "pad_token_id": 1,
    "problem_type": None,
    "return_dict": True,
    "tie_word_embeddings": False,
    "transformers_version": "5.24.0",
    "use_cache": False,
}
"""What `save_pretrained` and trainers add to a config.json."""


def saved(folder: Path, shards: int = 3, **fields: Any) -> Path:
    """As `save_pretrained` writes it, in so many shards of three dtypes."""
    folder.mkdir()
    described = msgspec.to_builtins(CONFIG) | ADDED | fields
    (folder / "config.json").write_text(json.dumps(described))
    tensors = {name: torch.from_numpy(value) for name, value in random_tensors(CONFIG).items()}
    names, dtypes = sorted(tensors), (torch.float32, torch.float16, torch.bfloat16)
    places: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        own = {name: tensors[name].to(dtypes[shard % 3]) for name in names[shard::shards]}
        save_torch(own, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(own, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    return folder


def test_a_folder_in_shards_is_the_model_whatever_its_dtypes(tmp_path: Path) -> None:
    files = read_model(saved(tmp_path / "saved"))
    assert files.config == CONFIG
    assert {*files.dtypes.values()} == {"F32", "F16", "BF16"}
    for name, values in random_tensors(CONFIG).items():
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
        rounded = torch.from_numpy(values).to(dtype[files.dtypes[name]]).float().numpy()
        assert np.array_equal(files.tensors[name], rounded)


def test_the_fingerprint_is_of_every_shard(tmp_path: Path) -> None:
    folder = saved(tmp_path / "saved")
    before, identity = read_model(folder).fingerprint, model_id(folder)
    shard = folder / "model-00003-of-00003.safetensors"
    tensors = load_file(folder / "model-00001-of-00003.safetensors")
    tensors = {name: value + 1 for name, value in tensors.items()}
    save_file(tensors, folder / "model-00001-of-00003.safetensors")
    assert read_model(folder).fingerprint != before
    assert model_id(folder) != identity != ""
    shard.unlink()
    assert model_id(folder) not in {identity, ""}  # whoever loads it says that it is gone


def cut(folder: Path) -> None:
    shard = folder / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-3])


def spoil(name: str, **fields: Any) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        described = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(described | fields))

    return write


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (cut, r"00002-of-00003\.safetensors is not a whole safetensors file"),
    (lambda folder: (folder / INDEX).write_text("{"), "is no index of shards"),
    (spoil("config.json", model_type="llama"), "no SRM model, but one of model_type = 'llama'"),
    (spoil("config.json", tie_word_embeddings=True), "tie_word_embeddings must be false, got True"),
    (spoil("config.json", is_encoder_decoder=True), "is_encoder_decoder must be false, got True"),
    (spoil("config.json", quantization_config={}), "quantization_config is not a field"),
    (spoil("config.json", eos_token_id=[]), "eos_token_id must be 1 … 64 ids, got 0"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_a_damaged_folder_is_explained(
    damage: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    folder = saved(tmp_path / "saved")
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(folder)


def copy(folder: Path, place: Path) -> None:
    copy_model(folder, place, lambda: True)


@pytest.mark.parametrize("keep", [hold_model, copy])
def test_shards_outlive_their_folder(
    keep: Callable[[Path, Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are weights whatever their size, and an optimizer beside them is not."""
    folder = saved(tmp_path / "saved", shards=1)
    small = (folder / INDEX).stat().st_size
    assert (folder / "model-00001-of-00001.safetensors").stat().st_size > small
    monkeypatch.setattr("srm.engine.kept_model.SMALL_BYTES", small)
    (folder / "optimizer.pt").write_bytes(bytes(small + 1))
    fingerprint = load_checkpoint(folder).fingerprint
    keep(folder, tmp_path / "copy")
    assert not (tmp_path / "copy" / "optimizer.pt").exists()
    assert as_started(folder, str(tmp_path / "copy")) == folder
    shutil.rmtree(folder)
    assert load_checkpoint(tmp_path / "copy").fingerprint == fingerprint


def test_a_model_folder_becomes_one_that_transformers_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "theirs"
    assert srm.main(["convert", "demo", "--to", "transformers", "--output", str(output)]) == 0
    out = capsys.readouterr().out
    assert "\n  BF16 became F32\n" in out and "AutoModelForCausalLM with trust_remote_code" in out
    described = json.loads((output / "config.json").read_text())
    module, name = described["auto_map"]["AutoModelForCausalLM"].split(".")
    assert f"class {name}(" in (output / f"{module}.py").read_text()
    module, name = described["auto_map"]["AutoConfig"].split(".")
    assert f"class {name}(" in (output / f"{module}.py").read_text()
    assert described["model_type"] == "srm" and described["dtype"] == "float32"
    ours, theirs = read_model(DEMO_MODEL), read_model(output)
    assert theirs.config == ours.config
    for tensor, values in ours.tensors.items():
        assert np.array_equal(theirs.tensors[tensor], values)
    tokenizer = json.loads((output / "tokenizer_config.json").read_text())
    assert tokenizer["bos_token"] == "<|begin_of_text|>"
    assert tokenizer["eos_token"] == tokenizer["pad_token"] == "<|end_of_text|>"
    assert tokenizer["model_max_length"] == ours.config.n_ctx
    text, own = Text(output), Text(DEMO_MODEL)
    assert text.encode(["a word"]) == own.encode(["a word"])
    assert text.special_tokens == own.special_tokens | {"pad_token": "<|end_of_text|>"}
    chats = [(folder / "chat_template.jinja").read_bytes() for folder in (output, DEMO_MODEL)]
    assert chats[0] == chats[1]
    # And back, by the command and by the loader.
    assert srm.main(["convert", str(output), "--output", str(tmp_path / "back")]) == 0
    assert read_model(tmp_path / "back").config == ours.config


def test_what_the_model_says_of_its_tokenizer_stays(tmp_path: Path) -> None:
    model = shutil.copytree(DEMO_MODEL, tmp_path / "model")
    (model / "tokenizer_config.json").write_text('{"pad_token": "<pad>", "padding_side": "left"}')
    convert(model, None, tmp_path / "theirs", form="transformers")
    tokenizer = json.loads((tmp_path / "theirs" / "tokenizer_config.json").read_text())
    assert tokenizer["pad_token"] == "<pad>" and tokenizer["padding_side"] == "left"
    assert tokenizer["eos_token"] == "<|end_of_text|>"


def test_a_model_without_tokenizer_and_what_is_no_model(tmp_path: Path) -> None:
    write_random_model(tmp_path / "model", CONFIG)
    convert(tmp_path / "model", None, tmp_path / "theirs", form="transformers")
    names = {path.name for path in (tmp_path / "theirs").iterdir()}
    assert names == {"config.json", WEIGHTS, *CLASS_FILES}
    with pytest.raises(ConfigError, match="stays as it is"):
        convert(tmp_path / "model", None, tmp_path / "model", form="transformers")
    for weights, message in (
        (tmp_path / "nowhere", "there is no folder"),
        (tmp_path / "model" / WEIGHTS, r"args must be given, as .* is no model folder"),
    ):
        with pytest.raises((ConfigError, CheckpointError), match=message):
            convert(weights, None, tmp_path / "more", form="transformers")
    with pytest.raises(ConfigError, match="tokenizer needs args"):
        convert(tmp_path / "model", None, tmp_path / "more", DEMO_MODEL / "tokenizer.json")


def test_the_classes_import_nothing_of_ours() -> None:
    """They run where only torch and transformers are."""
    assert {path.name for path in CLASSES.glob("*_srm.py")} == {*CLASS_FILES}
    allowed = {"__future__", "collections", "dataclasses", "itertools", "typing"}
    allowed |= {"torch", "transformers"}
    for name in CLASS_FILES:
        for node in ast.walk(ast.parse((CLASSES / name).read_text())):
            if isinstance(node, ast.ImportFrom):
                module = str(node.module)
                own = f"{module}.py" in CLASS_FILES if node.level else False
                assert own or module.partition(".")[0] in allowed, f"{name}: {module}"
            elif isinstance(node, ast.Import):
                assert {alias.name for alias in node.names} <= allowed, name
