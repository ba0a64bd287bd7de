"""One set of flags for two processes, and a port that is somebody's."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

import srm.__main__ as srm
from srm.engine.config import (
    COUNTDOWN_MODEL,
    DEMO_MODEL,
    REGEX_MODEL,
    EngineConfig,
    read_model_config,
)
from srm.errors import CheckpointError, ConfigError
from srm.server.config import ServerConfig, within_open_files
from srm.server.http.keys import check_limits, load_keys
from srm.server.http.listeners import listen, listen_as, remove_same, url_of
from srm.server.model_identity import model_id
from srm.server.supervise import launch
from srm.server.supervise.launch import QUESTION, flags, load_settings, main
from srm.server.wiring import ServerWiring
from srm.settings import load
from tests.kit.serving import ROOT


def test_each_process_gets_its_own_settings(tmp_path: Path) -> None:
    file = tmp_path / "srm.toml"
    file.write_text('port = 8123\nnum_slots = 7\nserved_model_name = "m"\n')
    server, engine = load_settings([f"--config={file}", "--model=somewhere", "--num-slots=9"])
    assert server == ServerConfig(model=Path("somewhere"), port=8123, served_model_name="m")
    assert engine == EngineConfig(model=Path("somewhere"), num_slots=9)


def test_settings_survive_the_command_line() -> None:
    origins = ("https://a.example", "http://b.example:81")
    example = json.dumps(launch.read_example(REGEX_MODEL))
    server = ServerWiring(
        model=Path("a b"), drain_s=1.5, listen_fd=7, cors_origins=origins, example=example
    )
    engine = EngineConfig(overlap=False, cache_dir=Path("-x"), drain_s=0.25)
    assert load(ServerWiring, flags(server), {}) == server
    assert load(EngineConfig, flags(engine), {}) == engine


def test_numbers_of_gpus_survive_the_command_line() -> None:
    """`--devices`, and any `--engines` above 1 on a GPU, ended `srm serve` with a TypeError."""
    for devices in ((1,), (0, 3)):
        engine = EngineConfig(device="gpu", devices=devices)
        assert load(EngineConfig, flags(engine), {}) == engine


BAD = {
    "--port=x": "port = 'x'",
    "--port=65536": "port must lie in",
    "--api-processes=-1": "api_processes must be 0 … 256, got -1",
    "--engines=0": "engines must be 1 … 64, got 0",
    "--engines=65": "engines must be 1 … 64, got 65",
    "--devices=0": "devices must be empty where device is cpu, got (0,); use device = gpu",
    "--device=gpu --devices=1,1": "devices must be different numbers from 0 on",
    "--device=gpu --devices=-1": "devices must be different numbers from 0 on",
    "--device=gpu --devices=0,1 --engines=3": "engines must be 2, one for each of devices, got 3",
    "--device=gpu --devices=0,1 --engines=1": "engines must be 2, one for each of devices, got 1",
    "--max-body-bytes=0": "max_body_bytes must be",
    "--num-slots=-1": "num_slots must be",
    "--memory-fraction=0": "memory_fraction must be",
    "--drain-s=-1": "drain_s must be",
    "--request-timeout-s=-1": "request_timeout_s must be",
    "--receive-timeout-s=0": "receive_timeout_s must be above 0",
    "--max-waiting-bytes=0": "max_waiting_bytes must be",
    "--max-waiting-bytes=9": "max_waiting_bytes must be at least max_body_bytes",
    "--admin-port=8000": "admin_port must be another than port",
    "--admin-port=65536": "admin_port must lie in",
    "--cors-origins=https://a.example/path": "cors_origins must be",
    "--otlp-endpoint=collector:4318": "otlp_endpoint must begin with",
    "--log-format=xml": "log_format = 'xml': allowed are text, json",
    "--config=nowhere.toml": "nowhere.toml",
}


def test_a_bad_setting_is_named(tmp_path: Path) -> None:
    (tmp_path / "srm.toml").write_text("slots = 7\n")
    in_file = {f"--config={tmp_path}/srm.toml": "unknown setting 'slots'"}
    for flag, message in (BAD | in_file).items():
        with pytest.raises(ConfigError) as refused:
            load_settings(flag.split())
        assert message in refused.value.message
    for flag in ("--nonsense=1", "--endpoint=tcp://127.0.0.1:1", "--listen-fd=3"):
        with pytest.raises(ConfigError, match=f"there is no flag {flag.partition('=')[0]}"):
            load_settings([flag])


def test_limits_of_keys_need_keys() -> None:
    check_limits(ServerConfig(requests_per_minute=3), load_keys("", {"SRM_API_KEYS": "k" * 16}))
    with pytest.raises(ConfigError, match="tokens_per_minute = 5 is a limit of API keys"):
        check_limits(ServerConfig(tokens_per_minute=5), load_keys("", {}))


def test_a_port_in_use_and_a_host_that_is_none_are_said_to_be() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port = {port}: cannot listen: Address .*PORT=\\d+"):
            listen("127.0.0.1", port)
    with pytest.raises(ConfigError, match=r"host = 'no such host'"):
        listen("no such host", 0)


def test_a_unix_socket_replaces_a_dead_one(tmp_path: Path) -> None:
    path = tmp_path / "srm.sock"
    config = ServerConfig(uds=str(path))
    in_use = "cannot listen: Address already in use"
    with listen_as(config), pytest.raises(ConfigError, match=in_use):
        listen_as(config)
    assert path.is_socket()  # as after a server that was killed
    listen_as(config).close()
    made = path.stat()
    path.rename(tmp_path / "elsewhere")
    with listen_as(config):  # a successor, whose predecessor ends late
        remove_same(path, made)
        assert path.is_socket()
        remove_same(path, path.stat())
    assert not path.exists()
    remove_same(path, made)
    (tmp_path / "file").write_text("of somebody")
    for other, reason in (("file", "Address already in use"), ("no/folder", "No such file")):
        with pytest.raises(ConfigError, match=reason):
            listen_as(ServerConfig(uds=str(tmp_path / other)))
    assert (tmp_path / "file").read_text() == "of somebody"
    with pytest.raises(ConfigError, match="too long"):
        listen_as(ServerConfig(uds="/tmp/" + "x" * 200))
    with pytest.raises(ValueError, match="instead of host and port"):
        ServerConfig(uds=str(path), port=0)


def test_names_a_data_folder_it_cannot_write_into(text_model: Path, tmp_path: Path) -> None:
    """Every upload was a 503, and nothing was said before."""
    (tmp_path / "no folder").write_text("a file")
    for folder in (tmp_path / "no folder", Path("/proc/1/data")):
        flags = [f"--model={text_model}", "--port=0", f"--data-dir={folder}"]
        with pytest.raises(ConfigError, match=f"data_dir = {folder}: "):
            main(flags, "nothing is started")


def test_connections_are_no_more_than_open_files_allow(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Beyond it nobody was answered, and no line said why."""
    for most, engines, allowed in (
        *((-1, 1, 16_384), (20_000, 1, 16_384), (16_384, 1, 16_080), (1024, 1, 720)),
        *((64, 1, 8), (1024, 64, 236), (50, 1, 1)),
    ):
        monkeypatch.setattr(
            "srm.server.config.resource.getrlimit", lambda _, most=most: (most, most)
        )
        caplog.clear()
        config = within_open_files(ServerConfig(engines=engines))
        assert config.max_connections == allowed
        message = f"is lowered to {allowed}: the limit of open files (ulimit -n) is {most}"
        assert (message in caplog.text) == (allowed < 16_384)
    monkeypatch.setattr("srm.server.config.resource.getrlimit", lambda _: (48, 48))
    with pytest.raises(ConfigError, match=r"open files \(ulimit -n\) must be at least 49, got 48"):
        within_open_files(ServerConfig())


