"""Weights of every version of the published code become models; broken ones are clear errors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch_file

import srm
from engine.config import ModelConfig
from engine.errors import CheckpointError, ConfigError
from engine.steps.batch import F32
from engine.weights.convert import convert
from engine.weights.random_model import random_tensors
from engine.weights.tensors import tensor_shapes
from tests.models.variants import configs
from training.checkpoint import load_model
from training.model import SRM

MIXED = ModelConfig(d_model=8, num_layers=2, num_heads=4, n_ctx=16, vocab_size=11)
HEAD = "mixer_blocks.1.token_mixing_layer.mixer_heads.2."

Tensors = dict[str, F32]
Files = tuple[Path, Path, Path]
"""Weights, their arguments, and the folder to write."""


def arguments(config: ModelConfig) -> dict[str, Any]:
    """ARGS.json of a model, as its trainer would write it."""
    constructor = {
        "vocab_size": config.vocab_size,
        "hidden_dim": config.d_model,
        "seq_len": config.n_ctx,
        "num_blocks": config.num_layers,
        "heads": None if config.is_headless else config.num_heads,
        "kernel": config.kernel_size,
        "expanded_convs": config.mixer == "expanded",
        "copy": False,
        "mixed_heads": config.mixer in {"mixed", "diagonal"},
        "combined_heads": config.mixer == "combined",
        "decay": config.decay,
        "parallel_heads": config.mixer == "parallel",
        "use_projections": config.use_projections,
    }
    kind = {"row": "row", "column": "col"}.get(config.mixer)
    return {
        "constructor": constructor,
        "effective_decay_constant": config.decay_constant,
        "combined_row_quirk": config.combined_row_quirk,
        **({"headless_kind": kind} if kind else {}),
    }


def unclipped(tensors: Tensors) -> Tensors:
    return {
        name: value.clip(np.float32(0.9), np.float32(1)) if name.endswith("decay_value") else value
        for name, value in tensors.items()
    }


def same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """Weights and arguments of MIXED, and a folder that is not there yet."""
    weights, args = tmp_path / "published.safetensors", tmp_path / "args.json"
    save_file(random_tensors(MIXED), weights)
    args.write_text(json.dumps(arguments(MIXED)))
    return weights, args, tmp_path / "model"


def rewrite(weights: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(weights)
    change(tensors)
    save_file(tensors, weights)


def converted(files: Files) -> tuple[ModelConfig, Tensors, list[str]]:
    weights, args, output = files
    lines = convert(weights, args, output)
    config = msgspec.json.decode((output / "config.json").read_bytes(), type=ModelConfig)
    return config, load_file(output / "model.safetensors"), lines


@settings(max_examples=50)
@given(config=configs())
@example(config=msgspec.structs.replace(MIXED, mixer="parallel", use_projections=False))
def test_every_variant_comes_out_as_it_was(
    config: ModelConfig, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if config.mixer == "expanded" and not (config.is_headless or config.use_projections):
        return  # the published code always projects it
    if not config.decay:
        config = msgspec.structs.replace(config, decay_constant=1)  # nothing asks for it
    if config.mixer == "combined" and config.decay_constant == 1:
        config = msgspec.structs.replace(config, combined_row_quirk=False)  # it is no difference
    folder = tmp_path_factory.mktemp("convert")
    tensors = random_tensors(config)
    if config.mixer == "parallel" and not config.use_projections:  # stored all the same
        other = msgspec.structs.replace(config, use_projections=True)
        tensors = {**random_tensors(other), **tensors}
    save_file(tensors, folder / "published.safetensors")
    (folder / "args.json").write_text(json.dumps(arguments(config)))
    files = folder / "published.safetensors", folder / "args.json", folder / "model"
    found_config, found, _ = converted(files)
    assert found_config == config
    same(found, unclipped({name: tensors[name] for name in tensor_shapes(config)}))
    assert load_model(files[2]).config == config


def test_what_the_trainer_saves_is_converted(tmp_path: Path) -> None:
    """A state_dict as HF's Trainer writes it: safetensors, float32, no prefix, format pt."""
    model = SRM(msgspec.structs.replace(MIXED, n_ctx=600))
    args = arguments(model.config)
    del args["effective_decay_constant"], args["combined_row_quirk"]
    (tmp_path / "args.json").write_text(json.dumps(args))
    weights = tmp_path / "model.safetensors"
    save_torch_file(model.state_dict(), weights, metadata={"format": "pt"})
    lines = convert(weights, tmp_path / "args.json", tmp_path / "out")
    assert "decay_constant is 1, as in every version of the published code" in lines
    state = load_model(tmp_path / "out").state_dict()
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert not (tmp_path / "out" / "tokenizer.json").exists()


