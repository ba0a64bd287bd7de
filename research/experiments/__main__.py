"""`research.experiments NAME`: runs one experiment, or goes on with it, and writes its record."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from research.experiments.harness.runner import publish
from research.experiments.harness.settings import configure
from srm.errors import ConfigError, SRMError
from srm.logs import configure_command
from srm.server.commands.standard_output import INTERRUPTED

EXPERIMENTS = (
    *("mixers", "baselines", "matrices", "scaling", "forms", "throughput"),
    *("copying", "capacity", "memory", "information", "finetuning", "grpo", "rollouts", "coverage"),
    "trainers",
)
"""Modules beside this one, each imported only when asked for: some need MAX and others do not.
Each has its `Settings`, and `run`, which returns a `Report`."""


def main(argv: list[str], **constants: Any) -> int:
    """Run the experiment that argv names, with the flags that follow; return the exit code."""
    if argv[:1] in (["--help"], ["-h"]):
        print("usage: python -m research.experiments NAME [options]\n")
        print(f"NAME is one of {', '.join(EXPERIMENTS)}.")
        return 0
    if not argv or argv[0] not in EXPERIMENTS:
        raise ConfigError(f"experiments are {', '.join(EXPERIMENTS)}; got {argv[:1]}")
    experiment = import_module(f"research.experiments.{argv[0]}")
    config = configure(experiment.Settings, argv[1:], **constants)
    publish(config, argv[1:], *experiment.run(config))
    return 0


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
