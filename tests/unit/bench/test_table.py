"""Pages state the newest records' figures, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

import srm
from bench.records import table
from bench.records.card import CARD
from bench.records.figures import FIGURES
from bench.records.table import PAGES, newest, written
from engine.config import DEMO_MODEL
from engine.errors import ConfigError
from engine.records import RECORDS
from engine.weights.inspect_model import inspect_model

BLOCK = "<!-- figures: {} -->\n{}<!-- end of figures -->\n"


def http_record(tokens_per_s: float, **when: str) -> dict[str, Any]:
    case = {"requests": 1, "n": 9, "is_stream": True, "engine_tokens_per_s": [100.0]}
    return {
        "command": "srm bench http",
        "date": "2026-01-02",
        "machine": "a machine",
        "settings": {"max_tokens": 5},
        "cases": [case | {"http_tokens_per_s": [tokens_per_s]}],
    } | when


def keep(folder: Path, name: str, record: dict[str, Any]) -> None:
    (folder / name).write_bytes(msgspec.json.encode(record))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.name))
def test_the_pages_agree_with_their_records(page: Path) -> None:
    assert written(page, RECORDS) == page.read_text(), "call: srm bench table"
    assert "<!-- figures: " in page.read_text()


def test_the_model_card_says_what_inspect_says() -> None:
    card = (DEMO_MODEL / "README.md").read_text()
    for name, value in inspect_model(DEMO_MODEL).items():
        assert f"| {name} | {value} |" in card


def test_every_figure_is_on_a_page() -> None:
    shown = "".join(page.read_text() for page in PAGES)
    assert [name for name in (*FIGURES, *CARD) if f"<!-- figures: {name} -->" not in shown] == []


def test_the_newest_whole_record_is_shown_by_time_and_not_by_name(tmp_path: Path) -> None:
    keep(tmp_path, "2026-01-02-aaa-http-demo.json", http_record(50, time="2026-01-02T03:00:00Z"))
    keep(tmp_path, "2026-01-02-fff-http-demo.json", http_record(10, time="2026-01-02T02:00:00Z"))
    keep(tmp_path, "2026-01-02-ggg-http-demo.json", http_record(20))  # of before there were times
    old_form = {"date": "2026-01-03", "command": "srm bench http", "engine_tokens_per_s": 1}
    keep(tmp_path, "2026-01-03-hhh-http-demo.json", old_form)
    keep(tmp_path, "2026-01-03-iii-http.json", http_record(30, date="2026-01-03"))  # another kind
    page = tmp_path / "page.md"
    page.write_text(f"Before.\n{BLOCK.format('http', 'Typed.')}After.\n")
    text = written(page, tmp_path)
    assert "| 1 × 9 | stream | 100 | 50 | 50% |" in text
    assert "`srm bench http` on a machine ([record](2026-01-02-aaa-http-demo.md))" in text
    assert "Typed." not in text and text.startswith("Before.\n") and text.endswith("After.\n")
    page.write_text(text)
    assert written(page, tmp_path) == text


def test_one_model_alone_is_no_summary(tmp_path: Path) -> None:
    models: list[dict[str, Any]] = [{"name": name, "runs": []} for name in ("demo", "random d 512")]
    keep(tmp_path, "1-engine.json", {"date": "2026-01-01", "models": models})
    keep(tmp_path, "2-engine.json", {"date": "2026-01-02", "models": models[:1]})
    found = newest("engine", tmp_path)
    assert found is not None and found[0].name == "1-engine.json"


def test_what_was_never_measured_says_so_and_what_nobody_makes_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(BLOCK.format("http", "1 tok/s\n"))
    assert written(page, tmp_path) == BLOCK.format("http", "Not measured yet.\n")
    page.write_text(BLOCK.format("speed", ""))
    with pytest.raises(ConfigError, match="figures: speed must be one of engine, "):
        written(page, tmp_path)


def test_the_command_writes_and_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(BLOCK.format("http", "9 tok/s\n"))
    for name, value in (("PAGES", (page,)), ("RECORDS", tmp_path), ("ROOT", tmp_path)):
        monkeypatch.setattr(table, name, value)
    assert srm.main(["bench", "table", "--check"]) == 1
    assert "page.md: does not agree with its records" in capsys.readouterr().out
    assert "9 tok/s" in page.read_text()
    assert srm.main(["bench", "table"]) == 0
    assert srm.main(["bench", "table", "--check"]) == 0
    assert page.read_text() == BLOCK.format("http", "Not measured yet.\n")
