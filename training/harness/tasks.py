"""Runs a task of lm-eval as a process and reads its results."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from srm.errors import UNDECODABLE, ConfigError
from srm.files import open_file, read_file
from srm.training.harness.config import HarnessConfig
from srm.training.text.whole_files import has, write_whole


class Score(msgspec.Struct, frozen=True):
    """A metric of a task, or of a part of it."""

    task: str
    metric: str
    value: float
    error: float | None
    """Standard error, where lm-eval has one."""
    questions: int | None


class TaskResult(msgspec.Struct, frozen=True):
    """What a task gave: scores, or why there are none."""

    task: str
    scores: list[Score]
    error: str = ""
    seconds: float | None = None
    """None where the results were there already."""


def run_task(
    config: HarnessConfig, program: str, model: Mapping[str, Any], about: str, task: str
) -> TaskResult:
    """Run a task, unless its results of the model that `about` identifies are there already; what
    lm-eval says goes into a log."""
    log = config.output / f"{task}.log"
    asked = [
        *("--tasks", task),
        *(("--include_path", str(config.include)) if config.include else ()),
        *(("--num_fewshot", str(config.shots)) if config.shots >= 0 else ()),
        *(("--limit", str(config.limit)) if config.limit else ()),
    ]
    how = {name: value for name, value in model.items() if name != "base_url"}
    identity = msgspec.json.encode([about, how, asked])
    folder = config.output / f"{task}-{hashlib.sha256(identity).hexdigest()[:8]}"
    done = folder / "asked.json"
    if has(done, identity) and (scores := read_scores(folder)):
        return TaskResult(task, scores)
    command = [
        *(program, "run", "--model", "local-completions", *asked),
        *("--model_args", ",".join(f"{name}={value}" for name, value in model.items())),
        *("--batch_size", "16", "--output_path", str(folder)),
    ]
    key = os.environ.get(config.api_key_env) or "none"  # it wants one
    sys.stderr.write(f"{task} …\n")
    began, why = time.monotonic(), ""
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with log.open("w") as written_log:
            environment = os.environ | {"OPENAI_API_KEY": key}
            subprocess.run(
                command, stdout=written_log, stderr=written_log, env=environment, check=True,
                timeout=config.task_limit_s,
            )  # fmt: skip
    except subprocess.TimeoutExpired:
        why = f"it took longer than task_limit_s = {config.task_limit_s}"
    except subprocess.CalledProcessError:
        why = _last_line(log)
    except OSError as error:
        raise ConfigError(f"output: {folder} cannot be used: {error}") from error
    scores = [] if why else read_scores(folder)
    if scores:
        write_whole(done, identity)
    elif not why:
        why = f"lm-eval left no results in {folder}"
    return TaskResult(task, scores, why, time.monotonic() - began)


def read_scores(folder: Path) -> list[Score]:
    """Return the scores of the newest results in a folder; none if there are none."""
    for path in sorted(folder.rglob("results_*.json"), reverse=True):
        try:
            written = msgspec.json.decode(read_file(path))
            counts = written.get("n-samples", {})
            return [
                Score(name, _metric(key), float(value), _error(values, key),
                      counts.get(name, {}).get("effective"))
                for name, values in written["results"].items()
                for key, value in values.items()
                if isinstance(value, int | float) and "_stderr" not in key and "," in key
            ]  # fmt: skip
        except (OSError, *UNDECODABLE, LookupError, AttributeError):
            continue  # cut off, or of another version: run the task again
    return []


def page(model: str, results: Sequence[TaskResult]) -> str:
    """Return the table of all scores, and the tasks without any."""
    lines = [
        f"Benchmarks of lm-eval, of {model}. ± is the standard error.",
        "",
        "| task | metric | value | ± | questions |",
        "|---|---|---|---|---|",
    ]
    for score in (score for result in results for score in result.scores):
        error = "–" if score.error is None else f"{score.error:.4f}"
        count = "–" if score.questions is None else f"{score.questions:,}"
        lines.append(f"| {score.task} | {score.metric} | {score.value:.4f} | {error} | {count} |")
    missing = [result for result in results if result.error]
    if missing:
        lines += ["", "Without a result, since the data or something else was not to be had:", ""]
        lines += [f"- `{result.task}`: {result.error}" for result in missing]
    return "\n".join([*lines, ""])


def _metric(key: str) -> str:
    name, _, how = key.partition(",")
    return name if how == "none" else f"{name} ({how})"


def _error(values: Mapping[str, Any], key: str) -> float | None:
    name, _, how = key.partition(",")
    error = values.get(f"{name}_stderr,{how}")
    return float(error) if isinstance(error, int | float) else None


def _last_line(log: Path) -> str:
    with open_file(log) as file:
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
    return next((line[:300] for line in reversed(lines) if line), "it failed without a word")
