"""The frame of benchmarks: settings are checked, records written, pages state the newest ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

import srm.__main__ as srm
from research.bench.frame import Settings, run, table
from research.bench.host.host import HostBenchConfig
from research.bench.records import table as pages
from research.bench.records.figures import CARD, FIGURES
from research.bench.records.table import PAGES, newest, written
from srm.engine.config import DEMO_MODEL, GRPO_MODEL
from srm.engine.weights.checkpoint import load_checkpoint
from srm.errors import ConfigError
from srm.loadtest.records import RECORDS
from srm.training.evaluate import Evaluation

BLOCK = "<!-- figures: {} -->\n{}<!-- end of figures -->\n"


class SomeConfig(Settings, frozen=True, forbid_unknown_fields=True):
    sizes: tuple[int, ...] = (1,)
    parts: tuple[float, ...] = (0.5,)
    peers: tuple[str, ...] = ()
    streams: tuple[int, ...] = ()
    random_widths: tuple[int, ...] = ()
    count: int = 1
    seconds: float = 1.0
    threads: int = 0
    check: bool = False


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sizes": ()}, r"sizes must be one or more numbers of at least 1, got \(\)"),
        ({"sizes": (3, 0)}, "sizes must be one or more"),
        ({"parts": (0.0,)}, "parts must be one or more numbers above 0"),
        ({"streams": (0,)}, "streams must be"),
        ({"random_widths": (6,)}, "random_widths must be multiples of 4"),
        ({"count": 0}, "count must be at least 1, got 0"),
        ({"seconds": 0.0}, "seconds must be above 0"),
        ({"seconds": float("nan")}, "seconds must be above 0"),
        ({"threads": -1}, "threads must be at least 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SomeConfig(**fields)


def test_the_contexts_length_bounds_a_host_benchmarks_sequences() -> None:
    with pytest.raises(ValueError, match="length must be"):
        HostBenchConfig(length=505)


def test_a_run_leaves_its_record_and_its_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [f"--output={tmp_path}", "--count=7"]
    done = run(
        SomeConfig,
        flags,
        "some",
        lambda config: {"cases": [config.count]},
        lambda record: table("a | b", (f"{case} | x" for case in record["cases"])),
        stem="some-{0.count}",
    )
    (path,) = tmp_path.glob("*-some-7.json")
    record = json.loads(path.read_text())
    assert done == 0
    assert record["command"] == " ".join(["srm bench some", *flags])
    assert record["cases"] == [7] and record["settings"]["output"] == str(tmp_path)
    shown = path.with_suffix(".md").read_text()
    assert shown.endswith("| a | b |\n|---|---|\n| 7 | x |\n")
    assert shown in capsys.readouterr().out


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


def test_the_pages_agree_with_their_records_and_show_every_figure() -> None:
    shown = "".join(page.read_text() for page in PAGES)
    assert [page for page in PAGES if written(page, RECORDS) != page.read_text()] == []
    assert [name for name in (*FIGURES, *CARD) if f"<!-- figures: {name} -->" not in shown] == []


def test_the_bundled_models_evaluations_are_of_their_weights_and_worth_something() -> None:
    demo, sibling = (
        msgspec.json.decode((folder / "evaluation.json").read_bytes(), type=Evaluation)
        for folder in (DEMO_MODEL, GRPO_MODEL)
    )
    assert demo.fingerprint == load_checkpoint(DEMO_MODEL).fingerprint
    assert sibling.fingerprint == load_checkpoint(GRPO_MODEL).fingerprint
    assert 0.2 < demo.pass_at["1"] < 0.7 and demo.pass_at["1000"] > 0.95
    gains = sibling.gains
    assert gains is not None and gains.fingerprint == demo.fingerprint
    assert gains.pass_at["1"] > 3 * gains.pass_at_error["1"]
    assert gains.pass_at["1000"] >= -gains.pass_at_error["1000"]
    for name in ("config.json", "tokenizer.json", "chat_template.jinja"):  # `srm weights` takes it
        assert (GRPO_MODEL / name).read_bytes() == (DEMO_MODEL / name).read_bytes()


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
    result = newest("engine", tmp_path)
    assert result is not None and result[0].name == "1-engine.json"


@pytest.mark.parametrize(("name", "shown"), [("random d 512", 2), ("random d 1024", 1)])
def test_ops_are_shown_of_one_model(name: str, shown: int, tmp_path: Path) -> None:
    for at, of in ((1, "random d 512"), (2, name)):
        models = [{"name": of, "runs": [{"dtype": "float32", "ops": []}]}]
        keep(tmp_path, f"{at}-kernels.json", {"date": f"2026-01-0{at}", "models": models})
    result = newest("kernels", tmp_path)
    assert result is not None and result[0].name == f"{shown}-kernels.json"


def test_the_command_writes_and_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(BLOCK.format("http", "9 tok/s\n"))
    for name, value in (("PAGES", (page,)), ("RECORDS", tmp_path), ("ROOT", tmp_path)):
        monkeypatch.setattr(pages, name, value)
    assert srm.main(["bench", "table", "--check"]) == 1
    assert "page.md: does not agree with its records" in capsys.readouterr().out
    assert "9 tok/s" in page.read_text()
    assert srm.main(["bench", "table"]) == 0
    assert srm.main(["bench", "table", "--check"]) == 0
    assert page.read_text() == BLOCK.format("http", "Not measured yet.\n")
    page.write_text(BLOCK.format("speed", ""))
    with pytest.raises(ConfigError, match="figures: speed must be one of engine, "):
        written(page, tmp_path)
