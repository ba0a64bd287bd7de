"""How a command that prints ends: with the exit codes that a shell expects of a program ended by a
signal."""

from __future__ import annotations

import os
import sys

INTERRUPTED = 130
"""Exit code when interrupted by Ctrl-C or told to stop."""
BROKEN_PIPE = 141
"""Exit code when whoever read the output has gone."""


def leave_broken_pipe() -> None:
    """Keep Python from failing again, at its end, because nobody reads the output."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
