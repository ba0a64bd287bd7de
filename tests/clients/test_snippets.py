"""The examples of docs/clients.md run as they stand, each in an empty folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from srm.engine.config import DEMO_MODEL
from tests.clients.conftest import AGENTS_PYTHON, Run
from tests.kit.serving import ROOT, Server

PAGE = (ROOT / "docs" / "clients.md").read_text()
EXAMPLES = re.findall(r"^```(sh|python) clients\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
NAMES = re.findall(r"^## (.*)\n(?:(?!^## ).*\n)*?```(?:sh|python) clients\n", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("language", "example"), EXAMPLES, ids=NAMES)
def test_the_example_runs(
    demo: Server, run: Run, tmp_path: Path, language: str, example: str
) -> None:
    script = tmp_path / f"example.{language}"
    here = example.replace("http://127.0.0.1:8000", demo.url)
    script.write_text(here.replace("models/demo", str(DEMO_MODEL)))
    if language == "python":
        run(
            AGENTS_PYTHON if re.search("litellm|dspy|instructor", example) else "python",
            str(script),
        )
    else:
        run("bash", "-euo", "pipefail", str(script))
