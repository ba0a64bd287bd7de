"""Every command of docs/loadtest.md runs, one after the other, against a server; only shorter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serving import ROOT, Server

_LIMIT_S = 120
_SHORTER = (
    (r"--duration-s \d+", "--duration-s 1.5"),
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
_VARIABLES = {
    "SRM_WARMUP_S": "0.2",
    "SRM_COOLDOWN_S": "0",
    "SRM_SETTLE_S": "0.2",
    "SRM_REPEATS": "1",
}


def commands() -> list[str]:
    return re.findall(
        r"^```sh test\n(.*?)^```$", (ROOT / "docs/loadtest.md").read_text(), re.M | re.S
    )


@pytest.mark.slow
def test_the_guide_runs_from_its_first_command_to_its_last(
    server: Server, text_model: Path, tmp_path: Path
) -> None:
    assert len(commands()) > 8
    program = f'srm() {{ "{sys.executable}" "{ROOT}/srm.py" "$@"; }}\n'
    environment = {**os.environ, **_VARIABLES, "SRM_URL": server.url, "MODEL": str(text_model)}
    for command in commands():
        shorter = command
        for pattern, replacement in _SHORTER:
            shorter = re.sub(pattern, replacement, shorter)
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", program + shorter],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, f"{shorter}\n{done.stdout[-3_000:]}\n{done.stderr[-3_000:]}"
    for folder in re.findall(r"--output (\S+)", "\n".join(commands())):
        if folder == "runs/batch":
            assert (tmp_path / folder / "offline.json").exists()
            continue
        page = (tmp_path / folder / "report.html").read_text()
        assert "<svg" in page or "<img" in page, folder
        assert not re.search(r"(?:src|href)=[\"']https?://", page), folder
        assert (tmp_path / folder / "report.json").stat().st_size
