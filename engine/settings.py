"""The one loader of settings, for every command's struct.

Settings come from, later beating earlier: defaults, a TOML file, `SRM_…` environment variables,
command-line flags. A key or value that is not understood raises ConfigError and names its source;
variables of other commands are left to `srm.py`, which knows them all. The string under a field is
its line in `--help`. Nothing changes after loading. Knows no setting.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import os
import textwrap
import tomllib
from collections.abc import Mapping
from functools import cache
from itertools import pairwise, zip_longest
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

import msgspec

from engine.errors import UNDECODABLE, ConfigError

T = TypeVar("T", bound=msgspec.Struct)

_SOURCES = (
    "A setting --some-name may also be SRM_SOME_NAME in the environment or some_name in the TOML "
    "file. Flags beat the environment, which beats the file, which beats defaults."
)


def load(
    kind: type[T], argv: list[str], environ: Mapping[str, str] = os.environ, prog: str = "srm"
) -> T:
    """Build a frozen settings struct from defaults, `--config FILE`, environment and flags.

    A field `num_slots` is `num_slots` in TOML, `SRM_NUM_SLOTS` in the environment, `--num-slots` as
    a flag; lists have commas. Raises ConfigError naming source, field and value.
    """
    return build(kind, read_settings((kind,), argv, environ, prog))


def read_settings(
    kinds: tuple[type[msgspec.Struct], ...],
    argv: list[str],
    environ: Mapping[str, str] = os.environ,
    prog: str = "srm",
    private: frozenset[str] = frozenset(),
    positional: str | None = None,
    short: Mapping[str, str] | None = None,
    presets: Path | None = None,
) -> dict[str, Any]:
    """Read what the sources set for fields of any of `kinds`, except those named in `private`.

    A field that several kinds have is one setting, described as the first of them does. The field
    `positional` may be given without its flag; `short` has further flags by field. `presets` is a
    folder of TOML files that may be named without it and `.toml`; the file needs no flag then.
    """
    hints: dict[str, Any] = {}
    parser = argparse.ArgumentParser(
        prog=prog, argument_default=argparse.SUPPRESS, allow_abbrev=False, epilog=_SOURCES
    )
    parser.add_argument("--config", metavar="FILE", help="a TOML file with any of these settings")
    for kind in kinds:
        types, meanings = get_type_hints(kind), field_docs(kind)
        for field in msgspec.structs.fields(kind):
            if field.name in hints or field.name in private:
                continue
            hints[field.name] = types[field.name]
            meaning = f"{meanings.get(field.name, '')} Default: {field.default}"
            flag = "--" + field.name.replace("_", "-")
            parser.add_argument(
                *filter(None, [flag, (short or {}).get(field.name)]),
                dest=field.name,
                metavar=_describe(hints[field.name]),
                help=meaning.replace("%", "%%"),
            )
    if presets is not None:
        about = f"the same as --config; or one of {_named(presets)}"
        parser.add_argument("config", nargs="?", metavar="FILE", help=about)
    if positional is not None:
        parser.add_argument(positional, nargs="?", help=f"the same as --{positional}")
    flags = vars(parser.parse_args(_spelled_out(argv, hints)))
    file = flags.pop("config", None)
    settings: dict[str, Any] = {}
    if file is not None:
        file = _preset(Path(file), presets)
        _apply(settings, hints, _read_toml(file), str(file))
    variables = {name: environ.get("SRM_" + name.upper()) for name in hints}
    env = {name: value for name, value in variables.items() if value is not None}
    _apply(settings, hints, env, "environment")
    _apply(settings, hints, flags, "command line")
    return settings


def build(kind: type[T], settings: Mapping[str, Any]) -> T:
    """Build the struct from those of the settings that are its fields. Raises ConfigError."""
    own = {name: settings[name] for name in kind.__struct_fields__ if name in settings}
    try:
        return kind(**own)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def of_values(kind: type[T], values: Mapping[str, Any], source: str) -> T:
    """Build the struct from values given by name, checked as a file's are. Raises ConfigError."""
    settings: dict[str, Any] = {}
    _apply(settings, get_type_hints(kind), values, source)
    return build(kind, settings)


@cache  # Python parses the whole file to find a class
def field_docs(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Return the string under each field, on one line. Python does not keep it, so the source is
    read."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    (parent,) = kind.__bases__
    inherited = field_docs(parent) if parent is not msgspec.Struct else {}
    return inherited | {
        field.target.id: " ".join(below.value.value.split())
        for field, below in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
        and isinstance(below.value.value, str)
    }


def _spelled_out(argv: list[str], hints: Mapping[str, Any]) -> list[str]:
    """Append `=true` to each flag of a boolean setting that no value follows."""
    names = {"--" + name.replace("_", "-") for name, hint in hints.items() if hint is bool}
    return [
        f"{flag}=true" if flag in names and follower not in {"true", "false"} else flag
        for flag, follower in zip_longest(argv, argv[1:])
    ]


def _named(presets: Path) -> str:
    return ", ".join(sorted(path.stem for path in presets.glob("*.toml")))


def _preset(file: Path, presets: Path | None) -> Path:
    if presets is None or file.is_file():
        return file
    found = presets / f"{file}.toml"
    if found.is_file():
        return found
    raise ConfigError(f"no such file: {file}; and it is none of {_named(presets)}")


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, *UNDECODABLE) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None


def _apply(
    settings: dict[str, Any], hints: dict[str, Any], values: Mapping[str, Any], source: str
) -> None:
    for name, value in values.items():
        if name not in hints:
            raise ConfigError(f"{source}: unknown setting {name!r}")
        if get_origin(hints[name]) is tuple and isinstance(value, str):
            parts: Any = [part for part in value.split(",") if part]
        elif hints[name] is str and type(value) in {int, float}:  # a TOML file may leave out quotes
            parts = str(value)
        else:
            parts = value
        try:
            settings[name] = msgspec.convert(
                parts, hints[name], strict=False, dec_hook=_decode_extension
            )
        except msgspec.ValidationError as error:
            choices = _choices(hints[name])
            allowed = f"; allowed are {', '.join(map(str, choices))}" if choices else ""
            raise ConfigError(f"{source}: {name} = {value!r}: {error}{allowed}") from None


def _choices(hint: Any) -> tuple[Any, ...]:
    """Return the allowed values of a setting, or of each item of a list; empty if they are not
    listed."""
    kind = get_args(hint)[0] if get_origin(hint) is tuple else hint
    return get_args(kind) if get_origin(kind) is Literal else ()


def _decode_extension(kind: type, value: object) -> object:
    if kind is Path and isinstance(value, str | Path):
        return Path(value)
    raise msgspec.ValidationError(f"expected {kind.__name__}")


def _describe(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "|".join(str(choice) for choice in get_args(hint))
    if get_origin(hint) is tuple:
        return _describe(get_args(hint)[0]) + ",…"
    if isinstance(hint, UnionType):
        return " or ".join(_describe(kind) for kind in get_args(hint) if kind is not NoneType)
    return cast(str, getattr(hint, "__name__", str(hint))).upper()
