"""A server's own folder in the data folder: it goes with it, or with the next start."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

import pytest

from srm.errors import ConfigError
from srm.server.supervise.own_folder import COPIES, keep_first, own_folder


def test_each_server_has_a_folder_which_goes_with_it(tmp_path: Path) -> None:
    with own_folder(tmp_path) as one, own_folder(tmp_path) as other:
        assert one != other and one.parent == other.parent == tmp_path / "running"
        (one / COPIES).mkdir()
    assert not list((tmp_path / "running").iterdir())


def test_what_killed_servers_left_goes_with_the_next_start(tmp_path: Path) -> None:
    for name, files in (("killed", ["lock", "weights"]), ("before it had a lock", [])):
        (tmp_path / "running" / name).mkdir(parents=True)
        for file in files:
            (tmp_path / "running" / name / file).touch()
    with own_folder(tmp_path) as living, own_folder(tmp_path) as next_one:
        result = set((tmp_path / "running").iterdir())
        assert result == {living, next_one}, "one that lives keeps its own"


def test_where_none_can_be_made_another_place_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with own_folder(tmp_path / "file" / "data") as folder:
        assert folder.parent == tmp_path
    assert "no folder can be made there" in caplog.text
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="TMPDIR"), own_folder(tmp_path / "file" / "data"):
        pass


def test_says_that_it_keeps_no_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert keep_first(tmp_path / "model", tmp_path / "nowhere" / "note") is None
    assert "is not kept" in caplog.text
