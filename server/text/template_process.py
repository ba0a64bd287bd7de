"""`python -m srm.server.text.template_process PARENT`: one chat template in a process that may be
killed.

A template is a program that came with a checkpoint, as Hugging Face writes them: Jinja's sandbox
keeps it from our objects. Python cannot stop a loop or an allocation from outside it, so a template
gets a process of its own with little memory, and `chat_template` ends it when it takes too long.
The first message is the template, the others are chats.

Names of special tokens are those only where the template wrote them. While it runs, each of these
is a character that no client can send, so whatever it does with a message makes none.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any, NoReturn

import msgspec
from jinja2 import TemplateError, nodes
from jinja2.environment import Template
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from srm.limited_process import Answer, limit_this_process, receive, send

_MARKS = range(0xD800, 0xE000)
"""Lone surrogates: in JSON there are none."""
_MARK = re.compile("([\ud800-\udfff])")
MAX_TEXT = 32 * 1024 * 1024
"""Most characters that a template may make of a chat."""


class TemplateFailed(Exception):
    """The template is invalid, or it objects to the messages."""


class TemplateSource(msgspec.Struct):
    """A chat template, and the texts that it may use."""

    source: str
    variables: dict[str, str]
    """The texts of special tokens, which chats may replace."""
    names: list[str]
    """Names of special tokens that are text where a client wrote them."""
    roles: list[str]
    literal: str
    """Stands in the rendered text behind the first character of each of these."""


class SpecialNames:
    """Names of special tokens, and what stands for those that the template writes."""

    def __init__(
        self, names: Collection[str] = (), roles: Collection[str] = (), literal: str = ""
    ) -> None:
        """As in TemplateSource."""
        self._names, self._literal = {*names}, literal
        any_name = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
        self._name = re.compile(any_name)
        self._start = re.compile(f"(?=(?:{any_name}))(.)", re.DOTALL)
        self._prefixes = tuple(name[:size] for name in names for size in range(1, len(name)))
        parts = [(*name.partition(role), name) for name in names for role in roles]
        self._around_roles = [part for part in parts if part[0] and part[2]]
        self._marks: dict[str, str] = {}
        self._written: dict[str, str] = {}

    def hide(self, text: str, is_part: bool = False) -> str:
        """Return a text of the template with a mark in place of each name and, if it `is_part` of
        what is written, of what stands around a role. Raises TemplateFailed if there are too many
        names."""
        if not self._names:
            return text
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        text = self._name.sub(lambda match: self._mark(match[0]), text)
        for before, _, behind, _ in self._around_roles if is_part else ():
            if text.endswith(before):
                text = text.removesuffix(before) + self._mark(before)
            if text.startswith(behind):
                text = self._mark(behind) + text.removeprefix(behind)
        return text

    def _mark(self, written: str) -> str:
        if written not in self._marks:
            if len(self._marks) == len(_MARKS):
                raise TemplateFailed(f"it names more than {len(_MARKS)} special tokens")
            mark = self._marks[written] = chr(_MARKS[len(self._marks)])
            self._written[mark] = written
        return self._marks[written]

    def show(self, text: str) -> str:
        """Return a rendered text with names in place of marks, and `literal` in all others."""
        if not self._names:
            return text
        for before, role, behind, name in self._around_roles:
            if before in self._marks and behind in self._marks:
                around = f"{self._marks[before]}{role}{self._marks[behind]}"
                text = text.replace(around, self._mark(name))
        text = _MARK.sub(
            lambda mark: mark[0] if self._written[mark[0]] in self._names else self.plain(mark[0]),
            text,
        )
        parts = _MARK.split(text)
        parts[::2] = map(self._as_text, parts[::2])
        return self.plain("".join(parts))

    def plain(self, text: str) -> str:
        """Return a text with what was written in place of marks."""
        return _MARK.sub(lambda mark: self._written.get(mark[0], mark[0]), text)

    def _as_text(self, text: str) -> str:
        text = self._start.sub(rf"\1{self._literal}", text)
        # The name behind it would make another name of this.
        return text + self._literal if text.endswith(self._prefixes) else text


def compile_template(source: str, special: SpecialNames | None = None) -> Template:
    """Compile a template, which writes marks in place of `special` names. Raises TemplateFailed for
    an invalid one."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    special = special or SpecialNames()
    try:
        tree = environment.parse(source)
        for text in tree.find_all(nodes.TemplateData):
            text.data = special.hide(text.data, is_part=True)
        for value in tree.find_all(nodes.Const):
            if isinstance(value.value, str):
                value.value = special.hide(value.value, is_part=True)
        return environment.from_string(tree)
    except TemplateError as error:
        line = getattr(error, "lineno", None)
        raise TemplateFailed(f"line {line}: {error.message}" if line else str(error)) from None
    except (RecursionError, MemoryError, SyntaxError, ValueError) as error:
        raise TemplateFailed(f"{type(error).__name__}: {error}") from None


def render(template: Template, variables: Mapping[str, Any]) -> str:
    """The text of a chat. Raises TemplateFailed, whatever the template ran into."""
    parts: list[str] = []
    length = 0
    try:
        for part in template.generate(variables):
            parts.append(part)
            length += len(part)
            if length > MAX_TEXT:
                raise TemplateFailed(f"it makes more than {MAX_TEXT} characters")
    except TemplateFailed:
        raise
    except TemplateError as error:
        raise TemplateFailed(error.message or type(error).__name__) from None
    except Exception as error:  # noqa: BLE001 - a template can run into anything Python has
        raise TemplateFailed(f"{type(error).__name__}: {error}") from None
    return "".join(parts)


class _Generation(Extension):
    """`{% generation %}` marks what an assistant says, for those who train: here, its body."""

    tags = {"generation"}  # noqa: RUF012 - so Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encode as JSON. Unlike Jinja's own filter, this escapes nothing for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def main(argv: list[str]) -> int:
    if not limit_this_process(int(argv[0])):
        return 1
    inbox, outbox = sys.stdin.buffer, sys.stdout.buffer
    first = receive(inbox)
    if first is None:
        return 0
    try:
        given = msgspec.json.decode(first, type=TemplateSource)
        special = SpecialNames(given.names, given.roles, given.literal)
        template = compile_template(given.source, special)
        own = {name: special.hide(text) for name, text in given.variables.items()}
    except TemplateFailed as error:
        send(outbox, Answer(error=str(error)))
        return 0
    send(outbox, Answer())
    while (chat := receive(inbox)) is not None:
        try:
            variables: dict[str, Any] = own | msgspec.json.decode(chat)
            answer = Answer(text=special.show(render(template, variables)))
        except TemplateFailed as error:
            answer = Answer(error=special.plain(str(error)))
        send(outbox, answer)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
