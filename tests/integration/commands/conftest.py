"""A server that knows nothing of us, and the files of a run against it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.commands.foreign_server import Foreign, listening, run

REWARD = "def vowel(text, question):\n    return any(one in text for one in 'aeiou')\n"
LINES = '{"question": "a cat", "answer": "#### 1"}\n{"question": "a mat", "answer": "#### 2"}\n'


@pytest.fixture
def foreign() -> Foreign:
    return Foreign()


@pytest.fixture
def url(foreign: Foreign) -> Iterator[str]:
    with listening(foreign) as address:
        yield address


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "questions.jsonl").write_text(LINES)
    return tmp_path


@pytest.fixture
def refusal(url: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """refusal(n=3): what is said of a run with these settings, which must end with code 2."""

    def refuse(**settings: Any) -> str:
        assert run(**{"url": url, "folder": folder, **settings}) == 2
        return capsys.readouterr().err

    return refuse
