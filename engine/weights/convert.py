"""`srm convert`: make a model folder from weights that the published code saved.

Undoes what differs between versions of that code and between ways to save: wrappers' prefixes, the
index of a matrix behind a Dropout, projections that are stored but unused. Says all it decided.
Reads no values but decays, which are clipped as the published code clips them when it runs.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
from safetensors.numpy import save_file

from srm.engine.config import ModelConfig
from srm.engine.errors import CheckpointError, ConfigError
from srm.engine.settings import CommandParser
from srm.engine.steps.batch import F32
from srm.engine.tokenizer_file import read_byte_level
from srm.engine.weights.tensor_file import (
    FILE,
    INDEX,
    StoredTensor,
    checked,
    read_file,
    read_tensors,
)
from srm.engine.weights.tensors import DECAY_RANGE, is_scalar, tensor_shapes
from srm.engine.weights.upstream_config import Constructor, model_config, read_args

Stored = dict[str, StoredTensor]

WRAPPERS = {"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""Name parts that torch.compile, data parallelism, FSDP and checkpointing add anywhere."""
AFTER_DROPOUT = re.compile(
    r"((?:channel_mixing_layer|token_mixing_layer|mixer_heads\.\d+)\.)3(\.(?:weight|bias))$"
)
"""Old versions had a Dropout before the second matrix, which counts as one layer."""
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""What a model folder may have besides weights and config.json."""
AUTOENCODER = {"wte", "encoderblocks", "decoderblocks", "lm_head", "projection"}
_KNOWN = "|".join(["input_layer", "mixer_blocks", "output_layer", "reward_head", *AUTOENCODER])
_BEFORE = re.compile(rf"^(?:.*?\.)??(?=(?:{_KNOWN})\.)")
"""Matches the names of surrounding modules in front of a tensor's own name."""


def convert(weights: Path, args: Path, output: Path, tokenizer: Path | None = None) -> list[str]:
    """Write `config.json`, `model.safetensors` and the tokenizer, if any; return what was decided,
    line by line. Raises ConfigError for arguments and CheckpointError for tensors that do not make
    a model; then nothing is written."""
    notes: list[str] = []
    published = read_args(args)
    if weights.is_dir():
        has_file, has_index = ((weights / name).exists() for name in (FILE, INDEX))
        weights /= INDEX if has_index and not has_file else FILE
        if has_index and has_file:  # as Hugging Face's libraries take them
            notes.append(f"read {FILE}, and not {INDEX} beside it")
    stored = _renamed(weights, read_tensors(weights), notes)
    config = model_config(published, args, stored.keys(), notes)
    _check_length(weights, stored, config)
    stored = _reconciled(weights, stored, config, published.constructor, notes)
    tensors = checked(weights, stored, tensor_shapes(config), str(args))
    if others := sorted({tensor.dtype for tensor in stored.values()} - {"F32"}):
        notes.append(f"{' and '.join(others)} became F32")
    _clip_decays(tensors, notes)
    notes.append(
        f"texts begin with token {config.bos_token_id} and end with token {config.eos_token_id}"
    )
    if tokenizer is None:
        notes.append("no tokenizer: the model takes and gives token ids")
    _write(output, weights, config, tensors, _tokenizer(tokenizer, config))
    return [_summary(config), *notes]


def _renamed(path: Path, stored: Stored, notes: list[str]) -> Stored:
    """Rename tensors to the names of the newest published code. Raises CheckpointError."""
    renamed: dict[str, str] = {}
    for old in sorted(stored):
        own = _BEFORE.sub("", old, count=1)
        parts = [part for part in own.split(".") if part not in WRAPPERS]
        if parts[0] == "reward_head":
            raise CheckpointError(
                f"{path}: tensor {old}: a reward model gives texts a score and no next token"
            )
        if parts[0] in AUTOENCODER:
            raise CheckpointError(
                f"{path}: tensor {old}: an autoencoder is no causal language model"
            )
        new = AFTER_DROPOUT.sub(r"\g<1>2\2", ".".join(parts))
        if new in renamed:
            raise CheckpointError(f"{path}: tensors {renamed[new]} and {old} are both {new}")
        renamed[new] = old
    unwrapped = [old for new, old in renamed.items() if old.count(".") > new.count(".")]
    if unwrapped:
        notes.append(f"left wrappers out of {len(unwrapped)} names, such as {unwrapped[0]}")
    if any(AFTER_DROPOUT.search(old) for old in stored):
        notes.append("an old version with Dropout: its layers 3 are named 2")
    return {new: stored[old] for new, old in renamed.items()}


def _check_length(path: Path, stored: Stored, config: ModelConfig) -> None:
    for name, tensor in stored.items():
        if is_scalar(name) and name.endswith(".weight") and config.n_ctx not in tensor.shape:
            raise CheckpointError(
                f"{path}: tensor {name} {list(tensor.shape)} is of another context than "
                f"constructor.seq_len = {config.n_ctx}"
            )


