"""`srm loadtest run` as a user starts it, in processes of its own, and what it recorded."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from loadtest.summarize import summarize

from loadtest.recording import Recording, load
from loadtest.summary import Summary
from tests.serving import ROOT

_LIMIT_S = 120


class Loaded(NamedTuple):
    """A run that ended well."""

    recording: Recording
    summary: Summary

    def monotonic(self, seconds: float) -> float:
        """A time of the run's clock on the machine's, which the toys write down."""
        return self.recording.about.started_unix + seconds - (time.time() - time.monotonic())


def loaded(folder: Path, url: str, **settings: object) -> Loaded:
    """loaded(tmp_path, toy.url, arrivals="constant", rate=100): settings as in Scenario."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    done = subprocess.run(
        [sys.executable, "srm.py", "loadtest", "run", f"--url={url}", f"--output={folder}", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3_000:] + done.stderr[-5_000:]
    recording = load(folder)
    return Loaded(recording, summarize(recording))
