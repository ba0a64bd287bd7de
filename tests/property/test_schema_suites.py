"""Schemas that others wrote: no invalid text is allowed, and tables say what masks say.

`SCHEMA_SUITES` names folders, with a colon between them, of suites that are not in this
repository: the JSON-Schema-Test-Suite, MaskBench, or schemas alone.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.tools.measure_schemas import FAULTS, SUITE_SUFFIX, Tables, cases_of, measure

FOLDERS = os.environ.get("SCHEMA_SUITES", "")
EVERY = 48
"""One of so many of Kubernetes' schemas is measured."""


def measure_all(cases: Iterable[tuple[Any, list[tuple[Any, bool]]]]) -> Counter[str]:
    total, tables = Counter[str](), Tables()
    for schema, tests in cases:
        counts, shown = measure(schema, tests, tables)
        assert not any(counts[fault] for fault in FAULTS), shown
        total += counts
    return total


def folder_of(package: str) -> Path:
    """The folder of a package that has schemas."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    return Path(spec.origin).parent


def test_schemas_of_kubernetes() -> None:
    versions = folder_of("kubernetes_validate") / "kubernetes-json-schema"
    newest = max(
        versions.glob("v*-local-strict"), key=lambda path: int(path.name.partition(".")[2][:2])
    )
    definitions = json.loads((newest / "_definitions.json").read_bytes())["$defs"]
    total = measure_all(
        ({"$ref": f"#/$defs/{name}", "$defs": definitions}, [])
        for name in sorted(definitions)[::EVERY]
    )
    assert total["schemas taken"] > total["schemas refused"]
    assert total["sampled"]


@pytest.mark.slow
def test_schemas_of_daily_tools() -> None:
    folder = folder_of("check_jsonschema") / "builtin_schemas"
    total = measure_all(
        (json.loads(path.read_bytes()), []) for path in sorted(folder.rglob(SUITE_SUFFIX))
    )
    assert total["schemas taken"] and total["sampled"]


@pytest.mark.slow
@pytest.mark.skipif(not FOLDERS, reason="SCHEMA_SUITES names no folder")
def test_public_suites() -> None:
    paths = [path for folder in FOLDERS.split(":") for path in Path(folder).rglob(SUITE_SUFFIX)]
    total = measure_all(case for path in sorted(paths) for case in cases_of(path.read_bytes()))
    assert total["passed"]
