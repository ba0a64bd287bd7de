"""`python3 -m deploy.gpu.run CALL RESULTS`: runs one call of the kit; knows no measurement.

Appends to RESULTS/call-N.jsonl the lines of all parts, each written by the part itself as soon as
it is known, and to call-N.log what they print. A part ends at its limit or the call's; one that
died while it tried something is started again without that, as long as it gets further, after that
has been tried once more in MAX's synchronous mode, which says where it failed. The exit status
counts the parts that failed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from deploy.gpu.calls import FIRST, LIMIT_S, SIZES, KitPart, calls
from deploy.gpu.lines import AGAIN, BROKE_OFF, drop_retried, open_lines, parse_lines

ENVIRONMENT = {
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # others' plugins may not even import there
    "PYTHONUNBUFFERED": "1",
    "MODULAR_DEVICE_CONTEXT_MEMORY_MANAGER_SIZE_PERCENT": "97",
}
TIMED_OUT = 124
"""The exit status of a part that took too long, as of timeout(1)."""
SYNCHRONOUS = {"MODULAR_DEBUG": "device-sync-mode"}
"""MAX then waits after each launch, and an error names the op, its shapes and our line."""
AGAIN_S, MOST_AGAIN = 30, 3
"""Seconds of an attempt in that mode, and the most of them in a call."""
CLOCKS = (
    *("nvidia-smi", "--format=csv", "--loop-ms=500"),
    "--query-gpu=timestamp,clocks.sm,clocks.mem,power.draw,temperature.gpu,"
    "clocks_event_reasons.active,utilization.gpu,memory.used",
)
ENDS_WITHIN_S = 5
LEAST_S = 5
"""No part begins with less time left."""
PADDED = 2
"""Rows that a step on a GPU has at least: what products of fewer give ends nothing."""
SECONDS_TO_END = 5
ECHO_S = 1.0
"""Seconds between looks at what a part has written."""
UNECHOED = {"raw", "wrong"}
"""Fields of a line that are long: they stay in its file."""
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)  # found before a fork, after which little may be done
HUNG = re.compile(
    r"^Timeout \((\d+):(\d+):(\d+)[.\d]*\)!\n.*^(?:Current t|T)hread [^\n]*\n +File ([^\n]+)",
    re.MULTILINE | re.DOTALL,
)
"""Matches a dump of `faulthandler` at an attempt's limit, to the last thread's innermost frame."""
HEADING = "\n=== "
"""Before each command in the log."""


class Call:
    """One call: its files and its time."""

    def __init__(
        self, number: int, device: str, results: Path, cache_dir: str, ends: float
    ) -> None:
        results = results.resolve()
        results.mkdir(parents=True, exist_ok=True)
        self._patience = SIZES[device].patience
        self.device, self.cache_dir, self.ends = device, cache_dir, ends
        self.environment: dict[str, str] = {}
        """Variables with which a GPU opened."""
        self.opened = True
        self._again = 0
        self.lines, self.log = (results / f"call-{number}.{kind}" for kind in ("jsonl", "log"))
        self.lines.touch()
        self._echoed = self.lines.stat().st_size

    def run(self, parts: Iterable[KitPart]) -> int:
        """Run the parts; return how many failed or found no time."""
        failed = 0
        wrong: dict[int, list[str]] = defaultdict(list)
        for part in parts:
            left, started = self.ends - time.time(), time.time()
            width = part.settings.get("d_model", 0)
            if part.under and shutil.which(part.under[0]) is None:
                self._write(part, left_out=f"no {part.under[0]} here")
                continue
            if part.needs_gpu and self.device == "cpu":
                self._write(part, left_out=part.needs_gpu)
                continue
            if part.needs_device and not self.opened:
                self._write(part, left_out="no GPU opened")
                failed += 1
                continue
            if part.needs_products and wrong[width]:
                self._write(part, left_out=f"products are wrong: {', '.join(wrong[width])}")
                failed += 1
                continue
            if left < LEAST_S:
                self._write(part, left_out="no time")
                failed += 1
                continue
            try:
                status = self._run_part(part, min(left, part.limit_s * self._patience))
                last = last_line(self.log)
            except OSError as error:  # as where a program is there that cannot be executed
                status, last = 1, f"{type(error).__name__}: {error}"
            lasted = round(time.time() - started, 1)
            self._write(part, exit=status, seconds=lasted, last=last)
            failed += status != 0
            if part.opens:
                opened = [line["environment"] for line in self._lines_of(part) if line.get("ok")]
                self.environment = opened[-1] if opened else {}
                self.opened = bool(opened)
            if part.checks_products:
                wrong[width] += wrong_products(part.name, self._lines_of(part))
        return failed

    def _run_part(self, part: KitPart, limit_s: float) -> int:
        """Run it, again while it dies of something new; TIMED_OUT if its time ran out."""
        ends, deaths = time.time() + limit_s, 0
        if broke_off := tried(self._lines_of(part)):
            self._write_death(broke_off, BROKE_OFF)
        while True:
            environment = self.environment | dict(part.environment)
            status = self._run_process(self._command(part), ends - time.time(), environment)
            died_of = tried(self._lines_of(part))
            if status in {0, TIMED_OUT} or died_of is None or time.time() > ends - LEAST_S:
                return status or deaths
            deaths += 1
            why = f"exit {status}: {last_line(self.log)}"
            self._write_death(died_of, why)
            if self.device == "gpu" and part.needs_device and self._again < MOST_AGAIN:
                self._again += 1
                again = replace(part, name=f"{part.name}{AGAIN}{died_of['key']}")
                command = self._command(again, only=died_of["key"])
                left = min(AGAIN_S, ends - time.time())
                self._run_process(command, left, environment | SYNCHRONOUS)

    def _run_process(
        self, command: list[str], limit_s: float, environment: Mapping[str, str]
    ) -> int:
        with self.log.open("ab") as log:
            log.write(f"{HEADING}{' '.join(command)}\n".encode())
            log.flush()
            own = {**os.environ, **ENVIRONMENT, **environment, "SRM_CACHE_DIR": self.cache_dir}
            process = start(command, log, own)
            try:
                return waited(process, limit_s, self._echo)
            except subprocess.TimeoutExpired:
                return TIMED_OUT
            finally:
                end_group(process)
                self._echo()

    def _command(self, part: KitPart, only: str = "") -> list[str]:
        task: dict[str, Any] = {"part": part.name, "lines": str(self.lines), "only": only}
        task |= {"attempt_s": part.attempt_s * self._patience, "device": self.device}
        task |= {"cache_dir": self.cache_dir}
        task |= {**SIZES[self.device].common, **part.settings}
        arguments = [json.dumps(task)] if part.arguments is None else part.arguments
        # A part that runs a program itself finds it.
        results = str(self.lines.parent)
        under = [text.replace("RESULTS", results) for text in part.under if len(part.under) > 1]
        return [*under, sys.executable, "-m", part.module, *arguments]

    def _lines_of(self, part: KitPart) -> list[dict[str, Any]]:
        lines, _ = parse_lines(self.lines.read_bytes())
        return [line for line in lines if line["part"] == part.name]

    def _write(self, part: KitPart, **facts: Any) -> None:
        self._append({"part": part.name, "key": "end", "at": time.time(), **facts})
        self._echo()

    def _echo(self) -> None:
        """Print the results since the last time, which a log of the connection keeps too."""
        with self.lines.open("rb") as file:
            file.seek(self._echoed)
            whole, end, _ = file.read().rpartition(b"\n")
        self._echoed += len(whole + end)
        for line in parse_lines(whole)[0]:
            if not line.get("begun"):
                say(json.dumps({name: line[name] for name in line if name not in UNECHOED}))

    def _write_death(self, begun: dict[str, Any], why: str) -> None:
        self._append(begun | {"begun": False, "at": time.time(), "ok": False, "died": why})

    def _append(self, line: dict[str, Any]) -> None:
        with open_lines(self.lines) as file:
            file.write(json.dumps(line).encode() + b"\n")


def say(text: str) -> None:
    """Print it, if anyone is left to read it: a connection that broke ends no call."""
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def die_with_parent() -> None:
    """In a child, before its program: have it killed when this process ends, even by SIGKILL."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def start(
    command: Sequence[str], output: BinaryIO, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a program that ends with this process; its children end with its session."""
    return subprocess.Popen(
        command,
        env=environment,
        stdout=output,
        stderr=output,
        start_new_session=True,
        preexec_fn=die_with_parent,  # noqa: PLW1509 (there are no threads)
    )


def end_call(number: int, _: object) -> None:
    """On a signal: end what runs, as `finally` says."""
    raise SystemExit(128 + number)


def waited(process: subprocess.Popen[bytes], limit_s: float, meanwhile: Callable[[], None]) -> int:
    """Return the exit status; raises TimeoutExpired when it takes longer."""
    ends = time.time() + max(limit_s, 0.1)
    while (left := ends - time.time()) > ECHO_S:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(ECHO_S)
        meanwhile()
    return process.wait(left)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End what a part left running, and wait for the part."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    # A process whose GPU hangs may not end: nothing waits for it without limit.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(ENDS_WITHIN_S)


@contextlib.contextmanager
def clocks_written(results: Path) -> Iterator[None]:
    """Have clocks, temperature and why clocks are low written to clocks.csv twice a second."""
    with (results / "clocks.csv").open("ab") as file:
        process = start(CLOCKS, file)
        try:
            yield
        finally:
            end_group(process)


def tried(lines: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the line of what a part had begun and not ended."""
    return lines[-1] if lines and lines[-1].get("begun") else None


