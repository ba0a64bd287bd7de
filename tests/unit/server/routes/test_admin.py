"""Folders of weights: only where the operator allows them."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from tokenizers import Tokenizer

from srm.engine.messages import Done
from srm.errors import CheckpointError, SwapInProgress
from srm.server.config import ServerConfig
from srm.server.routes.admin import Admin, resolved
from srm.server.text.text import Text
from tests.kit.bodies.refusals import refusal


def test_a_path_leads_into_the_folder_of_weights(tmp_path: Path) -> None:
    allowed, outside = tmp_path / "weights", tmp_path / "secret"
    (allowed / "a").mkdir(parents=True)
    outside.mkdir()
    (allowed / "link").symlink_to(outside)
    (allowed / "good").symlink_to(allowed / "a")
    for path in ("a", "./a", "b/../a", "good", str(allowed / "a")):
        assert resolved(path, str(allowed)) == allowed / "a"
    for path in ("..", "../secret", "a/../../secret", "link", "link/x", str(outside), "/",
                 str(allowed / ".." / "secret"), str(allowed) + "-more"):  # fmt: skip
        error = refusal(resolved, path, str(allowed))
        assert error.param == "path" and "weights_dir" in error.message
    assert resolved(str(allowed / "link"), "") == outside


@pytest.mark.parametrize("path", ["a\0b", "x" * 5_000, "relative"])
def test_what_is_no_path_is_refused(path: str) -> None:
    assert refusal(resolved, path, "").param == "path"


def body(folder: Path) -> bytes:
    return json.dumps({"path": str(folder)}).encode()


def test_takes_a_tokenizer_that_was_saved_again(text_model: Path, tmp_path: Path) -> None:
    """Trainers save it with other spaces and their padding: such a folder was refused."""
    folder = shutil.copytree(text_model, tmp_path / "model")
    admin = Admin(Mock(), ServerConfig(model=text_model))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    (folder / "tokenizer_config.json").write_text('{"pad_token": "<|end_of_text|>"}')
    assert admin.check_folder(str(folder)) == folder
    tokenizer.add_tokens(["another"])
    tokenizer.save(str(folder / "tokenizer.json"))
    assert "its tokenizer.json is not" in refusal(admin.check_folder, str(folder)).message


def test_a_special_token_that_both_name_must_be_the_same(text_model: Path, tmp_path: Path) -> None:
    served, folder = (shutil.copytree(text_model, tmp_path / name) for name in ("served", "model"))
    (served / "tokenizer_config.json").write_text('{"eos_token": "the"}')
    admin = Admin(Mock(), ServerConfig(model=served))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "the", "pad_token": "cat"}')
    assert admin.check_folder(str(folder)) == folder
    (folder / "tokenizer_config.json").write_text('{"eos_token": "cat"}')
    assert "its eos_token is not the one" in refusal(admin.check_folder, str(folder)).message


async def test_a_dead_disk_holds_changes(text_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight such changes took /metrics and all later changes, though who had asked was gone."""
    reads, answers = threading.Event(), threading.Event()

    def hang(_admin: Admin, path: str) -> Path:
        reads.set()
        assert answers.wait(120)
        return Path(path)

    detail: dict[str, str | int | float] = {
        "weights_version": 2,
        "fingerprint": "f",
        "seconds": 1.0,
        "pause_seconds": 0.5,
    }
    client = Mock(load_weights=AsyncMock(return_value=Done("id", detail)))
    admin = Admin(client, ServerConfig(model=text_model))
    monkeypatch.setattr(Admin, "check_folder", hang)
    leaves = asyncio.create_task(admin.load_weights(body(Path("/dead"))))
    try:
        assert await asyncio.to_thread(reads.wait, 120)
        leaves.cancel()
        await asyncio.gather(leaves, return_exceptions=True)
        with pytest.raises(SwapInProgress, match=r'"/good".*"/dead" is still being read'):
            await admin.load_weights(body(Path("/good")))
    finally:
        answers.set()
    async with asyncio.timeout(120):
        while True:
            with suppress(SwapInProgress):  # until the thread is through
                assert (await admin.load_weights(body(Path("/good")))).path == "/good"
                return
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "tokenizer_config.json"])
async def test_a_pipe_instead_of_a_text_file_is_refused_by_name(
    name: str, text_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(text_model, tmp_path / "model")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    admin = Admin(Mock(), ServerConfig(model=text_model))
    real = Path.open

    def opened(path: Path, *args: Any, **more: Any) -> Any:
        assert path != folder / name, "it would wait"
        return real(path, *args, **more)

    monkeypatch.setattr(Path, "open", opened)
    with pytest.raises(
        Exception, match=rf"{name}: must be a regular file|must be a regular file: .*{name}"
    ):
        admin.check_folder(str(folder))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_refuses_a_pipe_in_the_served_model(name: str, text_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(text_model, tmp_path / "model")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(
        CheckpointError, match=rf"{name}: must be a regular file|must be a regular file: .*{name}"
    ):
        Text(folder)