def test_decays_outside_the_range_are_clipped_and_counted(files: Files) -> None:
    low = "mixer_blocks.0.token_mixing_layer.mixer_heads.0.decay_value"
    outside = {HEAD + "decay_value": 1.06, low: 0.2}

    def set_decays(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("decay_value")]:
            tensors[name] = np.array([outside.get(name, 0.95)], np.float32)

    rewrite(files[0], set_decays)
    _, tensors, lines = converted(files)
    assert "clipped 2 of 8 decays to 0.9 … 1.0" in lines
    assert tensors[HEAD + "decay_value"] == 1 and tensors[low] == np.float32(0.9)


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "model._orig_mod.", "module.model."])
def test_prefixes_of_wrappers_are_left_out(files: Files, prefix: str) -> None:
    expected = load_file(files[0])
    save_file({prefix + name: value for name, value in expected.items()}, files[0])
    _, found, lines = converted(files)
    assert any(line.startswith(f"left wrappers out of {len(found)} names") for line in lines)
    same(found, unclipped(expected))


def test_the_version_with_dropout_is_read(tmp_path: Path) -> None:
    """Layer 3 for 2, and the bias of expanded convolutions without its first axis."""
    config = msgspec.structs.replace(MIXED, mixer="expanded", decay=False)
    expected, published = random_tensors(config), {}
    second = re.compile(r"(channel_mixing_layer|mixer_heads\.\d)\.2\.")
    for name, value in expected.items():
        is_expanded_bias = ".mixer_heads." in name and name.endswith("bias")
        published[second.sub(r"\1.3.", name)] = value[0] if is_expanded_bias else value
    assert "mixer_blocks.0.token_mixing_layer.mixer_heads.3.3.weight" in published
    save_file(published, tmp_path / "old.safetensors")
    (tmp_path / "args.json").write_text(json.dumps(arguments(config)))
    files = tmp_path / "old.safetensors", tmp_path / "args.json", tmp_path / "model"
    found_config, found, lines = converted(files)
    assert found_config == config
    assert "an old version with Dropout: its layers 3 are named 2" in lines
    same(found, expected)


def test_tied_embeddings_are_stored_twice(files: Files) -> None:
    rewrite(files[0], lambda tensors: tensors.pop("output_layer.weight"))
    with pytest.raises(CheckpointError, match=r"output_layer\.weight \[11, 8\] is missing"):
        convert(*files)
    args = arguments(MIXED)
    args["constructor"]["tie_io"] = True
    files[1].write_text(json.dumps(args))
    _, tensors, _ = converted(files)
    assert np.array_equal(tensors["input_layer.weight"], tensors["output_layer.weight"])


def put(name: str, value: Any) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: np.array(value)})


def turn(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: tensors[name].T.copy()})


def add(count: int) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({f"extra{i}": np.zeros(3, "f4") for i in range(count)})


