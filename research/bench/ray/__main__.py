"""`python -m research.bench.ray data | serve`: a batch with a node killed, or replicas of which
one is."""

from __future__ import annotations

import sys

from research.bench.ray import data, serving
from srm.errors import ConfigError, SRMError

COMMANDS = {"data": data.main, "serve": serving.main}


def main(argv: list[str]) -> int:
    """Run one of them and return its exit code."""
    if not argv or argv[0] not in COMMANDS:
        raise ConfigError(f"python -m research.bench.ray measures data or serve; got {argv[:1]}")
    return COMMANDS[argv[0]](argv[1:])


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except SRMError as error:
        print(f"research.bench.ray: {error.message}", file=sys.stderr)
        code = error.exit_code
    sys.exit(code)
