"""The kit for a GPU machine: no command that fails costs another, and its lists can be read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from deploy.gpu import run
from deploy.gpu.graphs import GRAPHS, OF_CALLS, OPS
from deploy.gpu.run import ALWAYS, TIMED_OUT, main, read_list, wait_for
from research.bench.engine.kernels import KernelsBenchConfig
from research.bench.engine.models import BenchConfig, StepsConfig
from research.bench.engine.ops import PRODUCTS
from research.bench.engine.throughput import EngineBenchConfig
from research.bench.frame import Settings
from research.bench.gpu import turns
from research.bench.gpu.profile import ProfileConfig, each_once, last_step, read_kernels
from research.bench.gpu.report import markdown, record_of
from research.bench.gpu.turns import TurnsConfig
from research.bench.model import recurrence_rate
from research.bench.server.sink import SinkConfig
from research.experiments import coverage, throughput
from research.experiments.harness.settings import configure
from srm.errors import ConfigError
from srm.settings import load
from srm.training.settings import PretrainConfig
from tests.kit.serving import ROOT

LISTS = sorted((ROOT / "deploy" / "gpu").glob("call-*.txt"))
SETTINGS: dict[str, type[Settings]] = {
    "sink": SinkConfig,
    "replays": StepsConfig,
    "kernels": KernelsBenchConfig,
    "engine": EngineBenchConfig,
    "profile": ProfileConfig,
    "turns": TurnsConfig,
}
PACKED = {"throughput": throughput, "coverage": coverage}
"""Experiments that are packed."""
SLEEP = "python -c 'import time; print(1, flush=True); time.sleep(600)'"


class Call:
    """A list and its results, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.list, self.results = folder / "call-1.txt", folder / "results"

    def run(self, *lines: str, more: tuple[str, ...] = ()) -> int:
        self.list.write_text("300 limit\n# a remark\n\n" + "\n".join(lines))
        return main([str(self.list), str(self.results), *more])

    @property
    def ends(self) -> dict[str, Any]:
        lines = (self.results / "call-1.jsonl").read_text().split("\n")
        return {line["name"]: line for line in map(json.loads, filter(None, lines))}


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return Call(tmp_path)


