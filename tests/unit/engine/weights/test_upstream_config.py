"""Constructor arguments are read as the published code reads them; what is open is asked for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from srm.engine.config import ModelConfig
from srm.engine.weights.upstream_config import model_config, read_args
from srm.errors import ConfigError

SIZES = {"vocab_size": 11, "hidden_dim": 8, "seq_len": 64, "num_blocks": 2}


def decide(
    folder: Path, constructor: dict[str, Any], names: tuple[str, ...] = (), **keys: Any
) -> tuple[ModelConfig, list[str]]:
    """The config and the notes for these arguments."""
    path, notes = folder / "args.json", list[str]()
    document = {"constructor": {**SIZES, **constructor}, "notes": "for people", **keys}
    path.write_text(json.dumps(document))
    return model_config(read_args(path), path, names, notes), notes


@pytest.mark.parametrize(
    ("constructor", "keys", "expected"),
    [
        ({"heads": 4, "parallel_heads": True, "use_projections": False}, {}, "parallel"),
        ({"heads": 4, "mixed_heads": True, "expanded_convs": True}, {}, "mixed"),
        ({"heads": 4, "expanded_convs": True, "combined_heads": True}, {}, "expanded"),
        ({"heads": 4, "combined_heads": True, "kernel": 4}, {}, "combined"),
        ({"heads": 4, "kernel": None}, {}, "column_heads"),
        ({"heads": 0, "expanded_convs": True, "kernel": 4}, {}, "expanded"),
        ({"heads": None, "kernel": 4, "mixed_heads": True}, {}, "kernel"),
        ({}, {"headless_kind": "row"}, "row"),
        ({"heads": 0}, {"headless_kind": "col"}, "column"),
        ({"heads": -1}, {"headless_kind": "column"}, "column"),
    ],
)  # fmt: skip
def test_switches_are_read_in_the_order_of_the_published_code(
    constructor: dict[str, Any], keys: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    config, _ = decide(tmp_path, constructor, **keys)
    assert config.mixer == expected
    assert config.num_heads == (4 if constructor.get("heads") == 4 else 1)
    assert config.use_projections == (constructor.get("heads") == 4 and expected != "parallel")
    if expected == "mixed":  # a diagonal in the file tells the other version
        result, _ = decide(tmp_path, constructor, ("mixer_heads.0.diag_weight",), **keys)
        assert result.mixer == "diagonal"


@pytest.mark.parametrize(
    ("constructor", "keys", "note"),
    [
        ({"heads": 4, "decay": True}, {}, "decay is set, but does nothing in .* column_heads"),
        ({"decay": True}, {"headless_kind": "row"}, "decay is set, but does nothing in .* row"),
        ({"heads": 4, "mixed_heads": True, "kernel": 2}, {}, "kernel is set, but does nothing"),
        ({"heads": 4, "use_projections": False}, {}, "use_projections false does nothing"),
        ({"heads": 4, "copy": True}, {}, "copy changes what a model is trained on"),
    ],
)
def test_switches_that_do_nothing_are_told(
    constructor: dict[str, Any], keys: dict[str, Any], note: str, tmp_path: Path
) -> None:
    config, notes = decide(tmp_path, constructor, **keys)
    assert not config.decay
    assert len(notes) == 1
    assert re.match(note, notes[0])


@pytest.mark.parametrize(
    ("constructor", "constant"),
    [
        ({"heads": 4, "mixed_heads": True, "seq_len": 512}, 1),
        ({"heads": 4, "mixed_heads": True, "seq_len": 1023}, 1),
        ({"heads": 4, "combined_heads": True, "seq_len": 850}, 1),
        ({"kernel": 2, "seq_len": 256}, 1),
        ({"heads": 4, "mixed_heads": True, "seq_len": 511}, None),
        ({"heads": 4, "mixed_heads": True, "seq_len": 2048}, None),
        ({"heads": 4, "mixed_heads": True, "seq_len": 512, "copy": True}, None),
        ({"kernel": 2, "seq_len": 255}, None),
        ({"kernel": 2, "seq_len": 512}, None),
    ],
)
def test_the_decay_constant_is_asked_for_where_versions_differ(
    constructor: dict[str, Any], constant: int | None, tmp_path: Path
) -> None:
    arguments = {**constructor, "decay": True}
    given, _ = decide(tmp_path, arguments, effective_decay_constant=3, combined_row_quirk=False)
    assert given.decay_constant == 3
    if constant is None:
        with pytest.raises(ConfigError, match=r'args\.json: add "effective_decay_constant"'):
            decide(tmp_path, arguments)
    else:
        config, notes = decide(tmp_path, arguments)
        assert config.decay and config.decay_constant == constant
        assert "decay_constant is 1, as in every version of the published code" in notes
    # Where nothing decays it is no question, nor to whom mixes a diagonal.
    assert decide(tmp_path, {**arguments, "decay": False})[0].decay_constant == 1
    if constructor.get("mixed_heads") and not constructor.get("copy"):
        diagonal = ("mixer_heads.0.diag_weight",)
        assert decide(tmp_path, arguments, diagonal)[0].decay_constant == 1


@pytest.mark.parametrize("quirk", [True, False])
def test_the_quirk_of_combined_rows_is_asked_for_where_it_matters(
    quirk: bool, tmp_path: Path
) -> None:
    arguments = {"heads": 4, "combined_heads": True, "decay": True}
    with pytest.raises(ConfigError, match='add "combined_row_quirk"'):
        decide(tmp_path, arguments, effective_decay_constant=2)
    keys: dict[str, Any] = {"effective_decay_constant": 2, "combined_row_quirk": quirk}
    assert decide(tmp_path, arguments, **keys)[0].combined_row_quirk == quirk
    keys["effective_decay_constant"] = 1  # divided by 1 either way
    assert not decide(tmp_path, arguments, **keys)[0].combined_row_quirk
    assert not decide(tmp_path, {**arguments, "decay": False}, **keys)[0].combined_row_quirk


@pytest.mark.parametrize(
    ("constructor", "keys", "message"),
    [
        ({}, {}, 'add "headless_kind": "row" or "col"'),
        ({"heads": 4, "parallel_heads": True}, {}, "add use_projections, true or false"),
        ({"heads": 3, "mixed_heads": True}, {}, "num_heads"),
        ({"heads": 1, "expanded_convs": True}, {}, "expanded_convs is supported"),
        ({"heads": 4, "seq_len": 0}, {}, r"seq_len"),
        ({"heads": 4, "dropout": 0.1}, {}, r"constructor\.dropout is not a field"),
        ({"heads": "4"}, {}, r"constructor\.heads must be an integer or null; got a string"),
        (
            {"heads": 4, "mixed_heads": True, "decay": True},
            {"effective_decay_constant": 0},
            "effective_decay_constant must be at least 1, got 0",
        ),
        ({}, {"headless_kind": "diagonal"}, "headless_kind must be row or col, got 'diagonal'"),
        (
            {"heads": 4},
            {"combined_row_quirk": "yes"},
            "combined_row_quirk must be a boolean or null; got a string",
        ),
        ({"heads": 4, "vocab_size": 1}, {}, "eos_token_id must lie in"),
        ({"is_reward_model": True}, {}, "is_reward_model: a reward model gives texts a score"),
    ],
)
def test_what_is_open_or_wrong_is_named(
    constructor: dict[str, Any], keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        decide(tmp_path, constructor, **keys)
    assert "args.json" in raised.value.message


def test_arguments_that_are_no_arguments_are_named(tmp_path: Path) -> None:
    path = tmp_path / "args.json"
    for content, message in (
        (None, "cannot read .*"),
        ("{", r".*args\.json is not JSON: "),
        *((content, r".*args\.json: ") for content in ("[]", "{}", '{"constructor": {}}')),
    ):
        if content:
            path.write_text(content)
        with pytest.raises(ConfigError, match=message) as error:
            read_args(path)
        assert "args.json" in error.value.message


@pytest.mark.parametrize(
    ("constructor", "switch"),
    [
        ({"heads": 4, "decay": True}, "mixed_heads, combined_heads or parallel_heads"),
        ({"heads": 4, "mixed_heads": True}, "decay"),
        ({"expanded_convs": True, "decay": True}, "kernel"),
    ],
)
def test_a_forgotten_switch_of_what_has_decays_is_asked_for(
    constructor: dict[str, Any], switch: str, tmp_path: Path
) -> None:
    """It was "32 tensors do not belong to the model"."""
    names = tuple(f"mixer_blocks.{i}.token_mixing_layer.decay_value" for i in range(2))
    message = rf"have 2 decays, such as mixer_blocks\.0\..*: add {switch} to constructor"
    with pytest.raises(ConfigError, match=message):
        decide(tmp_path, constructor, names)


def test_arguments_that_are_not_under_constructor_are_said_to_belong_there(tmp_path: Path) -> None:
    (tmp_path / "args.json").write_text('{"vocab_size": 11, "hidden_dim": 8}')
    with pytest.raises(ConfigError, match="constructor is missing, under which the model's arg"):
        read_args(tmp_path / "args.json")
