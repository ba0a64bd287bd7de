"""`make test-fast`: the quick tests of what changed since BASE, in under a minute.

Those are changed tests, the rules of the code and the pages, and then: for a changed module the
tests that import it, or if none does, those that import what imports it, and so on; for another
file the tests that name it. After SECONDS no further test starts, and that is said.

pytest-testmon would choose by coverage, but from a database of a whole run, which a newcomer has
not, and without what a test runs in other processes.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterable
from os import environ
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 40.0
ALWAYS = ["tests/test_architecture.py", "tests/test_docs.py"]
LEFT_OUT = "python_examples_run_one_after_the_other shell_examples_run a_trainer_changes_weights"
"""Tests of the pages that start servers."""
QUICK = ("tests/unit/", "tests/property/", "tests/deploy/")
"""Folders of tests that seldom start processes, in the order in which they run."""
PARTS = ("engine", "server", "loadtest", "training")
"""Folders whose modules are imported as the package srm's."""


def list_changed(base: str, root: Path = ROOT) -> list[str]:
    """Return the files that differ from where this branch left `base`, new ones too."""
    try:
        start = _git(root, "merge-base", "HEAD", base).strip()
    except subprocess.CalledProcessError:
        raise SystemExit(f"BASE = {base!r}: no commit that HEAD comes from; name another") from None
    new = _git(root, "ls-files", "--others", "--exclude-standard")
    return (_git(root, "diff", "--name-only", start) + new).splitlines()


def _git(root: Path, *arguments: str) -> str:
    return subprocess.check_output(["git", *arguments], cwd=root, text=True)


def find_tests(path: str, texts: dict[str, str]) -> list[str]:
    """Return the tests that a changed file concerns, of the Python files of `texts`, by path."""
    if is_test(path):
        return [path] if path in texts else []
    quick = [name for top in QUICK for name in texts if is_test(name) and name.startswith(top)]
    if not path.endswith(".py"):  # pages are tested always
        return [name for name in quick if Path(path).name in texts[name] and path[-3:] != ".md"]
    level, seen = [path], {path}
    while level:
        pattern = re.compile("|".join(map(match_imports, level)), re.M)
        level = [name for name in texts if name not in seen and pattern.search(texts[name])]
        if nearest := [name for name in quick if name in level]:
            return nearest
        seen.update(level)
    return []


def is_test(path: str) -> bool:
    return re.fullmatch(r"tests/(.*/)?test_\w+\.py", path) is not None


def match_imports(path: str) -> str:
    """Return a pattern of the statements that import this module."""
    *parents, name = Path(path).with_suffix("").parts
    package = r"\.".join((["srm"] if path.startswith(PARTS) else []) + parents)
    return rf"^[ \t]*(?:from|import) {package}(?:\.{name}\b| import (?:\([^)]*|.*)\b{name}\b)"


class Limit:
    """A plugin of pytest: ends a run between two tests after so many seconds."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds
        self.cut: pytest.Session | None = None

    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        if nextitem and time.monotonic() >= self.end:
            self.cut = item.session
            item.session.shouldstop = "the time is over; `make test` runs the others too"


def run(arguments: Iterable[str], seconds: float) -> int:
    """Return 0 if none of the tests failed that ran in the time, otherwise an exit status."""
    limit = Limit(seconds)
    status = pytest.main([*arguments], plugins=[limit])
    return min(limit.cut.testsfailed, 1) if limit.cut else status


def main() -> int:
    names = _git(ROOT, "ls-files", "-co", "--exclude-standard", "*.py").splitlines()
    texts = {name: (ROOT / name).read_text() for name in names if (ROOT / name).is_file()}
    tests = {path: find_tests(path, texts) for path in list_changed(environ["BASE"])}
    for path in [path for path in tests if not tests[path] and not path.endswith(".md")]:
        print(f"{path}: no quick test concerns it; see `make test`")
    chosen = [test for path in sorted(tests, key=is_test, reverse=True) for test in tests[path]]
    own = [test for test in chosen if test in tests]
    left_out = [f"--deselect=tests/test_docs.py::test_{name}" for name in LEFT_OUT.split()]
    marks = ["-q", "-m", "not slow and not gpu and not clients"]
    return run([*marks, *left_out, *dict.fromkeys([*own, *ALWAYS, *chosen])], SECONDS)


if __name__ == "__main__":
    sys.exit(main())
