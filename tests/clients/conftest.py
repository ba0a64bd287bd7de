"""The demo model served by the real engine, and programs of other people's clients to ask it.

They run in `.venv-clients`, those of agents in `.venv-agents`, verifiers in `.venv-verifiers`, Ray
and verl in `.venv-ray`, Ray beside the server in `.venv-deploy`. `make test-clients` makes all
five: what they need does not have to agree with what we need. Nothing is fetched: they are told
that they are offline.
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

import msgspec
import numpy as np
import pytest
import torch

from srm.engine.config import DEMO_MODEL
from srm.engine.weights.checkpoint import read_model
from srm.engine.weights.tensors import is_scalar
from srm.training.checkpoint import save_model
from tests.clients import table
from tests.clients.table import Row
from tests.kit.serving import ROOT, Server

BIN = Path(os.environ.get("CLIENTS_VENV", table.CLIENTS)) / "bin"
"""CLIENTS_VENV runs them with other versions, as tests of transformers do with its oldest."""
AGENTS_PYTHON = str(table.AGENTS / "bin" / "python")
RAY_PYTHON = str(table.RAY / "bin" / "python")
DEPLOY_PYTHON = str(ROOT / ".venv-deploy" / "bin" / "python")
PYTHONS = {
    "agents": AGENTS_PYTHON,
    "verifiers": str(table.VERIFIERS / "bin" / "python"),
    "ray": RAY_PYTHON,
}
"""By the folder of the programs that they run; others are run by .venv-clients."""
PROGRAMS = Path(__file__).parent / "programs"
OFFLINE = (
    *("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"),
    *("HF_HUB_DISABLE_TELEMETRY", "DO_NOT_TRACK"),
)

Run = Callable[..., str]
Printed = Callable[..., Any]
Noted = Callable[..., None]
ROWS: list[Row] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker("clients")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write docs/clients-called.md if `make test-clients` asks for it and all has passed."""
    if "CLIENTS_TABLE" in os.environ and exitstatus == 0 and shutil.which("node"):
        table.write(ROWS)


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


@pytest.fixture(scope="session")
def long_demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The same weights with a context of 4,096 tokens, each position past the last as the last.

    512 tokens do not hold a tool's schema, its call and its result.
    """
    files = read_model(DEMO_MODEL)
    short, folder = files.config.n_ctx, tmp_path_factory.mktemp("stretched") / "demo"
    weights = {}
    for name, value in files.tensors.items():
        added = 4096 - short if is_scalar(name) and value.shape[-1] == short else 0
        edges = [(0, 0)] * (value.ndim - 1) + [(0, added)]
        weights[name] = torch.tensor(np.pad(value, edges, "edge"))
    save_model(msgspec.structs.replace(files.config, n_ctx=4096), weights, folder, DEMO_MODEL)
    with Server(folder, "--num-slots=16", engine_module="srm.engine", start_s=600) as running:
        yield running
        running.wait_until_idle()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """run("lm-eval", "--tasks", …): run_client in a folder of the test."""
    return partial(run_client, tmp_path)


@pytest.fixture
def printed(run: Run) -> Printed:
    """printed("trl_client", URL, …): the last line, as JSON, of what a program of ours prints."""

    def last_line(program: str, *arguments: str) -> Any:
        [path] = PROGRAMS.rglob(f"{program}.py")
        python = PYTHONS.get(path.parent.name, "python")
        return json.loads(run(python, str(path), *arguments).splitlines()[-1])

    return last_line


@pytest.fixture
def printed_by_node(tmp_path: Path) -> Printed:
    """The same of a program for Node; the test is skipped where there is none."""
    if shutil.which("node") is None:
        pytest.skip("there is no node here")

    def last_line(program: str, *arguments: str) -> Any:
        text = (PROGRAMS / "node" / f"{program}.mjs").read_text()
        done = subprocess.run(
            ["node", "--input-type=module", "-", *arguments],
            cwd=table.NODE,  # where imports are looked for
            input=text,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3_000:] + done.stderr[-5_000:]
        return json.loads(done.stdout.splitlines()[-1])

    return last_line


@pytest.fixture
def noted() -> Noted:
    """noted("openai", "`models.list()`"): a row of the table, behind the assertions about it."""

    def add(package: str, *calls: str, result: str = "works") -> None:
        ROWS.extend(Row(package, called, result) for called in calls)

    return add


def run_client(folder: Path, program: str, *arguments: str, **variables: str) -> str:
    """Run a program of .venv-clients, or at a path, in a folder; return what it prints.

    It must succeed. `bash` is the system's, and finds the programs of .venv-clients.
    """
    environment = {**os.environ, **dict.fromkeys(OFFLINE, "1"), **variables}
    environment |= {"OPENAI_API_KEY": "none", "HF_HOME": str(folder / "hf"), "PYTHONPATH": ""}
    environment["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    environment["PATH"] = f"{BIN}:{environment['PATH']}"
    done = subprocess.run(
        [program if program == "bash" else str(BIN / program), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,  # of a hang
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3_000:] + done.stderr[-5_000:]
    return done.stdout
