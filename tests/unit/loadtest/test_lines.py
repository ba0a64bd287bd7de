from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from srm.errors import ConfigError
from srm.loadtest import lines, recording
from srm.loadtest.commands.sweep import SAVED, read_saved
from srm.loadtest.report.report import read_report


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("prompts.jsonl", lambda folder: lines.text_of(folder / "prompts.jsonl")),
        ("report.json", read_report),
        ("recording.json", recording.load),
        (SAVED, read_saved),
    ],
)
def test_refuses_a_device_instead_of_a_file(
    name: str, read: Callable[[Path], object], tmp_path: Path
) -> None:
    (tmp_path / name).symlink_to("/dev/null")  # one that has an end, should it be read
    with pytest.raises(ConfigError, match="must be a regular file"):
        read(tmp_path)
