"""Deltas of weights through every route that changes them, for two engines at once."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from srm.engine.weights.checkpoint import load_checkpoint
from srm.engine.weights.delta import write_delta
from srm.engine.weights.random_model import write_random_model
from tests.kit.processes.held_engine import held
from tests.kit.serving import (
    SERVER_FLAGS,
    TEXT_MODEL,
    Asked,
    Server,
    children,
    complete,
    error_of,
    free_port,
    is_ready,
    wait_until,
)

FILE, HEAD = "model.safetensors", "output_layer.weight"


@dataclass
class Trainer:
    """Writes one model after the other, each with one tensor that its predecessor has not."""

    root: Path
    folders: list[Path] = field(default_factory=list)

    def begin(self, text_model: Path) -> Path:
        shutil.copytree(text_model, self.root / "model")
        write_random_model(self.root / "model", TEXT_MODEL)
        self.folders.append(self.root / "model")
        return self.folders[0]

    def train(self) -> Path:
        """Return the next model's folder."""
        last, new = self.folders[-1], self.root / f"step-{len(self.folders)}"
        new.mkdir()
        shutil.copy(last / "config.json", new)
        tensors = load_file(last / FILE)
        tensors[HEAD] = tensors[HEAD][::-1].copy()
        tensors[HEAD][0, 0] = len(self.folders)
        save_file(tensors, new / FILE, {"format": "pt"})
        self.folders.append(new)
        return new

    def write_delta(self, base: int = -2, new: int = -1) -> Path:
        folder = self.root / f"delta-{len(list(self.root.iterdir()))}"
        write_delta(self.folders[base], self.folders[new], folder)
        return folder


@pytest.fixture(scope="module")
def trainer(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    trainer = Trainer(tmp_path_factory.mktemp("weights"))
    trainer.begin(text_model)
    return trainer


def flags(root: Path) -> tuple[str, ...]:
    return (*SERVER_FLAGS, "--engines=2", f"--weights-dir={root}", f"--data-dir={root / 'data'}",
            f"--admin-port={free_port()}")  # fmt: skip


@pytest.fixture(scope="module")
def served(trainer: Trainer) -> Iterator[Server]:
    module = "tests.kit.processes.held_engine"
    with Server(trainer.folders[0], *flags(trainer.root), engine_module=module) as running:
        yield running


ROUTES: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{f"ours, {running}": ("/v1/admin/weights", "path", {"running": running})
       for running in ("finish", "drop", "abort", "continue", "refeed")},
    "vLLM's": ("/update_weights", "weight_dir", {}),
    "SGLang's": ("/update_weights_from_disk", "model_path", {"weight_version": "policy-7"}),
}  # fmt: skip


@pytest.mark.parametrize("route", ROUTES)
def test_a_delta_is_as_good_as_the_folder(served: Server, trainer: Trainer, route: str) -> None:
    path, name, more = ROUTES[route]
    before = complete(served, max_tokens=1)["weights_version"]
    expected = load_checkpoint(trainer.train()).fingerprint
    delta = trainer.write_delta()
    body = {name: str(delta), **more}
    if more.get("running") == "finish":  # nothing may run, or it would wait
        reply = served.admin.post(path, json=body)
    else:
        with held(served.folder, steps=9):
            asked = Asked(served, n=6)
            reply = served.admin.post(path, json=body)
        answer = asked.answer()
        assert answer.status_code == (503 if more.get("running") == "drop" else 200)
    assert reply.status_code == 200, reply.text
    shutil.rmtree(delta)
    made = complete(served, max_tokens=4)
    assert (made["system_fingerprint"], made["weights_version"]) == (expected, before + 1)
    served.wait_until_idle()


@pytest.mark.parametrize("route", ["ours, continue", "vLLM's", "SGLang's"])
def test_refuses_a_delta_of_other_weights(served: Server, trainer: Trainer, route: str) -> None:
    path, name, more = ROUTES[route]
    before = complete(served, max_tokens=1)
    trainer.train()
    trainer.train()
    delta = trainer.write_delta()  # of a model that the server has not seen
    with held(served.folder, steps=9):
        asked = Asked(served, n=6)
        error = error_of(served.admin.post(path, json={name: str(delta), **more}))
        assert error["param"] == name
        assert f"those in use are {before['system_fingerprint']}" in error["message"]
        assert served.admin.get("/is_paused").json() == {"is_paused": False}
        wait_until(lambda: served.admin.get("/v1/admin/state").json()["changing"] == "")
    assert asked.answer().json()["weights_version"] == before["weights_version"]
    whole = {name: str(trainer.folders[-1]), **more}
    assert served.admin.post(path, json=whole).status_code == 200, "which is the way out"
    served.wait_until_idle()


def test_a_crash_keeps_what_a_delta_made(trainer: Trainer) -> None:
    first = trainer.folders[-1]
    if first != trainer.folders[0]:
        shutil.copy(trainer.folders[0] / "tokenizer.json", first)
    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    trainer.train()
    delta = trainer.write_delta()
    with Server(first, *flags(trainer.root)) as server:
        done = server.admin.post("/v1/admin/weights", json={"path": str(delta)}).json()
        assert done["fingerprint"] == load_checkpoint(trainer.folders[-1]).fingerprint
        shutil.rmtree(delta)
        text = complete(server, **greedy)["choices"][0]["text"]
        for name in sorted(name for name in children(server) if name.startswith("engine")):
            killed = children(server)[name]
            os.kill(killed, signal.SIGKILL)
            wait_until(lambda: children(server).get(name, killed) != killed)  # noqa: B023
            wait_until(lambda: is_ready(server))
        again = complete(server, **greedy)
        assert again["choices"][0]["text"] == text
        assert again["system_fingerprint"] == done["fingerprint"]
    trainer.train()
    with Server(first, *flags(trainer.root)) as server:
        body = {"path": str(trainer.write_delta())}
        error = error_of(server.admin.post("/v1/admin/weights", json=body))
        assert f"delta of weights '{done['fingerprint']}'" in error["message"]
        assert complete(server, **greedy)["choices"][0]["text"] != text
        body = {"path": str(trainer.write_delta(base=trainer.folders.index(first)))}
        # The other engine may still be at the one before, and says so by 409.
        wait_until(lambda: server.admin.post("/v1/admin/weights", json=body).status_code == 200)
