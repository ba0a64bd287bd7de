"""Random schemas, by the thousand: each is refused by name, or whatever is sampled of it is valid.

    python -m tests.tools.fuzz_schemas --schemas 10000 --seeds 10

A schema is drawn from its number alone: every second one is odd, every third is a tool's parameters
or strict. Each is made and tried as requests' are, and followed as an engine does: by its table if
it has one, else by masks.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import cache, lru_cache, partial
from itertools import product
from multiprocessing import get_context
from random import Random
from typing import Any

import msgspec
import numpy as np
from jsonschema_rs import validator_for

from srm.engine.constraints.automaton import TokenAutomaton
from srm.engine.constraints.byte_table import START
from srm.engine.constraints.grammars import Grammar, Matchers
from srm.server.schema.structured_outputs import ConstraintSource
from srm.server.schema.tools import Calls, Function
from srm.server.text.constraint_process import answer
from tests.kit.engines.drawn_schemas import ODD_NAMES, draw_schema, short_value
from tests.kit.engines.tables import of_demo

MAX_TOKENS = 120
_ROOM = 2
"""Times the tokens of a short example that must be room for an end: those found may be longer."""
UNMET = ("no value can meet", "no JSON text", "no text of")
"""How a refusal begins to say that a schema allows nothing."""
BROKEN = ("refused untruly", "stuck", "invalid", "cut", "without an end")
_VALUES: list[Any] = [
    None,
    True,
    0,
    1,
    -1,
    2,
    0.5,
    5,
    "",
    "a",
    "ab",
    "aaaaa",
    "red",
    "v1",
    [],
    {},
    {"a": 1},
]


def _source(schema: Any, number: int) -> ConstraintSource:
    raw = msgspec.Raw(msgspec.json.encode(schema))
    if number % 3 == 2:
        return Calls([Function("f", parameters=raw, strict=True)], True, False).source
    return ConstraintSource("schema", "json", raw, strict=number % 3 == 1)


def fates(number: int, seeds: int) -> Counter[str]:
    """Return what became of a schema: a refusal, or of each seed whether the text is valid."""
    vocabulary = of_demo()
    schema = draw_schema(Random(f"schema {number}"), is_odd=bool(number % 2))
    is_valid = validator_for(schema, validate_formats=True).is_valid
    answered = answer(msgspec.json.encode(_source(schema, number)), vocabulary.tokenizer)
    if (fault := answered.error) is not None:
        is_object = number % 3 == 2
        if (
            any(claim in fault for claim in UNMET)
            and "with strict" not in fault
            and any(
                is_valid(value) and (isinstance(value, dict) or not is_object)
                for value in _values()
            )
        ):
            return Counter({f"refused untruly: {fault} {json.dumps(schema)}": 1})
        return Counter({f"refused: {_reason(fault)}": 1})
    return Counter(_sample(answered.text, Random(seed), is_valid, schema) for seed in range(seeds))


def _reason(fault: str) -> str:
    """Return a refusal without its place and values."""
    _, _, what = fault.rpartition("/")
    return what.partition(": ")[2][:60] or fault[:60]


def _sample(constraint: str, random: Random, is_valid: Any, schema: Any) -> str:
    """Return whether a text of at most MAX_TOKENS random tokens is valid."""
    vocabulary = of_demo()
    table = _table(constraint)
    matcher = vocabulary.matcher(constraint)
    max_tokens, matchers = random.randint(8, MAX_TOKENS), Matchers()
    fits = _ROOM * _short_tokens(schema, is_valid) <= max_tokens
    state, sampled, is_ended, is_tight = START, list[int](), False, False
    for left in range(max_tokens, 0, -1):
        if table:
            is_tight = table.distance[START] > max_tokens
            allowed = table.allowed(state, left + is_tight)
            is_short = table.distance[START] - 1 <= max_tokens
        else:
            grammar, tokens = _grammar(constraint), np.array(sampled, np.int32).tobytes()
            masks, last = grammar.first_mask[None].copy(), sampled[-1] if sampled else None
            if last is not None:
                masks = matchers.next_masks([0], [last], partial(_find, grammar, tokens))
            matchers.close([0], [left], [last], masks, {0: grammar}.__getitem__)
            allowed = np.unpackbits(masks.view(np.uint8), bitorder="little").astype(bool)
            if not sampled and grammar.closing and (end := grammar.closing.start):
                fits, is_tight = fits or len(end) - 1 <= max_tokens, len(end) > max_tokens
            is_short = True
        if not is_short:
            return "too long for max_tokens"
        if not allowed.any() or (table is None and matcher.is_error()):
            return f"stuck after {vocabulary.text(sampled)!r}: {json.dumps(schema)}"
        ends = [token for token in _ends() if allowed[token]]
        is_end = ends and random.random() < 0.4
        token = int(random.choice(ends if is_end else np.flatnonzero(allowed).tolist()))
        if is_ended := token == vocabulary.eos:
            break
        sampled.append(token)
        if table:
            state = table.walk(np.array([token], np.int32), state)
        else:
            matcher.consume_token(token)
    text = vocabulary.text(sampled)
    if table is None and not matcher.is_accepting():
        if not fits:
            return "too long for max_tokens"
        return f"cut by max_tokens = {max_tokens}: {text!r} of {json.dumps(schema)}"
    try:
        value = json.loads(text)
    except ValueError:
        value = ...
    if not is_ended and fits and not is_tight:
        return f"without an end token: {text!r} of {json.dumps(schema)}"
    shown = f"invalid: {text!r} of {json.dumps(schema)}"
    return "valid" if value is not ... and is_valid(value) else shown


def _short_tokens(schema: Any, is_valid: Any) -> int:
    """Return the tokens of a short text of the schema: of more than there are, if none is known."""
    value = short_value(schema)
    if value is ... or not is_valid(value):
        return 10**6
    text = json.dumps({"name": "f", "arguments": value}) if False else json.dumps(value)
    return len(of_demo().tokenizer.tokenize_str(text))


@lru_cache(1)
def _table(constraint: str) -> TokenAutomaton | None:
    return of_demo().table(constraint)


@lru_cache(1)
def _grammar(constraint: str) -> Grammar:
    return of_demo().grammar(constraint)


def _find(grammar: Grammar, tokens: bytes, slot: int) -> tuple[Grammar, bytes]:
    return grammar, tokens


@cache
def _ends() -> list[int]:
    return [token for token, text in enumerate(of_demo().tokens) if text in (b'"', b"}", b"]", b"")]


@cache
def _values() -> list[Any]:
    """Small values, which odd schemas are about."""
    few = _VALUES[:12]
    objects = [{name: value} for name, value in product([*ODD_NAMES, "aaaaa"], _VALUES)]
    names = product(ODD_NAMES, ODD_NAMES)
    pairs = [{a: x, b: y} for (a, b), x, y in product(names, few, few) if a != b]
    return [*_VALUES, *objects, *pairs, *([value] * n for value in _VALUES for n in (1, 2, 3))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemas", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=10)
    args = parser.parse_args()
    numbers = range(args.first, args.first + args.schemas)
    total: Counter[str] = Counter()
    with ProcessPoolExecutor(mp_context=get_context("forkserver")) as processes:
        for counts in processes.map(partial(fates, seeds=args.seeds), numbers, chunksize=20):
            total += counts
    for fate, count in total.most_common():
        print(f"{count:8} {fate}")
    return int(any(fate.startswith(BROKEN) for fate in total))


if __name__ == "__main__":
    raise SystemExit(main())
