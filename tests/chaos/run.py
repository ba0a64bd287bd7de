"""`make chaos`: a job of many lines, during which processes of the server are killed all the time.

Engine, API process, jobs process and supervisor, in any state they happen to be in. The results
must be those of the same job left alone, byte for byte, each id once. Shows and records what was
done; exit code 1 if anything differs.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from engine.records import RECORDS, new_record, settings_of, write_record
from engine.settings import load
from server.storage.records import BatchRecord
from tests.chaos.jobs import KilledServer, completion_line, results, submit, wait_for
from tests.serving import SERVER_FLAGS, write_text_model

WHO = ("engine", "api", "jobs", "supervisor")


class ChaosConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of `make chaos`."""

    lines: int = 20_000
    """Of the job."""
    kills: int = 100
    """Most of them; fewer if the job is done before."""
    pause_s: float = 1.0
    """Between two kills, on average."""
    seed: int = 0
    """Of who is killed when."""
    output: Path = RECORDS
    """Folder for the record."""


@dataclass
class Outcome:
    """What was done to a job, and what became of it."""

    batch: BatchRecord
    kills: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    quiet_seconds: float = 0.0
    """Of the same job left alone."""
    lost: int = 0
    differing: int = 0


def harass(model: Path, folder: Path, config: ChaosConfig) -> Outcome:
    """Run a job twice: alone, and while processes are killed until it is done."""
    data, quiet = folder / "data", folder / "quiet"
    within_s = 60.0 + config.lines * 0.1 + config.kills * 10 * config.pause_s
    outcome = Outcome(submit(data, map(completion_line, range(config.lines))))
    shutil.copytree(data, quiet)
    started = time.monotonic()
    with KilledServer(model, quiet, *SERVER_FLAGS):
        wanted = results(quiet, wait_for(quiet, outcome.batch, within_s))
    outcome.quiet_seconds = time.monotonic() - started
    rng = random.Random(config.seed)
    started = time.monotonic()
    with KilledServer(model, data, *SERVER_FLAGS) as server:
        while outcome.kills.total() < config.kills and outcome.batch.is_runnable:
            time.sleep(rng.expovariate(1 / config.pause_s))
            who = rng.choice(WHO)
            outcome.kills[who] += server.kill(who)
            outcome.batch = wait_for(data, outcome.batch, 60, until=lambda _: True)
        outcome.batch = wait_for(data, outcome.batch, within_s)
    outcome.seconds = time.monotonic() - started
    for name, found in results(data, outcome.batch).items():
        outcome.lost += len(set(wanted[name]) - set(found))
        outcome.differing += len(set(found) - set(wanted[name]))
    return outcome


def table(rows: Mapping[str, object]) -> str:
    """A table of two columns in Markdown."""
    return "\n".join(["| | |", "|---|---|", *(f"| {k} | {v} |" for k, v in rows.items())]) + "\n"


def markdown(outcome: Outcome) -> str:
    """What happened, as a table."""
    kills = ", ".join(f"{outcome.kills[who]} x {who}" for who in WHO)
    rows = {
        "lines": f"{outcome.batch.total:,}",
        "status": outcome.batch.status,
        "kills": f"{outcome.kills.total()} ({kills})",
        "lost": outcome.lost,
        "duplicated": 0,  # or `results` would have raised
        "differing from the job left alone": outcome.differing,
        "seconds, with kills": f"{outcome.seconds:.1f}",
        "seconds, left alone": f"{outcome.quiet_seconds:.1f}",
    }
    return table(rows)


def main(argv: list[str]) -> int:
    """Do it, write a record, print its table."""
    config = load(ChaosConfig, argv, prog="python -m tests.chaos.run")
    with tempfile.TemporaryDirectory(prefix="srm-chaos-") as folder:
        model = Path(folder) / "model"
        write_text_model(model)
        outcome = harass(model, Path(folder), config)
    record = new_record("make chaos") | {
        "settings": settings_of(config),
        "kills": dict(outcome.kills),
        "lost": outcome.lost,
        "differing": outcome.differing,
        "completed": outcome.batch.completed,
        "failed": outcome.batch.failed,
        "seconds": outcome.seconds,
        "quiet_seconds": outcome.quiet_seconds,
    }
    write_record(record, "chaos", markdown(outcome), config.output)
    is_right = outcome.batch.status == "completed" and not outcome.lost + outcome.differing
    return 0 if is_right else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
