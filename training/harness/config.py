"""Settings of `srm evaluate harness`."""

from __future__ import annotations

from pathlib import Path

import msgspec

from srm.engine.config import find_model

MOST = 1_000_000
"""Most examples of a task, and most seconds of one."""


class HarnessConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm evaluate harness`."""

    tasks: tuple[str, ...] = ()
    """Tasks of lm-eval by name, such as arc_easy,hellaswag,lambada_openai."""
    url: str = "http://127.0.0.1:8000"
    """Server's address, with or without /v1 at its end."""
    model: Path | None = None
    """Folder of a model that is served for this run, in place of the server at `url`."""
    served_model_name: str = ""
    """Name sent as `model` in every request; empty: the first model of /v1/models."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable with the API key to send; no key is sent where it is not set."""
    tokenizer: Path | None = None
    """Folder with the server's tokenizer.json; None: that of `model`, or else the server's own by
    its routes, which begins no text with a begin token."""
    include: Path | None = None
    """Folder with further tasks, as YAML files of lm-eval."""
    shots: int = -1
    """Solved examples before each question; -1: as many as the task says."""
    limit: int = 0
    """Number of questions of each task, the first ones; 0: all."""
    concurrency: int = 4
    """Requests under way at any time."""
    task_limit_s: int = 86_400
    """Most seconds that a task may take."""
    program: str = ""
    """Program of lm-eval; empty: that of .venv-clients, else the one that the shell finds."""
    output: Path = Path("runs/harness")
    """Folder of the record and of each task's results; tasks with results are not run again."""

    def __post_init__(self) -> None:
        if self.model is not None:
            msgspec.structs.force_setattr(self, "model", find_model(self.model))
        if not self.tasks:
            raise ValueError("tasks must be names of tasks of lm-eval, got none")
        for task in self.tasks:
            if not task.replace("_", "").replace("-", "").replace(".", "").isalnum():
                raise ValueError(f"tasks must be names of letters, digits and _-., got {task!r}")
        for name, low in (("shots", -1), ("limit", 0), ("concurrency", 1), ("task_limit_s", 1)):
            if not low <= getattr(self, name) <= MOST:
                raise ValueError(f"{name} must be {low} … {MOST}, got {getattr(self, name)}")
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url must begin with http:// or https://, got {self.url!r}")
