"""Input files are looked through as a whole before a line is run."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest

from srm.server.batch import job_input
from srm.server.batch.job_input import Stopped, check_input

URL = "/v1/completions"
TWICE = "duplicate_custom_id"


def line(custom_id: str, url: str = URL) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": {}})


def codes(tmp_path: Path, *lines: str, max_lines: int = 0) -> list[tuple[str, int | None]]:
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(lines))
    result = check_input(path, URL, 1_000_000, max_lines)
    assert result.errors or result.total == len([line for line in lines if line])
    return [(error.code, error.line) for error in result.errors]


@pytest.mark.parametrize(
    ("lines", "errors"),
    [
        ([*map(line, "abcdefghij"), "", ""], []),
        ([line("a"), "{", line("b", "/v1/embeddings"), line("c")],
         [("invalid_json_line", 2), ("url_mismatch", 3)]),
        (["{"] * 250, [("invalid_json_line", 1 + i) for i in range(100)]),
        (["", "\ufeff"], [("invalid_json_line", 2)]),
        *(([text], [("empty_file", None)])
          for text in ("", "\n \n", "\ufeff", "\ufeff\n", "\ufeff\n\n", "\ufeff \n")),
        ([*map(line, "abcdefbgb")], [(TWICE, 7), (TWICE, 9)]),
        ([line("a"), line("a"), "{", line("b"), line("a")],
         [(TWICE, 2), ("invalid_json_line", 3), (TWICE, 5)]),
        ([line("a"), *[line("a"), "{"] * 100],
         [((TWICE, "invalid_json_line")[i % 2], 2 + i) for i in range(100)]),
    ],
)  # fmt: skip
def test_the_first_hundred_faults_are_told_by_their_lines(
    tmp_path: Path, lines: list[str], errors: list[tuple[str, int | None]]
) -> None:
    assert codes(tmp_path, *lines) == errors


def test_too_many_lines(tmp_path: Path) -> None:
    assert codes(tmp_path, *map(line, "abcde"), max_lines=4) == [("too_many_tasks", None)]
    assert not codes(tmp_path, *map(line, "abcde"), max_lines=5)


def test_equal_hashes_are_no_equal_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_input, "hash", lambda _: 5, raising=False)
    assert not codes(tmp_path, *map(line, "abcdef"))
    assert codes(tmp_path, *map(line, "abcba")) == [(TWICE, 4), (TWICE, 5)]


def test_memory_does_not_grow_with_the_file_and_the_look_can_be_stopped(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    with path.open("w") as file:
        file.writelines(line(f"a{number}" + "-" * 400) + "\n" for number in range(10_000))
    tracemalloc.start()
    result = check_input(path, URL, 1_000_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert result.total == 10_000
    # A chunk and its lines, and 8 bytes a line, of which the growing array may hold two copies.
    assert peak < 2_000_000 < path.stat().st_size / 2
    with pytest.raises(Stopped):
        check_input(path, URL, 1_000_000, is_stopped=lambda: True)
