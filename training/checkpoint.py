"""Write and read model folders: `config.json`, `model.safetensors`, `tokenizer.json`.

Matrices are stored in bfloat16; the mixer's α, β and decay stay float32 (0.999 is 1.0 in
bfloat16). Files appear whole or not at all.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from srm.engine.config import ModelConfig
from srm.engine.kept_model import WEIGHTS
from srm.engine.weights.checkpoint import read_model
from srm.engine.weights.convert import parser
from srm.engine.weights.tensors import is_scalar
from srm.engine.weights.transformers_folder import TEXT_FILES
from srm.errors import ConfigError
from srm.files import read_file
from srm.training.model import SRM
from srm.training.text.whole_files import has, is_sealed, replace_file

log = logging.getLogger(__name__)


def save_model(
    config: msgspec.Struct,
    weights: Mapping[str, Tensor],
    folder: Path,
    text_files: Path | None = None,
) -> None:
    """Write a model's state dict into `folder`, with the tokenizer of the folder `text_files`.

    Nothing changes before all is on the disk. A reader finds the model that was there or the new
    one, and for a moment none where they differ in more than weights. Raises ConfigError if it
    cannot be written; then the old one stays.
    """
    folder.mkdir(parents=True, exist_ok=True)
    others = {"config.json": msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n"}
    for path in [(text_files or folder) / name for name in TEXT_FILES]:
        if path.exists():
            others[path.name] = read_file(path)
    changed = {name: content for name, content in others.items() if not has(folder / name, content)}
    tensors = {
        name: (value.float() if is_scalar(name) else value.bfloat16()).contiguous()
        for name, value in weights.items()
    }
    with replace_file(folder / WEIGHTS) as partial:
        try:
            save_file(tensors, partial, metadata={"format": "pt"})
        except SafetensorError as error:
            raise ConfigError(f"{folder / WEIGHTS} cannot be written: {error}") from error
        with ExitStack() as replaced:
            for name, content in changed.items():
                replaced.enter_context(replace_file(folder / name)).write_bytes(content)
            if changed:
                (folder / WEIGHTS).unlink(missing_ok=True)


def keep_model(
    config: msgspec.Struct,
    weights: Mapping[str, Tensor],
    output: Path,
    text_files: Path,
    steps: Sequence[int],
    most_bytes: int,
) -> None:
    """Write the model of the last of these updates into `output/step-N`, and delete the models of
    the others, the oldest first, until the weights of all have at most so many bytes, or one is
    left. What the run did not write, and so does not name, stays."""
    save_model(config, weights, output / f"step-{steps[-1]}", text_files)
    folders = {step: output / f"step-{step}" for step in sorted({*steps})}
    sizes = {
        step: (path / WEIGHTS).stat().st_size
        for step, path in folders.items()
        if (path / WEIGHTS).exists()
    }
    for step in list(sizes)[:-1]:
        if sum(sizes.values()) <= most_bytes:
            break
        del sizes[step]
        log.info("%s is deleted: models take more than keep_bytes = %d", folders[step], most_bytes)
        for name in (WEIGHTS, "config.json", *TEXT_FILES):
            (folders[step] / name).unlink(missing_ok=True)
        with suppress(OSError):  # what others put there stays
            folders[step].rmdir()


def read_run(path: Path) -> dict[str, Any]:
    """Return the state of a run. Raises ConfigError if it cannot be read."""
    try:
        if not is_sealed(path):
            raise ConfigError(f"{path} is damaged, as its SHA-256 says: remove it or change output")
        run: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
    except (OSError, RuntimeError, EOFError, LookupError, ValueError, UnpicklingError) as error:
        raise ConfigError(f"{path} cannot be read: remove it or change output: {error}") from error
    return run


def convert_run(argv: list[str]) -> int:
    """Run `srm convert RUN/run.pt --output FOLDER`; return the exit code."""
    given = parser().parse_args(argv)
    if given.args or given.tokenizer or given.delta_of or given.to != "srm":
        raise ConfigError("a run.pt takes --output alone: convert the folder that is made of it")
    run = read_run(given.weights)
    try:
        config = msgspec.convert(run["settings"]["config"], ModelConfig)
    except (LookupError, msgspec.ValidationError) as error:
        raise ConfigError(f"{given.weights} is no run of a model that is served: {error}") from None
    folder = given.weights.parent
    save_model(config, run.get("best") or run["model"], given.output, folder)
    has_tokenizer = (given.output / "tokenizer.json").exists()
    beside = "with its tokenizer" if has_tokenizer else f"no tokenizer.json is in {folder}"
    made = f"the model of {len(run['losses']['steps'])} updates"
    sys.stdout.write(f"{given.output}: {made}, {beside}\n")
    return 0


def load_model(folder: Path) -> SRM:
    """Load the model of a folder, in float32. Raises CheckpointError if it is not one."""
    files = read_model(folder)
    model = SRM(files.config)
    model.load_state_dict({name: torch.tensor(value) for name, value in files.tensors.items()})
    return model
