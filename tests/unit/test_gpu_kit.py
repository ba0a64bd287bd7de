"""The kit for a GPU machine runs its tests beside whatever is installed there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.serving import ROOT

KIT = ROOT / "deploy" / "gpu"


def test_plugins_of_others_and_warnings_fail_no_test_of_the_kit(tmp_path: Path) -> None:
    (tmp_path / "theirs-1.dist-info").mkdir()
    (tmp_path / "theirs-1.dist-info" / "METADATA").write_text("Name: theirs\nVersion: 1\n")
    (tmp_path / "theirs-1.dist-info" / "entry_points.txt").write_text("[pytest11]\na = theirs\n")
    (tmp_path / "theirs.py").write_text("raise RuntimeError('made for another version')\n")
    test = tmp_path / "test_kit.py"
    test.write_text("import warnings\ndef test_it():\n    warnings.warn('theirs is old')\n")
    exported = re.findall(r"PYTEST_\w+=\S+", (KIT / "run.sh").read_text())
    command = [sys.executable, "-m", "pytest", "-q", "-c", str(KIT / "pytest.ini")]
    done = subprocess.run(
        [*command, f"--rootdir={tmp_path}", "-p", "no:cacheprovider", str(test)],
        env=os.environ
        | {"PYTHONPATH": str(tmp_path)}
        | dict(variable.split("=", 1) for variable in exported),
        capture_output=True,
        check=False,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
