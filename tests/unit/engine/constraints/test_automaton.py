"""Tables of constraints: what has one, how far a text's end is, and what takes too much."""

from __future__ import annotations

import json
import re
import tracemalloc
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import srm.__main__ as srm
from srm.engine.config import ModelConfig
from srm.engine.constraints import automaton, schema_pieces
from srm.engine.constraints.automaton import (
    UNREACHABLE,
    TokenAutomaton,
    compile_automaton,
    make_automaton,
)
from srm.engine.constraints.byte_automaton import (
    MAX_WORK,
    NotCompiled,
    Piece,
    Work,
    any_text,
    determinize,
)
from srm.engine.constraints.byte_table import DEAD, START
from srm.engine.constraints.constraint import (
    choice_constraint,
    json_constraint,
    lark_constraint,
    regex_constraint,
)
from srm.engine.constraints.grammars import Grammars
from srm.engine.constraints.pattern import FORMATS
from srm.engine.constraints.regex_pieces import regex, search_in_string
from tests.kit.engines.numpy_runner import TINY
from tests.kit.engines.tables import ALL, DEMO, cover, of_bytes, of_demo
from tests.kit.models.tiny_tokenizer import tiny_folder

TOKENS = [b"", b"a", b"b", b"ab", b"ba", b"c", b"\xc3", b"\xa9", b"d" * 3]
EOS = 0


def table(regex: str, tokens: list[bytes] = TOKENS) -> TokenAutomaton:
    made = compile_automaton(regex_constraint(regex), tokens, len(tokens) + 2, EOS)
    assert made is not None
    return made


def why_none(constraint: str) -> str:
    with pytest.raises(NotCompiled) as none:
        make_automaton(constraint, TOKENS, len(TOKENS), EOS)
    return str(none.value)


def ids(*tokens: bytes) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array([TOKENS.index(token) for token in tokens], np.int32)


def allowed(made: TokenAutomaton, state: int, left: int = ALL) -> set[bytes]:
    return {TOKENS[token] for token in np.flatnonzero(made.allowed(state, left)).tolist()}


def test_a_text_is_followed_to_its_end() -> None:
    made = table("(?:ab)+é?")
    assert allowed(made, START) == {b"a", b"ab"}
    whole = made.walk(ids(b"a", b"ba", b"b"))
    assert allowed(made, whole) == {b"a", b"ab", b"\xc3", b""}
    part = made.walk(ids(b"ab", b"\xc3"))
    assert allowed(made, part) == {b"\xa9"}
    assert made.walk(ids(b"ab", b"c")) == DEAD == made.walk(ids(b"ab", b"c", b"ab"))
    end = made.walk(np.array([TOKENS.index(b"ab"), EOS], np.int32))
    assert end == len(made.next_state) - 1 and allowed(made, end) == set()
    assert made.next_state.dtype == made.class_of.dtype == made.distance.dtype == np.uint16
    assert made.nbytes == 2 * (made.next_state.size + len(TOKENS) + 2 + len(made.distance))


def test_the_last_token_ends_a_whole_text() -> None:
    made = table("ab?")
    assert made.distance[START] == 2
    assert allowed(made, START, 2) == {b"a", b"ab"}
    assert allowed(made, made.walk(ids(b"a")), 1) == {b""}
    assert allowed(made, START, 1) == set()
    assert table("a*").distance[START] == 1


def test_with_few_tokens_left_only_what_can_end_is_allowed() -> None:
    made = table("a(?:b|c{5})")
    after = made.walk(ids(b"a"))
    assert allowed(made, after, 6) == {b"b", b"c"}
    assert allowed(made, after, 5) == {b"b"}


def test_what_no_tokens_can_end_is_left_out_where_tokens_are_counted() -> None:
    made = table("a|bx")
    assert allowed(made, START) == {b"a", b"b"}  # as llguidance, which looks no further
    assert made.distance[made.walk(ids(b"b"))] == UNREACHABLE
    assert allowed(made, START, UNREACHABLE) == {b"a"}
    assert why_none(regex_constraint("x+")) == "no tokens spell a text that meets it"
    assert compile_automaton(regex_constraint("x+"), TOKENS, len(TOKENS), EOS) is None


@pytest.mark.parametrize("pattern", ["(?:ab|c)*d{6}", "a{2,4}b|cab", "(?:a|ba)(?:b|cc)*", "é?[ac]"])
def test_the_distance_is_that_of_the_shortest_text(pattern: str) -> None:
    made = table(pattern)
    spelled = range(1, len(TOKENS))
    for first in ((), *product(spelled, repeat=1), *product(spelled, repeat=2)):
        state = made.walk(np.array(first, np.int32))
        if state == DEAD or made.distance[state] > 4:
            continue
        ends = (
            length
            for length in range(4)
            for rest in product(spelled, repeat=length)
            if made.allowed(made.walk(np.array(rest, np.int32), state), ALL)[EOS]
        )
        assert next(ends) + 1 == made.distance[state]


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - {"hostname"}))
def test_formats_have_tables_that_are_the_same_everywhere(name: str) -> None:
    constraint = json_constraint({"type": "string", "format": name})
    made = of_bytes().table(constraint)
    assert made is not None and cover(of_bytes(), constraint, made) >= len(made.next_state) - 2


