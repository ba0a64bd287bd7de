"""`srm evaluate harness` with a program in the place of lm-eval, which tests/clients has."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import srm.__main__ as srm
from srm.errors import ConfigError
from srm.training.harness.command import files_of_tasks
from srm.training.harness.config import HarnessConfig

PROGRAM = """#!{python}
import json, os, pathlib, sys, time
given = dict(zip(sys.argv[2::2], sys.argv[3::2]))
task, out = given["--tasks"], pathlib.Path(given["--output_path"])
with open(os.environ["ASKED"], "a") as file:
    file.write(json.dumps(given | {{"key": os.environ["OPENAI_API_KEY"]}}) + "\\n")
if task == "gone":
    sys.exit("Traceback ...\\nConnectionError: Couldn't reach 'gone' on the Hub\\n")
if task == "hangs":
    time.sleep(1000)
if task == "silent":
    sys.exit(0)
(out / "model").mkdir()
values = {{"alias": task, "acc,none": 0.25, "acc_stderr,none": 0.01, "word_perplexity,none": 9,
          "word_perplexity_stderr,none": "N/A", "exact_match,strict": 1.0}}
(out / "model" / "results_1.json").write_text(json.dumps(
    {{"results": {{task: values}}, "n-samples": {{task: {{"original": 9, "effective": 4}}}}}}))
"""


class _Models(BaseHTTPRequestHandler):
    fingerprint = "first"

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "tiny", "owned_by": "srm"}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        usage = {"prompt_tokens": 1, "completion_tokens": 1}
        self._answer({"choices": [], "usage": usage, "system_fingerprint": self.fingerprint})

    def _answer(self, reply: dict[str, Any]) -> None:
        body = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Models) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "lm-eval"
    path.write_text(PROGRAM.format(python=sys.executable))
    path.chmod(0o755)
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    monkeypatch.setenv("KEY", "secret")
    return path


def evaluate(program: Path, url: str, tasks: str, *flags: str) -> tuple[int, list[dict[str, Any]]]:
    """Exit code and the tasks of the record."""
    output = program.parent / "out"
    code = srm.main(
        ["evaluate", "harness", f"--url={url}", f"--tasks={tasks}", f"--program={program}",
         f"--output={output}", "--api-key-env=KEY", *flags]
    )  # fmt: skip
    (record,) = output.glob("*-harness.json")
    tasks_run: list[dict[str, Any]] = json.loads(record.read_text())["tasks"]
    return code, tasks_run


def asked(program: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (program.parent / "asked").read_text().splitlines()]


def test_each_task_has_its_scores_in_a_record(
    program: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, (result,) = evaluate(program, url, "one", "--shots=3", "--limit=4")
    assert code == 0 and result["error"] == ""
    (given,) = asked(program)
    assert (given["--num_fewshot"], given["--limit"], given["key"]) == ("3", "4", "secret")
    assert given["--model_args"] == (
        f"model=tiny,base_url={url}/completions,num_concurrent=4,max_retries=3,"
        "tokenizer_backend=auto"
    )
    scores = [(score["metric"], score["value"], score["error"]) for score in result["scores"]]
    assert scores == [
        ("acc", 0.25, 0.01), ("word_perplexity", 9.0, None), ("exact_match (strict)", 1.0, None),
    ]  # fmt: skip
    assert "| one | acc | 0.2500 | 0.0100 | 4 |" in capsys.readouterr().out


def test_a_task_without_data_is_named_and_takes_no_other_along(
    program: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, results = evaluate(program, url, "gone,silent,one")
    assert code == 1
    assert [bool(result["scores"]) for result in results] == [False, False, True]
    printed = capsys.readouterr().out
    assert "- `gone`: ConnectionError: Couldn't reach 'gone' on the Hub" in printed
    assert "- `silent`: lm-eval left no results in" in printed


def test_a_task_that_never_ends_is_ended(program: Path, url: str) -> None:
    code, (result,) = evaluate(program, url, "hangs", "--task-limit-s=1")
    assert code == 1 and "longer than task_limit_s = 1" in result["error"]


def test_what_was_measured_is_not_measured_again_unless_it_would_differ(
    program: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tasks, flags, times in (
        ("one", (), 1), ("one,two", (), 2), ("one", ("--limit=2",), 3), ("one", ("--limit=2",), 3),
        ("one", (), 3),
    ):  # fmt: skip
        code, results = evaluate(program, url, tasks, *flags)
        assert code == 0 and all(result["scores"] for result in results)
        assert len(asked(program)) == times
    next((program.parent / "out").glob("two-*/**/results_*.json")).write_text('{"resul')
    evaluate(program, url, "two")
    assert len(asked(program)) == 4
    monkeypatch.setattr(_Models, "fingerprint", "of other weights")
    evaluate(program, url, "one")
    assert len(asked(program)) == 5
    own = tmp_path / "tasks"
    own.mkdir()
    for content in ("a: 1", "a: 2", "a: 2"):
        (own / "one.yaml").write_text(content)
        evaluate(program, url, "one", f"--include={own}")
    assert len(asked(program)) == 7
    (own / "__pycache__").mkdir()
    for written in (".git", "__pycache__/utils.pyc"):
        (own / written).write_text("by a program")
    evaluate(program, url, "one", f"--include={own}")
    assert len(asked(program)) == 7
    with pytest.raises(ConfigError, match="output must not be include or around it"):
        files_of_tasks(HarnessConfig(tasks=("one",), include=own, output=tmp_path))
    (own / "one.yaml").rename(own / "two.yaml")
    evaluate(program, url, "one", f"--include={own}")
    assert len(asked(program)) == 8


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "tasks must be names of tasks of lm-eval, got none"),
        (("--tasks=a,../b",), "tasks must be names of letters, digits and _-., got '../b'"),
        (("--tasks=a", "--shots=-2"), "shots must be -1 … 1000000, got -2"),
        (("--tasks=a", "--url=here"), "url must begin with http:// or https://, got 'here'"),
        (("--tasks=a", "--program=/none"), "program: there is no /none"),
    ],
)
def test_what_cannot_be_run_is_refused(
    flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert srm.main(["evaluate", "harness", *flags]) == 2
    assert message in capsys.readouterr().err
