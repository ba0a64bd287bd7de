"""The table of docs/clients-called.md: packages, what was called of them, and what came of it.

`make test-clients` writes it when all its tests have passed; nobody types it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from importlib.metadata import distributions
from typing import NamedTuple

from tests.kit.serving import ROOT

VENVS = [ROOT / f".venv-{name}" for name in ("clients", "agents", "verifiers", "ray")]
CLIENTS, AGENTS, VERIFIERS, RAY = VENVS
NODE = AGENTS / "node"
PAGE = ROOT / "docs" / "clients-called.md"
_TABLE = re.compile(
    r"(?<=<!-- written by make test-clients -->\n).*?(?=<!-- end of table -->)", re.S
)


class Row(NamedTuple):
    package: str
    called: str
    result: str


def version(package: str) -> str:
    """That of an installed package, of Python or of Node."""
    sites = [str(site) for venv in VENVS for site in venv.glob("lib/*/site-packages")]
    for installed in distributions(name=package, path=sites):
        return installed.version
    shown: str = json.loads((NODE / "node_modules" / package / "package.json").read_text())[
        "version"
    ]
    return shown


def write(rows: Iterable[Row]) -> None:
    lines = ["| package | version | called | result |", "|---|---|---|---|"]
    lines += [
        f"| {row.package} | {version(row.package)} | {row.called} | {row.result} |"
        for row in sorted({*rows}, key=lambda row: (row.package.casefold(), row))
    ]
    table = "".join(f"{line}\n" for line in lines)
    PAGE.write_text(_TABLE.sub(lambda _old: table, PAGE.read_text()))
