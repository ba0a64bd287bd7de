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
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models

import srm.__main__ as srm
from srm.engine.config import ModelConfig
from srm.engine.steps.batch import F32
from srm.engine.weights.convert import convert
from srm.engine.weights.random_model import random_tensors
from srm.engine.weights.tensors import tensor_shapes
from srm.errors import CheckpointError, ConfigError
from srm.training.checkpoint import load_model
from tests.kit.models.variants import configs

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


def same(tensors: Tensors, expected: Tensors) -> None:
    assert tensors.keys() == expected.keys()
    assert all(np.array_equal(tensors[name], expected[name]) for name in expected)


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


def with_dropout(tensors: Tensors) -> Tensors:
    """The old names: layer 3 for 2; the bias of expanded convolutions lacks its first axis."""
    second = re.compile(r"(channel_mixing_layer|mixer_heads\.\d+)\.2\.")
    expanded = re.compile(r"mixer_heads\.\d+\.[02]\.bias$")
    return {
        second.sub(r"\1.3.", name): value[0] if expanded.search(name) else value
        for name, value in tensors.items()
    }


prefixes = st.sampled_from(
    [
        *["", "_orig_mod.", "module.", "model._orig_mod.", "module.model.", "net."],
        *["_fsdp_wrapped_module.", "base_model.model.", "module.net._fsdp_wrapped_module.", "any."],
    ]
)


