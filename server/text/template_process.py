"""`python -m srm.server.text.template_process PARENT`: one chat template in a process that may be
killed.

A template is a program that came with a checkpoint, as Hugging Face writes them: Jinja's sandbox
keeps it from our objects. Python cannot stop a loop or an allocation from outside it, so a template
gets a process of its own with little memory, and `chat_template` ends it when it takes too long.
The first message is the template, the others are chats.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import msgspec
from jinja2 import TemplateError, nodes
from jinja2.environment import Template
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from srm.engine.process.limited_process import Answer, limit_this_process, receive, send

MAX_TEXT = 32 * 1024 * 1024
"""Most characters that a template may make of a chat."""


class TemplateFailed(Exception):
    """The template is invalid, or it objects to the messages."""


def compile_template(source: str) -> Template:
    """Compile a template. Raises TemplateFailed for an invalid one."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
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
    source = receive(inbox)
    if source is None:
        return 0
    try:
        template = compile_template(msgspec.json.decode(source, type=str))
    except TemplateFailed as error:
        send(outbox, Answer(error=str(error)))
        return 0
    send(outbox, Answer())
    while (chat := receive(inbox)) is not None:
        try:
            variables: dict[str, Any] = msgspec.json.decode(chat)
            answer = Answer(text=render(template, variables))
        except TemplateFailed as error:
            answer = Answer(error=str(error))
        send(outbox, answer)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
