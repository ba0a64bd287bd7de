"""JSON schemas as pieces of an automaton over bytes: what of them is regular.

The schemas are those that `json_schema` wrote. The texts are those that llguidance allows for them:
the order of properties, how numbers are spelled and what a string may have are its ways. What is
not translated exactly has no table.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator
from functools import reduce
from typing import Any

from srm.engine.constraints.byte_automaton import (
    Dfa,
    Nfa,
    NotCompiled,
    Piece,
    Work,
    any_text,
    choice,
    determinize,
    join,
    literal,
    nothing,
    repeat,
    sequence,
)
from srm.engine.constraints.numbers import integer_regex, multiples, number_regex, spell_number
from srm.engine.constraints.pattern import FORMAT_REGEXES
from srm.engine.constraints.regex_pieces import (
    ANY,
    characters,
    regex,
    regex_in_string,
    search_in_string,
)
from srm.engine.constraints.schema_bounds import ANY_JSON
from srm.engine.constraints.schema_facts import Schema

MAX_NESTED = 60
"""Most schemas in each other, those that references lead to included."""
_NOT_TRANSLATED = {
    "object": ("patternProperties", "minProperties", "maxProperties"),
}
"""Keywords of values of a type that have no table."""
_TRANSLATED = frozenset(
    "type $defs minimum maximum exclusiveMinimum exclusiveMaximum multipleOf minLength "
    "maxLength pattern format items prefixItems minItems maxItems properties required "
    "additionalProperties".split()
)
_ALONE = ("enum", "const", "anyOf", "allOf", "$ref")


def schema_piece(schema: dict[str, Any], comma: str, colon: str, work: Work) -> Piece:
    """Reads what the schema allows, with these between items, and between names and values.
    Raises NotCompiled."""
    return _Translator(schema.get("$defs", {}), comma, colon, work).translate(schema)


class _Translator:
    def __init__(self, definitions: dict[str, Schema], comma: str, colon: str, work: Work) -> None:
        self._definitions = definitions
        self._comma = literal(comma.encode())
        self._separators = (comma, colon)
        self._work = work
        self._references: list[str] = []
        """Those that lead to what is being translated."""
        self._automata: dict[Hashable, Dfa] = {}
        """Of numbers and lengths, by what they say."""
        self._followed: dict[str, tuple[Piece, int]] = {}
        """Pieces by reference, and how deep schemas nest in each."""
        self._num_nested = 0
        self._deepest = 0

    def translate(self, schema: Schema, *place: str | int) -> Piece:
        """Return the piece of a schema, which is there in the one around. Raises NotCompiled."""
        try:
            return self._translate(schema)
        except NotCompiled as error:
            pointer = "".join(f"/{part}" for part in place)
            raise NotCompiled(error.reason, pointer + error.place) from None

    def _translate(self, schema: Schema) -> Piece:
        self._work.spend(1)
        if schema is True:
            raise NotCompiled("it allows any JSON")
        if schema is False:
            return nothing
        self._num_nested += 1
        self._check_depth(self._num_nested)
        piece = self._translate_object(schema)
        self._num_nested -= 1
        return piece

    def _translate_object(self, schema: dict[str, Any]) -> Piece:
        others = schema.keys() - {"type", "$defs"}
        if alone := [keyword for keyword in _ALONE if keyword in schema]:
            keyword = alone[0]
            if len(others) > 1 or ("type" in schema and keyword not in ("enum", "const")):
                raise NotCompiled(f"it has {keyword} beside other keywords")
            match keyword:
                case "enum":
                    return self._translate_values(schema["enum"], schema.get("type"))
                case "const":
                    return self._translate_values([schema["const"]], schema.get("type"))
                case "$ref":
                    return self._follow(schema["$ref"])
                case "allOf" if len(schema["allOf"]) > 1:
                    raise NotCompiled("it has allOf")
            branches = enumerate(schema[keyword])
            return choice([self.translate(branch, keyword, number) for number, branch in branches])
        if "type" not in schema:
            raise NotCompiled("it allows any JSON")
        for_others = {keyword for keywords in _NOT_TRANSLATED.values() for keyword in keywords}
        if unknown := sorted(schema.keys() - _TRANSLATED - for_others):
            raise NotCompiled(f"it has {unknown[0]}")
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        pieces = [self._translate_type(name, schema) for name in types]
        return choice(pieces) if len(pieces) > 1 else pieces[0]

    def _check_depth(self, depth: int) -> None:
        self._deepest = max(self._deepest, depth)
        if depth > MAX_NESTED:
            raise NotCompiled(f"its schemas nest deeper than {MAX_NESTED}")

    def _follow(self, reference: str) -> Piece:
        if reference in self._followed:
            piece, depth = self._followed[reference]
            self._check_depth(self._num_nested + depth)
            return piece
        if reference == ANY_JSON:
            raise NotCompiled("it allows any JSON")
        if reference in self._references:
            raise NotCompiled("it is recursive")
        if reference.removeprefix("#/$defs/") not in self._definitions:
            raise NotCompiled("it has a reference that is not known here")
        self._references.append(reference)
        deepest, self._deepest = self._deepest, self._num_nested
        piece = self.translate(self._definitions[reference.removeprefix("#/$defs/")], "$ref")
        self._followed[reference] = piece, self._deepest - self._num_nested
        self._deepest = max(deepest, self._deepest)
        self._references.pop()
        return piece

    def _translate_type(self, name: str, schema: dict[str, Any]) -> Piece:
        for keyword in _NOT_TRANSLATED.get(name, ()):
            if keyword in schema:
                raise NotCompiled(f"it has {keyword} of type {name}")
        match name:
            case "null":
                return literal(b"null")
            case "boolean":
                return any_text((b"true", b"false"))
            case "integer" | "number":
                return self._translate_number(name, schema)
            case "string":
                return self._translate_string(schema)
            case "array":
                return self._translate_array(schema)
        return self._translate_properties(schema)

    def _translate_number(self, name: str, schema: dict[str, Any]) -> Piece:
        spelled = (integer_regex if name == "integer" else number_regex)(schema)
        if spelled is None:
            return nothing
        if "multipleOf" not in schema:
            return regex(spelled, self._work)
        divisor = schema["multipleOf"]
        key = (spelled, divisor)
        if key not in self._automata:
            multiple = self._automaton(divisor, multiples(divisor))
            automaton = determinize(regex(spelled, self._work), self._work)
            self._automata[key] = join(automaton, multiple, self._work)
        return self._automata[key].piece

    def _automaton(self, key: Hashable, piece: Piece) -> Dfa:
        """Return the automaton of a piece that others have too, by what they share."""
        if key not in self._automata:
            self._automata[key] = determinize(piece, self._work)
        return self._automata[key]

    def _translate_values(self, values: list[Any], types: str | list[str] | None) -> Piece:
        names = [types] if isinstance(types, str) else types
        self._work.spend(4 * len(values))
        texts = [text for value in values for text in self._spell(value, names)]
        return any_text([text.encode() for text in texts])

    def _spell(self, value: Any, types: list[str] | None) -> Iterator[str]:
        """Yield how a value is written, if it is of these types."""
        own = {
            type(None): "null",
            bool: "boolean",
            int: "number",
            float: "number",
            str: "string",
            list: "array",
            dict: "object",
        }[type(value)]
        if types is None or own in types:
            yield self._spell_any(value)
        if types and own == "number" and "integer" in types and value == int(value):
            yield str(int(value))

    def _spell_any(self, value: Any) -> str:
        comma, colon = self._separators
        if isinstance(value, dict):
            pairs = (f"{_quote(name)}{colon}{self._spell_any(own)}" for name, own in value.items())
            return f"{{{comma.join(pairs)}}}"
        if isinstance(value, list):
            return f"[{comma.join(map(self._spell_any, value))}]"
        if isinstance(value, int | float) and not isinstance(value, bool):
            return spell_number(value)
        return _quote(value)

    def _translate_string(self, schema: dict[str, Any]) -> Piece:
        quote, least, most = literal(b'"'), schema.get("minLength", 0), schema.get("maxLength")
        pieces = []
        if (pattern := schema.get("pattern")) is not None:
            pieces.append(search_in_string(pattern, self._work))
        if (name := schema.get("format")) is not None:
            pieces.append(regex_in_string(FORMAT_REGEXES[name], self._work))
        length = repeat(characters(ANY, True), least, most)
        if not pieces:
            return sequence([quote, length, quote])
        automata = [determinize(piece, self._work) for piece in pieces]
        if least or most is not None:
            automata.append(self._automaton((least, most), length))
        if len(automata) == 1:
            return sequence([quote, *pieces, quote])
        joined = reduce(lambda a, b: join(a, b, self._work), automata)
        return sequence([quote, joined.piece, quote])

    def _translate_array(self, schema: dict[str, Any]) -> Piece:
        first, least = schema.get("prefixItems", []), schema.get("minItems", 0)
        most, rest = schema.get("maxItems"), schema.get("items", True)
        if most is not None and least > most:
            return nothing
        length = max(len(first), least) if most is None else most
        self._work.spend(length)
        firsts = enumerate(first[:length])
        pieces = [self.translate(item, "prefixItems", number) for number, item in firsts]
        further: Piece = nothing
        if most is None or length > len(first):
            further = self.translate(rest, "items")
        pieces += [further] * (length - len(pieces))

        def build(nfa: Nfa, node: int) -> int:
            end = nfa.add()
            for number, piece in enumerate(pieces):
                if number >= least:
                    nfa.skip(node, end)
                node = piece(nfa, self._comma(nfa, node) if number else node)
            nfa.skip(node, end)
            if most is None:
                start = nfa.add()
                nfa.skip(self._comma(nfa, node) if pieces else node, start)
                node = further(nfa, start)
                nfa.skip(node, end)
                nfa.skip(self._comma(nfa, node), start)
            return end

        return sequence([literal(b"["), build, literal(b"]")])

    def _translate_properties(self, schema: dict[str, Any]) -> Piece:
        named: dict[str, Schema] = schema.get("properties", {})
        required = schema.get("required", [])
        further: Schema = schema.get("additionalProperties", True)
        wanted = frozenset(required)
        others = [name for name in required if name not in named]
        items = [
            (self._pair(_quote(name), schema, "properties", name), name in wanted)
            for name, schema in {**named, **dict.fromkeys(others, further)}.items()
        ]
        if further is not False:
            item = self._pair([*named, *others], further, "additionalProperties")
            items.append((sequence([item, repeat(sequence([self._comma, item]), 0, None)]), False))

        def build(nfa: Nfa, node: int) -> int:
            """`bare`: nothing is there yet; `node`: something is, and a comma comes next."""
            bare, node = node, nfa.add()
            for item, is_required in items:
                start, after = nfa.add(), nfa.add()
                nfa.skip(bare, start)
                nfa.skip(self._comma(nfa, node), start)
                nfa.skip(item(nfa, start), after)
                if is_required:
                    bare = nfa.add()  # which nothing leads to any more
                else:
                    nfa.skip(node, after)
                node = after
            nfa.skip(bare, node)
            return node

        return sequence([literal(b"{"), build, literal(b"}")])

    def _pair(self, name: str | list[str], schema: Schema, *place: str) -> Piece:
        """Reads a name, or any but those of a list, and its value."""
        value = self.translate(schema, *place)
        own = literal(name.encode()) if isinstance(name, str) else self._other_name(name)
        return sequence([own, literal(self._separators[1].encode()), value])

    def _other_name(self, taken: list[str]) -> Piece:
        names = sequence([literal(b'"'), repeat(characters(ANY, True), 0, None), literal(b'"')])
        if not taken:
            return names
        texts = any_text([_quote(name).encode() for name in taken])
        return join(
            determinize(names, self._work), determinize(texts, self._work), self._work, without=True
        ).piece


def _quote(value: str | bool | None) -> str:
    return json.dumps(value, ensure_ascii=False)
