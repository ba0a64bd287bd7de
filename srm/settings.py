"""The one loader of settings, for every command's struct.

Settings come from, later beating earlier: defaults, a TOML file, `SRM_…` environment variables
where the command reads them, command-line flags. A key or value that is not understood raises
ConfigError and names its source; variables of no setting are left to `srm.__main__`, which
knows those that are read. The string under a field is its line in `--help`. Nothing changes after
loading.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import os
import sys
import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Set
from functools import cache
from itertools import chain, pairwise, zip_longest
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Any,
    Literal,
    NamedTuple,
    NoReturn,
    TypeVar,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec

from srm.errors import UNDECODABLE, ConfigError, did_you_mean, in_words, show_value
from srm.files import read_file

T = TypeVar("T", bound=msgspec.Struct)


class Setting(NamedTuple):
    """A field of a settings struct, or of a group: a struct that is the type of such a field."""

    name: str
    """Its name, which no other setting of the struct has; flags and variables go by it alone."""
    table: str
    """Field of its group, which is a table of the file; empty: it is in none."""
    hint: Any
    meaning: str
    default: Any
    heading: str
    """Title of its group in `--help`: the first line of its struct's docstring."""


class Command(NamedTuple):
    """A command as `--help` describes it, and the sources of its settings besides flags and the
    file of `--config`."""

    prog: str = "srm"
    about: str = ""
    """One sentence, which begins `--help`."""
    example: str = ""
    """A line of the shell; `#` and what it does may follow."""
    main: str = ""
    """Names of the settings that most need, which `--help` shows first."""
    private: Set[str] = frozenset()
    """Fields that cannot be given."""
    positional: str | None = None
    """Field that may be given without its flag."""
    short: Mapping[str, str] = {}
    """Further flags, by field."""
    elsewhere: Mapping[str, str] = {}
    """Flags of other programs that do the same, with what does it here."""
    presets: Path | None = None
    """Folder of TOML files that may be named without it and `.toml`, and without a flag."""
    variables: Set[str] | None = frozenset()
    """Fields that variables of the environment set; None: all."""

    def reads(self, name: str) -> bool:
        return self.variables is None or name in self.variables


class Given(dict[str, Any]):
    """Settings by name; of those `in_file`, the `file` alone set the value."""

    file, in_file = "", frozenset[str]()


def load(
    kind: type[T],
    argv: list[str],
    environ: Mapping[str, str] = os.environ,
    prog: str | Command = "srm",
) -> T:
    """Build a frozen settings struct from defaults, `--config FILE` and flags. Raises ConfigError
    naming source, field and value."""
    command = prog if isinstance(prog, Command) else Command(prog)
    return build(kind, read_settings((kind,), argv, command, environ))


def read_settings(
    kinds: tuple[type[msgspec.Struct], ...],
    argv: list[str],
    command: Command,
    environ: Mapping[str, str] = os.environ,
) -> Given:
    """Read what the sources set for fields of any of `kinds`.

    A field `num_slots` is `num_slots` in TOML, `--num-slots` as a flag; lists have commas. One
    that several kinds have is one setting, described as the first of them does. A variable
    of a field that the command takes and does not read from there is an error, unless a file or
    flag sets the field, which would win over the variable anyway.
    """
    known: dict[str, Setting] = {}
    for setting in chain(*map(settings_in, kinds)):
        if setting.name not in command.private:
            known.setdefault(setting.name, setting)
    hints = {name: setting.hint for name, setting in known.items()}
    flags = _read_flags(known, argv, command)
    file = flags.pop("config", None)
    settings = Given()
    if file is not None:
        file = _preset(Path(file), command.presets)
        _apply(settings, hints, _open_tables(_read_toml(file), known, str(file)), str(file))
    in_file = frozenset(settings)
    entries = {name: environ[variable_of(name)] for name in hints if variable_of(name) in environ}
    env = {name: value for name, value in entries.items() if command.reads(name)}
    _apply(settings, hints, env, "environment")
    _apply(settings, hints, flags, "command line")
    settings.file, settings.in_file = str(file), in_file - env.keys() - flags.keys()
    if unread := [name for name in entries if name not in settings]:
        variable, flag = variable_of(unread[0]), flag_of(unread[0])
        raise ConfigError(f"environment: {variable} is not read by {command.prog}: pass {flag}")
    return settings


