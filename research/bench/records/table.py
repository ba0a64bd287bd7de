"""`srm bench table`: writes the newest records' figures into the pages that state them.

A page has `<!-- figures: NAME -->` and `<!-- end of figures -->`, and between them what
`research.bench.records.figures` makes of the newest whole record of that kind, with its command and
a link; in a model's card, what it makes of the files beside it. So no figure there is
typed, and `--check` says whether any is out of date.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import msgspec

from research.bench.records.figures import CARD, FIGURES, is_whole
from srm.engine.config import DEMO_MODEL, GRPO_MODEL
from srm.errors import ConfigError
from srm.loadtest.records import RECORDS, ROOT
from srm.settings import load

PAGES = (
    *(ROOT / "README.md", DEMO_MODEL / "README.md", GRPO_MODEL / "README.md"),
    *sorted((ROOT / "docs").glob("*.md")),
)
END = "<!-- end of figures -->"
BLOCK = re.compile(rf"<!-- figures: ([\w-]+) -->\n(.*?){END}", re.S)


class TableConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm bench table`."""

    check: bool = False
    """Whether to write nothing, and only say which page does not agree with its records."""


def main(argv: list[str]) -> int:
    """Write the pages, or with `check` say which are out of date; then return 1 if any is."""
    config = load(TableConfig, argv, prog="srm bench table")
    stale = [page for page in PAGES if written(page, RECORDS) != page.read_text()]
    for page in stale:
        if not config.check:
            page.write_text(written(page, RECORDS))
        output = "does not agree with its records: srm bench table" if config.check else "written"
        sys.stdout.write(f"{page.relative_to(ROOT)}: {output}\n")
    return 1 if config.check and stale else 0


def written(page: Path, records: Path) -> str:
    """Return the page's text with the figures of the records.

    Raises ConfigError if a page asks for unknown figures.
    """

    def block(match: re.Match[str]) -> str:
        name = match[1]
        if name in CARD:
            lines = "\n".join(CARD[name](page.parent))
            return f"<!-- figures: {name} -->\n{lines}\n{END}"
        if name not in FIGURES:
            allowed = ", ".join((*FIGURES, *CARD))
            raise ConfigError(f"{page}: figures: {name} must be one of {allowed}")
        kind, render = FIGURES[name]
        last = newest(kind, records)
        if last is None:
            return f"<!-- figures: {name} -->\nNot measured yet.\n{END}"
        path, record = last
        report = os.path.relpath(path.with_suffix(".md"), page.parent)
        by = f"`{record['command']}` on " if record["command"].startswith("srm ") else "On "
        source = f"{by}{record['machine']} ([record]({report}))"  # of peers it has the command
        lines = "\n".join(render(record))
        return f"<!-- figures: {name} -->\n{lines}\n\n{source}\n{END}"

    return BLOCK.sub(block, page.read_text())


def newest(kind: str, records: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the newest whole record of a kind, if there is any.

    Records of one day are ordered by their time, which earlier records lack.
    """
    results = [
        (record.get("time", record["date"]), path, record)
        for path in records.glob(f"*-{kind}.json")
        if is_whole(record := msgspec.json.decode(path.read_bytes()))
    ]
    return max(results, key=lambda result: result[:2])[1:] if results else None
