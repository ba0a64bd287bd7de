"""`python -m server.text.template_process PARENT`: one chat template in a process that may be
killed.

Python cannot stop a loop or an allocation from outside it, so a template gets a process of its own
with little memory, and `chat_template` ends it when it takes too long. Messages are JSON behind
their length, first the template, then chats; each is answered. It leaves with its parent.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from typing import IO, Any

import msgspec

from server.text.template import TemplateFailed, compile_template, render

MAX_MEMORY = 1024**3
"""Most address space of the process, in bytes."""
_PR_SET_PDEATHSIG = 1


class Answer(msgspec.Struct):
    """The text of a chat (empty for the template itself), or why there is none."""

    text: str = ""
    error: str | None = None


def send(stream: IO[bytes], message: object) -> None:
    body = msgspec.json.encode(message)
    stream.write(len(body).to_bytes(8, "little") + body)
    stream.flush()


def receive(stream: IO[bytes]) -> bytes | None:
    """The next message as JSON; None if the other side is gone."""
    size = stream.read(8)
    if len(size) < 8:
        return None
    length = int.from_bytes(size, "little")
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
