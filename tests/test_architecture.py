"""The import rules of the project, as data. ARCHITECTURE.md explains them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

_ENGINE = ("engine", "engine.constraints", "engine.steps")
_SERVES = ("engine", "engine.client", "engine.steps.tokens")
"""What servers see of the engine: its messages and settings, and the client of its process."""
_EDGE = ("server", "server.schema", "server.http")
_ANSWERS = (*_EDGE, "server.text", "server.generation", "server.reply")
_OPENAI = ("server.dialects.completions", "server.dialects.chat")
_DIALECTS = (*_OPENAI, *map("server.dialects.{}".format, ("responses", "messages", "rollouts")))
_REPORTS = ("loadtest", "loadtest.analysis", "loadtest.client")
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "engine": (),
    "engine.constraints": ("engine",),
    "engine.steps": ("engine", "engine.constraints"),
    "engine.client": _ENGINE,
    "engine.state": _ENGINE,
    "engine.weights": _ENGINE,
    "engine.pytorch": (*_ENGINE, "engine.state", "engine.weights"),
    "engine.device": (*_ENGINE, "engine.state", "engine.weights"),
    "engine.scheduler": (*_ENGINE, "engine.state"),
    "engine.process": (*_ENGINE, "engine.state", "engine.weights", "engine.scheduler"),
    "engine.python": (
        *(*_ENGINE, "engine.state", "engine.weights", "engine.device", "engine.process"),
    ),
    "server": (*_SERVES, "engine.process.watchdog"),
    "server.schema": (*_SERVES, "server"),
    "server.http": (*_SERVES, "server", "server.schema"),
    "server.storage": (*_SERVES, *_EDGE),
    "server.text": (*_SERVES, "server", "server.schema", "engine.constraints"),
    "server.supervise": (*_SERVES, *_EDGE, "server.text", "engine.process.watchdog"),
    "server.generation": (
        *(*_SERVES, *_EDGE, "server.text", "engine.constraints.share_lines"),
        "server.storage.states",
    ),
    "server.reply": (*_SERVES, *_EDGE, "server.text", "server.generation"),
    "server.dialects.completions": (*_SERVES, *_ANSWERS),
    "server.dialects.chat": (*_SERVES, *_ANSWERS, "server.dialects.completions"),
    "server.dialects.responses": (*_SERVES, *_ANSWERS, *_OPENAI),
    "server.dialects.messages": (*_SERVES, *_ANSWERS, *_OPENAI),
    "server.dialects.rollouts": (*_SERVES, *_ANSWERS, *_OPENAI),
    "server.routes": (*_SERVES, *_ANSWERS, *_DIALECTS, "server.storage"),
    "server.batch": (*_SERVES, *_ANSWERS, *_DIALECTS, "server.storage", "server.routes"),
    "server.commands": (
        *(*_SERVES, *_ANSWERS, *_DIALECTS, "server.storage", "server.routes", "server.batch"),
        "server.supervise",
    ),
    "loadtest": (),
    "loadtest.workload": ("loadtest",),
    "loadtest.client": ("loadtest", "loadtest.workload"),
    "loadtest.analysis": ("loadtest",),
    "loadtest.report": _REPORTS,
    "loadtest.commands": (*_REPORTS, "loadtest.workload", "loadtest.report"),
    "training.text": ("engine",),
    "training.problems": (),
    "training.questions": ("engine", "training.text", "training.problems"),
    "training.statistics": (),
    "training.instruments": ("engine", "training.text"),
    "training.huggingface": (),
    "training": (
        *("engine", "engine.steps", "engine.weights", "engine.device", "engine.process"),
        *("training.text", "training.questions", "training.statistics", "training.problems"),
        *("training.instruments", "training.huggingface"),
    ),
    "training.finetuning": (
        *("training", "training.text", "training.questions", "engine", "engine.weights"),
        *("training.instruments", "server.schema", "server.text"),
    ),
    "training.grpo": (
        *("training", "training.text", "training.questions", "training.statistics"),
        *("training.problems", "engine", "engine.steps", "engine.weights", "engine.device"),
        *("engine.process", "training.instruments"),
    ),
    "training.baselines": ("training", "training.grpo", "training.huggingface"),
    "training.passk": (
        *("engine", "training", "training.text", "training.questions", "training.statistics"),
        *("training.problems", "loadtest"),
    ),
    "research.experiments.tasks": (
        *("training", "training.text", "training.problems", "training.questions"),
        "training.finetuning",
    ),
    "research.experiments.harness": (
        *("engine", "training", "training.text", "training.baselines"),
        "research.experiments.tasks",
        *("training.problems", "training.questions", "training.grpo", "loadtest"),
        "training.finetuning",
    ),
    "research.experiments": (
        *("engine", "engine.weights", "training", "training.text"),
        *("research.experiments.harness", "research.experiments.tasks"),
        *("training.questions", "training.statistics", "training.finetuning", "training.grpo"),
        *("training.baselines", "training.problems", "training.huggingface"),
    ),
    "deploy": ("server", "server.supervise", "engine"),
    "deploy.ray": (
        *("engine", "engine.client", "server", "server.text", "server.storage", "server.routes"),
        *("server.batch", "server.supervise", "server.commands"),
    ),
    "deploy.kubernetes": ("server", "engine", "loadtest"),
}
"""A package's files import its own, those of the packages named here, and what these may import.
All import the ground floor, the modules of `srm/`, which import each other alone.
`__main__` of a package wires all of it; research/bench/ measures everything, and nothing imports
it."""
MAY_IMPORT_LIBRARY = {
    "transformers": ("training.huggingface", "research.bench.peers.programs"),
    "max": ("engine.device", "research.bench.engine", "research.bench.gpu", "research.bench.peaks"),
    "triton": ("training.huggingface",),
    "torch": ("engine.pytorch", "training", "research.experiments", "research.bench.model"),
    "ray": ("deploy.ray", "srm.verl"),
    "llguidance": ("engine.constraints", "server.text.constraint_process"),
    "tokenizers": (
        "server",
        "loadtest",
        "training",
        "research",
        "engine.python",
        "srm.tokenizer_file",
    ),
}
LARGEST_FOLDER = 15
FORBIDDEN_NAMES = {"utils", "common", "helpers", "misc", "base", "manager"}
FORBIDDEN_IDENTIFIERS = {
    "word": "news roster exchange sender victims poor richer told said untold hear".split(),
    "name": (
        "give _give tell_again in_the_way is_turn _turns swaps _swaps Swaps FairLine ShareLine "
        "tallies _tallies _draws _room parted kept found"
    ).split(),
    "function": "of at take whole taken together of_values _of_richer _that_stand _wanted".split(),
    "method of no decoder": ["feed"],
    "loop variable": ["one"],
}
"""What says nothing of the thing, or of which the field has another word: a part of any name, any
name, or one of that kind. A decoder has `feed` and `flush`."""
_KERNEL = "a file of the kernel's, whose size is not that of its content"
_PIPE = "a pipe is allowed, or an object in a store"
MAY_OPEN = {
    "srm.files": "opens what it is asked for, and checks that it is a regular file",
    "srm.cores": _KERNEL,
    "srm.memory": _KERNEL,
    "engine.device.processor": _KERNEL,
    "engine.process.weights_note": "memory that engines share, which is no file of a folder",
    "training.precision": _KERNEL,
    "server.supervise.supervisor": _KERNEL,
    "server.routes.scrape": _KERNEL,
    "server.storage.clock": _KERNEL,
    "loadtest.records": _KERNEL,
    "server.commands.batch_input": _PIPE,
    "server.commands.batch_parquet": _PIPE,
    "server.commands.score": _PIPE,
    "server.supervise.own_folder": "a lock, which is not read",
    "server.routes.files": "a file that the store wrote, read without a buffer",
    "training.text.whole_files": "a file just written, which gets its SHA-256",
}
"""Who may open files to read without `srm.files`, and why. What waits for a pipe or reads a
device without an end is opened there, and refused."""
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
PARTS = ("engine", "server", "loadtest", "training")
"""Folders that are parts of the package srm."""
TOPS = ("engine", "server", "loadtest", "training", "research", "deploy", "srm")
PROGRAMS = "research.bench.peers.programs"
"""What runs in other engines' environments, and ours as any user would have it run."""
PROGRAMS_SEE = {
    f"{PROGRAMS}.timing",
    *("srm", "engine.python.offline"),
    *("training.checkpoint", "research.bench.model.recurrence"),  # the model in plain PyTorch
}


