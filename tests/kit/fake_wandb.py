"""Stands for the package wandb and its server, which has the runs of all processes."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

import pytest


class Run:
    """A run as one process sees it: what it logs goes into the rows of the server."""

    def __init__(self, name: str, rows: dict[int, dict[str, float]], given: dict[str, Any]) -> None:
        self.id, self.rows, self.given = name, rows, given
        self.starting_step = max(rows, default=-1) + 1

    def log(self, values: dict[str, float], step: int) -> None:
        assert step >= max(self.starting_step, *self.rows, 0), "it warns and drops the values"
        self.rows.setdefault(step, {}).update(values)


class Wandb(ModuleType):
    """Variables of the environment count where no argument is given, as they do there."""

    class Error(Exception):
        """`init` raises it for a run that cannot begin."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.server: dict[str, dict[int, dict[str, float]]] = {}
        self.runs: list[Run] = []
        """As they were begun, or gone on with."""

    def init(self, **given: Any) -> Run:
        if "WANDB_API_KEY" not in os.environ:
            raise self.Error("No API key configured")
        if os.environ.get("WANDB_MODE", "online") not in {"online", "offline"}:
            raise ValueError("1 validation error for Settings: mode")
        name = given.get("id") or os.environ.get("WANDB_RUN_ID") or f"run-{len(self.runs)}"
        resume = given.get("resume") or os.environ.get("WANDB_RESUME")
        rows = self.server.setdefault(name, {})
        if resume is None:
            rows.clear()
        self.runs.append(Run(name, rows, given))
        return self.runs[-1]


def install(monkeypatch: pytest.MonkeyPatch) -> Wandb:
    """Have the package for a test, and a key."""
    package = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", package)
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_API_KEY", "key")
    return package
