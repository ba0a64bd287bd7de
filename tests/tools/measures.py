"""`make measures`, or `python -m tests.tools.measures [COMMIT ...]`: how much there is, by room.

Counts what git has: of the working tree, or of commits beside each other. Words are those of pages
that people write, text in tables included; what programs write into pages is counted apart, and
records not at all.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = (".py", ".mojo", ".js", ".html", ".css")
ROOMS = {
    "product": ("engine", "server", "mojo_kernels", "loadtest", "training", "srm"),
    "research and deploy": ("research", "bench", "experiments", "deploy"),
    "tests": ("tests",),
}
"""Top-level folders, of today and before."""
RECORDS = ("research/records/", "research/records/")
REFERENCE = "docs/reference/"
"""Pages that programs write."""
_WRITTEN = re.compile(r"<!-- (table|figures|written by)\b.*?<!-- end of \w+ -->", re.S)
_APART = ("records", "decisions", "benchmarks", "requirements", "reference")
"""Folders that may hold any number of files."""


def measure(commit: str | None = None, root: Path = ROOT) -> dict[str, int]:
    """Return the measures of a commit, or of the working tree, by name."""
    paths = _paths(commit, root)
    lines, words = Counter[str](), Counter[str]()
    room_of = {folder: room for room, folders in ROOMS.items() for folder in folders}
    pages = [path for path in paths if path.endswith(".md") and not path.startswith(RECORDS)]
    code = [path for path in paths if path.endswith(CODE) and path.split("/")[0] in room_of]
    for path, text in _texts(commit, root, [*code, *pages]):
        if path in pages:
            by_hand = "" if path.startswith(REFERENCE) else _WRITTEN.sub("", text)
            words["by hand"] += len(by_hand.split())
            words["written by programs"] += len(text.split()) - len(by_hand.split())
        else:
            lines[room_of[path.split("/")[0]]] += text.count("\n")
    folders = Counter(path.rpartition("/")[0] for path in paths if path.endswith(CODE))
    kinds = {re.sub(r".*-", "", Path(path).stem) for path in paths if path.startswith(RECORDS)}
    records = [path for path in paths if path.startswith(RECORDS) and path.endswith(".md")]
    return {
        **{f"lines: {room}": lines[room] for room in ROOMS},
        **{f"words {kind}": words[kind] for kind in ("by hand", "written by programs")},
        "entries at the top": len({path.split("/")[0] for path in paths}),
        "files in the largest folder of sources": max(
            count for folder, count in folders.items() if not folder.endswith(_APART)
        ),
        "records": len(records),
        "kinds of records": len(kinds),
    }


def _git(root: Path, *arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True).stdout


def _paths(commit: str | None, root: Path) -> list[str]:
    listed = ["ls-tree", "-r", "-z", "--name-only", commit] if commit else ["ls-files", "-z"]
    paths = _git(root, *listed).decode().split("\0")[:-1]
    return paths if commit else [path for path in paths if (root / path).exists()]


def _texts(commit: str | None, root: Path, paths: Iterable[str]) -> Iterable[tuple[str, str]]:
    """Yield the texts of these files, links to folders left out."""
    for path in paths:
        if commit:
            yield path, _git(root, "show", f"{commit}:{path}").decode()
        elif (root / path).is_file():
            yield path, (root / path).read_text()


def main(commits: list[str]) -> int:
    """Print a table: a column for each commit, or one of the working tree."""
    columns = [measure(commit) for commit in commits] or [measure()]
    print("| measure | " + " | ".join(commits or ["now"]) + " |")
    print("|---" * (1 + len(columns)) + "|")
    for name in columns[0]:
        print(f"| {name} | " + " | ".join(f"{own[name]:,}" for own in columns) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
