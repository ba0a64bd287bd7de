"""`python -m tests.tools.measures [--at COMMIT] [--names]`: size and uniformity of the code.

Prints a table; `--names` says below it what was counted. A change of names changes no figure, but
for the files in ROAD and ROAD_TESTS: who splits or renames one of these adds its new name there.
Rates take minutes and two servers, so the last row only says who measures them.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from tests.test_architecture import FUNCTION, ROOT, forbidden_identifiers
from tests.tools.syntax import (
    count_lines,
    count_parameters,
    fields,
    fills_json,
    find_private,
    has_token_fields,
)

PRODUCT = ("engine", "server", "loadtest", "training", "mojo_kernels")
REST = ("bench", "experiments", "deploy", "srm")
CODE = {".py", ".mojo", ".js", ".html", ".css", ".sh", ".c", ".h"}
ROAD = """
  engine/scheduler/completion.py engine/scheduler/outputs.py engine/steps/token_deltas.py
  engine/client/streams.py engine/client/token_table.py engine/client/token_queues.py
  engine/client/alternatives.py engine/client/unread.py
  server/generation/generation.py server/generation/responder.py
  server/generation/stream_events.py server/generation/encoding.py server/generation/rendering.py
  server/generation/event_writer.py server/generation/stop_strings.py
  server/generation/detokenize.py server/generation/read_ahead.py server/text/sample.py
  server/text/logprobs.py server/text/score_columns.py server/text/packed.py
  engine/steps/tokens.py server/text/stream.py server/reply/*.py
""".split()
"""From the device's result to bytes: as it was at 446a5ca, and what is to take its place."""
ENCODERS = ("server/routes/completions.py", "server/routes/chat.py")
"""Of these the road has only the classes that are called so."""
ROAD_TESTS = """
  tests/unit/engine/client/test_streams.py tests/unit/engine/client/test_token_table.py
  tests/unit/engine/client/test_unread.py
  tests/unit/server/generation/test_event_writer.py tests/unit/server/generation/test_pacing.py
  tests/unit/server/generation/test_read_ahead.py tests/unit/server/generation/test_rendering.py
  tests/unit/server/generation/test_stop_strings.py tests/unit/server/text/test_logprobs.py
  tests/unit/server/text/test_sample.py tests/unit/server/text/test_score_columns.py
  tests/integration/http/test_streams.py
  tests/unit/engine/steps/test_tokens.py tests/unit/server/text/test_stream.py
  tests/unit/server/reply/*.py
""".split()
RECORD = re.compile(r"docs/benchmarks/\d{4}-\d\d-\d\d-[0-9a-f]+-(.+)\.\w+")
ENVIRONMENT = """
import difflib, sys
difflib.get_close_matches = lambda *_, **__: []  # takes most of the time
import srm.__main__ as srm
for name in sys.argv[1:]:
    try:
        srm.check_environment({name: ""})
    except srm.ConfigError:
        continue
    print(name)
"""
"""Prints those of some variables that no command refuses."""
Row = tuple[str, str | list[str], str]
"""Figure, value or what is counted, goal."""


class Tree:
    """The files of one commit, in a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        git = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.check_output(git, cwd=root, text=True).split("\n")
        self.files = [name for name in listed if name and (root / name).is_file()]
        self.modules = {
            name: ast.parse((root / name).read_text())
            for name in self.files
            if name.endswith(".py") and _top(name) in {*PRODUCT, *REST, "tests"}
        }
        self.nodes = {name: [*ast.walk(module)] for name, module in self.modules.items()}

    def count_lines(self, *patterns: str) -> int:
        """Count the lines of these files, some of which may not be there."""
        paths = [path for pattern in patterns for path in self.root.glob(pattern)]
        return sum(path.read_text().count("\n") for path in paths)

    def count_code(self, *tops: str) -> str:
        """Count the lines of code below these folders."""
        code = [name for name in self.files if _top(name) in tops and Path(name).suffix in CODE]
        return f"{self.count_lines(*code):,}"

    def run(self, *words: str) -> str:
        """Return what a Python program prints that imports this tree."""
        environ = {name: value for name, value in os.environ.items() if name[:4] != "SRM_"}
        environ["PYTHONPATH"] = str(self.root)
        python = [sys.executable, "-P"]
        return subprocess.check_output([*python, *words], cwd=self.root, env=environ, text=True)


def _top(name: str) -> str:
    return name.split("/", 1)[0]


def measure(tree: Tree) -> list[Row]:
    """Return every row of the table."""
    ours = {name: nodes for name, nodes in tree.nodes.items() if _top(name) != "tests"}
    classes = [node for nodes in ours.values() for node in nodes if isinstance(node, ast.ClassDef)]
    functions = [
        (node, f"{name}:{node.lineno} {node.name}")
        for name, nodes in ours.items()
        for node in nodes
        if isinstance(node, FUNCTION)
    ]
    accesses = [
        f"{name}:{getattr(node, 'lineno', 0)} {private}"
        for name, nodes in tree.nodes.items()
        if _top(name) == "tests"
        for node in nodes
        for private in find_private(node)
    ]
    records = [match[1] for name in tree.files if (match := RECORD.fullmatch(name))]
    road = tree.count_lines(*ROAD) + _count_encoder_lines(tree)
    sizes = tree.count_code(*PRODUCT), tree.count_code("bench"), tree.count_code("tests")
    return [
        *_run_stream(tree),
        ("classes with four of token ids, logprobs, top ids, top logprobs, reason",
         [node.name for node in classes if has_token_fields(node)], "≤ 2"),
        ("places that fill JSON by a sentinel",
         [name for name, nodes in ours.items() if _top(name) == "server" and fills_json(nodes)],
         "1"),
        ("lines of the road; of its unit and stream tests",
         f"{road:,}; {tree.count_lines(*ROAD_TESTS):,}", "≤ 2,200; ≤ 1,100"),
        *_find_words(tree),
        ("public class names with two meanings", _find_doubles(tree), "≤ 4"),
        ("functions with 7 parameters or more",
         [place for node, place in functions if count_parameters(node) >= 7], "≤ 6"),
        ("functions over 50 lines",
         [place for node, place in functions if count_lines(node) > 50], "≤ 3"),
        ("lines of product / bench / tests", " / ".join(sizes), "−4,000 / −1,500 / −1,500"),
        ("private accesses in tests", accesses, "≤ 40"),
        ("names of settings in the environment", _find_variables(tree, classes), "≤ 85"),
        ("records: kinds, files", f"{len({*records})}, {len(records)}", "≤ 45 kinds"),
        ("rate of the API process; with logprobs; n = 1,000; with stop strings",
         "`srm bench against --base 446a5ca`", "≥ 0.98; the last ≤ 1.3 × the time of plain"),
    ]  # fmt: skip


def _run_stream(tree: Tree) -> list[Row]:
    """Have the tree's own engine and server answer one plain stream."""
    ways = json.loads(tree.run(str(Path(__file__).with_name("road.py"))))
    way_back = " / ".join(map(str, ways["back"]))
    return [
        ("files run by a plain streamed completion", str(ways["files"]), "≤ 50"),
        ("on the way back: files / functions / deepest", way_back, "≤ 14 / ≤ 70 / ≤ 10"),
    ]


def _count_encoder_lines(tree: Tree) -> int:
    parts = [part for name in ENCODERS for part in tree.modules[name].body]
    return sum(count_lines(part) for part in parts if "Encoder" in getattr(part, "name", ""))


def _find_words(tree: Tree) -> list[Row]:
    """Find forbidden identifiers where they are made."""
    words: dict[str, list[str]] = {"product": [], "bench and others": [], "tests": []}
    for name, module in tree.modules.items():
        part = {"tests": "tests", **dict.fromkeys(REST, "bench and others")}
        words[part.get(_top(name), "product")] += forbidden_identifiers(module)
    return [(f"forbidden identifiers in {part}", names, "0") for part, names in words.items()]


def _find_doubles(tree: Tree) -> list[str]:
    """Find public classes of one name at the top of modules."""
    bodies = [module.body for name, module in tree.modules.items() if _top(name) != "tests"]
    names = Counter(part.name for body in bodies for part in body if isinstance(part, ast.ClassDef))
    return [name for name, count in names.items() if count > 1 and not name.startswith("_")]


def _find_variables(tree: Tree, classes: list[ast.ClassDef]) -> list[str]:
    """Find the fields of classes that a variable may set."""
    names = {field for node in classes for field in fields(node)}
    return tree.run("-c", ENVIRONMENT, *(f"SRM_{field.upper()}" for field in names)).split()


@contextmanager
def _laid_out(commit: str) -> Iterator[Path]:
    """Lay a commit out in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        root, git = Path(folder) / "tree", ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(root), commit], check=True)
        try:
            yield root
        finally:
            subprocess.run([*git, "remove", "--force", str(root)], check=True)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.measures")
    parser.add_argument("--at", metavar="COMMIT", default="", help="measure this commit")
    parser.add_argument("--names", action="store_true", help="say what is counted, too")
    args = parser.parse_args(argv)
    with _laid_out(args.at) if args.at else nullcontext(ROOT) as root:
        rows = measure(Tree(root))
    print(f"| figure | {args.at or 'now'} | goal |\n| --- | --- | --- |")
    for figure, value, goal in rows:
        print(f"| {figure} | {value if isinstance(value, str) else len(value)} | {goal} |")
    for figure, value, _ in rows if args.names else ():
        if not isinstance(value, str):
            counts = Counter(value).most_common()
            print(f"\n{figure}:", *(f"{name} × {count}" for name, count in counts), sep="\n  ")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