class CommandParser(argparse.ArgumentParser):
    """Says in one line what is wrong with a command line: raises ConfigError."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; {self.prog} --help lists the settings")


def _read_flags(known: Mapping[str, Setting], argv: list[str], command: Command) -> dict[str, Any]:
    positional = command.positional or ("config" if command.presets else "")
    parser = CommandParser(
        prog=command.prog,
        usage=f"{command.prog} [SETTINGS]" + (f" [{positional.upper()}]" if positional else ""),
        description="\n\n".join(
            filter(None, [command.about, command.example and f"example:\n  {command.example}"])
        ),
        formatter_class=_Layout,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        epilog=textwrap.fill(_sources(command), 80),
        add_help=False,
    )
    if command.presets is not None:
        about = f"the same as --config; or one of {_named(command.presets)}"
        parser.add_argument("config", nargs="?", metavar="CONFIG", help=about)
    if command.positional is not None:
        about = f"the same as --{command.positional}"
        parser.add_argument(positional, nargs="?", help=about, metavar=positional.upper())
    headings = [*dict.fromkeys(setting.heading for setting in known.values())]
    groups = {
        heading: parser.add_argument_group(heading)
        for heading in [*filter(None, [command.main and "Main settings"]), *headings]
    }
    first = command.main.split()
    for name in [*first, *(name for name in known if name not in first)]:
        setting = known[name]
        group = next(iter(groups)) if name in first else setting.heading
        groups[group].add_argument(
            *filter(None, [flag_of(name), command.short.get(name)]),
            dest=name,
            metavar=_describe(setting.hint),
            help=(setting.meaning + _default(setting)).replace("%", "%%"),
        )
    others = parser.add_argument_group("Others")
    others.add_argument("--config", metavar="FILE", help="a TOML file with any of these settings")
    others.add_argument("-h", "--help", action="help", help="print this")
    given, unknown = parser.parse_known_args(_spelled_out(argv, known))
    if unknown:
        flag = unknown[0].partition("=")[0]
        near = did_you_mean(flag, [*map(flag_of, known), "--config", "--help"])
        if here := command.elsewhere.get(flag.replace("_", "-")):
            near = f"; here it is {here}"
        raise ConfigError(
            f"there is no flag {flag}{near or f'; {command.prog} --help lists them'}"
            if flag.startswith("-")
            else f"nothing can be done with {unknown[0]!r}: settings are given as --name VALUE"
        )
    return vars(given)


class _Layout(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)


def _default(setting: Setting) -> str:
    """Say what the default is, as it would be given; nothing if nothing is, which the meaning of
    the setting explains."""
    default = setting.default
    if default is msgspec.NODEFAULT:
        return " Required."
    if default is None or default in ("", ()):
        return ""
    if isinstance(default, tuple):
        return f" Default: {','.join(map(str, default))}"
    if isinstance(default, Path) and default.is_absolute():  # a model, or of the source tree
        try:
            near = default.relative_to(Path.cwd())
        except (OSError, ValueError):
            near = Path(default.name)
        default = default.name if (default / "config.json").exists() else near
    return f" Default: {str(default).lower() if isinstance(default, bool) else default}"


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable_of(name: str) -> str:
    return "SRM_" + name.upper()


def build(kind: type[T], settings: Mapping[str, Any]) -> T:
    """Build the struct from those of the settings that are its fields, or those of its groups.
    Raises ConfigError."""
    hints = get_type_hints(kind)
    own = {name: settings[name] for name in kind.__struct_fields__ if name in settings}
    groups = [name for name in kind.__struct_fields__ if _is_group(hints[name])]
    own |= {name: build(hints[name], settings) for name in groups}
    try:
        return kind(**own)
    except ValueError as error:
        text = str(error)
        if isinstance(settings, Given) and (names := settings.in_file & set(text.split())):
            text += f"; {settings.file} sets {' and '.join(sorted(names))}"
        raise ConfigError(text) from None


def build_struct(kind: type[T], values: Mapping[str, Any], source: str, strict: bool = False) -> T:
    """Build the struct from values given by name, checked as a file's are; a program is `strict`,
    to which the text "5" is no number. Raises ConfigError."""
    settings: dict[str, Any] = {}
    _apply(settings, get_type_hints(kind), values, source, strict)
    return build(kind, settings)


def settings_in(kind: type[msgspec.Struct], table: str = "") -> Iterator[Setting]:
    """Yield the settings of a struct, and those of its groups; those of its bases come last."""
    hints, meanings = get_type_hints(kind), field_docs(kind)
    heading = (kind.__doc__ or "Settings").split("\n")[0].rstrip(".").replace("`", "")
    own = vars(kind).get("__annotations__", ())
    for field in sorted(msgspec.structs.fields(kind), key=lambda field: field.name not in own):
        name, hint = field.name, hints[field.name]
        if _is_group(hint):
            yield from settings_in(hint, name)
        else:
            yield Setting(name, table, hint, meanings.get(name, ""), field.default, heading)


def flatten(config: msgspec.Struct) -> dict[str, Any]:
    """Return the values of a struct and of its groups by name, as `build` takes them."""
    flat: dict[str, Any] = {}
    for name, value in msgspec.structs.asdict(config).items():
        flat |= flatten(value) if isinstance(value, msgspec.Struct) else {name: value}
    return flat


def _is_group(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, msgspec.Struct)


@cache
def field_docs(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Return the string under each field, on one line. Python does not keep it, so the source is
    read."""
    definition = _classes(kind.__module__)[kind.__name__]
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


@cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    """Return the classes that a module defines outside functions, by name."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _spelled_out(argv: list[str], known: Mapping[str, Setting]) -> list[str]:
    """Append `=true` to each flag of a boolean setting that no value follows."""
    names = {flag_of(name) for name, setting in known.items() if setting.hint is bool}
    return [
        f"{flag}=true" if flag in names and follower.lower() not in {"true", "false"} else flag
        for flag, follower in zip_longest(argv, argv[1:], fillvalue="")
    ]


def _sources(command: Command) -> str:
    """Say where settings may be given, which stands below those in `--help`."""
    if command.variables is None:
        variables = ", or SRM_SOME_NAME in the environment"
    else:
        named = ", ".join(map(variable_of, sorted(command.variables)))
        variables = named and f"; the environment may have {named}"
    return (
        f"A setting --some-name may also be some_name in the TOML file{variables}. Flags beat the "
        "environment, which beats the file, which beats defaults."
    )


def _named(presets: Path) -> str:
    return ", ".join(sorted(path.stem for path in presets.glob("*.toml")))


def _preset(file: Path, presets: Path | None) -> Path:
    if presets is None or file.is_file():
        return file
    path = presets / f"{file}.toml"
    if path.is_file():
        return path
    raise ConfigError(f"no such file: {file}; and it is none of {_named(presets)}")


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_file(path).decode("utf-8-sig"))
    except (OSError, *UNDECODABLE) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None


def _open_tables(
    values: Mapping[str, Any], known: Mapping[str, Setting], source: str
) -> dict[str, Any]:
    """Return what a file and its tables have, by name. Raises ConfigError that says where those
    belong that stand elsewhere."""
    flat: dict[str, Any] = {}
    misplaced: dict[str, list[str]] = {}
    tables = {setting.table for setting in known.values()}
    for key, value in values.items():
        is_table = isinstance(value, dict) and key in tables
        table, inside = (key, value) if is_table else ("", {key: value})
        flat |= inside
        for name in inside:
            if name in known and known[name].table != table:
                misplaced.setdefault(known[name].table, []).append(name)
    if misplaced:
        places = "; ".join(
            f"{', '.join(names)} {f'in the table [{table}]' if table else 'above all tables'}"
            for table, names in misplaced.items()
        )
        raise ConfigError(f"{source}: settings belong elsewhere: {places}")
    return flat


def _apply(
    settings: dict[str, Any],
    hints: dict[str, Any],
    values: Mapping[str, Any],
    source: str,
    strict: bool = False,
) -> None:
    for name, value in values.items():
        if name not in hints:
            raise ConfigError(f"{source}: unknown setting {name!r}{did_you_mean(name, hints)}")
        if get_origin(hints[name]) is tuple and isinstance(value, str):
            parts: Any = [part for part in value.split(",") if part]
        elif not strict and hints[name] is str and type(value) in {int, float}:
            parts = str(value)  # a TOML file may leave out quotes
        else:
            parts = value
        try:
            made = msgspec.convert(parts, hints[name], strict=strict, dec_hook=_decode_extension)
            if isinstance(made, int) and not -(2**63) <= made < 2**64:
                raise OverflowError("must be within 64 bits")
        except (ValueError, OverflowError) as error:
            choices = ", ".join(map(str, _choices(hints[name])))
            why = f"allowed are {choices}" if choices else in_words(error)
            raise ConfigError(f"{source}: {name} = {show_value(value)}: {why}") from None
        settings[name] = made


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
