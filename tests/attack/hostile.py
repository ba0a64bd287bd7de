"""Constraints that take all that they may, and folders of weights that are none."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

LETTERS = "abcdefghij"
CONFIG_NAMES = 1_000_000
"""Fields that a configuration has beside those of a model."""

Shape = Callable[[random.Random], dict[str, Any]]


def _schema(schema: object) -> dict[str, Any]:
    return {"structured_outputs": {"json": schema}}


def _regex(regex: str) -> dict[str, Any]:
    return {"structured_outputs": {"regex": regex}}


def _word(rng: random.Random, length: int) -> str:
    return "".join(rng.choices(LETTERS, k=length))


def _object(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], **more}


def _overlapping(rng: random.Random) -> dict[str, Any]:
    closed = {"additionalProperties": rng.choice((False, {"type": "null"}))}
    pattern = {"patternProperties": {f"^{rng.choice(LETTERS)}": {"type": "integer"}}}
    return _schema(_object({"a": {"type": "string"}, "b": {"const": 1}}, **pattern, **closed))


def _nested(rng: random.Random) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(rng.choice((40, 400))):
        schema = _object({_word(rng, 3): schema})
    return _schema(schema)


CONSTRAINTS: dict[str, Shape] = {
    "a long regex": lambda rng: _regex(_word(rng, 20_000)),
    "repeats of repeats": lambda rng: _regex(f"((({rng.choice(LETTERS)}?){{99}}){{99}}){{99}}"),
    "alternatives": lambda rng: _regex("|".join(_word(rng, 12) for _ in range(4_000))),
    "what nothing matches": lambda rng: _regex(f"{_word(rng, 3)}$x^"),
    "many dates": lambda rng: _schema(
        _object(
            {f"{_word(rng, 4)}{i}": {"type": "string", "format": "date-time"} for i in range(1_500)}
        )
    ),
    "many properties": lambda rng: _schema(
        _object({f"{_word(rng, 9)}{i}": {"type": "number"} for i in range(9_000)})
    ),
    "a large enum": lambda rng: _schema({"enum": [_word(rng, 30) for _ in range(9_000)]}),
    "a large choice": lambda rng: {
        "structured_outputs": {"choice": [_word(rng, 30) for _ in range(9_000)]}
    },
    "one object or another": lambda rng: _schema(
        {"anyOf": [_object({_word(rng, 2): {"const": i}, "z": {}}) for i in range(300)]}
    ),
    "overlapping rules": _overlapping,
    "no room": lambda rng: _schema(
        {"type": "string", "pattern": "^a{9}$", "maxLength": rng.randint(0, 9)}
    ),
    "deep": _nested,
    "itself": lambda rng: _schema(
        {"$defs": {"x": {"anyOf": [{"$ref": "#/$defs/x"}, {"type": "null"}]}}, "$ref": "#/$defs/x"}
    ),
    "numbers": lambda rng: _schema(
        {"type": "number", "minimum": rng.choice((-1e308, 0, 5e-324)), "maximum": 1e308}
    ),
    "odd words": lambda rng: _schema(
        {"type": "object", rng.choice(("not", "if", "contains", "nullable", "uniqueItems")): True}
    ),
    "a grammar": lambda rng: {
        "structured_outputs": {"grammar": f'root ::= x x x\nx ::= "{_word(rng, 2)}" x | "b"'}
    },
}
"""By what they are: fields of a completion, other ones at each draw."""


def hostile_constraint(rng: random.Random) -> dict[str, Any]:
    """Fields of a completion under one of `CONSTRAINTS`, of few tokens and samples."""
    shape = CONSTRAINTS[rng.choice([*CONSTRAINTS])]
    return {"prompt": "the", "max_tokens": 9, "n": rng.choice((1, 4)), **shape(rng)}


def hostile_folders(model: Path, folder: Path) -> list[str]:
    """Make folders that pass for weights of `model`, whose configuration is no file, is another
    folder's or is endless; return their paths."""
    secret = folder / "secret"
    shutil.copy(model / "config.json", secret)
    names = {f"{i}": i for i in range(CONFIG_NAMES)}
    makes: dict[str, Callable[[Path], object]] = {
        "fifo": os.mkfifo,
        "endless": lambda path: path.symlink_to("/dev/zero"),
        "outside": lambda path: path.symlink_to(secret),
        "itself": lambda path: path.symlink_to(path),
        "a folder": Path.mkdir,
        "wide": lambda path: path.write_text(json.dumps(names)),
    }
    paths = [shutil.copytree(model, folder / name) for name in makes]
    for path, make in zip(paths, makes.values(), strict=True):
        (path / "config.json").unlink()
        make(path / "config.json")
    return [str(path) for path in paths]
