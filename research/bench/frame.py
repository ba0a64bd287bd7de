"""The frame of every benchmark: checked settings, one record, its tables and its picture."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from research.bench.peaks.torch_side import plot_record
from srm.engine.config import ModelConfig
from srm.loadtest.records import RECORDS, new_record, settings_of, write_record
from srm.settings import load

Record = dict[str, Any]

DRAWN = {"engine", "kernels", "prefill", "host", "peers"}
"""Kinds of records that have a picture."""
MAY_BE_0 = {"threads", "n", "hostile", "constrained"}
MAY_BE_EMPTY = {"random_widths", "streams", "peers", "counted_rows", "variants"}


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of every benchmark: numbers are above 0, and lists of them have at least one."""

    output: Path = RECORDS
    """Folder that the record is written to."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, tuple) and all(isinstance(item, int | float) for item in value):
                check_sizes(name, value)
            elif isinstance(value, float) and not value > 0:
                raise ValueError(f"{name} must be above 0, got {value}")
            elif isinstance(value, int) and not isinstance(value, bool):
                least = 0 if name in MAY_BE_0 else 1
                if value < least:
                    raise ValueError(f"{name} must be at least {least}, got {value}")


def check_sizes(name: str, sizes: tuple[float, ...]) -> None:
    """Raise ValueError unless there is a size, where one must be, and each is at least 1.

    Those that are no integers must be above 0, and widths multiples of 4.
    """
    if name == "random_widths" and any(width < 4 or width % 4 for width in sizes):
        raise ValueError(f"random_widths must be multiples of 4, got {sizes}")
    is_missing = not sizes and name not in MAY_BE_EMPTY
    if is_missing or any(size < 1 if isinstance(size, int) else not size > 0 for size in sizes):
        least = "above 0" if any(isinstance(size, float) for size in sizes) else "of at least 1"
        raise ValueError(f"{name} must be one or more numbers {least}, got {sizes}")


Kind = TypeVar("Kind", bound=Settings)


def run(
    kind: type[Kind],
    argv: list[str],
    name: str,
    measure: Callable[[Kind], Record],
    markdown: Callable[[Record], list[str]],
    stem: str = "",
) -> int:
    """Run `srm bench NAME`: measure, write a record with its picture, print its tables.

    `stem` is what the record's name ends with, if it is not the command's; `{0}` in it stands for
    the settings.
    """
    config = load(kind, argv, prog=f"srm bench {name}")
    command = " ".join([f"srm bench {name}", *argv])
    record_run(command, config, (stem or name).format(config), lambda: measure(config), markdown)
    return 0


def record_run(
    command: str,
    config: Settings,
    stem: str,
    measure: Callable[[], Record],
    markdown: Callable[[Record], list[str]],
) -> None:
    """Measure, write a record with its picture, print its tables."""
    record = new_record(command, getattr(config, "device", "cpu"))
    record |= {"settings": settings_of(config)}
    record |= measure()
    path = write_record(record, stem, "\n".join(markdown(record)) + "\n", config.output)
    if stem in DRAWN:
        plot_record(stem, path)


def note(entry: Record) -> Record:
    """Print what was measured at once: a command that never ends has it in its log."""
    sys.stderr.write(msgspec.json.encode(entry).decode() + "\n")
    return entry


def random_shape(width: int) -> ModelConfig:
    """Return the paper's main model of this width, as benchmarks fill it with random weights."""
    return ModelConfig(d_model=width, num_layers=8, num_heads=4, n_ctx=512, vocab_size=8192)


def table(heads: str, rows: Iterable[str]) -> list[str]:
    """Return a table in Markdown; heads, and the cells of each row, are separated by " | "."""
    return [f"| {heads} |", "|" + "---|" * len(heads.split(" | ")), *(f"| {row} |" for row in rows)]