def wrong_products(part: str, lines: list[dict[str, Any]]) -> list[str]:
    """Return what a part found wrong of products, at as many rows as occur in a step.

    A part that looked at none has found something wrong too.
    """
    ended = drop_retried([line for line in lines if not line.get("begun")])
    looked_at = [line for line in ended if line.get("product")]
    if not looked_at:
        return [f"{part} looked at none"]
    wrong = [line for line in looked_at if not line["ok"] and line["rows"] >= PADDED]
    return [f"{part}: {line['key']}" for line in wrong]


def last_line(log: Path) -> str:
    """Return the last line that the last command printed, cut to 200 characters; of an attempt that
    took too long, what its main thread did, whose traceback is the last."""
    printed = log.read_text(errors="replace").rpartition(HEADING)[2].partition("\n")[2]
    if hung := HUNG.search(printed):
        hours, minutes, seconds = map(int, hung.groups()[:3])
        taken = (hours * 60 + minutes) * 60 + seconds
        return f"longer than {taken} s, in {hung[4].strip()}"[:200]
    return next((line.strip()[:200] for line in reversed(printed.splitlines()) if line.strip()), "")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python3 -m deploy.gpu.run", allow_abbrev=False)
    parser.add_argument("call", type=int, choices=LIMIT_S)
    parser.add_argument("results", type=Path)
    parser.add_argument("--device", choices=SIZES, default="gpu", help="cpu: a rehearsal")
    cache_dir = os.environ.get("SRM_CACHE_DIR", str(Path("~/.cache/srm").expanduser()))
    parser.add_argument("--cache-dir", default=cache_dir, help="folder of compiled graphs")
    parser.add_argument("--began", type=float, default=time.time(), help="seconds since 1970")
    parser.add_argument("--parts", type=re.compile, help="only parts whose name this matches")
    given = parser.parse_args(argv)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, end_call)
    ends = given.began + SIZES[given.device].patience * LIMIT_S[given.call] - SECONDS_TO_END
    call = Call(given.call, given.device, given.results, given.cache_dir, ends)
    watched = given.device == "gpu" and shutil.which(CLOCKS[0])
    with clocks_written(given.results) if watched else contextlib.nullcontext():
        parts = calls(SIZES[given.device], given.cache_dir)[given.call]
        if given.parts:
            parts = [part for part in parts if part.name in FIRST or given.parts.match(part.name)]
        return call.run(parts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