OBJECT = {"type": "object", "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (True, "it allows any JSON"),
        ({"type": "object"}, "/additionalProperties: it allows any"),
        ({**OBJECT, "properties": {"a": {"type": "array"}}}, "/properties/a/items: it allows any"),
        (
            {**OBJECT, "properties": {"a": {"$ref": "#"}}},
            "/properties/a/$ref/properties/a: it is r",
        ),
        ({"anyOf": [{"minimum": 1}]}, "/anyOf/0/items: it allows any JSON"),
        ({"allOf": [{"pattern": "a"}, {"pattern": "b"}]}, "it has allOf"),
        ({"pattern": "a", "anyOf": [{"pattern": "b"}]}, "it has anyOf beside other keywords"),
        (
            {"type": "number", "maximum": 19312.448886849466},
            "/anyOf/0: it has a number of too many digits",
        ),
        ({"enum": [0.1, 0.30000000000000004]}, "it has a number of too many digits"),
        ({**OBJECT, "maxProperties": 1}, "it has maxProperties of type object"),
        ({**OBJECT, "patternProperties": {"a": True}}, "it has patternProperties of type object"),
        ({"type": "string", "pattern": r"\W"}, r"the regex has \p, which is not known here"),
    ],
)
def test_what_is_not_regular_or_not_known_exactly_has_no_table(schema: Any, reason: str) -> None:
    assert why_none(json_constraint(schema)).startswith(reason)


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        (lark_constraint('start: "a" start | "b"'), "it is a grammar"),
        (lark_constraint("start: /a/ /b/"), "it is a grammar"),
        (lark_constraint(r"start: /\d/"), r"the regex has \d"),  # any digit of Unicode
        (regex_constraint("(?i)a"), "the regex has a group"),
        (regex_constraint(r"[a&&b]|\pL"), "the regex has sets of sets"),
        (regex_constraint("[[:alpha:]]"), "the regex has a class"),
        ('{"grammars":[{"json_schema":{"type":"null","x-guidance":{}}}]}', "it has options"),
        ('{"grammars":[{"json_schema":{"type":"null"}}]}', "it is a grammar"),
        (
            json_constraint({"type": "array", "items": False}).replace("items", "rows"),
            "it has rows",
        ),
        (
            json_constraint({"$ref": "#/x-a", "x-a": {"type": "null"}}).replace("/0", "/a"),
            "it has a reference",
        ),
        (lark_constraint('start: CHOICE\nCHOICE: "\\x41"'), "it is a grammar"),
        ("start: /a/", "it is a grammar"),
    ],
)
def test_what_is_not_ours_has_no_table(constraint: str, reason: str) -> None:
    assert why_none(constraint).startswith(reason)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def doubling(count: int) -> dict[str, Any]:
    pair = [{"type": "array", "prefixItems": [{"$ref": f"#/x-{n + 1}"}] * 2} for n in range(count)]
    return {"$ref": "#/x-0", **{f"x-{n}": s for n, s in enumerate([*pair, {"type": "null"}])}}


