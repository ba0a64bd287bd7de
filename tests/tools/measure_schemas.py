"""`python -m tests.tools.measure_schemas FOLDER…`: what becomes of the schemas of public suites.

A folder has files as the JSON-Schema-Test-Suite has them, which is in the source package of
`jsonschema` (`json/tests/draft2020-12`): each a list of `schema`, `tests` and in those `data` and
`valid`. Compact texts of all data go through the matcher. Nothing of a suite is in this repository.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from srm.engine.constraints.constraint import json_constraint
from srm.engine.constraints.trial import why_not
from srm.engine.errors import InvalidRequest
from tests.engines.matching import accepts, byte_tokenizer


def measure(schema: Any, tests: list[dict[str, Any]]) -> Counter[str]:
    """Count a schema's tests by what became of them; wrong ones are printed."""
    try:
        constraint = json_constraint(schema)
    except InvalidRequest as error:
        return Counter({"refused": len(tests), f"refused: {_reason(error.message)}": len(tests)})
    if fault := why_not(constraint, byte_tokenizer()):
        return Counter({"refused": len(tests), f"refused: {fault[:60]}": len(tests)})
    counts: Counter[str] = Counter()
    for test in tests:
        text = json.dumps(test["data"], separators=(",", ":"), ensure_ascii=False)
        is_accepted = accepts(constraint, text)
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
    for path in files:
        for case in json.loads(path.read_text()):
            total += measure(case["schema"], case["tests"])
    for what, count in total.most_common():
        print(f"{count:6} {what}")
    return min(total["invalid text accepted"], 1)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
