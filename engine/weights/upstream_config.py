"""Turn the constructor arguments of a published model (blbadger/mrm) into a ModelConfig.

Arguments are read as the published code reads them: in its order, and ignoring what it ignores.
What neither they nor the weights tell is asked for, by the name of the key to add, and never
guessed. Everything decided on the way is a line of the notes.
"""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import msgspec

from srm.engine.config import Mixer, ModelConfig
from srm.errors import UNDECODABLE, ConfigError, in_words
from srm.files import read_file

Positive = Annotated[int, msgspec.Meta(ge=1)]


class Constructor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of `MLPMixer`, of all its versions."""

    vocab_size: Positive
    hidden_dim: Positive
    seq_len: Positive
    num_blocks: Positive
    heads: int | None = None
    kernel: int | None = 1
    expanded_convs: bool = False
    copy: bool = False
    mixed_heads: bool = False
    combined_heads: bool = False
    decay: bool = False
    parallel_heads: bool = False
    use_projections: bool | None = None
    tie_io: bool = False
    dropout_layer: bool = False
    is_reward_model: bool = False


class PublishedArgs(msgspec.Struct, frozen=True):
    """ARGS.json. Other keys may describe the model to its reader."""

    constructor: Constructor
    effective_decay_constant: int | None = None
    headless_kind: str | None = None
    combined_row_quirk: bool | None = None
    bos_token_id: int = 0
    eos_token_id: int | tuple[int, ...] = 1


READ_BY: dict[Mixer, set[str]] = {
    "parallel": {"parallel_heads", "mixed_heads", "decay"},
    "mixed": {"mixed_heads", "decay"},
    "diagonal": {"mixed_heads", "decay"},
    "expanded": {"expanded_convs"},
    "combined": {"combined_heads", "decay"},
    "column_heads": set(),
    "kernel": {"kernel", "decay"},
    "row": set(),
    "column": set(),
}
"""Switches that the published code reads where it builds each mixer; others do nothing."""


def read_args(path: Path) -> PublishedArgs:
    """Read ARGS.json. Raises ConfigError naming the file and the field."""
    try:
        return msgspec.json.decode(read_file(path).removeprefix(BOM_UTF8), type=PublishedArgs)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except msgspec.ValidationError as error:
        is_flat = str(error).endswith("field `constructor`")
        hint = ", under which the model's arguments belong" if is_flat else ""
        raise ConfigError(f"{path}: {in_words(error)}{hint}") from None
    except UNDECODABLE as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None


def model_config(
    args: PublishedArgs, path: Path, names: Collection[str], notes: list[str]
) -> ModelConfig:
    """Return the model that the arguments in `path` build, given the names of its tensors."""
    constructor = args.constructor
    if constructor.is_reward_model:
        raise ConfigError(
            f"{path}: is_reward_model: a reward model gives texts a score and no next token"
        )
    mixer = _mixer(args, path, names)
    is_headless = not _has_heads(constructor)
    decay = constructor.decay and "decay" in READ_BY[mixer]
    decays = [name for name in names if name.endswith(".decay_value")]
    if decays and not decay:
        switch = "kernel" if is_headless else "mixed_heads, combined_heads or parallel_heads"
        raise ConfigError(
            f"{path}: the weights have {len(decays)} decays, such as {min(decays)}, and a model of "
            f"{mixer} as described has none: add "
            f"{'decay' if 'decay' in READ_BY[mixer] else switch} to constructor"
        )
    constant = _decay_constant(args, path, mixer, notes) if decay else 1
    for name in ("parallel_heads", "mixed_heads", "combined_heads", "expanded_convs", "decay"):
        if getattr(constructor, name) and name not in READ_BY[mixer]:
            notes.append(f"{name} is set, but does nothing in the published code of {mixer}")
    if _kernel_size(constructor) > 1 and mixer != "kernel":
        notes.append(f"kernel is set, but does nothing in the published code of {mixer}")
    if constructor.copy:
        notes.append("copy changes what a model is trained on, and nothing here")
    try:
        return ModelConfig(
            d_model=constructor.hidden_dim,
            num_layers=constructor.num_blocks,
            num_heads=1 if is_headless else constructor.heads or 0,
            n_ctx=constructor.seq_len,
            vocab_size=constructor.vocab_size,
            use_projections=not is_headless and _projects(args, path, mixer, notes),
            decay=decay,
            decay_constant=constant,
            bos_token_id=args.bos_token_id,
            eos_token_id=args.eos_token_id,
            mixer=mixer,
            kernel_size=_kernel_size(constructor) if mixer == "kernel" else 1,
            combined_row_quirk=(
                mixer == "combined" and constant > 1 and _combined_row_quirk(args, path, constant)
            ),
        )
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def _has_heads(constructor: Constructor) -> bool:
    return constructor.heads is not None and constructor.heads > 0


def _kernel_size(constructor: Constructor) -> int:
    return constructor.kernel if constructor.kernel is not None else 1


def _mixer(args: PublishedArgs, path: Path, names: Collection[str]) -> Mixer:
    constructor = args.constructor
    if _has_heads(constructor):
        if constructor.parallel_heads:
            return "parallel"
        if constructor.mixed_heads:  # two files of the published code, with the same arguments
            is_diagonal = any(name.endswith(".diag_weight") for name in names)
            return "diagonal" if is_diagonal else "mixed"
        if constructor.expanded_convs:
            if constructor.heads == 1:
                raise ConfigError(f"{path}: expanded_convs is supported without heads or with many")
            return "expanded"
        return "combined" if constructor.combined_heads else "column_heads"
    if constructor.expanded_convs:
        return "expanded"
    if _kernel_size(constructor) > 1:
        return "kernel"
    match args.headless_kind:
        case "row":
            return "row"
        case "col" | "column":
            return "column"
        case str():
            raise ConfigError(
                f"{path}: headless_kind must be row or col, got {args.headless_kind!r}"
            )
    raise ConfigError(
        f'{path}: add "headless_kind": "row" or "col". A model without heads may be either, and '
        "neither its weights nor its arguments tell"
    )


def _decay_constant(args: PublishedArgs, path: Path, mixer: Mixer, notes: list[str]) -> int:
    """Return c of λ ** ((t - s) / c), which the published code computes in ways that changed."""
    given = args.effective_decay_constant
    if given is not None and given < 1:
        raise ConfigError(f"{path}: effective_decay_constant must be at least 1, got {given}")
    if given is not None:
        return given
    divisor = 256 if mixer == "kernel" else 512
    published = 1 if mixer == "diagonal" else args.constructor.seq_len // divisor
    if published == 1 and not args.constructor.copy:
        notes.append("decay_constant is 1, as in every version of the published code")
        return 1
    why = (
        f"the published seq_len // {divisor} is 0, by which nothing can be divided"
        if published == 0
        else f"the published code has used {published} and other values"
    )
    raise ConfigError(
        f'{path}: add "effective_decay_constant", the c of λ ** ((t - s) / c). '
        f"The weights do not tell it, and {why}"
    )


def _projects(args: PublishedArgs, path: Path, mixer: Mixer, notes: list[str]) -> bool:
    given = args.constructor.use_projections
    if mixer == "parallel" and given is None:
        raise ConfigError(
            f"{path}: add use_projections, true or false, to constructor. Files of parallel heads "
            "hold projections whether they are used or not"
        )
    if mixer in {"column_heads", "combined", "expanded", "diagonal"}:
        if given is False:
            notes.append(f"use_projections false does nothing in the published code of {mixer}")
        return True
    return given is not False


def _combined_row_quirk(args: PublishedArgs, path: Path, constant: int) -> bool:
    if args.combined_row_quirk is None:
        raise ConfigError(
            f'{path}: add "combined_row_quirk": true if row units divided their values by c = '
            f"{constant} instead of the exponent, as in the published code, or false"
        )
    return args.combined_row_quirk