UP, OUT = "mixer_blocks.0.channel_mixing_layer.0.weight", "output_layer.weight"
ZEROS = np.zeros((1, 8), np.float32)
BROKEN: list[tuple[Callable[[Tensors], object], str]] = [
    (lambda t: t.pop(HEAD + "bias"), r"heads\.2\.bias \[16\] is missing; .*args\.json asks for it"),
    (
        lambda t: (t.pop(HEAD + "weight"), t.pop(HEAD + "bias")),
        r"heads\.2\.weight \[1, 16\] is missing, like 1 more; .*args\.json asks for it",
    ),
    (add(1), r"1 tensor does not belong to the model of .*: extra0 \[3\]$"),
    (add(6), r"6 tensors do not belong to the model of .*: extra0 \[3\], .*extra4 \[3\], …$"),
    (turn(HEAD + "weight"), r"weight has shape \[16, 1\], but .*\[1, 16\]: it is transposed"),
    (turn(UP), r"layer\.0\.weight has shape \[8, 32\], but .* for \[32, 8\]: it is transposed"),
    (put(OUT, np.full((11, 8), np.nan, "f4")), r"output_layer\.weight has values that are not"),
    (
        put(HEAD + "weight", np.zeros((1, 17), "f4")),
        r"\[1, 17\] is of another context than .* = 16",
    ),
    (
        put("model." + OUT, ZEROS),
        r"tensors model\.output_layer\.weight and output_layer\.weight are",
    ),
    (put(OUT, np.zeros((11, 8), np.int64)), r"is I64; F32, F16 and BF16 can be read"),
    (put("reward_head.weight", ZEROS), r"reward_head\.weight: a reward model gives texts a score"),
    (
        put("encoderblocks.0.x", ZEROS),
        r"encoderblocks.*: an autoencoder is no causal language model",
    ),
]


@pytest.mark.parametrize(("change", "message"), BROKEN)
def test_broken_weights_are_named_and_nothing_is_written(
    files: Files, change: Callable[[Tensors], object], message: str
) -> None:
    rewrite(files[0], change)
    with pytest.raises(CheckpointError, match=message):
        convert(*files)
    assert not files[2].exists()


def test_cut_and_foreign_files_are_named(files: Files) -> None:
    whole = files[0].read_bytes()
    pickle, pointer = b"PK\x03\x04 a pickle of torch", b"version https://git-lfs.github.com/spec/v1"
    for content in (whole[:-5], whole[:100], b"", pickle, pointer):
        files[0].write_bytes(content)
        with pytest.raises(CheckpointError, match="is not a whole safetensors file") as raised:
            convert(*files)
        assert ("torch.save" in raised.value.message) == (content == pickle)
        assert ("git lfs pull" in raised.value.message) == (content == pointer)


def test_broken_arguments_are_named(files: Files) -> None:
    args = arguments(MIXED)
    args["constructor"]["is_reward_model"] = True
    for text, message in (
        (json.dumps(args), r"args\.json: is_reward_model: a reward model gives texts a score"),
        ("{", r"args\.json is not JSON: .* truncated"),
        ("{}", r"args\.json: .*missing required field `constructor`"),
    ):
        files[1].write_text(text)
        with pytest.raises(ConfigError, match=message):
            convert(*files)
        assert not files[2].exists()


def test_a_file_is_not_converted_onto_itself(files: Files) -> None:
    weights = files[0].rename(files[0].parent / "model.safetensors")
    before = weights.read_bytes()
    with pytest.raises(ConfigError, match="stays as it is"):
        convert(weights, files[1], weights.parent)
    assert weights.read_bytes() == before


def test_a_tokenizer_is_copied_if_its_tokens_are_the_models(files: Files, tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    spec: dict[str, Any] = {"model": {"vocab": {"a": 0, "b": 10}}, "added_tokens": [{"id": 1}]}
    tokenizer.write_text(json.dumps(spec))
    convert(*files, tokenizer)
    assert (files[2] / "tokenizer.json").read_bytes() == tokenizer.read_bytes()
    spec["added_tokens"][0]["id"] = 11
    tokenizer.write_text(json.dumps(spec))
    with pytest.raises(CheckpointError, match="token id 11 lies outside the model's 11"):
        convert(*files, tokenizer)
    tokenizer.write_text("[]")
    with pytest.raises(CheckpointError, match=r"is not a byte-level BPE tokenizer\.json"):
        convert(*files, tokenizer)


def test_the_command_says_what_it_decided(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    weights, args, output = map(str, files)
    assert srm.main(["convert", weights, "--args", args, "--output", output]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{output}: mixer mixed, num_layers 2, d_model 8, num_heads 4, n_ctx 16")
    assert "\n  texts begin with token 0 and end with token 1\n" in said
    assert said.endswith("\n  no tokenizer: the model takes and gives token ids\n")
    assert srm.main(["convert", args, "--args", args, "--output", output]) == 3
    assert srm.main(["convert", weights, "--args", weights, "--output", output]) == 2
