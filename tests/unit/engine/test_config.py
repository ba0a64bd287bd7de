"""Settings: where they come from, what is refused, and how they are explained."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from srm.engine.config import (
    COUNTDOWN_MODEL,
    DEMO_MODEL,
    GRPO_MODEL,
    EngineConfig,
    ModelConfig,
    parse_model_config,
)
from srm.engine.wiring import EngineWiring
from srm.errors import CheckpointError, ConfigError
from srm.server.commands.admin_cli import WeightsConfig
from srm.server.config import ServerConfig
from srm.settings import Command, build, field_docs, load, read_settings
from srm.training.finetuning.config import SFTConfig
from srm.training.grpo.config import GRPOConfig
from srm.training.settings import EvaluateConfig


class Drawer(msgspec.Struct, frozen=True):
    """Something with settings."""

    width: int = 1
    """How wide, in cm:
    100 % of it."""
    shelves: tuple[int, ...] = (1, 2)
    color: str = "red"

    def __post_init__(self) -> None:
        """No field is above this."""
        if self.width < 1:
            raise ValueError(f"width must be at least 1, got {self.width}")


def test_later_sources_beat_earlier_ones(tmp_path: Path) -> None:
    file = tmp_path / "drawer.toml"
    file.write_text('width = 2\ncolor = "blue"\nshelves = [3]\n')
    assert load(Drawer, [], {}) == Drawer()
    argv = [f"--config={file}"]
    assert load(Drawer, argv, {}) == Drawer(2, (3,), "blue")
    environ = {"SRM_WIDTH": "3", "SRM_SHELVES": "4,5"}
    assert with_variables(argv, environ) == Drawer(3, (4, 5), "blue")
    assert with_variables([*argv, "--width=4"], environ) == Drawer(4, (4, 5), "blue")


def test_a_byte_order_mark_was_an_invalid_statement(tmp_path: Path) -> None:
    file = tmp_path / "drawer.toml"
    file.write_text("width = 2\n", encoding="utf-8-sig")
    assert load(Drawer, [f"--config={file}"], {}) == Drawer(2)


def with_variables(argv: list[str], environ: dict[str, str]) -> Drawer:
    return build(Drawer, read_settings((Drawer,), argv, Command(variables=None), environ))


def test_a_variable_that_is_not_read_is_no_silent_one(tmp_path: Path) -> None:
    file = tmp_path / "drawer.toml"
    file.write_text("width = 2\n")
    unread = {"SRM_WIDTH": "3"}
    with pytest.raises(ConfigError, match="environment: SRM_WIDTH is not read by srm: pass --wid"):
        load(Drawer, [], unread)
    assert load(Drawer, ["--width=4"], unread) == Drawer(4)
    assert load(Drawer, [f"--config={file}"], unread) == Drawer(2)
    command, environ = Command(variables={"shelves"}), {"SRM_SHELVES": "4"}
    assert build(Drawer, read_settings((Drawer,), [], command, environ)) == Drawer(1, (4,))
    with pytest.raises(ConfigError, match="SRM_WIDTH is not read"):
        read_settings((Drawer,), [], command, environ | unread)


def test_presets_are_named_without_folder_and_flag(tmp_path: Path) -> None:
    (tmp_path / "wide.toml").write_text("width = 9\ncolor = 5\n")

    def load_drawer(*argv: str) -> Drawer:
        return build(Drawer, read_settings((Drawer,), list(argv), Command(presets=tmp_path), {}))

    assert load_drawer() == Drawer()
    assert load_drawer("wide") == load_drawer("--config=wide") == Drawer(9, color="5")
    assert load_drawer("--color=red", "wide", "--shelves=7") == Drawer(9, (7,))
    assert load_drawer(str(tmp_path / "wide.toml")) == load_drawer("wide")
    with pytest.raises(ConfigError, match="no such file: narrow; and it is none of wide"):
        load_drawer("narrow")


@pytest.mark.parametrize(
    ("argv", "environ", "message"),
    [
        (["--width=0"], {}, "width must be at least 1, got 0"),
        (["--width=wide"], {}, "command line: width = 'wide'"),
        (["--shelves=1,x"], {}, "command line: shelves = '1,x'"),
        ([], {"SRM_WIDTH": ""}, "environment: width = ''"),
        (["--config=nowhere.toml"], {}, "cannot read nowhere.toml"),
    ],
)
def test_what_is_wrong_is_named_with_its_source(
    argv: list[str], environ: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        with_variables(argv, environ)


def test_dtype_is_what_the_device_can_do() -> None:
    for argv, dtype in (
        ([], "float32"),
        (["--dtype=bfloat16"], "bfloat16"),
        (["--device=gpu"], "bfloat16"),
        (["--device=gpu", "--dtype=float8"], "float8"),
    ):
        assert load(EngineConfig, argv, {}).compute_dtype == dtype
    with pytest.raises(ConfigError, match="no flag --num-slot; did you mean '--num-slots'"):
        load(EngineConfig, ["--num-slot=9"], {})  # part of a flag is not the flag


def test_the_string_under_a_field_is_what_help_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert field_docs(Drawer) == {"width": "How wide, in cm: 100 % of it."}
    with pytest.raises(SystemExit):
        load(Drawer, ["--help"], {})
    out = capsys.readouterr().out
    assert "How wide, in cm: 100 % of it. Default: 1" in out
    assert "--shelves INT,…" in out


@pytest.mark.parametrize(
    ("settings", "width", "limits"),
    [
        ({}, 512, (2_048, 4_096)),
        ({"device": "gpu"}, 512, (16_384, 32_768)),
        ({"device": "gpu"}, 1_024, (8_192, 16_384)),
        ({"device": "gpu"}, 2**24, (1, 2)),
        ({"device": "gpu"}, 2, (65_536, 131_072)),
        ({"device": "gpu", "max_step_rows": 65_536}, 1_024, (65_536, 131_072)),
        ({"max_step_tokens": 9_000}, 512, (2_048, 9_000)),
        ({"max_step_tokens": 101}, 512, (50, 101)),
        ({"max_step_tokens": 2}, 512, (1, 2)),
        ({"max_step_rows": 7, "max_step_tokens": 8}, 512, (7, 8)),
    ],
)
def test_limits_of_a_step_are_chosen_where_they_are_not_set(
    settings: dict[str, Any], width: int, limits: tuple[int, int]
) -> None:
    model = ModelConfig(d_model=width, num_layers=1, num_heads=2, n_ctx=8, vocab_size=8)
    assert EngineConfig(**settings).step_limits(model) == limits


def test_a_gpu_can_count_the_values_of_a_step() -> None:
    model = ModelConfig(d_model=1_024, num_layers=1, num_heads=2, n_ctx=8, vocab_size=2**17)
    most = 2**14 - 2  # of them, and of one more, fewer than 2**31 logits
    assert EngineConfig(device="gpu").step_limits(model) == (most // 2, most // 2 * 2)
    assert EngineConfig(device="gpu", max_step_tokens=most).step_limits(model)[1] == most
    assert EngineConfig(max_step_tokens=most + 1).step_limits(model)[1] == most + 1
    with pytest.raises(ConfigError, match=f"max_step_tokens must be at most {most} where device"):
        EngineConfig(device="gpu", max_step_tokens=most + 1).step_limits(model)


@pytest.mark.parametrize(
    ("settings", "width", "limit"),
    [
        ({}, 1_024, 512),
        ({}, 512, 512),
        ({}, 256, 1_024),
        ({}, 2, 4_096),
        ({"max_step_tokens": 101}, 256, 101),
        ({"device": "gpu"}, 1_024, 16_384),
        ({"device": "gpu", "prefill_step_tokens": 700}, 1_024, 700),
        ({"prefill_step_tokens": 4_096}, 1_024, 4_096),
        ({"max_step_tokens": 5_000, "prefill_step_tokens": 2}, 256, 2),
    ],
)
def test_a_step_that_feeds_prompts_is_a_short_one_on_a_cpu(
    settings: dict[str, Any], width: int, limit: int
) -> None:
    model = ModelConfig(d_model=width, num_layers=1, num_heads=2, n_ctx=8, vocab_size=8)
    config = EngineConfig(**settings)
    _, tokens = config.step_limits(model)
    assert config.prefill_step_limit(model) == limit
    too_many = msgspec.structs.replace(config, prefill_step_tokens=tokens + 1)
    message = f"prefill_step_tokens must be at most max_step_tokens = {tokens}, got {tokens + 1}"
    with pytest.raises(ConfigError, match=message):
        too_many.step_limits(model)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"prefill_step_tokens": 1}, "prefill_step_tokens must be 0 or at least 2, got 1"),
        ({"prefill_step_tokens": -1}, "prefill_step_tokens must be 0 or at least 2, got -1"),
        *(
            ({"max_prefill_share": share}, rf"max_prefill_share must be in \(0, 1\], got {share}")
            for share in (0.0, -0.5, 1.5, float("nan"))
        ),
        ({"device": "gpu", "max_step_rows": 65_537}, "max_step_rows must be at most 65536 where"),
        ({"max_step_rows": -1}, "max_step_rows must be at least 0"),
        ({"max_step_tokens": 1}, "max_step_tokens must be 0 or larger"),
        ({"max_step_rows": 8, "max_step_tokens": 8}, "max_step_tokens must be 0 or larger"),
        ({"device": "gpu", "dtype": "float32"}, "dtype must be auto, bfloat16 or float8 where"),
        (
            {"dtype": "float8"},
            "dtype must be auto, float32 or bfloat16 where device is cpu, got fl",
        ),
        ({"num_slots": -1}, "num_slots must be 0"),
        ({"memory_fraction": 0}, "memory_fraction must be in"),
        ({"prefix_slots": 0}, "prefix_slots must be at least 1"),
        ({"max_logprobs": 0}, "max_logprobs must be at least 1, or -1 for the whole vocabulary"),
        ({"max_logprobs": -2}, "max_logprobs must be at least 1, or -1"),
        ({"step_timeout_s": 0.5}, "step_timeout_s must be 0, or 1"),
        ({"drain_s": float("nan")}, "drain_s must be at least 0"),
    ],
)
def test_what_no_engine_can_do_is_named(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        EngineConfig(**settings)
    with pytest.raises(ValueError, match=named):
        EngineWiring(**settings)


def test_an_engine_is_reached_at_an_address_that_there_can_be() -> None:
    with pytest.raises(ValueError, match="endpoint must begin with ipc:// or tcp://, got 'http:"):
        EngineWiring(endpoint="http://x")


def test_a_config_with_a_byte_order_mark_and_fields_of_hugging_face_is_read(tmp_path: Path) -> None:
    path = DEMO_MODEL / "config.json"
    plain = parse_model_config(path, path.read_bytes())
    saved = msgspec.json.decode(path.read_bytes())
    saved |= {"architectures": ["SRM"], "model_type": "srm", "torch_dtype": "float32"}
    saved |= {"transformers_version": "5.0.0", "dtype": "float32"}
    assert parse_model_config(path, b"\xef\xbb\xbf" + msgspec.json.encode(saved)) == plain
    with pytest.raises(CheckpointError, match="hidden_size is not a field"):
        parse_model_config(path, msgspec.json.encode(saved | {"hidden_size": 5}))
    with pytest.raises(CheckpointError, match="one of model_type = 'llama'"):
        parse_model_config(path, b'{"model_type": "llama"}')


@pytest.mark.parametrize("place", ["name", "parent", "link"])
def test_a_model_whose_path_is_no_utf_8_is_refused_by_name(place: str, tmp_path: Path) -> None:
    """It is in JSON: of replies, which were 500s, and of the note of the weights in use."""
    odd = tmp_path / os.fsdecode(b"caf\xe9")
    model = {"name": odd, "parent": odd / "model", "link": tmp_path / "link"}[place]
    if place == "link":
        model.symlink_to(odd)
    with pytest.raises(ConfigError, match=r"model must be UTF-8, got b'.*caf\\xe9"):
        load(EngineConfig, [f"--model={model}"], {})
    assert load(EngineConfig, ["--model=/café/模型"], {}).model == Path("/café/模型")
    with pytest.raises(ConfigError, match=r"served_model_name must be UTF-8, got b'caf\\xe9'"):
        load(ServerConfig, [f"--served-model-name={odd.name}"], {})
    with pytest.raises(ConfigError, match=r"path must be UTF-8, got b'caf\\xe9'"):
        load(WeightsConfig, [f"--path={odd.name}"], {})


def test_a_bundled_model_goes_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everywhere, unless a folder of that name is here."""
    monkeypatch.chdir(tmp_path)
    assert load(EngineConfig, ["--model=demo-grpo"], {}).model == GRPO_MODEL
    assert load(EngineConfig, ["--model=countdown"], {}).model == COUNTDOWN_MODEL
    assert load(ServerConfig, ["--model=demo"], {}).model_name == "demo"
    assert load(SFTConfig, ["--model=demo"], {}).model == DEMO_MODEL
    assert load(GRPOConfig, ["--model=demo"], {}).model == DEMO_MODEL
    assert load(EvaluateConfig, ["--model=demo"], {}).model == DEMO_MODEL
    (tmp_path / "demo").mkdir()
    assert load(EngineConfig, ["--model=demo"], {}).model == Path("demo")
