"""`make test-fast` chooses the tests of what changed, and starts none after its time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.serving import ROOT
from tests.tools.changed import LEFT_OUT, find_tests, list_changed

TEXTS = {
    "engine/state/slots.py": "import numpy as np\n",
    "engine/state/parked.py": "from srm.engine.state import fair_share, slots\n",
    "server/app.py": "import srm.engine.state.parked\n",
    "tests/kit/making.py": "",
    "tests/property/test_first.py": "import srm.server.app\n",
    "tests/unit/test_parked.py": "from srm.engine.state.parked import Parked\n",
    "tests/unit/test_app.py": "def test():\n    from srm.server.app import App\n",
    "tests/unit/test_both.py": "from srm.engine.state import (\n    parked,\n    share,\n)\n",
    "tests/unit/test_other.py": "from srm.engine.state.slots_of import x\n# Dockerfile\n",
    "tests/unit/test_kit.py": "from tests.kit import making\n",
    "tests/integration/test_slots.py": "from srm.engine.state.slots import Slots\n",
}
NEAREST = ["tests/unit/test_parked.py", "tests/unit/test_both.py"]


@pytest.mark.parametrize(
    ("path", "tests"),
    [
        ("engine/state/parked.py", NEAREST),
        ("engine/state/slots.py", NEAREST),  # which only a test of servers imports
        ("server/app.py", ["tests/unit/test_app.py", "tests/property/test_first.py"]),
        ("tests/kit/making.py", ["tests/unit/test_kit.py"]),
        ("tests/integration/test_slots.py", ["tests/integration/test_slots.py"]),
        ("tests/unit/test_gone.py", []),
        ("deploy/Dockerfile", ["tests/unit/test_other.py"]),
        ("docs/Dockerfile.md", []),
        ("engine/state/unknown.py", []),
    ],
)
def test_a_file_concerns_the_nearest_quick_tests(path: str, tests: list[str]) -> None:
    assert find_tests(path, TEXTS) == tests


def test_what_changed_is_since_the_branch_began(tmp_path: Path) -> None:
    script = """
        git init -q -b main && git config user.name x && git config user.email x@x
        echo 1 > a.py && git add . && git commit -qm a && git switch -qc mine
        echo 1 > b.py && git add . && git commit -qm b && git switch -q main
        echo 1 > c.py && git add . && git commit -qm c && git switch -q mine
        echo 2 > a.py && echo 1 > new.py"""
    subprocess.run(["sh", "-ec", script], cwd=tmp_path, check=True)
    assert list_changed("main", tmp_path) == ["a.py", "b.py", "new.py"]
    with pytest.raises(SystemExit, match="BASE = 'gone'"):
        list_changed("gone", tmp_path)


@pytest.mark.parametrize(
    ("seconds", "first", "status", "says"),
    [
        (0, "pass", 0, "1 passed"),
        (0, "assert 0", 1, "1 failed"),
        (9999, "pass", 1, "1 failed, 1 passed"),
    ],
)
def test_a_run_ends_between_two_tests_and_says_so(
    tmp_path: Path, seconds: int, first: str, status: int, says: str
) -> None:
    file = tmp_path / "test_two.py"
    file.write_text(f"def test_a():\n    {first}\n\ndef test_b():\n    assert 0\n")
    script = f"from tests.tools.changed import run\nraise SystemExit(run({[str(file)]}, {seconds}))"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == status and f" {says} in " in done.stdout, done.stdout
    assert ("`make test` runs the others" in done.stdout) == (seconds == 0)


def test_what_is_left_out_of_the_pages_tests_is_there() -> None:
    text = (ROOT / "tests/test_docs.py").read_text()
    assert all(f"def test_{name}(" in text for name in LEFT_OUT.split())