def test_names_another_librarys_model(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Engine, API and jobs process each complained of its first unknown field."""
    (tmp_path / "config.json").write_text('{"architectures": [], "model_type": "llama"}')
    for command, given in (("serve", "--port=0"), ("generate", "hello"), ("batch", "-")):
        assert srm.main([command, f"--model={tmp_path}", given]) == CheckpointError.exit_code
        assert capfd.readouterr().err == (
            f"srm {command}: {tmp_path / 'config.json'}: this is no SRM model, "
            "but one of model_type = 'llama'\n"
        )


@pytest.mark.parametrize("command", ["serve", "generate", "batch", "score", "inspect", "convert"])
def test_a_hub_name_or_a_gguf_file_is_no_model_folder(
    command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "llama.gguf"
    file.write_bytes(b"GGUF")
    given = {"serve": "--port=0", "generate": "hello", "batch": "-", "score": "-"}.get(command)
    for model, what in (("meta-llama/Llama-3", "there is no folder"), (file, "is a file")):
        named = [str(model)] if given is None else [f"--model={model}", given]
        more = [f"--output={tmp_path / 'out'}"] if command == "convert" else []
        assert srm.main([command, *named, *more]) == CheckpointError.exit_code
        error = capfd.readouterr().err
        assert what in error and str(model) in error
        assert "GGUF is not read, and nothing is downloaded" in error


@pytest.mark.parametrize(
    ("host", "message"), [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("localhost", "localhost")]
)
async def test_the_page_is_said_to_be_where_it_is(
    host: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With an admin_port the page is there alone, and the line named the other."""
    monkeypatch.setattr(launch, "_is_ready", AsyncMock(return_value=True))
    with listen(host, 0) as public, listen("127.0.0.1", 0) as admin:
        page = url_of("127.0.0.1", admin)
        example = launch.usual_example(DEMO_MODEL)
        await launch.announce("m", url_of(host, public), page, example)
        out = capsys.readouterr().out
        assert f'"prompt": {json.dumps(QUESTION)},' in out
        assert f'"prompt": {json.dumps(QUESTION)},' in (ROOT / "README.md").read_text()
        assert f"Serving m on http://{message}:{public.getsockname()[1]}\n" in out
        assert f"Dashboard and playground: http://127.0.0.1:{admin.getsockname()[1]}/ " in out


def test_the_first_example_is_one_that_the_model_knows(tmp_path: Path) -> None:
    """The puzzle model was asked about pears, of which it has no token."""
    readme = (ROOT / "README.md").read_text()
    asked = launch.read_example(REGEX_MODEL)
    (shown,) = re.findall(r"'(\{\s*\"prompt\": \"✓.*?\})'", readme, re.S)
    assert asked == json.loads(shown)
    puzzle = launch.read_example(COUNTDOWN_MODEL)
    assert set(puzzle["verify"]["using"]) < {*map(int, re.findall(r"\d+", puzzle["prompt"]))}
    config = launch._with_model(ServerConfig(model=REGEX_MODEL), tmp_path / "copies", asked)
    assert json.loads(config.example) == asked
    assert launch.read_example(DEMO_MODEL) == launch.read_example(tmp_path) == {}
    assert launch.usual_example(DEMO_MODEL)["prompt"] == QUESTION
    assert launch.usual_example(tmp_path) == {"prompt": [0], "max_tokens": 32, "temperature": 0}


@pytest.mark.parametrize(
    "text",
    ["", "[1]", '{"prompt": 1', '{"a":' + 9_000 * "[", '{"a": "' + 20_000 * "a" + '"}', "\ufeff{}"],
)
def test_an_example_that_is_no_small_object_is_told(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / launch.EXAMPLE).write_text(text)
    assert launch.read_example(tmp_path) == {}
    assert "example.json is no JSON object of 16 KiB (" in caplog.text


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii", "koi8-r"])
async def test_an_example_is_an_argument_of_the_shell(
    encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it holds: quotes, letters that the output lacks, what would move the cursor."""
    monkeypatch.setattr(launch, "_is_ready", AsyncMock(return_value=True))
    for prompt in ("it's ✓", "é😀'; date #", "\x9b31m\u202e \x7f\x1b[2J\n"):
        (tmp_path / launch.EXAMPLE).write_text(json.dumps({"prompt": prompt}))
        written = io.TextIOWrapper(io.BytesIO(), encoding)
        monkeypatch.setattr(sys, "stdout", written)
        asked = launch.read_example(tmp_path)
        await launch.announce("m", "http://a", "http://a", asked)
        written.seek(0)
        line = written.read().splitlines()[1]
        assert line.isprintable()
        assert json.loads(shlex.split(line)[-1]) == {"prompt": prompt}


@pytest.mark.parametrize("more", [{}, {"return": "counts"}, {"stream": True}])
async def test_of_many_samples_the_last_is_shown_alone(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A terminal got 60 KB of JSON. A refusal is shown whole."""
    monkeypatch.setattr(launch, "_is_ready", AsyncMock(return_value=True))
    await launch.announce("m", "http://a", "http://a", launch.read_example(REGEX_MODEL) | more)
    curl, _, program = capsys.readouterr().out.splitlines()[1].partition(" | ")
    assert bool(program) == ("curl -sS http" in curl) == (not more)
    choices = [{"text": "no\\d"}, {"text": "yes\\d"}]
    right = {"choices": choices, "samples": [2]}, "yes\\d [2]\n"
    for reply, shown in (right, ({"error": "so"}, "so \n")) if program else ():
        ran = subprocess.check_output(["bash", "-c", program], input=json.dumps(reply).encode())
        assert ran.decode() == shown


def test_each_model_has_a_name_and_a_data_folder_of_its_own(tmp_path: Path) -> None:
    assert ServerConfig(model=Path("models/demo/")).model_name == "demo"
    assert ServerConfig(model=Path("models/demo"), served_model_name="x").model_name == "x"
    one, two = (ServerConfig(model=tmp_path / name / "model").data_folder for name in "ab")
    assert one != two
    assert one.parent == two.parent == Path("~/.local/share/srm").expanduser()
    assert ServerConfig(data_dir="~/here").data_folder == Path("~/here").expanduser()


def test_a_model_is_told_from_another_wherever_it_lies(tmp_path: Path) -> None:
    for name, config, weights in (("a", "{}", "x"), ("b", "{}", "x"), ("c", "{}", "y")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(config)
        (tmp_path / name / "model.safetensors").write_text(weights)
    a, b, c = (model_id(tmp_path / name) for name in "abc")
    assert a == b != c
    (tmp_path / "b" / "tokenizer.json").write_text("{}")
    assert model_id(tmp_path / "b") != a
    assert model_id(tmp_path / "nowhere") == ""


def test_a_folder_above_that_may_not_be_entered_is_named(monkeypatch: pytest.MonkeyPatch) -> None:

    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    for look in ("exists", "is_dir", "is_file"):
        monkeypatch.setattr(Path, look, refuse)
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ConfigError, match=r"data_dir = /a/b: Permission denied"):
        launch.check_writable("data_dir", Path("/a/b"))
    with pytest.raises(ConfigError, match=r"api_keys_file = '/a/b': cannot be read: Permission"):
        load_keys("/a/b", {})
    with pytest.raises(CheckpointError, match=r"cannot read /a/b/config.json: Permission denied"):
        read_model_config(Path("/a/b"))
