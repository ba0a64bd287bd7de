"""`srm loadtest` as a user calls it, against our server with the numpy engine and a toy server."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import pytest

import srm.__main__ as srm
from srm.errors import ConfigError
from srm.loadtest.__main__ import main
from srm.loadtest.commands.run_command import INTERRUPTED
from srm.loadtest.recording import load
from srm.loadtest.report.report import read_report
from srm.loadtest.summary import Summary
from tests.kit.loads.toy_server import FAILED, ToyConfig, ToyServer
from tests.kit.serving import ROOT, Server

Printed = pytest.CaptureFixture[str]
SHORT = ("--concurrency=4", "--output-tokens=4", "--prompt-tokens=6")


def call(url: str, folder: Path, *flags: str, command: str = "run") -> int:
    return main([command, f"--url={url}", f"--output={folder}", *SHORT, *flags])


def started(*argv: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "srm", "loadtest", *argv]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True)


def summary_in(folder: Path) -> Summary:
    (run,) = read_report(folder).runs
    return run.summary


def offline_in(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "offline.json").read_text())
    return document


@pytest.fixture(scope="module")
def made(server: Server, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a run, and what it printed."""
    folder = tmp_path_factory.mktemp("made")
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        assert call(server.url, folder, "--duration-s=1.5") == 0
    assert "\x1b" not in err.getvalue()
    return folder, out.getvalue()


