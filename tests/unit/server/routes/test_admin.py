"""Folders of weights: only where the operator allows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.routes.admin import resolved
from tests.bodies.refusals import refusal


def test_a_path_leads_into_the_folder_of_weights(tmp_path: Path) -> None:
    allowed, outside = tmp_path / "weights", tmp_path / "secret"
    (allowed / "a").mkdir(parents=True)
    outside.mkdir()
    (allowed / "link").symlink_to(outside)
    (allowed / "good").symlink_to(allowed / "a")
    for path in ("a", "./a", "b/../a", "good", str(allowed / "a")):
        assert resolved(path, str(allowed)) == allowed / "a"
    for path in ("..", "../secret", "a/../../secret", "link", "link/x", str(outside), "/",
                 str(allowed / ".." / "secret"), str(allowed) + "-more"):  # fmt: skip
        error = refusal(resolved, path, str(allowed))
        assert error.param == "path" and "weights_dir" in error.message
    assert resolved(str(allowed / "link"), "") == outside


@pytest.mark.parametrize("path", ["a\0b", "x" * 5_000, "relative"])
def test_what_is_no_path_is_refused(path: str) -> None:
    assert refusal(resolved, path, "").param == "path"
