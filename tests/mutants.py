"""`make mutants`: one-token changes of scheduling, snapshots, batches and store: do tests notice?

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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
WITHIN_CPU_S = 60
"""Of a run of tests: a change that makes them go on for ever is noticed."""
ENGINE, SERVER, WHOLE = "tests/unit/engine/", "tests/unit/server/", "tests/integration/"
MACHINE = "tests/property/test_engine_machine.py"
NAMES = "scheduler shares turns cut prefill prefixes parked parking slots columns scoring"
SCHEDULING = [*(f"{ENGINE}test_{name}.py" for name in NAMES.split()), MACHINE]
TESTS = {
    "engine/scheduler admission turns shares completion assembly victims lines prefill prefixes"
    " parked parking slots": SCHEDULING,
    "engine/snapshot snapshot_writer capture durable":
    [f"{ENGINE}test_snapshot.py", f"{ENGINE}test_durable.py", f"{WHOLE}test_snapshots.py"],
    "server/batch_job batch_input line_runner sending room batch_lines result_files part_file jobs":
    [*(f"{SERVER}test_{name}.py" for name in
       "batch_input line_runner sending room batch_lines part_file jobs batches".split()),
     f"{WHOLE}test_batches_http.py"],
    "server/store store_rows store_database store_sidecars store_upkeep store_records":
    [f"{SERVER}test_store.py", f"{WHOLE}test_files_http.py"],
}  # fmt: skip
"""By package and modules: the tests that concern them, quick ones first."""
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
    for one in tokenize.generate_tokens(io.StringIO(text).readline):
        (row, start), (_, stop), line = one.start, one.end, lines[min(one.start[0], len(lines)) - 1]
        if one.string in OTHER and not line.lstrip().startswith(("import ", "from ", "@")):
            changed = f"{line[:start]}{OTHER[one.string]}{line[stop:]}"
            source = "".join([*lines[: row - 1], changed, *lines[row:]])
            try:
                compile(source, path, "exec")
            except SyntaxError:
                continue
            yield Mutant(path, row, line.strip(), one.string, source)


def noticed(mutant: Mutant, tests: list[str]) -> str:
    """What fails of the tests on a copy of the tree with this change; empty where it survives."""
    with tempfile.TemporaryDirectory() as folder:
        for entry in ROOT.iterdir():
            if entry.name in ("engine", "server", "tests"):
                shutil.copytree(entry, Path(folder, entry.name))
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


def main() -> None:
    count, seed, jobs = (int(os.environ.get(*given)) for given in
                         (("COUNT", "60"), ("SEED", "14"), ("JOBS", "2")))  # fmt: skip
    concern = {f"{modules.split('/')[0]}/{name}.py": tests for modules, tests in TESTS.items()
               for name in modules.split("/")[1].split()}  # fmt: skip
    possible = [one for path in concern for one in mutants(path)]
    drawn = sorted(possible, key=lambda one: one.rank(seed))[:count]
    wanted = [one for one in drawn if (one.path, one.line, one.old) not in EQUIVALENT]
    survivors = 0
    with ThreadPoolExecutor(jobs) as pool:
        same = {path: Mutant(path, 0, "", "", (ROOT / path).read_text()) for path in concern}
        first = {modules.split()[0] + ".py": tests for modules, tests in TESTS.items()}
        for failed in pool.map(lambda path: noticed(same[path], first[path]), first):
            assert not failed, f"{failed} fails without any change"
        asked = {pool.submit(noticed, one, concern[one.path]): one for one in wanted}
        for done in as_completed(asked):
            survivors += not done.result()
            print(f"{asked[done]}\n    {done.result() or 'SURVIVED'}", flush=True)
    died = len(wanted) - survivors
    print(f"{count} drawn, {count - len(wanted)} equivalent, {died} of {len(wanted)} died")


if __name__ == "__main__":
    main()
