"""Input files are looked through as a whole before a line is run."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest

from server.batch import job_input
from server.batch.job_input import Checked, Stopped, check_input

URL = "/v1/completions"


def line(custom_id: str, url: str = URL) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": {}})


def checked(tmp_path: Path, text: str, max_lines: int = 0) -> Checked:
    path = tmp_path / "in.jsonl"
    path.write_text(text)
    return check_input(path, URL, 1_000_000, max_lines)


def codes(found: Checked) -> list[tuple[str, int | None]]:
    return [(error.code, error.line) for error in found.errors]


def test_a_good_file(tmp_path: Path) -> None:
    found = checked(tmp_path, "\n".join(line(f"a{number}") for number in range(10)) + "\n\n")
    assert (found.total, found.errors) == (10, [])


def test_every_line_at_fault_is_told(tmp_path: Path) -> None:
    found = checked(tmp_path, "\n".join([line("a"), "{", line("b", "/v1/embeddings"), line("c")]))
    assert codes(found) == [("invalid_json_line", 2), ("url_mismatch", 3)]


def test_the_first_hundred_are_told(tmp_path: Path) -> None:
    assert len(checked(tmp_path, "{\n" * 250).errors) == 100


@pytest.mark.parametrize("text", ["", "\n \n", "\ufeff", "\ufeff\n", "\ufeff\n\n", "\ufeff \n"])
def test_an_empty_file(tmp_path: Path, text: str) -> None:
    assert codes(checked(tmp_path, text)) == [("empty_file", None)]


def test_too_many_lines(tmp_path: Path) -> None:
    text = "\n".join(line(f"a{number}") for number in range(10))
    assert codes(checked(tmp_path, text, max_lines=9)) == [("too_many_tasks", None)]
    assert not checked(tmp_path, text, max_lines=10).errors


def test_an_id_that_is_there_twice(tmp_path: Path) -> None:
    ids = [*"abcdef", "b", "g", "b"]
    found = checked(tmp_path, "\n".join(map(line, ids)))
    assert codes(found) == [("duplicate_custom_id", 7), ("duplicate_custom_id", 9)]
    assert "line 2" in found.errors[0].message


def test_ids_that_are_there_twice_are_told_of_beside_other_faults(tmp_path: Path) -> None:
    found = checked(tmp_path, "\n".join([line("a"), line("a"), "{", line("b"), line("a")]))
    assert codes(found) == [
        ("duplicate_custom_id", 2),
        ("invalid_json_line", 3),
        ("duplicate_custom_id", 5),
    ]


def test_the_first_hundred_are_told_whatever_is_wrong_with_them(tmp_path: Path) -> None:
    found = checked(tmp_path, "\n".join([line("a"), *[line("a"), "{"] * 100]))
    assert len(found.errors) == 100
    assert codes(found)[:2] == [("duplicate_custom_id", 2), ("invalid_json_line", 3)]
    assert codes(found)[-1] == ("invalid_json_line", 101)


def test_equal_hashes_are_no_equal_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_input, "hash", lambda _: 5, raising=False)
    assert not checked(tmp_path, "\n".join(map(line, "abcdef"))).errors
    assert codes(checked(tmp_path, "\n".join(map(line, "abcba")))) == [
        ("duplicate_custom_id", 4),
        ("duplicate_custom_id", 5),
    ]


def test_it_can_be_stopped(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(line("a"))
    with pytest.raises(Stopped):
        check_input(path, URL, 1_000_000, is_stopped=lambda: True)


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    with path.open("w") as file:
        file.writelines(line(f"a{number}") + "\n" for number in range(50_000))
    tracemalloc.start()
    found = check_input(path, URL, 1_000_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.total == 50_000
    assert path.stat().st_size > 3_500_000
    # A chunk and its lines, and 8 bytes a line, of which the growing array may hold two copies.
    assert peak < 4_500_000
