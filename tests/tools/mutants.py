"""`make mutants`: one-token changes of the engine, the server and the training objective: do tests
notice?

Draws COUNT changes with a fixed SEED, whatever else is in the files, runs for each the tests that
concern its module, and prints which survived. What no test can notice stands in EQUIVALENT with the
reason, and is counted out. The tests must pass on the tree as it is, or what they notice is naught.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
WITHIN_CPU_S = 60
"""Of a run of tests: a change that makes them go on for ever is noticed."""
UNIT, WHOLE, HTTP = "tests/unit", "tests/integration/batches", "tests/integration/http"
TESTS = {
    "engine/scheduler engine/state/fair_share.py engine/state/prefixes.py engine/state/parked.py"
    " engine/state/slots.py": [
        *(f"{UNIT}/engine/scheduler", f"{UNIT}/engine/state"),
        "tests/property/test_engine_machine.py",
    ],
    "engine/process/snapshot.py engine/process/snapshot_writer.py engine/process/capture.py"
    " engine/process/durable.py": [
        *(f"{UNIT}/engine/process/test_{name}.py" for name in ("snapshot", "durable")),
        f"{WHOLE}/test_snapshots.py",
    ],
    "server/batch": [
        *(f"{UNIT}/server/batch", f"{UNIT}/server/routes/test_batches.py"),
        f"{WHOLE}/test_batches_http.py",
    ],
    "server/reply": [f"{UNIT}/server/reply", f"{HTTP}/test_streams.py"],
    "server/generation": [f"{UNIT}/server/generation", "tests/property/test_until.py"],
    "server/schema": [f"{UNIT}/server/schema", f"{UNIT}/server/http/test_refusals.py"],
    "server/dialects/rollouts": [
        *(f"{UNIT}/server/reply/test_dialect.py", "tests/integration/dialects/test_rollouts.py"),
    ],
    "engine/constraints": [f"{UNIT}/engine/constraints", "tests/property/test_schemas.py"],
    "engine/weights": [f"{UNIT}/engine/weights"],
    "training/grpo/objective.py": [f"{UNIT}/training/grpo"],
    "server/storage/store.py server/storage/database.py server/storage/rows.py"
    " server/storage/sidecars.py server/storage/upkeep.py server/storage/records.py": [
        *(f"{UNIT}/server/storage/test_store.py", f"{WHOLE}/test_files_http.py"),
    ],
}
"""By files: the tests that concern them, quick ones first."""
COPIED = ("engine", "server", "training", "srm", "tests")
"""Folders that a changed tree has of its own: the links of `srm` lead to those beside it."""
OTHER = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "+": "-", "-": "+",
         "+=": "-=", "-=": "+=", "//": "*", "%": "*", "and": "or", "or": "and", "True": "False",
         "False": "True", "min": "max", "max": "min", "any": "all", "all": "any", "0": "1",
         "1": "2", "2": "3", "is": "is not", "not": "", "if": "if not", "elif": "elif not",
         "while": "while not", "break": "continue", "continue": "break"}  # fmt: skip
EQUIVALENT = {
    ("engine/process/snapshot_writer.py", "waiting, size = [], 0", "0"):
    "states are written in pieces of about that size: their bytes and checksums are the same",
    ("server/batch/jobs.py", "if time.monotonic() >= tidy_at:", ">="):
    "no two readings of the clock are a minute apart to the last bit",
    ("engine/scheduler/wait_queues.py", "elif len(self._lines) > 2:", ">"):
    "two are what the branch before it takes",
}  # fmt: skip
"""By file, line and changed token: why nothing can tell it from the original."""


class Mutant(NamedTuple):
    """A file with one token changed; or with none, where `old` is empty."""

    path: str
    row: int
    line: str
    old: str
    source: str

    def __str__(self) -> str:
        return f"{self.path}:{self.row}: {self.old} -> {OTHER[self.old]}    {self.line}"

    def rank(self, seed: int) -> bytes:
        """As good as chance, and as long as its line stays, the same."""
        return blake2b(repr((seed, self.path, self.line, self.old)).encode()).digest()


def mutants(path: str) -> Iterator[Mutant]:
    """All changes of a file that leave it Python."""
    text = (ROOT / path).read_text()
    lines = text.splitlines(keepends=True)
    for generate_token in tokenize.generate_tokens(io.StringIO(text).readline):
        (row, start), (_, stop), line = (
            generate_token.start,
            generate_token.end,
            lines[min(generate_token.start[0], len(lines)) - 1],
        )
        if generate_token.string in OTHER and not line.lstrip().startswith(
            ("import ", "from ", "@")
        ):
            changed = f"{line[:start]}{OTHER[generate_token.string]}{line[stop:]}"
            source = "".join([*lines[: row - 1], changed, *lines[row:]])
            try:
                compile(source, path, "exec")
            except SyntaxError:
                continue
            yield Mutant(path, row, line.strip(), generate_token.string, source)


def noticed(mutant: Mutant, tests: list[str]) -> str:
    """What fails of the tests on a copy of the tree with this change; empty where it survives."""
    with tempfile.TemporaryDirectory() as folder:
        for entry in ROOT.iterdir():
            if entry.name in COPIED:
                shutil.copytree(entry, Path(folder, entry.name), symlinks=True)
            elif not entry.name.startswith("."):
                Path(folder, entry.name).symlink_to(entry)
        Path(folder, mutant.path).write_text(mutant.source)
        command = [sys.executable, "-m", "pytest", "-xqm", "not slow", "-p", "no:cacheprovider"]
        own = Path(mutant.path).stem  # whose tests come first
        command += ["--hypothesis-profile=mutants", *sorted(tests, key=lambda one: own not in one)]
        limited = ["bash", "-c", f'ulimit -t {WITHIN_CPU_S}; exec "$@"', "bash", *command]
        try:
            done = subprocess.run(
                limited, cwd=folder, capture_output=True, timeout=1200, check=False
            )
        except subprocess.TimeoutExpired:
            return "no end"
    failed = re.search(rb"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return "" if not done.returncode else failed[1].decode() if failed else f"{done.returncode}"


def below(places: Iterable[str], pattern: str) -> list[str]:
    """These files, and those of these folders whose names match."""
    paths = [ROOT / place for place in places]
    results = [sorted(path.glob(pattern)) if path.is_dir() else [path] for path in paths]
    return [str(path.relative_to(ROOT)) for some in results for path in some]


def main() -> None:
    asked = {"COUNT": 60, "SEED": 14, "JOBS": 2}
    count, seed, jobs = (int(os.environ.get(name, usual)) for name, usual in asked.items())
    named = {place for files, places in TESTS.items() for place in [*files.split(), *places]}
    assert not (gone := [place for place in named if not (ROOT / place).exists()]), gone
    groups = [(below(files.split(), "[!_]*.py"), below(places, "test_*.py"))
              for files, places in TESTS.items()]  # fmt: skip
    concern = {path: tests for files, tests in groups for path in files}
    possible = [mutant for path in concern for mutant in mutants(path)]
    drawn = sorted(possible, key=lambda one: one.rank(seed))[:count]
    wanted = [token for token in drawn if (token.path, token.line, token.old) not in EQUIVALENT]
    died = 0
    with ThreadPoolExecutor(jobs) as pool:
        same = [Mutant(path, 0, "", "", (ROOT / path).read_text()) for (path, *_), _ in groups]
        for failed in pool.map(noticed, same, (tests for _, tests in groups)):
            assert not failed, f"{failed} fails without any change"
        running = {pool.submit(noticed, item, concern[item.path]): item for item in wanted}
        for done in as_completed(running):
            died += bool(done.result())
            print(f"{running[done]}\n    {done.result() or 'SURVIVED'}", flush=True)
    print(f"{count} drawn, {count - len(wanted)} equivalent, {died} of {len(wanted)} died")


if __name__ == "__main__":
    main()
