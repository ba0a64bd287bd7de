"""One set of flags for two processes, and a port that is somebody's."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.settings import load
from server.config import ServerConfig
from server.keys import load_keys
from server.launch import flags, listen, load_settings
from server.limits import check_limits


def test_each_process_gets_its_own_settings(tmp_path: Path) -> None:
    file = tmp_path / "srm.toml"
    file.write_text('port = 8123\nnum_slots = 7\nserved_model_name = "m"\n')
    server, engine = load_settings([f"--config={file}", "--model=somewhere", "--num-slots=9"])
    assert server == ServerConfig(model=Path("somewhere"), port=8123, served_model_name="m")
    assert engine == EngineConfig(model=Path("somewhere"), num_slots=9)
    assert server.endpoint == engine.endpoint


def test_settings_survive_the_command_line() -> None:
    server = ServerConfig(
        model=Path("a b"),
        port=0,
        drain_s=1.5,
        listen_fd=7,
        cors_origins=("https://a.example", "http://b.example:81"),
    )
    engine = EngineConfig(overlap=False, cache_dir=Path("-x"), drain_s=0.25)
    assert load(ServerConfig, flags(server), {}) == server
    assert load(EngineConfig, flags(engine), {}) == engine


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--port=x"], "port = 'x'"),
        (["--port=65536"], "port must lie in"),
        (["--api-processes=0"], "api_processes must be 1 … 256, got 0"),
        (["--max-body-bytes=0"], "max_body_bytes must be"),
        (["--num-slots=-1"], "num_slots must be"),
        (["--memory-fraction=0"], "memory_fraction must be"),
        (["--drain-s=-1"], "drain_s must be"),
        (["--request-timeout-s=-1"], "request_timeout_s must be"),
        (["--receive-timeout-s=0"], "receive_timeout_s must be above 0"),
        (["--max-waiting-bytes=0"], "max_waiting_bytes must be"),
        (["--max-waiting-bytes=9"], "max_waiting_bytes must be at least max_body_bytes"),
        (["--admin-port=8000"], "admin_port must be another than port"),
        (["--admin-port=65536"], "admin_port must lie in"),
        (["--cors-origins=https://a.example/path"], "cors_origins must be"),
        (["--otlp-endpoint=collector:4318"], "otlp_endpoint must begin with"),
        (["--log-format=xml"], "log_format = 'xml'"),
        (["--config=nowhere.toml"], "nowhere.toml"),
    ],
)
def test_a_bad_setting_is_named(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings(argv)


@pytest.mark.parametrize("flag", ["--nonsense=1", "--endpoint=tcp://127.0.0.1:1", "--listen-fd=3"])
def test_an_unknown_flag_exits_with_2(flag: str) -> None:
    with pytest.raises(SystemExit) as left:
        load_settings([flag])
    assert left.value.code == 2


def test_an_unknown_key_in_a_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "srm.toml"
    file.write_text("slots = 7\n")
    with pytest.raises(ConfigError, match="unknown setting 'slots'"):
        load_settings([f"--config={file}"])


def test_limits_of_keys_need_keys() -> None:
    check_limits(ServerConfig(requests_per_minute=3), load_keys("", {"SRM_API_KEYS": "k" * 16}))
    with pytest.raises(ConfigError, match="tokens_per_minute = 5 is a limit of API keys"):
        check_limits(ServerConfig(tokens_per_minute=5), load_keys("", {}))


def test_a_port_in_use_is_said_to_be() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port = {port}: cannot listen: Address already"):
            listen("127.0.0.1", port)


def test_a_host_that_is_none_is_said_to_be() -> None:
    with pytest.raises(ConfigError, match=r"host = 'no such host'"):
        listen("no such host", 0)


def test_the_model_is_called_by_its_folder_unless_named() -> None:
    assert ServerConfig(model=Path("models/demo/")).model_name == "demo"
    assert ServerConfig(model=Path("models/demo"), served_model_name="x").model_name == "x"
