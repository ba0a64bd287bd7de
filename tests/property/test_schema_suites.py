"""Schemas that others wrote: no invalid text is allowed, and tables say what masks say.

What a schema's masks allow is sampled and judged by `jsonschema-rs`. So are values that
`hypothesis-jsonschema` makes, where that is installed, and what becomes of valid ones by a small
change. Both kinds of whitespace are tried, and the table of a schema that has one for the bundled
model.

`SCHEMA_SUITES` names folders, with a colon between them, of suites that are not in this
repository: the JSON-Schema-Test-Suite, MaskBench, or schemas alone. A file has a case, `schema` and
`tests` with `data` and `valid`; a list of cases; or a schema alone.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from jsonschema_rs import Draft4Validator, Draft7Validator, validator_for

from srm.engine.constraints.automaton import TokenAutomaton, make_automaton
from srm.engine.constraints.byte_automaton import NotCompiled
from srm.engine.constraints.constraint import json_constraint
from srm.engine.constraints.trial import why_not
from srm.errors import InvalidRequest
from tests.kit.engines.matching import accepts, byte_tokenizer, draw_text
from tests.kit.engines.tables import of_demo

try:
    from hypothesis_jsonschema import from_schema
except ImportError:
    from_schema = None

FOLDERS = os.environ.get("SCHEMA_SUITES", "")
EVERY = 48
"""One of so many of Kubernetes' schemas is measured."""
SUITE_SUFFIX = "*.json"
SPACES = ("", " ")
DRAWN = 2
"""Texts that are sampled of each schema, and values that hypothesis makes."""
LONGEST = 2_000
"""Bytes after which a text that is sampled is given up."""
_REPLACEMENTS: tuple[Any, ...] = (
    *(None, True, -1, 10**6 + 0.5, "", "~" * 300, [], {}, {"~": 0}, ...),
)
"""What is put into a place of a value; `...`: nothing is there any more."""
FAULTS = ("invalid text allowed", "not the same by the table")


def table_of(constraint: str) -> TokenAutomaton | None:
    """The table of a constraint for the bundled model, if it has one."""
    vocabulary = of_demo()
    try:
        return make_automaton(constraint, vocabulary.tokens, len(vocabulary.tokens), vocabulary.eos)
    except NotCompiled:
        return None


def _table_accepts(table: TokenAutomaton, text: str) -> bool:
    token_ids = [of_demo().tokens.index(bytes([byte])) for byte in text.encode()]
    return bool(table.distance[table.walk(np.array(token_ids, np.int32))] == 1)


def measure(schema: Any, tests: Iterable[tuple[Any, bool]]) -> tuple[Counter[str], list[str]]:
    """Count what becomes of a schema and of texts, and show those that are not as they should be.

    `tests`: values, and whether they are valid.
    """
    tests = list(tests)
    refused = Counter({"schemas refused": 1})
    try:
        constraints = {space: json_constraint(schema, space=space) for space in SPACES}
    except InvalidRequest:
        return refused, []
    if why_not(constraints[""], byte_tokenizer()):
        return refused, []
    counts, shown = Counter({"schemas taken": 1}), []
    random = Random(json.dumps(schema))
    is_judged_valid = _judge(schema)
    drawn_values: list[Any] = []
    for constraint in constraints.values():
        for drawn in filter(None, (draw_text(constraint, random, LONGEST) for _ in range(DRAWN))):
            counts["sampled"] += 1
            drawn_values.append(_read(drawn))
            if not is_judged_valid(drawn_values[-1]):
                counts["invalid text allowed"] += 1
                shown.append(f"invalid text allowed: {json.dumps(schema)[:300]} {drawn[:200]}")
    more = [*_made_values(schema), *drawn_values]
    more += [value for value, is_valid in tests if is_valid]
    more += [changed for value in more for changed in _change(value, random)]
    tests += [(value, True) for value in more if is_judged_valid(value)]
    tests += [(value, False) for value in more if not is_judged_valid(value)]
    table = table_of(constraints[""])
    for space, constraint in constraints.items():
        for value, is_valid in tests:
            text = spell(value, space)
            is_allowed = accepts(constraint, text)
            verdict = {True: "passed", False: "valid text not allowed"}[is_allowed == is_valid]
            if is_allowed and not is_valid:
                verdict = "invalid text allowed"
            if not space and table and _table_accepts(table, text) != is_allowed:
                verdict = "not the same by the table"
            counts[verdict] += 1
            if verdict != "passed":
                shown.append(f"{verdict}: {json.dumps(schema)[:300]} {text[:200]}")
    return counts, shown


def _judge(schema: Any) -> Callable[[Any], bool]:
    """Return what says whether a value is valid, by the draft that the schema names or the latest
    that it is of. `jsonschema` itself reckons 0.09 to be no multiple of 0.0001."""
    for make in (validator_for, Draft7Validator, Draft4Validator):
        with suppress(ValueError):
            judge: Callable[[Any], bool] = make(schema, validate_formats=True).is_valid
            return judge
    raise ValueError(f"a schema of no draft is taken: {json.dumps(schema)[:300]}")


def _read(text: str) -> Any:
    """Return what the text says; a number that no double holds is the largest one."""

    def number(digits: str) -> float:
        return min(max(float(digits), -sys.float_info.max), sys.float_info.max)

    return json.loads(text, parse_float=number)


def spell(value: Any, space: str) -> str:
    """Write a value as completions do."""
    return json.dumps(value, separators=(f",{space}", f":{space}"), ensure_ascii=False)


def _made_values(schema: Any) -> list[Any]:
    made: list[Any] = []
    if from_schema is None:
        return made
    few = settings(
        max_examples=DRAWN,
        phases=[Phase.generate],
        database=None,
        derandomize=True,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    with suppress(Exception):  # a schema beyond it, which says so in many ways
        note = given(from_schema(schema))(lambda value: made.append(value))  # type: ignore[no-untyped-call]  # noqa: PLW0108
        few(note)()
    return made


def _change(value: Any, random: Random) -> Iterator[Any]:
    """Yield values in which one place is another one: gone, more, of another type or size."""
    places = list(_places(value, ()))
    for place in random.sample(places, min(len(places), 4)):
        for new in _REPLACEMENTS:
            yield _with(copy.deepcopy(value), place, new)


def _places(value: Any, place: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    yield place
    items: Iterable[Any] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, item in items:
        yield from _places(item, (*place, key))


def _with(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    """Return the value with a new one at this place; with nothing there for `...`."""
    if not place:
        return {} if new is ... else new
    around = value
    for key in place[:-1]:
        around = around[key]
    if new is ...:
        del around[place[-1]]
    elif isinstance(new, dict) and new and isinstance(around[place[-1]], dict):
        around[place[-1]] |= new
    else:
        around[place[-1]] = new
    return value


def cases_of(file: bytes) -> Iterator[tuple[Any, list[tuple[Any, bool]]]]:
    """Yield the schemas of a file and their tests."""
    content = json.loads(file)
    if isinstance(content, dict) and not isinstance(content.get("tests"), list):
        yield content, []
        return
    for case in content if isinstance(content, list) else [content]:
        yield case["schema"], [(test["data"], test["valid"]) for test in case["tests"]]


def measure_all(cases: Iterable[tuple[Any, list[tuple[Any, bool]]]]) -> Counter[str]:
    total = Counter[str]()
    for schema, tests in cases:
        counts, shown = measure(schema, tests)
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
