"""`python -m srm.server api | jobs`: one process of `srm serve`, with only its own imports."""

from __future__ import annotations

import sys
from importlib import import_module

from srm.errors import SRMError
from srm.logs import printable

_MODULES = {"api": "srm.server.routes.api_process", "jobs": "srm.server.batch.jobs"}


def main(argv: list[str]) -> int:
    module = _MODULES.get(argv[0]) if argv else None
    if module is None:
        print("usage: python -m srm.server api | jobs [options]", file=sys.stderr)
        return 2
    try:
        code: int = import_module(module).main(argv[1:])
        return code
    except SRMError as error:
        print(f"{argv[0]}: {printable(error.message)}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
