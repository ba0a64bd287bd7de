"""Every command of docs/loadtest.md runs, one after the other, against a server; only shorter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kit.serving import ROOT, Server

_LIMIT_S = 120
_SHORTER = (
    (r"--duration-s \d+", "--duration-s 1.5"),
    (r"srm loadtest (run|sweep|offline)", r"srm loadtest \1 --warmup-s 0.2 --cooldown-s 0"),
    (r"srm loadtest sweep", "srm loadtest sweep --settle-s 0.2 --repeats 1"),
    (r"duration_s = \d+", "duration_s = 1.5"),
    (r"--samples 100000", "--samples 300"),
    (r"--lines 10000", "--lines 20"),
    (r"--max-load \d+", "--max-load 4"),
    (r"--concurrency 64", "--concurrency 16"),
    (r"http://127\.0\.0\.1:8000", "$SRM_URL"),
    (r"--served-model-name demo", "--served-model-name tiny"),
    (r"models/demo", "$MODEL"),
)
"""The numpy engine stands in for the real one, which takes a minute to compile."""


@pytest.mark.slow
def test_the_guide_runs_from_its_first_command_to_its_last(
    server: Server, text_model: Path, tmp_path: Path
) -> None:
    page = (ROOT / "docs/loadtest.md").read_text()
    commands: list[str] = re.findall(r"^```sh test\n(.*?)^```$", page, re.M | re.S)
    assert len(commands) > 8
    program = f'srm() {{ PYTHONPATH="{ROOT}" "{sys.executable}" -m srm "$@"; }}\n'
    environment = {**os.environ, "SRM_URL": server.url, "MODEL": str(text_model)}
    for command in commands:
        shorter = command
        for pattern, replacement in _SHORTER:
            shorter = re.sub(pattern, replacement, shorter)
        shell = ["bash", "-euo", "pipefail", "-c", program + shorter]
        place: dict[str, Any] = {"cwd": tmp_path, "env": environment, "timeout": _LIMIT_S}
        done = subprocess.run(shell, check=False, capture_output=True, text=True, **place)
        assert done.returncode == 0, f"{shorter}\n{done.stdout[-3_000:]}\n{done.stderr[-3_000:]}"
    for name in re.findall(r"--output (\S+)", "\n".join(commands)):
        folder = tmp_path / name
        if name == "runs/batch":
            assert (folder / "offline.json").exists()
            continue
        html = (folder / "report.html").read_text()
        assert "<svg" in html and not re.search(r"(?:src|href)=[\"']https?://", html), name
        assert (folder / "report.json").stat().st_size
