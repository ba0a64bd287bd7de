"""Ray Data's processor of HTTP requests, as docs/ray.md has it."""

from __future__ import annotations

import re
from pathlib import Path

from tests.clients.conftest import RAY_PYTHON, Noted, Run
from tests.kit.serving import ROOT, Server


def test_the_example_answers_every_prompt(
    demo: Server, run: Run, noted: Noted, tmp_path: Path
) -> None:
    page = (ROOT / "docs" / "ray.md").read_text()
    [example] = re.findall(r"^```python clients\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(example.replace("http://127.0.0.1:8000", demo.url))
    printed = run(RAY_PYTHON, str(script), RAY_USAGE_STATS_ENABLED="0").splitlines()
    texts = [line for line in printed if line.startswith("12 ")]  # of three prompts, four each
    assert len(texts) == 2
    noted("ray", "`HttpRequestProcessorConfig`, `build_processor`, `Dataset.take_all`")
