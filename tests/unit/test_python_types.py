"""The Python API as type checkers see it where the package is installed."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import venv
from pathlib import Path

import mypy
import numpy as np

import srm
from tests.kit.serving import ROOT

USES = """
from typing import assert_type

import numpy as np
from numpy.typing import NDArray

from srm import Completion, CompletionPart, Engine, Generated, SamplingParams, json_constraint


async def read(llm: Engine) -> None:
    async for part in llm.stream_tokens("a"):
        assert_type(part, CompletionPart)


def use(llm: Engine) -> list[Generated]:
    found = llm.generate(["a"], SamplingParams(constraint=json_constraint({})), progress=False)
    (made,) = found[0].completions
    assert_type(made, Completion)
    assert_type(made.text, str)
    assert_type(made.token_ids, NDArray[np.int32])
    llm.generate(["a"], SamplingParams(maxTokens=3))  # type: ignore[call-arg]
    llm.generate([np.array([5, 6], np.int64)])
    llm.generate(["a"], SamplingParams(n="3"))  # type: ignore[arg-type]
    return found
"""


def test_the_example_and_all_uses_pass_mypy_strictly(tmp_path: Path) -> None:
    """mypy reads an installed package only if it says that it is typed."""
    venv.create(tmp_path / "venv")
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "srm").symlink_to(ROOT / "srm")
    (site / "others.pth").write_text(str(Path(np.__file__).parents[1]))
    readme = (ROOT / "README.md").read_text()
    (example,) = [part for part in readme.split("```") if part.startswith("python\nfrom")]
    (tmp_path / "many.py").write_text(example.removeprefix("python\n"))
    (tmp_path / "uses.py").write_text(USES)
    page = (ROOT / "docs" / "python.md").read_text().split("```python test\n")[1:]
    examples = ["# mypy: allow-untyped-defs, allow-untyped-calls\n", *page]
    (tmp_path / "page.py").write_text("".join(part.partition("```")[0] for part in examples))
    python = tmp_path / "venv" / "bin" / "python"
    command = [sys.executable, "-m", mypy.__name__, "--strict", "--python-executable", str(python)]
    done = subprocess.run(
        [*command, "--config-file=", "many.py", "uses.py", "page.py"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "Success: no issues found in 3 source files\n", done.stdout + done.stderr


def test_checkers_see_the_names_that_there_are() -> None:
    stub = ast.parse((ROOT / "srm" / "__init__.pyi").read_text())
    seen = {
        alias.asname: node.module
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    }
    assert seen == vars(srm)["_HOMES"]
    assert {*vars(srm)["__all__"]} == {*seen} & {*dir(srm)}
    assert all(hasattr(srm, name) for name in seen)


def test_the_python_reference_has_every_class() -> None:
    page = (ROOT / "docs" / "python-reference.md").read_text().split()
    homes = vars(srm)["_HOMES"].items()
    classes = {f"{home}.{name}" for name, home in homes if isinstance(getattr(srm, name), type)}
    assert not {name for name in classes if not name.startswith("srm.errors.")} - {*page}
