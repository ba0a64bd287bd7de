"""The demo model served by the real engine, and programs of other people's clients to ask it.

They run under the Python of `.venv-clients`, which `make test-clients` makes: what they need does
not have to agree with what we need. Nothing is fetched: they are told that they are offline.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from srm.engine.config import DEMO_MODEL
from tests.serving import ROOT, Server

BIN = Path(os.environ.get("CLIENTS_VENV", ROOT / ".venv-clients")) / "bin"
"""CLIENTS_VENV runs them with other versions, as tests of transformers do with its oldest."""
PROGRAMS = Path(__file__).parent / "programs"
OFFLINE = (
    *("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"),
    *("HF_HUB_DISABLE_TELEMETRY", "DO_NOT_TRACK"),
)

Run = Callable[..., str]
Printed = Callable[..., Any]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker("clients")


def write_tokenizer(model: Path, folder: Path) -> None:
    """The tokenizer of a model as transformers loads one."""
    folder.mkdir()
    shutil.copy(model / "tokenizer.json", folder)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|end_of_text|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="session")
def demo() -> Iterator[Server]:
    with Server(DEMO_MODEL, "--num-slots=512", engine_module="srm.engine", start_s=600) as running:
        yield running
        running.wait_until_idle()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """run("lm-eval", "--tasks", …): run_client in a folder of the test."""
    return partial(run_client, tmp_path)


@pytest.fixture
def printed(run: Run) -> Printed:
    """printed("trl_chat", URL, …): the last line, as JSON, of what a program of ours prints."""

    def last_line(program: str, *arguments: str) -> Any:
        ran = run("python", str(PROGRAMS / f"{program}.py"), *arguments)
        return json.loads(ran.splitlines()[-1])

    return last_line


def run_client(folder: Path, program: str, *arguments: str, **variables: str) -> str:
    """Run a program of .venv-clients in a folder, which must succeed; return what it prints.

    `bash` is the system's, and finds those programs.
    """
    environment = {**os.environ, **dict.fromkeys(OFFLINE, "1"), **variables}
    environment |= {"OPENAI_API_KEY": "none", "HF_HOME": str(folder / "hf"), "PYTHONPATH": ""}
    environment["PATH"] = f"{BIN}:{environment['PATH']}"
    done = subprocess.run(
        [program if program == "bash" else str(BIN / program), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3_000:] + done.stderr[-5_000:]
    return done.stdout
