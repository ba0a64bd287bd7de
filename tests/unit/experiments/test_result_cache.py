"""Results on disk are taken once, whole, and for nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from research.experiments.harness.result_cache import Numbers, cached
from srm.errors import ConfigError


def never() -> Numbers:
    raise AssertionError("measured again")


def test_a_result_is_measured_once_and_read_as_it_was(tmp_path: Path) -> None:
    path, about = tmp_path / "new" / "row-0.json", {"seeds": (0, 1), "steps": 3}
    result = cached(path, about, lambda: {"loss": 0.1 + 0.2, "parts": (1, 2)})
    assert result == {"loss": 0.1 + 0.2, "parts": [1, 2]} == cached(path, about, never)


def test_a_result_of_other_settings_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "row-0.json"
    cached(path, {"steps": 3}, dict)
    with pytest.raises(ConfigError, match=r"row-0.json is of another steps, 3 and not 4"):
        cached(path, {"steps": 4}, never)
    with pytest.raises(ConfigError, match="another texts, None and not 'ab'"):
        cached(path, {"steps": 3, "texts": "ab"}, never)


def test_no_changed_byte_is_read_as_another_result(tmp_path: Path) -> None:
    path, about = tmp_path / "row-0.json", {"steps": 3}
    result = cached(path, about, lambda: {"loss": 1.25})
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            assert cached(path, about, never) == result  # what changed was a blank
        except ConfigError as error:
            assert str(path) in str(error)
    path.write_bytes(whole[:-9])
    with pytest.raises(ConfigError, match="is damaged, remove it"):
        cached(path, about, never)


def test_the_setting_that_is_another_is_named_whatever_stands_before_it(tmp_path: Path) -> None:
    path, many = tmp_path / "row-0.json", {f"setting {number}": number for number in range(99)}
    cached(path, {"settings": {**many, "last": 1}}, dict)
    with pytest.raises(ConfigError, match=r"is of another last, 1 and not 2: remove it"):
        cached(path, {"settings": {**many, "last": 2}}, dict)
