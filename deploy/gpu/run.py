"""`python3 -m deploy.gpu.run LIST RESULTS`: runs the commands of a list; knows no measurement.

A line of the list is `SECONDS NAME COMMAND`; `SECONDS limit` is that of all of them. In a command,
`python` and `srm` are run by this Python, and `$OUT` is RESULTS/NAME, a folder of its own, whose
file `log` has what it printed. RESULTS/LIST.jsonl gets a line for each command as soon as it has
ended. One that fails or takes too long costs no other. Those that succeeded in an earlier call are
left out. The exit status counts the commands that failed or found no time.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from string import Template
from typing import Any, BinaryIO, NamedTuple

ENVIRONMENT = {
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # others' plugins may not even import there
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",  # a traceback of every thread, on SIGABRT
    "MODULAR_DEVICE_CONTEXT_MEMORY_MANAGER_SIZE_PERCENT": "97",
    "MODULAR_DEVICE_CONTEXT_DISABLE_HEALTHCHECK": "true",  # clocks.csv says if one is throttled
}
PROGRAMS = {"python": [sys.executable], "srm": [sys.executable, "-m", "srm"]}
TIMED_OUT = 124
"""The exit status of a command that took too long, as of timeout(1)."""
CLOCKS = (
    *("nvidia-smi", "--format=csv", "--loop-ms=500"),
    "--query-gpu=timestamp,clocks.sm,clocks.mem,power.draw,temperature.gpu,"
    "clocks_event_reasons.active,utilization.gpu,memory.used",
)
LEAST_S = 5
"""No command begins with less time left."""
ENDS_WITHIN_S = 5
ALWAYS = {"adopt"}
"""Commands that every call begins with."""
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)  # found before a fork, after which little may be done


class Command(NamedTuple):
    """A line of a list."""

    limit_s: float
    name: str
    words: list[str]


def read_list(path: Path) -> tuple[float, list[Command]]:
    """Return the seconds of all commands together, and the commands."""
    lines = [shlex.split(line, comments=True) for line in path.read_text().splitlines()]
    commands = [Command(float(line[0]), line[1], line[2:]) for line in lines if line]
    limits = [command.limit_s for command in commands if command.name == "limit"]
    return sum(limits), [command for command in commands if command.name != "limit"]


def succeeded(path: Path) -> set[str]:
    """Return the names of the commands that ended well in earlier calls."""
    names = set()
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):  # one that broke off
            entry = json.loads(line)
            names |= {entry["name"]} if entry["exit"] == 0 else set()
    return names


def run_command(command: Command, folder: Path, left_s: float) -> dict[str, Any]:
    """Run it; return its line."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**ENVIRONMENT, **os.environ, "OUT": str(folder)}
    words = [Template(word).safe_substitute(environment) for word in command.words]
    words = [run for word in words for run in PROGRAMS.get(word, [word])]
    started, log_path = time.time(), folder / "log"
    with log_path.open("ab") as log:
        try:
            with started_process(words, log, environment) as process:
                status = wait_for(process, min(command.limit_s, left_s))
        except OSError as error:  # as where a program is missing
            status = 127
            log.write(f"{error}\n".encode())
    printed = log_path.read_text(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(printed) if line.strip()), "")
    last = last.replace(str(folder), "$OUT")[:200]
    seconds = round(time.time() - started, 1)
    return {"exit": status, "seconds": seconds, "last": last, "command": shlex.join(command.words)}


def wait_for(process: subprocess.Popen[bytes], limit_s: float) -> int:
    """Return the exit status. A command that takes too long writes where its threads are."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ENDS_WITHIN_S)
        return TIMED_OUT


def _before_program() -> None:
    """In a child: have it killed when this process ends, even by SIGKILL; and no core dumped."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@contextlib.contextmanager
def started_process(
    words: Sequence[str], output: BinaryIO, environment: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a program; end what it has started too, however the block ends."""
    process = subprocess.Popen(
        words,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        preexec_fn=_before_program,  # noqa: PLW1509 (there are no threads)
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # A process whose GPU hangs may not end: nothing waits for it without limit.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ENDS_WITHIN_S)


@contextlib.contextmanager
def clocks_written(results: Path) -> Iterator[None]:
    """Have clocks, temperature and why clocks are low written to clocks.csv twice a second."""
    if shutil.which(CLOCKS[0]) is None:
        yield
        return
    with (results / "clocks.csv").open("ab") as file, started_process(CLOCKS, file, {**os.environ}):
        yield


def end_call(number: int, _: object) -> None:
    """On a signal: end what runs, as `finally` says."""
    raise SystemExit(128 + number)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python3 -m deploy.gpu.run", allow_abbrev=False)
    parser.add_argument("list", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--began", type=float, default=time.time(), help="seconds since 1970")
    parser.add_argument("--only", type=re.compile, help="only commands whose names begin so")
    given = parser.parse_args(argv)
    if not given.list.is_file():
        others = ", ".join(sorted(str(path) for path in Path(__file__).parent.glob("call-*.txt")))
        parser.error(f"there is no {given.list}, but {others}")
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, end_call)
    results = given.results.resolve()
    results.mkdir(parents=True, exist_ok=True)
    limit_s, commands = read_list(given.list)
    path = results / given.list.with_suffix(".jsonl").name
    done, failed = set() if given.only else succeeded(path), 0
    wanted: Callable[[str], object] = (
        given.only.match if given.only else lambda name: name not in done
    )
    with clocks_written(results):
        for command in commands:
            if command.name not in ALWAYS and not wanted(command.name):
                continue
            left_s = given.began + limit_s - time.time()
            line: dict[str, Any] = {"name": command.name, "at": time.time()}
            if left_s < LEAST_S:
                line |= {"exit": None, "last": "no time"}
            else:
                line |= run_command(command, results / command.name, left_s - ENDS_WITHIN_S / 2)
            failed += line["exit"] != 0
            text = json.dumps(line)
            with path.open("a") as file:
                file.write(f"\n{text}\n")  # a line that broke off before has an end of its own
            with contextlib.suppress(OSError):  # a connection that broke ends no call
                sys.stdout.write(f"{text}\n")
                sys.stdout.flush()
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