@pytest.fixture(autouse=True)
def _without_pages(made: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots take longer than all else: one page, of the run that is made, is enough."""
    monkeypatch.setattr("srm.loadtest.report.report_files.html", lambda _report: "")


def test_a_run_is_reported_and_printed_as_plain_text(made: tuple[Path, str]) -> None:
    folder, printed = made
    names = {path.name for path in folder.iterdir()}
    assert {"recording.json", "recording.npz", "report.json", "report.html", "report.md"} <= names
    assert "<svg" in (folder / "report.html").read_text()
    assert printed.startswith("concurrent 4, measured from 0 s to 1.5 s, ended by duration\n")
    assert f"report: {folder / 'report.html'}\n" in printed and "\x1b" not in printed
    about = load(folder).about
    assert about.command.startswith("srm loadtest run --url=http://127.0.0.1:")
    assert about.command.endswith(f" --seed={about.scenario.seed}")
    assert about.server_metrics
    assert all("srm_engine_running_sequences" in sample.values for sample in about.server_metrics)
    summary = summary_in(folder)
    assert summary.completed == summary.planned > 0
    assert summary.miscounted == 0


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--fail-if=ttft_p98>0", "ttft_p98"),
        ("--objectives=speed<1", "speed"),
        ("--concurrency=0", "concurrency"),
    ],
)
def test_a_wrong_setting_is_found_before_anything_is_sent(
    server: Server, tmp_path: Path, flag: str, message: str
) -> None:
    before = server.metric("srm_engine_requests_total")
    for command in ("run", "sweep", "offline"):
        with pytest.raises(ConfigError, match=message):
            call(server.url, tmp_path / command, flag, command=command)
    assert server.metric("srm_engine_requests_total") == before
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("command", "flags"), [("run", ()), ("offline", ("--samples=2",))])
def test_a_second_run_sends_other_prompts_and_its_command_the_same_again(
    tmp_path: Path, command: str, flags: tuple[str, ...]
) -> None:
    with ToyServer(ToyConfig(ttft_s=0.0, itl_s=0.0)) as toy:
        flags = ("--duration-s=0", "--requests=1", "--metrics-url=none", *flags)
        for name in ("first", "second"):
            assert call(toy.url, tmp_path / name, *flags, command=command) == 0
        seed = load(tmp_path / "first").about.command.split()[-1]
        assert call(toy.url, tmp_path / "third", *flags, seed, command=command) == 0
    first, second, third = [served.body["prompt"] for served in toy.served]
    assert first == third != second


def test_nothing_that_listens_is_a_wrong_setting(tmp_path: Path) -> None:
    nowhere = "http://127.0.0.1:9"
    for command in ("sweep", "offline"):
        with pytest.raises(ConfigError, match=f"nothing listens at {nowhere}"):
            call(nowhere, tmp_path, command=command)
    process = started("run", f"--url={nowhere}", f"--output={tmp_path}")
    out, err = process.communicate(timeout=600)
    assert process.returncode == ConfigError.exit_code and out == ""
    assert f"srm loadtest: nothing listens at {nowhere}" in err and "Traceback" not in err


def test_a_server_without_metrics_that_refuses_all_is_told_of(
    tmp_path: Path, capsys: Printed
) -> None:
    with ToyServer(fault=lambda _number: "500") as toy:
        flags = ("--duration-s=0", "--requests=40", f"--metrics-url={toy.url}/nothing")
        assert call(toy.url, tmp_path, *flags) == 1
        assert "note: " in (err := capsys.readouterr().err) and "404" in err
        assert call(toy.url, tmp_path, *flags) == 1
        assert "note: " not in capsys.readouterr().err, "each step of a sweep said it again"
    assert load(tmp_path).about.server_metrics == []
    summary = summary_in(tmp_path)
    assert (summary.completed, summary.planned, summary.errors) == (0, 40, {"server": 40})


@pytest.mark.parametrize("command", ["run", "sweep", "offline"])
def test_why_all_requests_failed_is_on_the_terminal_and_in_the_report(
    tmp_path: Path, capsys: Printed, command: str
) -> None:
    settings = {"sweep": ("--settle-s=0", "--repeats=1", "--loads=2"), "offline": ("--samples=2",)}
    with ToyServer(fault=lambda _number: "400") as toy:
        flags = ("--duration-s=0", "--requests=4", "--metrics-url=none", *settings.get(command, ()))
        assert call(toy.url, tmp_path, *flags, command=command) == 1
    reason = json.dumps(FAILED)
    assert f"400: {reason}" in capsys.readouterr().out
    (run,) = read_report(tmp_path).runs
    assert f"The first client error: 400: {reason}" in run.warnings
    assert "as was asked for" in (tmp_path / "report.md").read_text()


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    with ToyServer(ToyConfig(ttft_s=0.01, itl_s=0.001)) as toy:
        flags = ("--duration-s=600", "--output-tokens=4", f"--output={tmp_path}")
        process = started("run", f"--url={toy.url}", *flags)
        assert process.stderr is not None
        while " 0 completed" in (line := process.stderr.readline()):
            pass  # of a busy machine
        assert "elapsed" in line
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=600)
    assert process.returncode == INTERRUPTED, err
    assert "Traceback" not in err and "ended by interrupt" in out
    about = load(tmp_path).about
    assert about.stopped_by == "interrupt" and about.seconds < 500
    assert summary_in(tmp_path).completed > 0


def test_a_report_is_made_again_and_compared(
    made: tuple[Path, str], tmp_path: Path, capsys: Printed
) -> None:
    """By another window, other objectives and other conditions, some of which hold."""
    folder, first = str(made[0]), summary_in(made[0])
    again, part = tmp_path / "again", tmp_path / "part"
    conditions = "--fail-if=e2e_p50>0,error_share>0"
    assert main(["report", folder, f"--output={again}", conditions]) == 1
    printed = capsys.readouterr().out
    assert "FAILED: e2e_p50>0: e2e_p50 is " in printed and "error_share" not in printed
    assert msgspec.json.encode(summary_in(again)) == msgspec.json.encode(first)

    planned = load(made[0]).requests["planned"]
    last = float(planned[planned < first.window[1]].max())  # a busy machine plans few
    flags = (f"--window=0,{last}", "--objectives=e2e<1e-6", "--fail-if=good_share<0.5")
    assert main(["report", folder, f"--output={part}", *flags]) == 1
    summary = summary_in(part)
    assert summary.window == (0.0, last) and 0 < summary.planned < first.planned
    assert summary.good_share == 0 and summary.objectives == ("e2e<1e-6",)
    assert "FAILED: good_share<0.5" in capsys.readouterr().out
    for wrong in (["--window=3,2"], [str(tmp_path / "nowhere")]):
        with pytest.raises(ConfigError, match=r"window|nowhere"):
            main(["report", *wrong])

    assert main(["compare", folder, str(part), str(tmp_path / "compared")]) == 0
    printed = capsys.readouterr().out
    assert "Output tokens" in printed and "report: " in printed
    assert "<html" in (tmp_path / "compared" / "compare.html").read_text()
    for usage in ([folder], ["--window=1,2", folder, str(part)], []):
        with pytest.raises(ConfigError, match="takes folders of reports, A B"):
            main(["compare", *usage])


def test_the_command_is_known_and_explains_itself(capsys: Printed) -> None:
    assert srm.main(["loadtest", "--help"]) == 0
    usage = capsys.readouterr().out
    assert all(f"  {name}  " in usage for name in ("run", "sweep", "offline", "report", "compare"))
    assert srm.main(["loadtest", "replay"]) == ConfigError.exit_code
    assert "replay" in capsys.readouterr().err
    assert srm.main(["loadtest", "compare", "--help"]) == 0
    for command in ("run", "sweep", "offline", "report"):
        with pytest.raises(SystemExit) as left:
            main([command, "--help"])
        assert left.value.code == 0 and "--output" in capsys.readouterr().out


@pytest.mark.parametrize("form", ["stream_whole", "packed"])
def test_samples_of_one_request_are_counted_whatever_their_form(
    server: Server, tmp_path: Path, capsys: Printed, form: str
) -> None:
    flags = ("--samples=150", f"--form={form}", "--metrics-url=none", "--seed=5")
    assert call(server.url, tmp_path, *flags, command="offline") == 0
    result = offline_in(tmp_path)
    assert (result["completed"], result["failed"], result["samples"]) == (1, 0, 150)
    assert result["output_tokens"] == 150 * 4
    assert (result["first_sample_s"] is None) == (form == "packed")
    assert (result["first_sample_s"] or 0) <= result["seconds"]
    printed = capsys.readouterr()
    assert "| samples | 150 |" in printed.out and "note: " not in printed.err
    assert printed.out.startswith((tmp_path / "offline.md").read_text().split("\n\n")[-1])
    assert (tmp_path / "report.html").exists()


def test_a_server_that_refuses_the_samples_is_exit_code_1(server: Server, tmp_path: Path) -> None:
    flags = ("--samples=150", '--extra-body={"best_of": 1}')
    assert call(server.url, tmp_path, *flags, command="offline") == 1
    result = offline_in(tmp_path)
    assert result["failed"] == 1 and "400" in result["first_error"]


def test_a_batch_is_written_run_and_counted(
    server: Server, tmp_path: Path, capsys: Printed
) -> None:
    flags = ("--kind=batch", "--lines=40", "--n=choice:1=0.5,3=0.5")
    before = server.http.get("/v1/files").json()["data"]  # of other tests
    assert call(server.url, tmp_path, *flags, command="offline") == 0
    result = offline_in(tmp_path)
    assert (result["completed"], result["failed"], result["prompt_tokens"]) == (40, 0, 40 * 6)
    assert 40 < result["samples"] < 120 and result["output_tokens"] == result["samples"] * 4
    parts = result["upload_s"] + result["run_s"] + result["download_s"]
    assert result["seconds"] == pytest.approx(parts)
    assert "| answered | 40 of 40 |" in capsys.readouterr().out
    assert server.http.get("/v1/files").json()["data"] == before, "nothing is left there"


def test_a_server_without_batches_is_named(tmp_path: Path) -> None:
    with ToyServer() as toy, pytest.raises(ConfigError, match=r"POST .*/v1/files: 404"):
        call(toy.url, tmp_path, "--kind=batch", command="offline")


_LIMIT_S = 120
_SHORTER = (
    (r"--duration-s \d+", "--duration-s 1.5"),
    (r"srm loadtest (run|sweep|offline)", r"srm loadtest \1 --warmup-s 0.2 --cooldown-s 0"),
    (r"srm loadtest sweep", "srm loadtest sweep --settle-s 0.2 --repeats 1"),
    (r"duration_s = \d+", "duration_s = 1.5"),
    (r"--samples 100000", "--samples 300"),
    (r"--lines 10000", "--lines 20"),
    (r"--max-load \d+", "--max-load 4"),
    (r"--concurrency 64", "--concurrency 16"),
    (r"http://127\.0\.0\.1:8000", "$SRM_URL"),
    (r"--served-model-name demo", "--served-model-name tiny"),
    (r"models/demo", "$MODEL"),
)
"""The numpy engine stands in for the real one, which takes a minute to compile."""


@pytest.mark.slow
def test_the_guide_runs_from_its_first_command_to_its_last(
    server: Server, text_model: Path, tmp_path: Path
) -> None:
    page = (ROOT / "docs/loadtest.md").read_text()
    commands: list[str] = re.findall(r"^```sh test\n(.*?)^```$", page, re.M | re.S)
    assert len(commands) > 8
    program = f'srm() {{ PYTHONPATH="{ROOT}" "{sys.executable}" -m srm "$@"; }}\n'
    environment = {**os.environ, "SRM_URL": server.url, "MODEL": str(text_model)}
    for command in commands:
        shorter = command
        for pattern, replacement in _SHORTER:
            shorter = re.sub(pattern, replacement, shorter)
        shell = ["bash", "-euo", "pipefail", "-c", program + shorter]
        place: dict[str, Any] = {"cwd": tmp_path, "env": environment, "timeout": _LIMIT_S}
        done = subprocess.run(shell, check=False, capture_output=True, text=True, **place)
        assert done.returncode == 0, f"{shorter}\n{done.stdout[-3_000:]}\n{done.stderr[-3_000:]}"
    for name in re.findall(r"--output (\S+)", "\n".join(commands)):
        folder = tmp_path / name
        if name == "runs/batch":
            assert (folder / "offline.json").exists()
            continue
        html = (folder / "report.html").read_text()
        assert "<svg" in html and not re.search(r"(?:src|href)=[\"']https?://", html), name
        assert (folder / "report.json").stat().st_size