@settings(max_examples=50)
@given(config=configs(), prefix=prefixes, is_old=st.booleans())
@example(config=replace(MIXED, mixer="parallel", use_projections=False), prefix="", is_old=False)
@example(config=replace(MIXED, mixer="expanded", decay=False), prefix="", is_old=True)
def test_every_variant_comes_out_as_it_was(
    config: ModelConfig, prefix: str, is_old: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """As HF's Trainer saves it: safetensors, float32, format pt; maybe wrapped."""
    if config.mixer == "expanded" and not (config.is_headless or config.use_projections):
        return  # the published code always projects it
    if not config.decay:
        config = replace(config, decay_constant=1)  # nothing asks for it
    if config.mixer == "combined" and config.decay_constant == 1:
        config = replace(config, combined_row_quirk=False)  # it is no difference
    published = expected = random_tensors(config)
    if config.mixer == "parallel":  # projections are stored whether they are used or not
        published = {**random_tensors(replace(config, use_projections=True)), **expected}
    is_old = is_old and config.mixer == "expanded" and not config.is_headless
    if is_old:
        published = with_dropout(published)
    folder = tmp_path_factory.mktemp("convert")
    files = folder / "published.safetensors", folder / "args.json", folder / "model"
    wrapped = {prefix + name: value for name, value in published.items()}
    save_file(wrapped, files[0], metadata={"format": "pt"})
    files[1].write_text(json.dumps(arguments(config)))
    found_config, result, lines = converted(files)
    assert found_config == config
    same(result, unclipped({name: expected[name] for name in tensor_shapes(config)}))
    assert load_model(files[2]).config == config
    notes = [line for line in lines if line.startswith("left wrappers out of")]
    assert [note.rpartition(" ")[2] for note in notes] == [min(wrapped)] * bool(prefix)
    assert ("an old version with Dropout: its layers 3 are named 2" in lines) == is_old
    assert not (files[2] / "tokenizer.json").exists()


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


def test_tied_embeddings_are_stored_twice(files: Files) -> None:
    rewrite(files[0], lambda tensors: tensors.pop("output_layer.weight"))
    message = r"output_layer\.weight \[11, 8\] is missing, and input_.*\"tie_io\": true"
    with pytest.raises(CheckpointError, match=message):
        convert(*files)
    args = arguments(MIXED)
    args["constructor"]["tie_io"] = True
    files[1].write_text(json.dumps(args))
    _, tensors, _ = converted(files)
    assert np.array_equal(tensors["input_layer.weight"], tensors["output_layer.weight"])


def test_shards_are_read_by_their_index_or_their_folder(files: Files, tmp_path: Path) -> None:
    """As trainers write what is large. They were refused: nothing said what there was."""
    tensors, folder = random_tensors(MIXED), tmp_path / "shards"
    folder.mkdir()
    names = sorted(tensors)
    shards = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for shard, some in shards.items():
        save_file({f"model.{name}": tensors[name] for name in some}, folder / shard)
    index = folder / "model.safetensors.index.json"
    places = {f"model.{name}": shard for shard, some in shards.items() for name in some}
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    for weights in (index, folder):
        _, result, _ = converted((weights, files[1], files[2]))
        same(result, unclipped(tensors))
    first, second = (folder / shard for shard in shards)
    with pytest.raises(CheckpointError, match=r"is one of 2 shards: name their index, model\.saf"):
        convert(first, *files[1:])
    with pytest.raises(ConfigError, match="stays as it is"):
        convert(folder, files[1], folder)
    index.write_text(json.dumps({"weight_map": places | {"model.x": second.name}}))
    with pytest.raises(CheckpointError, match=r"tensor model\.x is not in model-00002"):
        convert(index, *files[1:])
    second.unlink()
    with pytest.raises(
        CheckpointError, match=r"cannot read .*00002-of-00002\.safetensors: No such"
    ):
        convert(index, *files[1:])
    index.write_text("{}")
    with pytest.raises(CheckpointError, match=r"is no index of shards: .*weight_map"):
        convert(index, *files[1:])


def test_shards_without_an_index_say_what_to_do(files: Files, tmp_path: Path) -> None:
    shard = tmp_path / "model-00001-of-00002.safetensors"
    save_file(random_tensors(MIXED), shard)
    (tmp_path / "model.safetensors").unlink(missing_ok=True)
    for weights in (shard, tmp_path):
        with pytest.raises(
            CheckpointError, match=r"it is not there: .* or write it: {\"weight_map"
        ):
            convert(weights, *files[1:])


def test_only_names_that_were_wrapped_are_an_example_of_wrapped_ones(files: Files) -> None:
    """It was any name of the file, another one in each run."""
    rewrite(files[0], lambda tensors: tensors.update(w=tensors.pop("output_layer.weight")))
    rewrite(files[0], lambda tensors: tensors.update({"m.output_layer.weight": tensors.pop("w")}))
    assert "left wrappers out of 1 names, such as m.output_layer.weight" in converted(files)[2]


def test_of_each_shard_is_taken_what_the_index_says(files: Files, tmp_path: Path) -> None:
    """A tensor that a later shard has too was taken from there, without a word."""
    tensors, folder = random_tensors(MIXED), tmp_path / "shards"
    folder.mkdir()
    last = {OUT: tensors[OUT]}
    save_file({name: tensors[name] for name in tensors if name != OUT}, folder / "a.safetensors")
    save_file({**last, UP: tensors[UP] + 1, "old": ZEROS}, folder / "b.safetensors")
    index = folder / "model.safetensors.index.json"
    places = {name: f"{'b' if name == OUT else 'a'}.safetensors" for name in tensors}
    index.write_text("\ufeff" + json.dumps({"weight_map": places}))
    _, result, _ = converted((index, *files[1:]))
    same(result, unclipped(tensors))
    for name in ("b\0.safetensors", "../b.safetensors", "/b", "b" * 5000, "", "."):
        index.write_text(json.dumps({"weight_map": places | {OUT: name}}))
        with pytest.raises(CheckpointError, match=r"shard '.{0,64}' is no name of a file beside"):
            convert(index, *files[1:])


def test_the_whole_file_comes_before_an_index_beside_it(files: Files, tmp_path: Path) -> None:
    """As Hugging Face's libraries take them; an old index was taken silently."""
    folder = tmp_path / "both"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text("{}")
    files[0].rename(folder / "model.safetensors")
    _, _, lines = converted((folder, *files[1:]))
    assert "read model.safetensors, and not model.safetensors.index.json beside it" in lines


def test_the_one_shard_of_one_is_a_whole_file(files: Files) -> None:
    """It was refused as one of 01 shards."""
    converted((files[0].rename(files[0].parent / "model-00001-of-00001.safetensors"), *files[1:]))
    ten = files[0].parent / "model-00001-of-00010.safetensors"
    with pytest.raises(CheckpointError, match="is one of 10 shards"):
        convert(ten, *files[1:])


def test_tied_tensors_that_differ_are_refused(files: Files) -> None:
    """They were converted as two."""
    args = arguments(MIXED)
    args["constructor"]["tie_io"] = True
    files[1].write_text(json.dumps(args))
    with pytest.raises(CheckpointError, match=r"tie_io is true, and input_.* and output_.* differ"):
        convert(*files)
    rewrite(files[0], lambda tensors: tensors.update({OUT: tensors["input_layer.weight"]}))
    converted(files)


def test_a_note_of_the_file_is_no_alias(files: Files) -> None:
    """It made a tensor of its own, which did not belong to the model."""
    save_file(random_tensors(MIXED), files[0], metadata={"largest": "input_layer.weight"})
    converted(files)


def test_tied_embeddings_are_stored_once_under_an_alias(files: Files) -> None:
    """As `save_model` of safetensors writes tensors that share memory."""
    tensors = random_tensors(MIXED)
    del tensors["output_layer.weight"]
    wrapped = {f"model.{name}": value for name, value in tensors.items()}
    alias = {"model.output_layer.weight": "model.input_layer.weight"}
    save_file(wrapped, files[0], metadata={"format": "pt", **alias})
    _, result, _ = converted(files)
    assert np.array_equal(result["input_layer.weight"], result["output_layer.weight"])


def test_a_model_folder_with_wrapped_names_says_what_it_has(files: Files) -> None:
    converted(files)
    save_file(
        {f"net.{name}": value for name, value in random_tensors(MIXED).items()},
        files[2] / "model.safetensors",
    )
    message = (
        r"input_layer\.weight .* and the file has net\.input.*, …; `srm convert` leaves wrappers"
    )
    with pytest.raises(CheckpointError, match=message):
        load_model(files[2])


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
    (
        put("mixer_blocks.0.projection.x", ZEROS),
        r"1 tensor does not belong .*: mixer_blocks\.0\.projection\.x",
    ),
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
    for content in (whole[:-5], whole[:4], b"", pickle, pointer):
        files[0].write_bytes(content)
        with pytest.raises(CheckpointError, match="is not a whole safetensors file") as raised:
            convert(*files)
        assert ("torch.save" in raised.value.message) == (content == pickle)
        assert ("git lfs pull" in raised.value.message) == (content == pointer)


def test_who_may_read_the_config_may_read_the_weights(files: Files) -> None:
    converted(files)
    names = ("config.json", "model.safetensors")
    assert len({(files[2] / name).stat().st_mode for name in names}) == 1


def test_a_file_is_not_converted_onto_itself(files: Files) -> None:
    weights = files[0].rename(files[0].parent / "model.safetensors")
    before = weights.read_bytes()
    with pytest.raises(ConfigError, match="stays as it is"):
        convert(weights, files[1], weights.parent)
    assert weights.read_bytes() == before


def test_an_output_that_cannot_be_written_is_said(files: Files, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    for output, reason in (("taken", "File exists"), ("taken/below", "Not a directory")):
        with pytest.raises(ConfigError, match=f"cannot write .*{output}: {reason}"):
            convert(files[0], files[1], tmp_path / output)


def test_a_tokenizer_is_copied_if_its_tokens_are_the_models(files: Files, tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    made = Tokenizer(models.BPE({"a": 0, "b": 10}, []))
    made.decoder = decoders.ByteLevel()
    made.save(str(tokenizer))
    convert(*files, tokenizer)
    assert (files[2] / "tokenizer.json").read_bytes() == tokenizer.read_bytes()
    made.model = models.BPE({"a": 0, "b": 11}, [])
    made.save(str(tokenizer))
    with pytest.raises(CheckpointError, match="token id 11 lies outside the model's 11"):
        convert(*files, tokenizer)
    tokenizer.write_text("[]")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a tokenizer: "):
        convert(*files, tokenizer)


def test_a_tokenizer_that_the_server_refuses_was_copied(files: Files, tmp_path: Path) -> None:
    made = Tokenizer(models.BPE({"▁a": 0}, []))  # as Llama 2's
    made.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="only byte-level BPE tokenizers are supported"):
        convert(*files, tmp_path / "tokenizer.json")
    assert not files[2].exists()


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_no_text_file_of_another_model_stays_beside_new_weights(files: Files, name: str) -> None:
    files[2].mkdir(exist_ok=True)
    (files[2] / name).write_text("{}")
    before = {path.name for path in files[2].iterdir()}
    with pytest.raises(ConfigError, match=f"has {name} of another model"):
        convert(*files)
    assert {path.name for path in files[2].iterdir()} == before


def test_the_command_says_what_it_decided(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    weights, args, output = map(str, files)
    assert srm.main(["convert", weights, "--args", args, "--output", output]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{output}: mixer mixed, num_layers 2, d_model 8, num_heads 4, n_ctx 16")
    assert "\n  texts begin with token 0 and end with token 1\n" in out
    assert out.endswith("\n  no tokenizer: the model takes and gives token ids\n")
    assert srm.main(["convert", args, "--args", args, "--output", output]) == 3
    assert srm.main(["convert", weights, "--args", weights, "--output", output]) == 2
