"""`python -m tests.tools.measure_schemas FOLDER…`: what becomes of the schemas of public suites.

A folder has files as the JSON-Schema-Test-Suite has them, which is in the source package of
`jsonschema` (`json/tests/draft2020-12`): each a list of `schema`, `tests` and in those `data` and
`valid`. Compact texts of all data go through the matcher, and through the table of a schema that
has one for the bundled model. Nothing of a suite is in this repository.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from srm.engine.constraints.automaton import TokenAutomaton, make_automaton
from srm.engine.constraints.byte_automaton import NotCompiled
from srm.engine.constraints.constraint import json_constraint
from srm.engine.constraints.trial import why_not
from srm.engine.errors import InvalidRequest
from tests.engines.matching import accepts, byte_tokenizer
from tests.engines.tables import of_demo


class Tables:
    """The tables of schemas, for the bundled model."""

    def __init__(self) -> None:
        self.milliseconds: list[float] = []
        self.sizes: list[int] = []
        self.missing: Counter[str] = Counter()

    def make(self, constraint: str) -> TokenAutomaton | None:
        """Make the table of a constraint, if it has one, and note what it takes."""
        vocabulary = of_demo()
        started = time.thread_time()
        try:
            table = make_automaton(
                constraint, vocabulary.tokens, len(vocabulary.tokens), vocabulary.eos
            )
        except NotCompiled as error:
            self.missing[error.reason] += 1
            return None
        self.milliseconds.append(1e3 * (time.thread_time() - started))
        self.sizes.append(table.nbytes)
        return table

    def report(self) -> None:
        count = len(self.sizes)
        print(f"{count} of {count + self.missing.total()} schemas have a table")
        if count:
            print(f"milliseconds to compile: {_spread(self.milliseconds)}")
            print(f"bytes: {_spread(self.sizes)}")
        for reason, number in self.missing.most_common():
            print(f"{number:6} {reason}")


def _spread(values: Sequence[float]) -> str:
    median, most = statistics.median(values), max(values)
    return f"{median:,.0f} in the median, {most:,.0f} at most"


def _table_accepts(table: TokenAutomaton, text: str) -> bool:
    token_ids = [of_demo().tokens.index(bytes([byte])) for byte in text.encode()]
    return bool(table.distance[table.walk(np.array(token_ids, np.int32))] == 0)


def measure(schema: Any, tests: list[dict[str, Any]], tables: Tables) -> Counter[str]:
    """Count a schema's tests by what became of them; wrong ones are printed."""
    try:
        constraint = json_constraint(schema)
    except InvalidRequest as error:
        return Counter({"refused": len(tests), f"refused: {_reason(error.message)}": len(tests)})
    if fault := why_not(constraint, byte_tokenizer()):
        return Counter({"refused": len(tests), f"refused: {fault[:60]}": len(tests)})
    counts: Counter[str] = Counter()
    table = tables.make(constraint)
    for test in tests:
        text = json.dumps(test["data"], separators=(",", ":"), ensure_ascii=False)
        is_accepted = accepts(constraint, text)
        if table is not None and _table_accepts(table, text) != is_accepted:
            counts["not the same by the table"] += 1
            print(f"not the same by the table: {json.dumps(schema)[:300]} {text[:100]}")
        if is_accepted == test["valid"]:
            counts["passed"] += 1
            continue
        kind = "invalid text accepted" if is_accepted else "valid text not accepted"
        counts[kind] += 1
        print(f"{kind}: {json.dumps(schema)[:300]} {text[:100]}")
    return counts


def _reason(message: str) -> str:
    """Return a message with the last part of its place alone."""
    place, _, what = message.partition(": ")
    return f"{place.rpartition('/')[2]}: {what.partition(';')[0]}"[:80]


def main(folders: list[str]) -> int:
    files = [path for folder in folders for path in sorted(Path(folder).rglob("*.json"))]
    if not files:
        print("there are no schemas in", *folders)
        return 0
    total: Counter[str] = Counter()
    tables = Tables()
    for path in files:
        for case in json.loads(path.read_text()):
            total += measure(case["schema"], case["tests"], tables)
    for what, count in total.most_common():
        print(f"{count:6} {what}")
    tables.report()
    return min(total["invalid text accepted"] + total["not the same by the table"], 1)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
