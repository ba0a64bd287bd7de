"""`python -m deploy.ray INPUT -o FOLDER`: `srm batch` over a Ray cluster."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from engine.errors import ConfigError, SRMError


def main(argv: list[str]) -> int:
    """Run it. Raises SRMError, a ConfigError among others where Ray is not installed."""
    if find_spec("ray") is None:
        raise ConfigError("Ray is not installed: pip install 'ray[data,serve]' pyarrow")
    from deploy.ray import batch  # noqa: PLC0415

    return batch.main(argv)


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except SRMError as error:
        print(f"deploy.ray: {error.message}", file=sys.stderr)
        code = error.exit_code
    sys.exit(code)