def sources() -> list[Path]:
    paths = [path for top in TOPS[:-1] for path in sorted((ROOT / top).rglob("*.py"))]
    paths += sorted((ROOT / "srm").glob("*.py"))  # whose folders are links to the others
    return paths


MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in sources()
    if path.stem != "__init__"
}


NAMED = [*MODULES.values(), *sorted((ROOT / "tests").rglob("*.py"))]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes_of(tree: ast.AST) -> list[ast.AST]:
    """All nodes of a tree, which several tests walk."""
    return [*ast.walk(tree)]


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module that is imported anywhere in the tree, as far as names can say."""
    for node in nodes_of(tree) if isinstance(tree, ast.Module) else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (_own(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                whole = _own(f"{node.module}.{alias.name}")
                yield whole if whole in MODULES else _own(f"{node.module}")


def _own(name: str) -> str:
    """Return the name of a module as `MODULES` has it: without the package of its part."""
    return name.removeprefix("srm.") if {*name.split(".")[1:2]} & {*PARTS} else name


def opened_to_read(tree: ast.AST) -> list[str]:
    """Calls that open a file to read by its name, which a pipe or a device may have.

    Other things have a method `open` too: a call counts if it has a mode that only reads, or none.
    """
    results = []
    for call in (node for node in nodes_of(tree) if isinstance(node, ast.Call)):
        name, arguments = ast.unparse(call.func), [*map(ast.unparse, call.args)]
        named = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        after = arguments[name in {"open", "io.open", "os.open"} :]  # the path
        mode = named.get("mode", after[0] if after else "'r'")
        if name == "os.open":
            reads = not any(flag in mode for flag in ("O_CREAT", "O_WRONLY", "O_DIRECTORY"))
        elif name in {"open", "io.open"} or name.endswith(".open"):
            reads = mode == "mode" or (mode[0] == "'" and not set("wax") & set(mode))
        else:
            reads = name.endswith((".read_bytes", ".read_text"))
        if reads:
            results.append(f"{name}({', '.join(arguments)})")
    return results


def violations(module: str, tree: ast.AST) -> list[str]:
    """What the file of that dotted name does that the rules forbid."""
    results = []
    is_free = module.endswith("__main__") or module.startswith("research.bench.")
    package = module.rpartition(".")[0]
    may = {package, "srm", *MAY_IMPORT.get(package, ())}
    for name in imports(tree):
        top = name.split(".")[0]
        if module.startswith(PROGRAMS):
            if top in TOPS and name not in PROGRAMS_SEE:
                results.append(f"a program of peers may not look into {name}")
            continue
        if top in TOPS and not is_free and may.isdisjoint({name, name.rpartition(".")[0]}):
            results.append(f"{module} may not import {name}")
        if top == "tests":
            results.append(f"{module} may not import {name}: only tests do")
        owners = MAY_IMPORT_LIBRARY.get(top)
        if owners and not f"{module}.".startswith(tuple(f"{owner}." for owner in owners)):
            results.append(f"{module} may not import {top}")
    if module.startswith((*PARTS, "srm")) and module not in MAY_OPEN:
        results += [f"{call} is not by srm.files" for call in opened_to_read(tree)]
    for node in nodes_of(tree):
        if isinstance(node, ast.ImportFrom):
            whole = node.module or ""
            if whole.split(".")[0] in PARTS:
                results.append(f"{whole}: it is srm.{whole}")
            if node.level and not whole.endswith("_srm"):  # beside a checkpoint, with others
                results.append("imports are absolute")
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            results.append("TYPE_CHECKING hides a cycle")
        if isinstance(node, FUNCTION):
            own = [name for name in imports(node) if name.split(".")[0] in TOPS]
            results += [f"{node.name}() imports {name}: imports are at the top" for name in own]
    return results


def identifiers(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Every identifier where the tree makes it, by kind; but a test's name, which is a sentence."""
    for node in nodes_of(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield "name", name
            case ast.arg(arg=name):
                yield "name", name
            case ast.ClassDef(name=name, body=body):
                yield "name", name
                methods = [part.name for part in body if isinstance(part, FUNCTION)]
                if "flush" not in methods:
                    yield from (("method of no decoder", method) for method in methods)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                if not name.startswith("test_"):
                    yield from (("name", name), ("function", name))
            case (
                ast.For(target=target)
                | ast.AsyncFor(target=target)
                | ast.comprehension(target=target)
            ):
                names = [part.id for part in ast.walk(target) if isinstance(part, ast.Name)]
                yield from (("loop variable", name) for name in names)


def forbidden_identifiers(tree: ast.AST) -> list[str]:
    """The tree's identifiers that FORBIDDEN_IDENTIFIERS has."""
    forbidden = []
    for kind, name in identifiers(tree):
        words = re.findall("[A-Z]?[a-z]+|[A-Z]+", name) if kind == "name" else []
        has_word = any(word.lower() in FORBIDDEN_IDENTIFIERS["word"] for word in words)
        if has_word or name in FORBIDDEN_IDENTIFIERS[kind]:
            forbidden.append(name)
    return forbidden


def test_imports_keep_the_rules() -> None:
    """All but two faces: the command, and the layer for torch."""
    broken = [
        f"{path.relative_to(ROOT)}: {violation}"
        for name, path in MODULES.items()
        if name not in {"srm.__main__", "srm.torch"}
        for violation in violations(name, tree_of(path))
    ]
    assert not broken, "\n".join(broken)


def test_packages_import_in_one_direction() -> None:
    seen: list[str] = []
    for package, others in MAY_IMPORT.items():
        assert all(any(f"{item}.".startswith(f"{old}.") for old in seen) for item in others)
        seen.append(package)
    ruled = [
        module
        for module in MODULES
        if "." in module and not module.startswith(("research.bench.", "deploy.", "srm."))
    ]
    assert {module.rpartition(".")[0] for module in ruled} <= {*seen}


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = {
        name: {text for text in imports(tree_of(path)) if text in MODULES}
        for name, path in MODULES.items()
    }
    TopologicalSorter(graph).prepare()


def test_folders_are_small() -> None:
    sizes = Counter(path.parent for path in sources() if not path.stem.startswith("__"))
    assert not {folder for folder, size in sizes.items() if size > LARGEST_FOLDER}


def test_package_inits_cost_nothing() -> None:
    api = ROOT / "srm" / "__init__.py"  # its names are looked up when asked
    for path in [source for source in sources() if source.stem == "__init__" and source != api]:
        body = tree_of(path).body
        assert all(isinstance(node, ast.Expr) for node in body), f"{path}: more than a docstring"


def test_importing_the_engine_loads_neither_max_nor_tokenizers() -> None:
    script = (
        "import sys, srm, srm.engine.messages, srm.engine.client.client\n"
        "late = {'max', 'tokenizers', 'srm.engine.python.offline', 'srm.engine.process.engine'}\n"
        "assert not late & set(sys.modules)\n"
        "from srm import SamplingParams\n"
        "assert not {'max', 'tokenizers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


def test_every_module_says_what_it_is() -> None:
    assert not [path for path in sources() if path.stem in FORBIDDEN_NAMES]
    assert not [source for source in sources() if not ast.get_docstring(tree_of(source))]


@pytest.mark.parametrize(
    ("module", "source", "rule"),
    [
        ("engine.state.slots", "from srm.engine.scheduler import scheduler", "may not import"),
        ("engine.metrics", "from srm.engine.process import engine", "may not import"),
        ("engine.scheduler.scheduler", "import max.graph", "may not import max"),
        ("engine.device.runner", "import torch.nn", "torch"),
        ("engine.scheduler.scheduler", "from tokenizers import Tokenizer", "tokenizers"),
        ("engine.device.runner", "from srm.training.model import SRM", "may not import training"),
        (
            "server.routes.app",
            "from srm.engine.scheduler import scheduler",
            "may not import engine",
        ),
        ("server.http.auth", "from srm.server.routes.app import App", "may not import server"),
        ("server.routes.app", "import max", "may not import max"),
        (
            "loadtest.client.worker",
            "from srm.engine.messages import Request",
            "may not import engine",
        ),
        ("loadtest.commands.sweep", "from srm.server.config import ServerConfig", "may not import"),
        ("research.bench.peers.running", "import torch", "torch"),
        ("research.bench.gpu.one_step", "from tests.kernels import oracle", "only tests do"),
        (
            "research.bench.peers.programs.run_srm",
            "from srm.engine.process.engine import Engine",
            "look into",
        ),
        (
            "research.bench.peers.programs.run_pytorch",
            "from srm.loadtest import scenario",
            "look into",
        ),
        ("training.loop", "def f():\n    from srm.engine.config import load", "at the top"),
        (
            "training.loop",
            "from research.bench.engine import gemm",
            "may not import research.bench",
        ),
        ("loadtest.lines", "data = path.read_bytes()", "srm.files"),
        ("loadtest.lines", "with path.open() as file: ...", "srm.files"),
        ("loadtest.lines", "with open(path, encoding='latin-1') as file: ...", "srm.files"),
        ("loadtest.lines", "file = os.open(path, os.O_RDONLY)", "srm.files"),
        ("training.loop", "file = path.open(mode='rb', buffering=0)", "srm.files"),
        ("server.routes.app", "if typing.TYPE_CHECKING:\n    import x", "hides a cycle"),
        ("server.routes.app", "from engine.messages import Request", "it is srm.engine.messages"),
        ("server.routes.app", "from .health import VERSION", "imports are absolute"),
    ],
)
def test_the_rules_notice(module: str, source: str, rule: str) -> None:
    assert any(rule in violation for violation in violations(module, ast.parse(source)))


def test_names_are_those_of_the_field() -> None:
    forbidden = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in NAMED
        for name in forbidden_identifiers(tree_of(path))
    ]
    assert not forbidden, "\n".join(forbidden)


@pytest.mark.parametrize(
    ("source", "forbidden"),
    [
        ("has_news = NO_NEWS", ["has_news"]),
        ("def f(newsletter, found): return found.told", ["found"]),
        ("class Swaps:\n    def feed(self): self._roster = 1", ["Swaps", "feed", "_roster"]),
        ("class Text:\n    def feed(self): ...\n    def flush(self): ...", []),
        ("taken = [one for one in range(9)]\none = 1", ["one"]),
        ("def taken(): ...\ndef test_what_is_told(): ...", ["taken"]),
    ],
)
def test_identifiers_are_found_where_they_are_made(source: str, forbidden: list[str]) -> None:
    assert sorted(forbidden_identifiers(ast.parse(source))) == sorted(forbidden)


@pytest.mark.parametrize(
    "source",
    [
        "path.open('wb')",
        "open(path, 'x')",
        "path.open('ab', buffering=0)",
        "os.open(path, os.O_RDWR | os.O_CREAT)",
        "os.open(folder, os.O_RDONLY | os.O_DIRECTORY)",
        "self.streams.open(requests, params.logprobs)",
    ],
)
def test_files_are_opened_to_write_as_anybody_likes(source: str) -> None:
    assert not violations("training.loop", ast.parse(source))


def test_modules_that_may_open_files_open_some() -> None:
    trees = {name: tree_of(MODULES[name]) for name in MAY_OPEN}
    assert not [name for name, tree in trees.items() if not opened_to_read(tree)]
