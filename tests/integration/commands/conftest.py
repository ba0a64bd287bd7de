"""A server that knows nothing of us, and the files of a run against it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.commands.foreign_server import Foreign, listening

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
