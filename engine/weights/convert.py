"""`srm convert`: make a model folder of weights that the published code saved, or of another one.

Undoes what differs between versions of that code and between ways to save: wrappers' prefixes, the
index of a matrix behind a Dropout, projections that are stored but unused. Says all it decided.
Reads no values but decays, which are clipped as the published code clips them when it runs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from srm.engine.config import BUNDLED_NAMES, ModelConfig, check_model_folder, find_model
from srm.engine.kept_model import INDEX, WEIGHTS
from srm.engine.steps.batch import F32
from srm.engine.weights.checkpoint import read_model
from srm.engine.weights.delta import write_delta
from srm.engine.weights.tensor_file import (
    StoredTensor,
    checked,
    read_file,
    read_tensors,
    weights_path,
)
from srm.engine.weights.tensors import DECAY_RANGE, is_scalar, tensor_shapes
from srm.engine.weights.transformers_folder import TEXT_FILES, transformers_files
from srm.engine.weights.upstream_config import Constructor, model_config, read_args
from srm.errors import CheckpointError, ConfigError
from srm.files import SMALL_BYTES
from srm.progress import count_seconds
from srm.settings import CommandParser
from srm.tokenizer_file import read_tokenizer

RUN = "run.pt"
"""State of a training run, which `training/checkpoint.py` reads."""
Stored = dict[str, StoredTensor]

WRAPPERS = {"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""Name parts that torch.compile, data parallelism, FSDP and checkpointing add anywhere."""
AFTER_DROPOUT = re.compile(
    r"((?:channel_mixing_layer|token_mixing_layer|mixer_heads\.\d+)\.)3(\.(?:weight|bias))$"
)
"""Old versions had a Dropout before the second matrix, which counts as one layer."""
AUTOENCODER = {"wte", "encoderblocks", "decoderblocks", "lm_head", "projection"}
_KNOWN = "|".join(["input_layer", "mixer_blocks", "output_layer", "reward_head", *AUTOENCODER])
_BEFORE = re.compile(rf"^(?:.*?\.)??(?=(?:{_KNOWN})\.)")
"""Matches the names of surrounding modules in front of a tensor's own name."""


Form = Literal["srm", "transformers"]
"""Who is to read the folder: this project, or `transformers` too."""


def convert(
    weights: Path,
    args: Path | None,
    output: Path,
    tokenizer: Path | None = None,
    form: Form = "srm",
) -> list[str]:
    """Write `config.json`, `model.safetensors` and the tokenizer, if any; return what was decided,
    line by line. Raises ConfigError for arguments and CheckpointError for tensors that do not make
    a model; then nothing is written. Without `args`, `weights` is a model folder."""
    notes: list[str] = []
    texts: dict[str, bytes] = {}
    folder = weights
    if weights.is_dir():
        weights = weights_path(folder)
        if weights.name == WEIGHTS and (folder / INDEX).exists():
            notes.append(f"read {WEIGHTS}, and not {INDEX} beside it")
    if args is not None:
        config, tensors = _published(weights, args, notes)
    elif tokenizer is not None:
        raise ConfigError(
            "tokenizer needs args: a model folder has a tokenizer of its own, or none"
        )
    else:
        config, tensors = _read_folder(folder, notes)
        paths = [folder / name for name in TEXT_FILES if (folder / name).exists()]
        texts = {path.name: read_file(path, SMALL_BYTES) for path in paths}
        tokenizer = next((path for path in paths if path.name == "tokenizer.json"), None)
    notes.append(
        f"texts begin with token {config.bos_token_id} and end with token "
        f"{' or '.join(map(str, config.end_ids))}"
    )
    if tokenizer is None:
        notes.append("no tokenizer: the model takes and gives token ids")
    else:
        texts["tokenizer.json"] = _tokenizer(tokenizer, config)
    if form == "transformers":
        texts |= transformers_files(config, texts, tokenizer)
        notes.append("for transformers: AutoModelForCausalLM with trust_remote_code")
    else:
        text = msgspec.json.format(msgspec.json.encode(config), indent=2)
        texts["config.json"] = text + b"\n"
    _write(output, weights, tensors, texts)
    return [_summary(config), *notes]


