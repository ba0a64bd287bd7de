"""A flipped bit in what lies on a disk is an error that names the file, or no error: no other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest
from max.driver import CPU

from srm.engine.device.graph_notes import read_notes
from srm.engine.device.precompile import PrecompileConfig
from srm.engine.weights.checkpoint import load_checkpoint
from srm.engine.weights.random_model import write_random_model
from srm.engine.weights.upstream_config import Constructor, PublishedArgs, read_args
from srm.errors import CheckpointError, ConfigError, SRMError
from srm.loadtest import recording
from srm.loadtest.commands.knee import SweepConfig
from srm.loadtest.commands.sweep import SAVED, Saved, read_saved
from srm.loadtest.report.report import SCHEMA, read_report
from srm.server.http.keys import load_keys
from srm.server.text.text import Text
from srm.server.text.tokenizer_files import chat_template, special_tokens
from srm.settings import load
from tests.attack.damage import flipped
from tests.kit.engines.numpy_runner import TINY
from tests.kit.loads.recorded import recording as recorded
from tests.kit.serving import write_text_model
from tests.unit.engine.device.test_graph_notes import keep

Case = tuple[Path, Callable[[], object]]
"""A file, and what reads it."""


def made(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def weights(folder: Path, name: str) -> Case:
    write_random_model(folder, TINY)
    return folder / name, partial(load_checkpoint, folder)


def text(folder: Path, name: str) -> Case:
    write_text_model(folder)
    return folder / name, partial(Text, folder)


def template(folder: Path) -> Case:
    path = made(folder / "chat_template.jinja", "{{ 'é' }}".encode())
    return path, partial(chat_template, folder)


def tokenizer_config(folder: Path) -> Case:
    content = b'{"bos_token": {"content": "<s>"}, "chat_template": "x"}'
    return made(folder / "tokenizer_config.json", content), partial(special_tokens, folder)


def published(folder: Path) -> Case:
    args = PublishedArgs(Constructor(vocab_size=20, hidden_dim=8, seq_len=16, num_blocks=1))
    path = made(folder / "ARGS.json", msgspec.json.encode(args))
    return path, partial(read_args, path)


def settings(folder: Path) -> Case:
    path = made(folder / "srm.toml", b'n_ctx = 8\ngpu_arch = "sm_\xc3\xa9"\n')
    return path, partial(load, PrecompileConfig, [f"--config={path}"], {})


def graph_note(folder: Path) -> Case:
    keep(folder, CPU())
    (path,) = folder.glob("*.json")
    return path, partial(read_notes, folder)


def keys(folder: Path) -> Case:
    path = made(folder / "keys", "josé 0123456789abcdef0123456789abcdef\n".encode())
    return path, partial(load_keys, str(path), {})


def load_recording(folder: Path) -> Case:
    recorded().save(folder)
    return folder / "recording.json", partial(recording.load, folder)


def load_report(folder: Path) -> Case:
    path = made(folder / "report.json", msgspec.json.encode({"schema": SCHEMA, "runs": []}))
    return path, partial(read_report, folder)


def load_sweep(folder: Path) -> Case:
    path = made(folder / SAVED, msgspec.json.encode(Saved(SweepConfig(), ["a"], ["a"])))
    return path, partial(read_saved, folder)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (partial(weights, name="config.json"), CheckpointError),
        (partial(weights, name="model.safetensors"), CheckpointError),
        (partial(text, name="config.json"), CheckpointError),
        (partial(text, name="tokenizer.json"), CheckpointError),
        (template, CheckpointError),
        (tokenizer_config, CheckpointError),
        (published, ConfigError),
        (settings, ConfigError),
        (graph_note, ConfigError),
        (keys, ConfigError),
        (load_recording, ConfigError),
        (load_report, ConfigError),
        (load_sweep, ConfigError),
    ],
)
def test_of_a_file(tmp_path: Path, make: Callable[[Path], Case], kind: type[SRMError]) -> None:
    path, read = make(tmp_path)
    refusals = 0
    for changed in flipped(path.read_bytes()):
        path.write_bytes(changed)
        try:
            read()
        except kind as error:
            assert str(tmp_path) in error.message
            refusals += 1
    assert refusals