@pytest.mark.parametrize("error", [ZeroDivisionError, MemoryError, RecursionError])
def test_a_bug_costs_the_table_alone(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(automaton, "determinize", fail)
    assert compile_automaton(regex_constraint("a"), TOKENS, len(TOKENS), EOS) is None
    assert [record.levelname for record in caplog.records] == ["ERROR"] and caplog.records[
        0
    ].exc_info


@pytest.mark.parametrize(
    "constraint",
    [
        regex_constraint("(0|1)*1(0|1){30}"),
        regex_constraint("((a{1,100}){1,100}){1,100}"),
        regex_constraint("((((a{0,9}){0,99999}){0,99999}){0,99999})"),
        regex_constraint("(?:a?){600}a{600}"),
        regex_constraint("(" * 9_000 + "a" + ")" * 9_000),
        regex_constraint("[" * 300 + "a" + "]" * 300),
        regex_constraint("[^a]{1,30000}"),
        json_constraint({"type": "string", "maxLength": 1_000_000}),
        json_constraint({"type": "string", "pattern": "(a|b)*a(a|b){20}", "maxLength": 900}),
        json_constraint({"type": "string", "minLength": 2**31}),
        json_constraint({"type": "array", "items": {"type": "null"}, "minItems": 2**31}),
        json_constraint({"type": "array", "items": {"type": "null"}, "maxItems": 2**31}),
        json_constraint(nested(40) | {"maxItems": 10**6}),
        json_constraint(nested(90)),
        json_constraint(doubling(40)),
    ],
)
def test_what_takes_too_much_is_given_up(constraint: str) -> None:
    assert re.search("too much work|nests? deeper|class that is not known", why_none(constraint))


def test_what_compiling_takes_is_counted_and_the_same_each_time() -> None:
    spent = []
    for _ in range(2):
        work = Work(MAX_WORK)
        determinize(regex("(?:[a-z]{1,12}[ ,.]){1,20}", work), work)
        spent.append(work.left)
    assert spent[0] == spent[1] < MAX_WORK
    with pytest.raises(NotCompiled, match="too much work"):
        short = Work(MAX_WORK - spent[0] - 1)
        determinize(regex("(?:[a-z]{1,12}[ ,.]){1,20}", short), short)


def test_what_many_references_lead_to_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 2**18 ways; all that is built of it is counted."""
    read, search = [], search_in_string

    def count(pattern: str, work: Work) -> Piece:
        read.append(pattern)
        return search(pattern, work)

    monkeypatch.setattr(schema_pieces, "search_in_string", count)
    leaf = {"type": "string", "pattern": "[a-zé-ü]" * 600}
    pairs = {f"d{n + 1}": {"anyOf": [{"$ref": f"#/$defs/d{n}"}] * 2} for n in range(18)}
    schema = {"$ref": "#/$defs/d18", "$defs": {"d0": leaf, **pairs}}
    assert "too much work" in why_none(json_constraint(schema))
    assert len(read) == 1


def test_references_nest_where_they_are_used_again() -> None:
    levels = {
        f"d{n}": {"type": "array", "items": {"$ref": f"#/$defs/d{n - 1}"}} for n in range(1, 70)
    }
    names = [f"d{n}" for n in range(70)]
    schema = {
        "type": "object",
        "properties": {name: {"$ref": f"#/$defs/{name}"} for name in names},
        "required": names,
        "$defs": {"d0": {"type": "null"}, **levels},
    }
    assert "nest deeper" in why_none(json_constraint(schema, strict=True))


def test_a_long_text_takes_memory_by_its_length() -> None:
    work = Work(MAX_WORK)
    tracemalloc.start()
    determinize(any_text([b"x" * 10_000]), work)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20_000_000


@pytest.mark.parametrize("make", [of_bytes, of_demo])
def test_deep_schemas_and_large_enums_have_tables(make: Callable[[], Any]) -> None:
    for constraint in (
        json_constraint(nested(55)),
        json_constraint({"enum": [f"value {n}" for n in range(5_000)]}),
        choice_constraint([f"{n * 7919 % 100_003}" for n in range(5_000)]),
    ):
        assert make().table(constraint) is not None


def test_a_grammar_has_a_table_beside_its_masks() -> None:
    grammars = Grammars(TINY, tiny_folder() / "tokenizer.json")
    grammar = grammars.compile(regex_constraint("[a-c]{3}"))
    made = grammar.automaton
    assert made is not None and made.distance[START] == 4
    bits = np.unpackbits(grammar.first_mask.view(np.uint8), bitorder="little")
    assert np.array_equal(bits[: TINY.vocab_size].astype(bool), made.allowed(START, ALL))
    assert grammars.compile(lark_constraint('start: "a" start | "b"')).automaton is None


def test_masks_leave_the_spelling_to_the_model() -> None:
    config = ModelConfig(d_model=8, num_layers=1, num_heads=4, n_ctx=16, vocab_size=2_048)
    grammar = Grammars(config, DEMO).compile(choice_constraint(["hello", "help"]))
    bits = np.unpackbits(grammar.first_mask.view(np.uint8), bitorder="little")
    spelled = {of_demo().tokens[token] for token in np.flatnonzero(bits).tolist()}
    assert spelled == {b"h", b"he"}


def test_inspecting_says_which_way_a_constraint_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps({"type": "object"}))
    command = ["inspect", str(DEMO.parent), "--schema", str(path)]
    assert srm.main([*command, "--strict"]) == 0
    shown = capsys.readouterr().out
    assert "a table on the device" in shown and "max_tokens   at least 2\n" in shown
    assert srm.main(command) == 0
    assert "masks on the host: /additionalProperties: it allows any" in capsys.readouterr().out
    assert srm.main([*command[:2], "--regex", "a{2}"]) == 0
    assert " bytes" in capsys.readouterr().out
    for text, message in (
        ('{"type": "null", "type": "string"}', "schema.json: an object has 'type' twice"),
        ('{"const": NaN}', "schema.json: NaN is no JSON"),
        ('{"const": ', "schema.json: Expecting value"),
    ):
        path.write_text(text)
        assert srm.main(command) != 0
        assert message in capsys.readouterr().err
    path.write_text('{"not": {}}')
    for wrong, message in (
        (command, "schema.json: /not: this keyword is not supported"),
        ([*command[:2], "--strict"], "strict needs schema"),
        ([*command[:3], str(tmp_path / "none")], "none: .*No such file"),
        ([*command[:2], "--regex", "("], "unclosed group"),
    ):
        assert srm.main(wrong) != 0
        assert re.search(message, capsys.readouterr().err)
