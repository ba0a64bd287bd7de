"""The import rules of the project, as data. ARCHITECTURE.md explains them."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("engine", "server", "training", "loadtest", "deploy")

ENGINE_ORDER = (
    "errors",
    "tasks",
    "settings",
    "config",
    "logs",
    "memory",
    "records",
    "messages",
    "batch",
    "generated",
    "parked",
    "news",
    "metrics",
    "prefixes",
    "edits",
    "shares",
    "sequence",
    "accept",
    "lines",
    "history",
    "pace",
    "latency",
    "slots",
    "parking",
    "assembly",
    "outputs",
    "prefill",
    "turns",
    "admission",
    "victims",
    "roster",
    "completion",
    "scheduler",
    "queue_rate",
    "tensors",
    "tensor_file",
    "weights",
    "checkpoint",
    "random_model",
    "published",
    "convert",
    "inspect_model",
    "linear",
    "kernels",
    "model",
    "state_pool",
    "graph_cache",
    "libc",
    "telemetry",
    "runner",
    "engine",
    "swap",
    "watchdog",
    "snapshot",
    "snapshot_writer",
    "capture",
    "durable",
    "process",
    "token_queues",
    "stretches",
    "token_table",
    "streams",
    "client",
    "precompile",
    "graph_notes",
    "__main__",
    "tokenizer",
    "asked",
    "offline",
)
"""A file of engine/ imports only files before it."""

MAY_IMPORT_MAX = {
    "linear",
    "kernels",
    "model",
    "state_pool",
    "graph_cache",
    "runner",
    "precompile",
    "graph_notes",
}
MAY_IMPORT_TOKENIZERS = {"tokenizer"}
"""Of engine: the Python API, where texts may be given."""
SERVER_SEES = {
    f"engine.{name}"
    for name in (
        *("client", "streams", "news", "messages", "settings", "config", "errors", "logs"),
        *("memory", "records", "tasks"),  # of every process
    )
}
LOADTEST_SEES = {"engine.errors", "engine.settings", "engine.records"}
"""What every command of ours says, reads and writes in one way: nothing that serves."""
MAY_IMPORT_PACKAGES = {
    "engine": {"engine"},
    "server": {"server", "engine"},
    "training": {"training", "engine"},
    "loadtest": {"loadtest", "engine"},
    "deploy": {"deploy", "server", "engine"},
}
FORBIDDEN_NAMES = {"utils", "common", "helpers", "misc", "base", "manager"}


def sources() -> list[Path]:
    found = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return [*found, ROOT / "srm.py"]


def is_type_checking(node: ast.AST) -> bool:
    return "TYPE_CHECKING" in {
        getattr(part, "id", getattr(part, "attr", None)) for part in ast.walk(node)
    }


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module that is imported anywhere in the tree, as far as names can say."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            module = node.module or ""
            if module in PACKAGES:  # `from engine import metrics` imports engine.metrics
                yield from (f"{module}.{alias.name}" for alias in node.names)
            else:
                yield module


def violations(package: str, module: str, tree: ast.AST) -> list[str]:
    """What `package/module.py` does that the rules forbid. `module` is a dotted path."""
    found = []
    for name in imports(tree):
        top = name.split(".")[0]
        if top in PACKAGES and top not in MAY_IMPORT_PACKAGES[package]:
            found.append(f"{package} may not import {name}")
        if top == "torch" and package != "training":
            found.append("only training may import torch")
        if top == "max" and not (package == "engine" and module in MAY_IMPORT_MAX):
            found.append(f"{package}.{module} may not import max")
        if top == "tokenizers" and package == "engine" and module not in MAY_IMPORT_TOKENIZERS:
            found.append(f"engine.{module} knows no text: it may not import tokenizers")
        if package in {"server", "deploy"} and top == "engine" and name not in SERVER_SEES:
            found.append(f"{package} may not look into {name}")
        if package == "loadtest" and top == "engine" and name not in LOADTEST_SEES:
            found.append(f"loadtest speaks HTTP: it may not look into {name}")
        if package == "engine" and top == "engine":
            imported = name.removeprefix("engine.")
            if imported not in ENGINE_ORDER[: ENGINE_ORDER.index(module)]:
                found.append(f"engine.{module} comes before {imported} and may not import it")
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and is_type_checking(node.test):
            found.append("TYPE_CHECKING hides a cycle")
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            own = [name for name in imports(node) if name.split(".")[0] in PACKAGES]
            found += [f"{node.name}() imports {name}: imports are at the top" for name in own]
    return found


def named(path: Path) -> tuple[str, str]:
    package, *rest = path.relative_to(ROOT).with_suffix("").parts
    return package, ".".join(rest)


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_keep_the_rules(path: Path) -> None:
    package, module = named(path)
    if module == "" or module.endswith("__init__"):
        return  # srm.py, the one face, imports a command when asked for it; packages are empty
    assert not violations(package, module, ast.parse(path.read_text()))


def test_package_inits_cost_nothing() -> None:
    for package in PACKAGES:
        for path in (ROOT / package).rglob("__init__.py"):
            body = ast.parse(path.read_text()).body
            is_api = path == ROOT / "engine" / "__init__.py"  # its names are looked up when asked
            assert is_api or all(isinstance(node, ast.Expr) for node in body), (
                f"{path} is more than a docstring"
            )


def test_importing_the_engine_loads_neither_max_nor_tokenizers() -> None:
    script = (
        "import sys, engine, engine.messages, engine.client\n"
        "assert not {'max', 'tokenizers', 'engine.offline', 'engine.engine'} & set(sys.modules)\n"
        "from engine import SamplingParams\n"
        "assert not {'max', 'tokenizers'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False)
    assert done.returncode == 0


def test_every_engine_file_has_its_place_in_the_order() -> None:
    files = {named(path)[1] for path in (ROOT / "engine").rglob("*.py")}
    assert {name for name in files if not name.endswith("__init__")} == set(ENGINE_ORDER)


def test_no_file_is_named_after_nothing() -> None:
    assert not [path for path in sources() if path.stem in FORBIDDEN_NAMES]


def test_every_module_says_what_it_is() -> None:
    undocumented = [
        path for path in sources() if not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert not undocumented


@pytest.mark.parametrize(
    ("package", "module", "source", "rule"),
    [
        ("engine", "slots", "from engine.scheduler import Scheduler", "comes before scheduler"),
        ("engine", "metrics", "from engine import engine", "comes before engine"),
        ("engine", "slots", "from engine import slots", "comes before slots"),
        ("engine", "scheduler", "import max.graph", "may not import max"),
        ("engine", "runner", "import torch.nn", "torch"),
        ("engine", "scheduler", "from tokenizers import Tokenizer", "knows no text"),
        ("engine", "runner", "from training.model import SRM", "may not import training"),
        ("server", "app", "from engine.scheduler import Scheduler", "look into"),
        ("server", "app", "from engine import scheduler", "look into"),
        ("server", "app", "import max", "may not import max"),
        ("loadtest", "run", "from engine.messages import Request", "may not look into"),
        ("loadtest", "run", "from server.config import ServerConfig", "may not import server"),
        ("training", "loop", "def f():\n    from engine.config import load", "at the top"),
        ("server", "app", "if typing.TYPE_CHECKING:\n    import x", "hides a cycle"),
    ],
)
def test_the_rules_notice(package: str, module: str, source: str, rule: str) -> None:
    assert any(rule in found for found in violations(package, module, ast.parse(source)))
