"""What tests had compiled is compiled once, and again where anything is another."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from tests.kit import kept
from tests.kit.kept import KEEP_S, keep_compiled


class Compiler:
    """Counts what it compiles, slowly."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.source, self.folder, self.count = source, folder, 0
        self.fails = False

    def output(self, *facts: str) -> bytes:
        return keep_compiled("program", [self.source], facts, self._compile, self.folder)

    def _compile(self) -> bytes:
        self.count += 1
        if self.fails:
            raise ValueError("a program that does not compile")
        return self.source.read_bytes().upper()


@pytest.fixture
def compiler(tmp_path: Path) -> Compiler:
    source = tmp_path / "program.mojo"
    source.write_text("def main")
    return Compiler(source, tmp_path / "kept")


def test_the_same_is_compiled_once(compiler: Compiler) -> None:
    threads = [threading.Thread(target=compiler.output) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiler.output() == b"DEF MAIN" and compiler.count == 1


@pytest.mark.parametrize("changed", ["source", "kernels", "facts", "version"])
def test_what_is_another_is_compiled(
    compiler: Compiler, changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = tmp_path / "mojo_kernels" / "srm"
    kernels.mkdir(parents=True)
    monkeypatch.setattr(kept, "KERNELS", kernels)
    compiler.output()
    if changed == "source":
        compiler.source.write_text("def other")
    if changed == "kernels":
        (kernels.parent / "imported.mojo").write_text("def own")
    if changed == "version":
        monkeypatch.setattr("importlib.metadata.version", lambda _: "0")
    assert compiler.output(*["wide"] * (changed == "facts")) == compiler.source.read_bytes().upper()
    assert compiler.count == 2


@pytest.mark.parametrize("left", [0, 9, -1])
def test_a_damaged_file_is_compiled_anew(compiler: Compiler, left: int) -> None:
    compiler.output()
    (path,) = compiler.folder.glob("*.z")
    path.write_bytes(path.read_bytes()[:left])
    assert compiler.output() == b"DEF MAIN" and compiler.count == 2
    assert compiler.output() == b"DEF MAIN" and compiler.count == 2


def test_a_failed_compile_leaves_nothing(compiler: Compiler) -> None:
    compiler.fails = True
    with pytest.raises(ValueError, match="does not compile"):
        compiler.output()
    assert [path.suffix for path in compiler.folder.iterdir()] == [".lock"]


def test_what_is_not_used_for_a_month_goes(compiler: Compiler) -> None:
    compiler.output("old")
    (old,) = compiler.folder.glob("*.z")
    compiler.output("used")
    paths = [*compiler.folder.iterdir()]
    for path in paths:
        os.utime(path, (0, time.time() - KEEP_S - 9))
    compiler.output("used")
    compiler.output("new")
    assert len([*compiler.folder.glob("*.z")]) == 2 and not old.exists()
    assert compiler.count == 3
