"""Files that others name: regular ones alone, and links no further than the folder of weights."""

from __future__ import annotations

import json
import os
import shutil
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from srm.engine.kept_model import INDEX, WEIGHTS, hold_model
from srm.engine.process.weight_reload import load_weights
from srm.engine.process.weights_note import Copying, SharedNote
from srm.engine.weights.checkpoint import load_checkpoint
from srm.engine.weights.inspect_constraint import read_constraint
from srm.engine.weights.random_model import write_random_model
from srm.engine.weights.upstream_config import read_args
from srm.errors import CheckpointError, InvalidRequest, SRMError
from srm.server.config import ServerConfig
from srm.server.http.keys import load_keys
from srm.server.model_identity import model_id
from srm.server.routes.admin import Admin
from srm.server.text.text import Text
from srm.server.text.tokenizer_files import chat_template, special_tokens
from srm.settings import load as load_settings
from srm.tokenizer_file import read_tokenizer
from srm.training.text.documents import documents
from srm.training.text.rows import rows
from tests.kit.engines.numpy_runner import TINY


def in_time(call: Callable[[], object]) -> BaseException | None:
    """Return what a call raises; the limit only ends a hang."""
    raised: list[BaseException | None] = []

    def run() -> None:
        try:
            call()
            raised.append(None)
        except BaseException as error:  # noqa: BLE001
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert raised, "it waits for a file"
    return raised[0]


def settings(path: Path) -> object:
    return load_settings(ServerConfig, ["--config", str(path)], prog="srm serve")


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "configuration": ("config.json", lambda path: load_checkpoint(path.parent)),
    "configuration of servers": ("config.json", lambda path: Text(path.parent)),
    "weights": (WEIGHTS, lambda path: load_checkpoint(path.parent)),
    "tokenizer": ("tokenizer.json", read_tokenizer),
    "template": ("chat_template.jinja", lambda path: chat_template(path.parent)),
    "a template by its name": ("t.jinja", lambda path: chat_template(path.parent, str(path))),
    "description": ("tokenizer_config.json", lambda path: special_tokens(path.parent)),
    "arguments": ("args.json", read_args),
    "schema": ("schema.json", lambda path: read_constraint(path, None, strict=False)),
    "keys": ("keys", lambda path: load_keys(str(path), {})),
    "settings": ("srm.toml", settings),
    "text": ("a.txt", lambda path: list(documents([path]))),
    "rows": ("a.jsonl", lambda path: list(rows(path, "data"))),
    "table": ("a.parquet", lambda path: list(rows(path, "data"))),
}


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
@pytest.mark.parametrize("what", READERS)
def test_opens_regular_files_only(what: str, kind: str, text_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(text_model, tmp_path / "model")
    name, read = READERS[what]
    path = folder / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    assert isinstance(in_time(lambda: read(path)), SRMError)


def test_a_model_with_a_pipe_in_it_has_no_id(text_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(text_model, tmp_path / "model")
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    assert in_time(lambda: model_id(folder)) is None and model_id(folder) == ""


def made(folder: Path, seed: int = 0) -> Path:
    write_random_model(folder, TINY, seed)
    return folder


def changed(folder: Path, within: Path, copies: Path) -> str:
    """Return the fingerprint of the weights that an operator's route has an engine load."""
    copying = Copying(SharedNote(), str(copies))

    def copy(folder: Path) -> Path:
        return copying.copy(folder, "change", within)

    return load_weights(load_checkpoint, folder, TINY, copy, within).fingerprint


@pytest.mark.parametrize("name", ["config.json", WEIGHTS, "notes.txt"])
def test_links_do_not_lead_out_of_the_weights_folder(name: str, tmp_path: Path) -> None:
    secret, allowed = made(tmp_path / "secret", 1), tmp_path / "weights"
    (secret / "notes.txt").write_text("secret")
    folder = made(allowed / "a")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(secret / name)
    with pytest.raises(InvalidRequest, match=rf"{name}: leads outside .*weights"):
        changed(folder, allowed, tmp_path / "copies")
    assert not (tmp_path / "copies" / "change").exists()
    (folder / name).unlink()
    shutil.copy(secret / name, allowed / "shared")  # within the folder of weights they may
    (folder / name).symlink_to("../shared")
    assert changed(folder, allowed, tmp_path / "other")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_text_files_of_weights_are_no_links_to_others(
    name: str, text_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_bytes((text_model / "tokenizer.json").read_bytes())
    folder = shutil.copytree(text_model, tmp_path / "weights" / "a")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "secret")
    for allowed in (str(tmp_path / "weights"), ""):
        admin = Admin(Mock(), ServerConfig(model=text_model, weights_dir=allowed))
        with pytest.raises(InvalidRequest, match="leads outside"):
            admin.check_folder(str(folder))


@pytest.mark.parametrize("part", ["folder", "file"])
def test_refuses_what_becomes_a_link_while_it_is_read(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that was swapped between the check and the read was loaded from outside."""
    secret, allowed = made(tmp_path / "secret", 1), tmp_path / "weights"
    folder = made(allowed / "a")
    swapped = folder if part == "folder" else folder / "config.json"
    real: Any = os.path.realpath

    def resolve(path: Any, **more: Any) -> Any:
        resolved = real(path, **more)
        if os.fspath(path) == str(folder / "config.json") and not swapped.is_symlink():
            swapped.rename(tmp_path / "away")
            swapped.symlink_to(secret if part == "folder" else secret / "config.json")
        return resolved

    monkeypatch.setattr(os.path, "realpath", resolve)
    with pytest.raises(InvalidRequest, match=r"cannot read .*config\.json"):
        changed(folder, allowed, tmp_path / "copies")
    assert swapped.is_symlink()


def test_a_model_from_the_cache_of_hugging_face_is_served(text_model: Path, tmp_path: Path) -> None:
    """Its files are links to those that all versions of a model share."""
    (blobs := tmp_path / "blobs").mkdir()
    (folder := tmp_path / "snapshots" / "main").mkdir(parents=True)
    model = shutil.copytree(text_model, tmp_path / "model")
    write_random_model(model, Text(text_model).model)
    for file in model.iterdir():
        shutil.copy(file, blobs / f"hash-of-{file.name}")
        (folder / file.name).symlink_to(f"../../blobs/hash-of-{file.name}")
    assert Text(folder).has_tokenizer and model_id(folder) == model_id(model)
    assert load_checkpoint(folder).fingerprint == load_checkpoint(model).fingerprint
    hold_model(folder, tmp_path / "held")
    assert load_checkpoint(tmp_path / "held").fingerprint == load_checkpoint(model).fingerprint


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_header_of_too_many_names_is_refused(is_sharded: bool, tmp_path: Path) -> None:
    """A million took 17 s."""
    folder = made(tmp_path / "model")
    (folder / WEIGHTS).unlink()
    names = [f"a{number}" for number in range(10_000)]
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps(dict.fromkeys(names, empty)).encode()
    shards = ["b", "c"] if is_sharded else [WEIGHTS]
    for shard in shards:
        (folder / shard).write_bytes(struct.pack("<Q", len(header)) + header)
    if is_sharded:
        files = {f"{shard}{name}": shard for shard in shards for name in names}
        (folder / INDEX).write_text(json.dumps({"weight_map": files}))
    else:
        many = json.dumps(dict.fromkeys([f"a{number}" for number in range(20_000)], empty)).encode()
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(many)) + many)
    with pytest.raises(CheckpointError, match=r"its header has \d+ bytes, and may have \d+"):
        load_checkpoint(folder)
