"""The console command `srm`: one face, each subcommand imported only when asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable

from engine.errors import SRMError

USAGE = """usage: srm COMMAND [options]

  serve     answer OpenAI-style requests over HTTP
  train     generate problems, train a tokenizer and pretrain a model
  evaluate  greedy accuracy and pass@k on held-out problems
  bench     measure the engine on this machine

`srm COMMAND --help` explains each.
"""

TRAINING = {"train", "evaluate"}


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; return its exit code."""
    args = sys.argv[1:] if argv is None else argv
    command, rest = (args[0], args[1:]) if args else ("--help", [])
    try:
        return _find(command)([command, *rest] if command in TRAINING else rest)
    except SRMError as error:
        print(f"srm {command}: {error.message}", file=sys.stderr)
        return error.exit_code


def _find(command: str) -> Callable[[list[str]], int]:
    if command == "serve":
        from server.launch import main as serve

        return serve
    if command in TRAINING:
        from training.__main__ import main as training

        return training
    if command == "bench":
        from engine.bench import main as bench

        return bench
    return _usage if command in {"--help", "-h", "help"} else _unknown


def _usage(_args: list[str]) -> int:
    print(USAGE, end="")
    return 0


def _unknown(_args: list[str]) -> int:
    print(USAGE, end="", file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main())
