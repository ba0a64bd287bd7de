"""`python -m srm.server.text.template_process PARENT`: one chat template in a process that may be
killed.

A template is a program that came with a checkpoint, as Hugging Face writes them: Jinja's sandbox
keeps it from our objects. Python cannot stop a loop or an allocation from outside it, so a template
gets a process of its own with little memory, and `chat_template` ends it when it takes too long.
Messages are JSON behind their length, first the template, then chats; each is answered. It leaves
with its parent.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Mapping
from datetime import datetime
from typing import IO, Any, NoReturn

import msgspec
from jinja2 import TemplateError, nodes
from jinja2.environment import Template
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_TEXT = 32 * 1024 * 1024
"""Most characters that a template may make of a chat."""
MAX_MEMORY = 1024**3
"""Most address space of the process, in bytes."""
_MAX_MESSAGE = 8 * MAX_TEXT
"""Most bytes of a message: a text with every character escaped, and more."""
_PR_SET_PDEATHSIG = 1


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


class Answer(msgspec.Struct):
    """The text of a chat (empty for the template itself), or why there is none."""

    text: str = ""
    error: str | None = None


def send(stream: IO[bytes], message: object) -> None:
    body = msgspec.json.encode(message)
    stream.write(len(body).to_bytes(8, "little") + body)
    stream.flush()


def receive(stream: IO[bytes]) -> bytes | None:
    """The next message as JSON; None if the other side is gone, or says what is none."""
    size = stream.read(8)
    if len(size) < 8:
        return None
    if (length := int.from_bytes(size, "little")) > _MAX_MESSAGE:
        return None
    body = stream.read(length)
    return body if len(body) == length else None


def main(argv: list[str]) -> int:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(argv[0]):  # it has gone already, before we asked
        return 1
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
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
