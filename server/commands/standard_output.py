"""How a command that prints leaves: the exit codes that a shell expects of a program that ended
by a signal."""

from __future__ import annotations

import os
import sys

INTERRUPTED = 130
"""By Ctrl-C, or told to stop."""
BROKEN_PIPE = 141
"""Whoever read what it printed has gone."""


def leave_broken_pipe() -> None:
    """Let Python not find out again, at its end, that nobody reads."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
