"""Every command of the guide in docs/training.md runs, one after the other, only smaller."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import srm.__main__ as srm
from srm.server.commands import generate
from tests.kit.serving import ROOT, SERVER_FLAGS, Server, free_port

ENGINE = "tests.kit.processes.numpy_engine"
URL, ADMIN_URL = "http://127.0.0.1:8000", "http://127.0.0.1:8001"
_LIMIT_S = 600
_SMALLER = (
    (r"12_000", "200"),
    (r"\b500\b", "20"),
    (r'glob\("\*\.py"\)', 'glob("c*.py")'),
    (r"--max-vocab-size \d+", "--max-vocab-size 300"),
    (r"--d-model \d+", "--d-model 16"),
    (r"--num-layers \d+", "--num-layers 1"),
    (r"--batch-tokens \d+", "--batch-tokens 512"),
    (r"--steps \d+", "--steps 2"),
    (r"--epochs \d+", "--epochs 1"),
    (r"--evaluate-every \d+", "--evaluate-every 1"),
    (r"--(problems|evaluation-questions) \d+", r"--\1 3"),
    (r"--(samples|evaluation-samples) \d+", r"--\1 8"),
    (r"--questions \d+", "--questions 2"),
    (r"--rollouts \d+", "--rollouts 4"),
    (r"--group-size \d+", "--group-size 2"),
    (r"--max-tokens \d+", "--max-tokens 8"),
)


def commands() -> list[str]:
    """The blocks that are run, smaller."""
    page = (ROOT / "docs/training.md").read_text()
    matches: list[str] = re.findall(r"^```sh test\n(.*?)^```$", page, re.M | re.S)
    for pattern, replacement in _SMALLER:
        matches = [re.sub(pattern, replacement, match) for match in matches]
    return matches


def check(folder: Path) -> None:
    """What the commands have left."""
    fingerprints = []
    for name in ("base", "sft", "grpo"):
        assert (folder / name / "model.safetensors").stat().st_size
    for name in ("sft", "grpo"):
        (record,) = (folder / f"passk-{name}").glob("*-passk.json")
        document = json.loads(record.read_text())
        assert {problem["drawn"] for problem in document["problems"]} == {8}
        fingerprints += document["fingerprints"]
    assert len(set(fingerprints)) == 2
    updates = (folder / "grpo/updates.jsonl").read_text().splitlines()
    assert len(updates) == 2


def test_the_guide_has_ten_commands_and_shows_what_they_print() -> None:
    page = (ROOT / "docs/training.md").read_text()
    assert re.findall(r"^### (\d+)\. ", page, re.M) == [str(number) for number in range(1, 11)]
    sections = re.split(r"^### ", page, flags=re.M)[1:]
    assert all(re.search(r"^```sh test\n", section, re.M) for section in sections)
    assert all(re.search(r"^```(text|json)\n", section, re.M) for section in sections)


def test_the_guide_runs_with_the_numpy_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, but for what serves; rollouts are sampled in torch."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # of the engine of `srm generate`
    monkeypatch.setenv("SRM_NUM_SLOTS", "16")
    monkeypatch.setattr(generate, "main", partial(generate.main, engine_module=ENGINE))
    with ExitStack() as stack:
        server: Server | None = None
        for command in commands():
            if command.startswith("srm serve "):
                model = tmp_path / re.findall(r"--model (\S+)", command)[0]
                port = f"--admin-port={free_port()}"
                server = stack.enter_context(Server(model, *SERVER_FLAGS, port))
            elif command.startswith("srm "):
                _, *argv = shlex.split(address(server, command).replace("\\\n", " "))
                argv += ["--sampler=torch"] if argv[:2] == ["train", "grpo"] else []
                argv += ["--threads=1"] if argv[:1] == ["train"] and "tokenizer" not in argv else []
                argv += [f"--url={server.url}"] if server and "passk" in argv else []
                assert srm.main(argv) == 0, command
            else:
                subprocess.run(["bash", "-euc", address(server, command)], check=True)
    check(tmp_path / "runs/guide")


def address(server: Server | None, command: str) -> str:
    """The command, sent to this server."""
    if server is None:
        return command
    return command.replace(ADMIN_URL, server.admin_url).replace(URL, server.url)


@pytest.mark.slow
def test_the_guide_runs_as_it_stands(tmp_path: Path) -> None:
    """In one shell, with the real engine."""
    script = "\n".join(commands())
    port = free_port()
    ports = {"8000": str(port), "8001": str(free_port())}
    script = re.sub(r"\b800[01]\b", lambda result: ports[result[0]], script)
    script = script.replace("evaluate passk", f"evaluate passk --url http://127.0.0.1:{port}")
    program = f'srm() {{ PYTHONPATH="{ROOT}" "{sys.executable}" -m srm "$@"; }}\n'
    program += "trap 'kill $!' EXIT\n"
    shell = ["bash", "-euo", "pipefail", "-c", program + script]
    place: dict[str, Any] = {"cwd": tmp_path, "timeout": _LIMIT_S}
    done = subprocess.run(shell, check=False, capture_output=True, text=True, **place)
    assert done.returncode == 0, f"{done.stdout[-3_000:]}\n{done.stderr[-3_000:]}"
    check(tmp_path / "runs/guide")