def _reconciled(
    path: Path, stored: Stored, config: ModelConfig, constructor: Constructor, notes: list[str]
) -> Stored:
    """Drop tensors that are never read; reshape or share those that other versions stored so."""
    stored = dict(stored)
    if config.mixer == "parallel" and not config.use_projections:
        unused = [name for name in stored if re.search(r"layer\.(in|out)_proj\.", name)]
        for name in unused:
            del stored[name]
        notes.append(f"left out {len(unused)} tensors of projections that are never used")
    if config.mixer == "expanded":  # once [n], now [1, n]
        for name, tensor in stored.items():
            if is_scalar(name) and name.endswith(".bias") and len(tensor.shape) == 1:
                stored[name] = replace(tensor, shape=(1, *tensor.shape))
    ends = ("input_layer.weight", "output_layer.weight")
    present = [name for name in ends if name in stored]
    if constructor.tie_io and len(present) == 1:
        stored |= {name: stored[present[0]] for name in ends}
        notes.append(f"tie_io: the one tensor {present[0]} is embedding and head")
    elif constructor.tie_io and len(present) == 2 and stored[ends[0]] != stored[ends[1]]:
        raise CheckpointError(
            f"{path}: tie_io is true, and {' and '.join(ends)} differ; if they are two tensors, "
            'leave "tie_io" out of constructor'
        )
    elif len(present) == 1:
        (absent,) = set(ends) - set(present)
        raise CheckpointError(
            f"{path}: tensor {absent} {list(stored[present[0]].shape)} is missing, and "
            f'{present[0]} is there; if one tensor is both, add "tie_io": true to constructor'
        )
    return stored


def _clip_decays(tensors: dict[str, F32], notes: list[str]) -> None:
    low, high = (np.float32(end) for end in DECAY_RANGE)
    decays = [name for name in tensors if name.endswith("decay_value")]
    outside = 0
    for name in decays:
        clipped = tensors[name].clip(low, high)
        outside += int((clipped != tensors[name]).sum())
        tensors[name] = clipped
    if outside:
        total = sum(tensors[name].size for name in decays)
        notes.append(f"clipped {outside} of {total} decays to {DECAY_RANGE[0]} … {DECAY_RANGE[1]}")


def _tokenizer(path: Path | None, config: ModelConfig) -> bytes | None:
    """The content, if any. Raises CheckpointError if no server reads it, or its tokens do not fit
    the model."""
    if path is None:
        return None
    content = read_file(path)
    largest = max(read_byte_level(path).get_vocab().values(), default=-1)
    if largest >= config.vocab_size:
        raise CheckpointError(
            f"{path}: token id {largest} lies outside the model's {config.vocab_size}"
        )
    return content


def _write(
    output: Path,
    weights: Path,
    config: ModelConfig,
    tensors: dict[str, F32],
    tokenizer: bytes | None,
) -> None:
    """Write whole files or none; `config.json` comes last."""
    target = output / FILE
    source = output / weights.name if weights.suffix == ".json" else target
    if source.exists() and source.samefile(weights):
        raise ConfigError(f"--output {output} is the folder of {weights}, which stays as it is")
    own = {"tokenizer.json"} if tokenizer is not None else set()
    others = [name for name in TEXT_FILES if name not in own and (output / name).exists()]
    if others:
        raise ConfigError(
            f"--output {output} has {', '.join(others)} of another model, which would stay beside "
            "the new weights: name another folder, or delete what is there"
        )
    try:
        output.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".partial")
        partial.touch()
        mode = partial.stat().st_mode
        save_file(tensors, partial, metadata={"format": "pt"})
        partial.chmod(mode)  # as the user's umask says; safetensors lets nobody else read
        partial.replace(target)
        if tokenizer is not None:
            (output / "tokenizer.json").write_bytes(tokenizer)
        text = msgspec.json.format(msgspec.json.encode(config), indent=2)
        (output / "config.json").write_bytes(text + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {error.strerror}") from None


def _summary(config: ModelConfig) -> str:
    fields = ("mixer", "num_layers", "d_model", "num_heads", "n_ctx", "vocab_size", "decay")
    facts = [f"{name} {msgspec.to_builtins(getattr(config, name))}" for name in fields]
    if config.decay:
        facts.append(f"decay_constant {config.decay_constant}")
    if config.mixer == "kernel":
        facts.append(f"kernel_size {config.kernel_size}")
    if config.combined_row_quirk:
        facts.append("combined_row_quirk")
    facts.append("projections" if config.use_projections else "no projections")
    return ", ".join(facts)


def parser() -> CommandParser:
    """Make the command-line parser."""
    made = CommandParser(
        prog="srm convert",
        description="Make a model folder out of weights that the published code saved.",
        epilog="example: srm convert runs/theirs --args args.json --output models/mine",
        allow_abbrev=False,
    )
    made.add_argument(
        "weights",
        type=Path,
        metavar="WEIGHTS",
        help=f"the {FILE} it saved, the {INDEX} of shards, or the folder of either",
    )
    made.add_argument(
        "--args",
        type=Path,
        required=True,
        help="JSON: the arguments of its constructor, and what they do not tell",
    )
    made.add_argument("--output", type=Path, required=True, help="folder of the model to write")
    made.add_argument("--tokenizer", type=Path, help="a tokenizer.json; none without it")
    return made


def main(argv: list[str]) -> int:
    given = parser().parse_args(argv)
    lines = convert(given.weights, given.args, given.output, given.tokenizer)
    sys.stdout.write("\n".join([f"{given.output}: {lines[0]}", *(f"  {x}" for x in lines[1:]), ""]))
    return 0
