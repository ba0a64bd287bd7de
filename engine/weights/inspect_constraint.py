"""`srm inspect MODEL --schema FILE`: which way a constraint goes, and what that takes."""

from __future__ import annotations

from pathlib import Path

from srm.engine.config import ModelConfig
from srm.engine.constraints.automaton import make_automaton
from srm.engine.constraints.byte_automaton import NotCompiled
from srm.engine.constraints.byte_table import START
from srm.engine.constraints.constraint import json_constraint, read_json, regex_constraint
from srm.engine.constraints.grammars import Grammars
from srm.errors import ConfigError, InvalidRequest
from srm.files import read_file


def inspect_constraint(folder: Path, config: ModelConfig, constraint: str) -> dict[str, str]:
    """Facts about a constraint by name. Raises InvalidRequest for one that is not taken."""
    grammars = Grammars(config, folder / "tokenizer.json")
    try:
        table = grammars.build(constraint, make_table=make_automaton).automaton
    except NotCompiled as error:
        return {"constraint": f"masks on the host: {error}"}
    assert table is not None
    states, classes = table.next_state.shape
    return {
        "constraint": "a table on the device",
        "table": f"{states:,} states, {classes:,} classes of tokens, {table.nbytes:,} bytes",
        "max_tokens": f"at least {max(1, table.distance[START] - 1):,}",
    }


def read_constraint(schema: Path | None, regex: str | None, strict: bool) -> str:
    """Return the constraint of a schema in a file, or of a regex. Raises ConfigError."""
    name, path = ("regex", "") if schema is None else ("schema", f" {schema}")
    try:
        if schema is None:
            return regex_constraint(regex or "")
        return json_constraint(read_json(read_file(schema).decode("utf-8-sig")), strict)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name}{path}: {error}") from None
    except InvalidRequest as error:
        raise ConfigError(f"{name}{path}: {error.message}") from None
