"""Benchmark records: where and at what a measurement was made, and one file per run.

A record is written by the program that measured, never typed: JSON with the raw numbers, and a
table in Markdown beside it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from srm.errors import ConfigError
from srm.files import read_file

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "research" / "records"


def new_record(command: str, device: str = "cpu") -> dict[str, Any]:
    """Make a record with command, time, commit and machine; for a "gpu", its name too."""
    now = time.gmtime()
    return {
        "command": command,
        "date": time.strftime("%Y-%m-%d", now),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", now),
        "commit": _commit(),
        "machine": _machine() if device == "cpu" else f"{_gpu()}; {_machine()}",
    }


def settings_of(config: msgspec.Struct) -> dict[str, Any]:
    """Return a benchmark's settings for its record; paths in this tree as seen from its root."""

    def shown(path: Path) -> str:
        return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)

    settings: dict[str, Any] = msgspec.to_builtins(config, enc_hook=shown)
    return settings


def write_record(record: dict[str, Any], name: str, table: str, folder: Path) -> Path:
    """Write `<date>-<commit>-<name>.json` and `.md` into `folder`, and print the latter.

    Returns the Markdown's path; a picture of the record stands beside it. Raises ConfigError if the
    folder cannot be written.
    """
    stem = f"{record['date']}-{record['commit']}-{name}"
    content = msgspec.json.format(msgspec.json.encode(record), indent=1)
    path, text = folder / f"{stem}.md", page_of(record, name, table)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".json").write_bytes(content + b"\n")
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"output: {path}: {error.strerror}") from error
    sys.stdout.write(f"{text}\n{path}\n")
    return path


def page_of(record: dict[str, Any], name: str, table: str) -> str:
    """Return the page of a record: what was run, at what and where, and the table."""
    return (
        f"# {name}, {record['date']}\n\n`{record['command']}` at {record['commit']}, "
        f"{record['machine']}.\n\n{table}"
    )


def _commit() -> str:
    archived = ROOT / "COMMIT"  # a source tree that was packed without its history
    if archived.exists():
        return read_file(archived).decode().strip()
    if shutil.which("git") is None:  # as in a container
        return "installed"
    ran = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"],
        capture_output=True,
        text=True,
        check=False,
    )
    return ran.stdout.strip() or "installed"


def _gpu() -> str:
    """Name, memory and driver of the first GPU, if nvidia-smi is installed."""
    if shutil.which("nvidia-smi") is None:
        return "a GPU without nvidia-smi"
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]


def _machine() -> str:
    """Describe it; several processors go by one name and differ by twice: so the family too."""
    results = [line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines()]
    facts = {key.strip(): value.strip() for key, *rest in results for value in rest}
    name = facts.get("model name", platform.processor())
    widest = next((label for flag, label in _WIDEST if flag in facts.get("flags", "").split()), "")
    cores = len(os.sched_getaffinity(0))
    has_max = importlib.util.find_spec("max") is not None  # torch is also measured without it
    versions = f"Python {platform.python_version()}, "
    versions += f"MAX {importlib.metadata.version('max')}" if has_max else "no MAX"
    kind = ", ".join(filter(None, [f"family {facts.get('cpu family', 'unknown')}", widest]))
    return f"{name} ({kind}), {cores} cores, {versions}"


_WIDEST = (("avx512_bf16", "AVX-512 with bfloat16"), ("avx512f", "AVX-512"), ("avx2", "AVX2"))