def test_a_command_that_fails_hangs_or_is_missing_costs_no_other(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait_once_it_runs(process: subprocess.Popen[bytes], limit_s: float) -> int:
        while limit_s == 0.5 and not (call.results / "hangs" / "log").read_bytes():
            time.sleep(0.01)
        return wait_for(process, limit_s)

    monkeypatch.setattr(run, "wait_for", wait_once_it_runs)
    lines = [
        "300 fails python -c 'print(5); raise SystemExit(3)'",
        f"0.5 hangs {SLEEP}",
        "300 missing no-such-program",
        "300 last python -c 'import os; print(os.environ[\"OUT\"])' $OUT",
    ]
    assert call.run(*lines) == 3
    assert (call.ends["fails"]["exit"], call.ends["fails"]["last"]) == (3, "5")
    assert call.ends["hangs"]["exit"] == TIMED_OUT
    assert 'File "<string>", line 1 in <module>' in (call.results / "hangs" / "log").read_text()
    assert call.ends["missing"]["exit"] == 127 and "no-such-program" in call.ends["missing"]["last"]
    assert call.ends["last"]["exit"] == 0 and call.ends["last"]["last"] == "$OUT"
    assert call.ends["last"]["command"].endswith("'$OUT'")


def test_results_are_printed_and_written_as_they_come(
    call: Call, capsys: pytest.CaptureFixture[str]
) -> None:
    look = "python -c 'import sys; print(open(sys.argv[1]).read())' $OUT/../call-1.jsonl"
    assert call.run("300 first python -c 1", f"300 second {look}") == 0
    assert json.loads(call.ends["second"]["last"])["name"] == "first"
    assert [json.loads(line)["name"] for line in capsys.readouterr().out.splitlines()] == [
        "first",
        "second",
    ]


def test_a_call_that_broke_off_goes_on_with_what_did_not_succeed(call: Call) -> None:
    lines = (
        "300 adopt python -c 1",
        "300 right python -c 1",
        "300 wrong python -c 'raise SystemExit(1)'",
    )
    assert call.run(*lines) == 1
    path = call.results / "call-1.jsonl"
    path.write_text(path.read_text() + '{"name": "rig')  # the machine vanished
    before = path.read_text()
    assert call.run(*lines) == 1
    after = path.read_text().removeprefix(before).split()
    assert "rig" in before and [f'"{name}",' in after for name in ("adopt", "right", "wrong")] == [
        True,
        False,
        True,
    ]
    assert call.run(*lines, more=("--only=rig",)) == 0


def test_no_command_begins_when_the_time_of_all_is_over(call: Call) -> None:
    assert call.run("300 a python -c 1", more=("--began=1000",)) == 1
    assert call.ends["a"]["exit"] is None and call.ends["a"]["last"] == "no time"


def test_an_unknown_list_is_refused_with_those_that_there_are(
    call: Call, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([str(call.list), str(call.results)])
    assert "deploy/gpu/call-4.txt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("under", "numbers", "status"),
    [
        ([], [signal.SIGTERM], 143),
        ([], [signal.SIGHUP], 129),
        ([], [signal.SIGKILL], -9),
        (["nohup"], [signal.SIGHUP, signal.SIGTERM], 143),
    ],
)
def test_no_command_outlives_a_call_that_is_ended(
    call: Call, under: list[str], numbers: list[signal.Signals], status: int
) -> None:
    """A command holds the log open as long as it lives: a pipe, whose reader sees that."""
    call.list.write_text(f"300 limit\n300 a {SLEEP}\n")
    (call.results / "a").mkdir(parents=True)
    os.mkfifo(pipe := call.results / "a" / "log")
    heeded = ["env", "--default-signal=HUP"]  # in `nohup make test` too
    program = [sys.executable, "-m", "deploy.gpu.run", str(call.list), str(call.results)]
    with (
        subprocess.Popen(
            [*heeded, *under, *program], cwd=ROOT, stdout=subprocess.DEVNULL
        ) as running,
        pipe.open("rb") as log,
    ):
        assert log.readline() == b"1\n"
        for number in numbers:
            running.send_signal(number)
        assert running.wait() == status
        log.read()  # ends when the last that writes there has ended


@pytest.mark.parametrize("listed", LISTS, ids=lambda listed: listed.stem)
def test_a_lists_commands_have_settings_that_can_be_read(listed: Path) -> None:
    limit_s, commands = read_list(listed)
    assert commands[0].name in ALWAYS and limit_s < 600
    assert len({command.name for command in commands}) == len(commands)
    for _, _, words in commands:
        if words[:2] == ["srm", "bench"]:
            load(SETTINGS[words[2]], words[3:], prog="")
        if words[:3] == ["srm", "train", "pretrain"]:
            load(PretrainConfig, words[3:])
        for module in [words[place + 1] for place, word in enumerate(words) if word == "-m"][:1]:
            path = ROOT / module.removeprefix("srm.").replace(".", "/")
            files = path.with_suffix(".py"), path / "__main__.py"
            assert module == "pytest" or any(file.exists() for file in files)
            if module == "research.experiments":
                configure(PACKED[words[3]].Settings, words[4:])
        assert all(
            (ROOT / word).exists() for word in words if word.startswith(("tests/", "deploy/"))
        )


@pytest.mark.parametrize("listed", LISTS, ids=lambda listed: listed.stem)
def test_every_graph_that_a_list_needs_is_packed(listed: Path) -> None:
    graphs = OF_CALLS.get(listed.stem.removeprefix("call-"), GRAPHS)
    packed = [command.split() for command in graphs.values()]
    for _, _, words in read_list(listed)[1]:
        if words[:2] == ["srm", "bench"] and words[2] != "turns":
            config = load(SETTINGS[words[2]], words[3:], prog="")
            if not isinstance(config, BenchConfig):  # it serves a bundled model
                continue
            module = "bench.gpu.compile_ops" if words[2] == "kernels" else "device.precompile"
            for width, dtype in [(w, d) for w in config.random_widths for d in config.dtypes]:
                wanted = ["--d-model", str(width), "--dtype", dtype]
                of_variants = ["--variants", ",".join(config.variants)] if config.variants else []
                for item in (wanted, wanted + of_variants):
                    assert [item] == [
                        of for name, *of in packed if name.endswith(module) and of == item
                    ]


def test_every_graph_of_variants_is_packed() -> None:
    """Those that `srm bench turns` compares unless others are named."""
    config = TurnsConfig()
    packed = {
        f"{OPS} --d-model {width} --dtype bfloat16 --only {','.join(PRODUCTS)} --variants={names}"
        for width in config.random_widths
        for names in ["", *(way.replace("+", ",") for way in config.compared)]
    }
    assert packed == {*OF_CALLS["5"].values()}


def test_variants_are_shown_as_parts_of_todays_time() -> None:
    case = {"d_model": 512, "op": "up", "rows": 4096, "seconds": {"today": 2e-5, "tanh": 1.5e-5}}
    text = turns.markdown({"settings": {"compared": ["tanh"]}, "cases": [case]})
    assert text[0] == "| d | op | rows | µs today | tanh |"
    assert text[2:] == ["| 512 | up | 4,096 | 20.0 | 75.0% |"]


def test_a_step_of_ncus_table() -> None:
    """MAX's kernels are named by digits; what a step is follows from what repeats."""
    names = ["k0", "k1", *["k2", "k3", "k3", "k4", "k3"] * 2, "k2", "k5", "k6", "k7"]
    report = '==PROF== Connected\n"ID","Kernel Name","gpu__time_duration.sum"\n"","","us"\n'
    report += "".join(f'"{i}","{name}","1.5"\n' for i, name in enumerate(["fill", *names]))
    report += "".join(f'"{i}","{name}","1,000"\n' for i, name in enumerate(names))
    result = last_step(read_kernels(report), num_layers=2)
    assert result["launches"] == 16 and result["ns"] == 16_000_000
    kernels = {kernel["name"]: (kernel["calls"], kernel["ns"]) for kernel in result["kernels"]}
    assert kernels["mix"] == kernels["up"] == (2, 2_000_000)
    assert kernels["expand"] == kernels["head"] == kernels["score"] == (1, 1_000_000)
    assert len(last_step(read_kernels(report), num_layers=3)["kernels"]) == 16
    assert each_once(16, 2)[0] == 28
    with pytest.raises(ValueError, match="no step repeats"):
        last_step([("a", 1.0), ("b", 1.0)], num_layers=2)
    with pytest.raises(ValueError, match="no table"):
        read_kernels("==ERROR== ERR_NVGPUCTRPERM")
    with pytest.raises(ValueError, match="in 'fortnight'"):
        read_kernels(report.replace('"us"', '"fortnight"'))


def test_pytorch_of_a_random_model_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    task: dict[str, Any] = {
        "model": "64",
        "device": "cpu",
        "dtypes": ["float32"],
        "forms": ["eager"],
    }
    task |= {"batch_sizes": [2], "repetitions": 1, "seconds": 0.001}
    assert recurrence_rate.main([json.dumps(task)]) == 0
    printed = capsys.readouterr()
    (rates,) = json.loads(printed.out)
    assert rates["by"] == "PyTorch eager" and rates["batches"][0]["tokens_per_s"] > 0
    assert '"batch_size":2' in printed.err, "what takes too long has been printed before"


RECORD = {"machine": "H200", "commit": "1", "date": "2026-11-26", "time": "2026-11-26T00:00:00Z"}


def write(results: Path, name: str, **facts: Any) -> None:
    (results / name).mkdir(parents=True)
    (results / name / "log").write_text("once\nagain\n")
    if facts:
        page = results / name / "2026-11-26-1-replays.md"
        page.write_text("# replays\n\n| d |\n\n![A picture](a.svg)\n")
        page.with_suffix(".json").write_text(json.dumps(facts))
    with (results / "call-4.jsonl").open("a") as lines:
        line = {"name": name, "exit": 0, "seconds": 1, "last": "a | b", "command": "srm"}
        lines.write(json.dumps(line) + "\n")


def test_a_report_has_each_commands_page_or_the_end_of_its_log(tmp_path: Path) -> None:
    write(tmp_path, "replays", **RECORD)
    write(tmp_path, "serve")
    with (tmp_path / "call-4.jsonl").open("a") as lines:
        lines.write('{"name": "br')  # the machine vanished
    record = record_of(tmp_path)
    text = "\n".join(markdown(record))
    assert record["machine"] == "H200" and record["commands"][0]["records"]
    assert "| replays | 0 | 1 | a \\| b |" in text and "\n| d |\n" in text and "![" not in text
    assert "## serve\n\n`srm`\n\n```\nonce\nagain\n```" in text


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"commit": "2"}, "H200 at 1 and of H200 at 2"),
        ({"machine": "A100"}, "A100 at 1 and of H200"),
    ],
)
def test_results_of_two_machines_or_commits_are_no_report(
    other: dict[str, str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="no record that says"):
        record_of(tmp_path)
    write(tmp_path, "first", **RECORD)
    write(tmp_path, "second", **RECORD | other)
    with pytest.raises(ConfigError, match=message):
        record_of(tmp_path)
