"""ModelConfig (what a checkpoint is) and EngineConfig (how it is served), and the one loader.

Settings come from, later beating earlier: defaults, a TOML file, `SRM_…` environment variables,
command-line flags. A key or value that is not understood raises ConfigError and names its source.
Nothing changes after loading.
"""

from __future__ import annotations

import argparse
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

import msgspec

from engine.errors import ConfigError

DEMO_MODEL = Path(__file__).resolve().parents[1] / "models" / "demo"
"""The bundled checkpoint; the same place in a source tree and in an installed package."""


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`config.json` of a checkpoint: the paper's main architecture, mixed heads."""

    d_model: int
    num_layers: int
    num_heads: int
    n_ctx: int
    """Longest sequence that can be fed, in tokens."""
    vocab_size: int
    use_projections: bool = True
    decay: bool = True
    decay_constant: int = 1
    """The exponent's divisor c: a source s is weighed by lambda ** ((t - s) / c)."""
    bos_token_id: int = 0
    eos_token_id: int = 1
    mixer: Literal["mixed"] = "mixed"
    format: Literal["srm"] = "srm"
    format_version: Literal[1] = 1

    def __post_init__(self) -> None:
        for name in ("d_model", "num_layers", "num_heads", "n_ctx", "vocab_size", "decay_constant"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads % 2 or self.d_model % self.num_heads:
            raise ValueError(
                f"num_heads must be even and divide d_model: {self.num_heads}, {self.d_model}"
            )
        for name in ("bos_token_id", "eos_token_id"):
            if not 0 <= getattr(self, name) < self.vocab_size:
                raise ValueError(f"{name} must lie in 0 … vocab_size - 1")

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads

    @property
    def state_width(self) -> int:
        """Values one sequence keeps: one row per layer."""
        return self.num_layers * self.d_model

    @property
    def flops_per_token(self) -> int:
        """Multiply-adds of the matrix products, counted as two, output head included."""
        mixing = 2 if self.use_projections else 0
        return 2 * self.d_model * (self.num_layers * (8 + mixing) * self.d_model + self.vocab_size)


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the engine runs. Field docstrings are in docs/configuration.md."""

    model: Path = DEMO_MODEL
    device: Literal["cpu", "gpu"] = "cpu"
    num_slots: int = 16_384
    max_step_rows: int = 2_048
    max_step_tokens: int = 4_096
    max_waiting: int = 100_000
    cache_dir: Path = Path("~/.cache/srm")
    overlap: bool = True
    endpoint: str = "tcp://127.0.0.1:8765"
    """Where API processes reach the engine process: `ipc://PATH` or a loopback `tcp://`."""
    drain_s: float = 30.0
    """How long a stopping engine process may take to finish what is running."""

    def __post_init__(self) -> None:
        for name in ("num_slots", "max_step_rows", "max_step_tokens", "max_waiting"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_step_tokens <= self.max_step_rows:
            raise ValueError("max_step_tokens must be larger than max_step_rows")
        if not self.endpoint.startswith(("ipc://", "tcp://")):
            raise ValueError(f"endpoint must begin with ipc:// or tcp://, got {self.endpoint!r}")
        if not self.drain_s >= 0:
            raise ValueError(f"drain_s must be at least 0, got {self.drain_s}")


T = TypeVar("T", bound=msgspec.Struct)


def load(
    kind: type[T],
    argv: list[str],
    environ: Mapping[str, str] = os.environ,
    prog: str = "srm",
) -> T:
    """Build a frozen settings struct from defaults, `--config FILE`, environment and flags.

    Every field `num_slots` is `num_slots` in TOML, `SRM_NUM_SLOTS` in the environment and
    `--num-slots` on the command line, lists comma-separated. Raises ConfigError naming source,
    field and value.
    """
    hints = get_type_hints(kind)
    parser = argparse.ArgumentParser(prog=prog, argument_default=argparse.SUPPRESS)
    parser.add_argument("--config", type=Path, help="a TOML file with any of these settings")
    defaults = kind()
    for field in msgspec.structs.fields(kind):
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            dest=field.name,
            metavar=_describe(hints[field.name]),
            help=f"default {getattr(defaults, field.name)}",
        )
    flags = vars(parser.parse_args(argv))
    file = flags.pop("config", None)
    settings: dict[str, Any] = {}
    if file is not None:
        _apply(settings, kind, hints, _read_toml(file), str(file))
    env = {
        field.name: environ["SRM_" + field.name.upper()]
        for field in msgspec.structs.fields(kind)
        if "SRM_" + field.name.upper() in environ
    }
    _apply(settings, kind, hints, env, "environment")
    _apply(settings, kind, hints, flags, "command line")
    try:
        return kind(**settings)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None


def _apply(
    settings: dict[str, Any],
    kind: type[msgspec.Struct],
    hints: dict[str, Any],
    values: Mapping[str, Any],
    source: str,
) -> None:
    for name, value in values.items():
        if name not in hints or name not in kind.__struct_fields__:
            raise ConfigError(f"{source}: unknown setting {name!r}")
        if get_origin(hints[name]) is tuple and isinstance(value, str):
            parts: Any = [part for part in value.split(",") if part]
        else:
            parts = value
        try:
            settings[name] = msgspec.convert(
                parts, hints[name], strict=False, dec_hook=_decode_extension
            )
        except msgspec.ValidationError as error:
            raise ConfigError(f"{source}: {name} = {value!r}: {error}") from None


def _decode_extension(kind: type, value: object) -> object:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise msgspec.ValidationError(f"expected {kind.__name__}")


def _describe(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "|".join(str(choice) for choice in get_args(hint))
    return cast(str, getattr(hint, "__name__", str(hint))).upper()