def _read_folder(folder: Path, notes: list[str]) -> tuple[ModelConfig, dict[str, F32]]:
    if not folder.is_file() or folder.suffix == ".gguf":
        check_model_folder(folder)
    if not (folder / "config.json").exists():
        hint = f"; srm convert {folder / RUN} makes one" if (folder / RUN).exists() else ""
        raise ConfigError(
            f"args must be given, as {folder} is no model folder: it has no config.json{hint}"
        )
    files = read_model(folder)
    _note_dtypes(files.dtypes.values(), notes)
    return files.config, files.tensors


def _published(weights: Path, args: Path, notes: list[str]) -> tuple[ModelConfig, dict[str, F32]]:
    published = read_args(args)
    stored = _renamed(weights, read_tensors(weights), notes)
    config = model_config(published, args, stored.keys(), notes)
    _check_length(weights, stored, config)
    stored = _reconciled(weights, stored, config, published.constructor, notes)
    tensors = checked(weights, stored, tensor_shapes(config), str(args))
    _note_dtypes((tensor.dtype for tensor in stored.values()), notes)
    _clip_decays(tensors, notes)
    return config, tensors


def _note_dtypes(dtypes: Iterable[str], notes: list[str]) -> None:
    if others := sorted({*dtypes} - {"F32"}):
        notes.append(f"{' and '.join(others)} became F32")


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


def _tokenizer(path: Path, config: ModelConfig) -> bytes:
    """The content. Raises CheckpointError if no server reads it, or its tokens do not fit the
    model."""
    read_tokenizer(path, config.vocab_size)
    return read_file(path, SMALL_BYTES)


def _write(output: Path, weights: Path, tensors: dict[str, F32], texts: dict[str, bytes]) -> None:
    """Write whole files or none; `config.json` comes last."""
    target = output / WEIGHTS
    source = output / weights.name if weights.suffix == ".json" else target
    if source.exists() and source.samefile(weights):
        raise ConfigError(f"--output {output} is the folder of {weights}, which stays as it is")
    others = [name for name in TEXT_FILES if name not in texts and (output / name).exists()]
    if others:
        raise ConfigError(
            f"--output {output} has {', '.join(others)} of another model, which would stay beside "
            "the new weights: name another folder, or delete what is there"
        )
    partial = target.with_suffix(".partial")
    try:
        output.mkdir(parents=True, exist_ok=True)
        partial.touch()
        mode = partial.stat().st_mode
        save_file(tensors, partial, metadata={"format": "pt"})
        partial.chmod(mode)  # as the user's umask says; safetensors lets nobody else read
        partial.replace(target)
        for name in sorted(texts, key=lambda name: name == "config.json"):
            (output / name).write_bytes(texts[name])
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            partial.unlink()
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot write {output}: {reason}") from None


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
        description="Make a model folder out of weights that the published code saved, or of "
        "another model folder one that transformers reads.",
        epilog="example: srm convert runs/theirs --args args.json --output models/mine",
        allow_abbrev=False,
    )
    made.add_argument(
        "weights",
        type=Path,
        metavar="WEIGHTS",
        help=f"the {WEIGHTS} it saved, the {INDEX} of shards, or the folder of either; without "
        f"--args a model folder, one of {BUNDLED_NAMES}, or the run.pt of a training run",
    )
    made.add_argument(
        "--args",
        type=Path,
        help="JSON: the arguments of its constructor, and what they do not tell",
    )
    made.add_argument("--output", type=Path, required=True, help="folder of the model to write")
    made.add_argument(
        "--tokenizer", type=Path, help="a tokenizer.json; else that of the model folder, or none"
    )
    made.add_argument(
        "--to",
        choices=get_args(Form),
        default="srm",
        help="transformers: write what its Auto classes and the server both read",
    )
    made.add_argument(
        "--delta-of",
        type=Path,
        metavar="BASE",
        help="write only the tensors that differ from this model folder, for a server that runs it",
    )
    return made


def main(argv: list[str]) -> int:
    given = parser().parse_args(argv)
    weights = given.weights if given.args else find_model(given.weights)
    counting = count_seconds(f"converting {weights}")
    if given.delta_of is None:
        with counting:
            lines = convert(weights, given.args, given.output, given.tokenizer, given.to)
    elif given.args or given.tokenizer or given.to != "srm":
        raise ConfigError(
            "--delta-of takes model folders as they are, and no --args, --tokenizer, --to"
        )
    else:
        with counting:
            lines = write_delta(find_model(given.delta_of), weights, given.output)
    sys.stdout.write("\n".join([f"{given.output}: {lines[0]}", *(f"  {x}" for x in lines[1:]), ""]))
    return 0
