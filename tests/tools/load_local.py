"""`make load`: `srm serve` on this machine, loaded by the ci scenario, and stopped.

`python -m tests.tools.load_local MODEL [flags of srm loadtest run]`; the exit code is the
latter's.
"""

from __future__ import annotations

import sys

import srm.__main__ as srm
from research.bench.host.serving import serving


def main(argv: list[str]) -> int:
    model, *flags = argv
    with serving(f"--model={model}") as server:
        return srm.main(["loadtest", "run", "ci", f"--url={server.url}", *flags])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
