"""`research.experiments NAME`: runs one experiment, or goes on with it, and writes its record.

`research.experiments page RECORD.json` makes a record's page again from its numbers alone.
"""

from __future__ import annotations

import re
import sys
from difflib import unified_diff
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from research.experiments.harness.runner import publish, reported
from research.experiments.harness.settings import configure
from srm.errors import UNDECODABLE, ConfigError, SRMError
from srm.loadtest.records import page_of
from srm.loadtest.scenario import as_path
from srm.logs import configure_command
from srm.server.commands.standard_output import INTERRUPTED

EXPERIMENTS = (
    *("mixers", "matrices", "scaling", "throughput", "copying", "capacity", "memory"),
    *("finetuning", "grpo", "rollouts", "coverage", "trainers", "baselines", "forms"),
    "information",
)
"""Modules beside this one, each imported only when asked for: some need MAX and others do not.
Each has its `Settings`, `run`, which returns a `Report`, and `page`, which makes its text of
settings and results alone."""


def main(argv: list[str], **constants: Any) -> int:
    """Run the experiment that argv names, with the flags that follow; return the exit code."""
    if argv[:1] in (["--help"], ["-h"]):
        print("usage: python -m research.experiments NAME [options]")
        print("       python -m research.experiments page RECORD.json\n")
        print(f"NAME is one of {', '.join(EXPERIMENTS)}.")
        return 0
    if argv[:1] == ["page"]:
        if len(argv) != 2:
            raise ConfigError(f"page takes one file, a record's .json; got {argv[1:]}")
        return compare(Path(argv[1]))
    if not argv or argv[0] not in EXPERIMENTS:
        raise ConfigError(f"experiments are {', '.join(EXPERIMENTS)}; got {argv[:1]}")
    experiment = import_module(f"research.experiments.{argv[0]}")
    config = configure(experiment.Settings, argv[1:], **constants)
    publish(config, argv[1:], *experiment.run(config))
    return 0


def compare(path: Path) -> int:
    """Make a record's page again and print where the page beside it differs, by its lines; return
    the exit code, 1 where it does. Raises ConfigError for a record that no page can be made of."""
    page = path.with_suffix(".md")
    try:
        written = page.read_text()
        record = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        remade = remake(record, path.with_suffix(".svg").name)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from None
    except (*UNDECODABLE, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        fault = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{path}: no page can be made of it: {fault}") from None
    both = written.split("\n"), remade.split("\n")
    lines = [*unified_diff(*both, str(page), f"numbers of {path}", n=0, lineterm="")]
    print("\n".join(lines) or f"{page} is what its numbers say")
    return 1 if lines else 0


def remake(record: dict[str, Any], picture: str) -> str:
    """Return a record's page, made by the experiment itself of settings and results. Raises
    ConfigError for one of another command."""
    command = re.match(
        r"(?:python -m (?:research\.)?experiments|srm evaluate) (\w+)", record["command"]
    )
    name = command[1] if command else ""
    if name == "passk":
        remade: str = import_module("srm.training.passk.command").remake_page(record, picture)
        return remade
    if name not in EXPERIMENTS:
        raise ConfigError(
            f"pages are made again for {', '.join(EXPERIMENTS)}, passk; got a record of "
            f"{name or record['command']!r}"
        )
    experiment = import_module(f"research.experiments.{name}")
    config = msgspec.convert(record["settings"], experiment.Settings, dec_hook=as_path)
    blocks = experiment.page(config, record["results"])
    return page_of(record, f"experiment-{name}", reported(record, blocks, picture))


if __name__ == "__main__":
    configure_command()
    try:
        code = main(sys.argv[1:])
    except SRMError as error:
        print(f"experiments: {error.message}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        print("experiments: interrupted; the same command goes on at this case", file=sys.stderr)
        code = INTERRUPTED
    sys.exit(code)
