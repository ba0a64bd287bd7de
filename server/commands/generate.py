"""`srm generate`: completions of one prompt on standard output, with an engine of its own.

A prompt, its checks and its text are those of `/v1/completions`. One completion is printed as it
comes, several each when those before it are through.
"""

from __future__ import annotations

import asyncio
import math
import re
import sys
import uuid
from contextlib import AsyncExitStack, ExitStack, aclosing
from typing import Any

import msgspec

from srm.engine.client.client import EngineClient
from srm.engine.config import check_utf8
from srm.errors import UNDECODABLE, ConfigError, RequestError, in_words
from srm.progress import count_seconds
from srm.server.commands.standard_output import BROKEN_PIPE, INTERRUPTED, leave_broken_pipe
from srm.server.dialects.completions.endpoint import Completions
from srm.server.generation.engine_request import RequestOwner
from srm.server.routes.services import answering
from srm.server.schema.completion_request import parse_completion
from srm.server.supervise.embedded_engine import PRIVATE, command_settings, with_engine
from srm.server.text.text import Text
from srm.settings import Command

_NOT_SENT = {"prompt", "token_ids", "json", "extra_body"}
_WORKING = "working on the prompt"


class GenerateConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm generate`, besides those of the engine. None is the field's default."""

    prompt: str = "-"
    """Prompt, with or without the flag; -: standard input, less a newline at its end."""
    token_ids: bool = False
    """Whether the prompt is token ids, with spaces or commas between them."""
    json: bool = False
    """Whether to print the JSON reply that the server would give, instead of text."""
    n: int = 1
    """Number of completions; several are printed each behind its number."""
    max_tokens: int = 128
    """Longest completion in tokens."""
    temperature: float | None = None
    """Sampling temperature; 0 is greedy."""
    top_k: int | None = None
    """Top-k: sample among the k likeliest tokens."""
    top_p: float | None = None
    """Top-p: sample among the fewest likeliest tokens whose probabilities reach it."""
    min_p: float | None = None
    """Min-p: sample among tokens at least so likely, relative to the likeliest."""
    seed: int | None = None
    """Seed of the sampling; None: a random one."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion."""
    ignore_eos: bool = False
    """Whether completions go on at the end-of-text token."""
    extra_body: str = "{}"
    """Further fields of the request, as a JSON object; they override flags."""

    def __post_init__(self) -> None:
        for text in (self.prompt, self.extra_body, *self.stop):
            check_utf8("prompt, stop and extra_body", text)
        for name, value in msgspec.structs.asdict(self).items():
            if isinstance(value, float) and not math.isfinite(value):  # JSON would have null
                raise ValueError(f"{name} must be a finite number, got {value}")


def main(argv: list[str], engine_module: str = "srm.engine") -> int:
    """Print completions; returns the exit code. Raises SRMError."""
    command = Command(
        "srm generate",
        "Print completions of one prompt.",
        "srm generate --max-tokens 32 $'Question: What is 6 * 7?\\nAnswer:'",
        "model prompt n max_tokens temperature top_p seed stop json",
        private=PRIVATE,
        positional="prompt",
        variables=None,
    )
    asked, engine = command_settings(GenerateConfig, argv, command)
    body, text = _body(asked), Text(engine.model)

    async def work(client: EngineClient) -> None:
        with answering(client, text, engine.model) as (completions, *_):
            try:
                await (_print_json if asked.json else _print_text)(completions, client, body)
            except RequestError as error:  # what was asked for on the command line
                raise ConfigError(error.message) from None

    try:
        _check(body)
        asyncio.run(with_engine(engine, engine_module, work))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        leave_broken_pipe()
        return BROKEN_PIPE
    return 0


def _body(asked: GenerateConfig) -> dict[str, Any]:
    """Return the body of the request. Raises ConfigError."""
    fields = msgspec.structs.asdict(asked)
    given = {
        name: value
        for name, value in fields.items()
        if name not in _NOT_SENT and value not in (None, ())
    }
    try:
        extra = msgspec.json.decode(asked.extra_body, type=dict[str, Any])
    except UNDECODABLE as error:
        raise ConfigError(f"extra_body must be a JSON object: {in_words(error)}") from None
    prompt = asked.prompt
    if prompt == "-":
        if sys.stdin is None or sys.stdin.isatty():
            raise ConfigError("prompt is missing: srm generate PROMPT")
        try:
            prompt = sys.stdin.buffer.read().decode().removesuffix("\n")
        except UnicodeDecodeError as error:
            raise ConfigError(f"prompt is not UTF-8: {error}") from None
        if not prompt:
            raise ConfigError("prompt is missing: standard input is empty; srm generate PROMPT")
    given["prompt"] = _token_ids(prompt) if asked.token_ids else prompt
    return {**given, "stream": not asked.json, **extra}


def _token_ids(prompt: str) -> list[int]:
    parts = re.split(r"[\s,]+", prompt.strip().removeprefix("[").removesuffix("]").strip())
    try:
        return [int(part) for part in parts]
    except ValueError:
        raise ConfigError(
            f"prompt must be token ids, as --token-ids says; got {prompt[:80]!r}"
        ) from None


def _check(body: dict[str, Any]) -> None:
    """Check the request before the engine starts, as far as that is possible. Raises
    ConfigError."""
    try:
        request = parse_completion(msgspec.json.encode(body))
    except RequestError as error:
        raise ConfigError(error.message) from None
    if len(request.prompt) != 1:
        raise ConfigError(f"prompt must be one, got {len(request.prompt)}: see srm batch")


async def _print_json(
    completions: Completions, _client: EngineClient, body: dict[str, Any]
) -> None:
    with count_seconds(_WORKING):
        reply = await completions.answer_whole(msgspec.json.encode(body), _id(), RequestOwner())
    _write(reply + b"\n")


async def _print_text(completions: Completions, client: EngineClient, body: dict[str, Any]) -> None:
    request = parse_completion(msgspec.json.encode(body))
    generation = await completions.start(_id(), request, RequestOwner())
    is_alone, texts = generation.num_choices == 1, [""] * generation.num_choices
    ended: set[int] = set()
    turn = 0
    async with AsyncExitStack() as opened:
        arriving = await opened.enter_async_context(aclosing(generation.run(client)))
        waiting = opened.enter_context(ExitStack())  # until there is something to print
        waiting.enter_context(count_seconds(_WORKING))
        async for tokens in arriving:
            for part in generation.detokenizer.decode(tokens):
                texts[part.index] += part.text
                if part.finish_reason is not None:
                    ended.add(part.index)
            while turn in ended and not is_alone:
                waiting.close()
                _write(f"[{turn}]{texts[turn]}\n".encode())
                turn += 1
            if is_alone and texts[0]:
                waiting.close()
                _write(texts[0].encode())
                texts[0] = ""
    if is_alone:
        _write(b"\n")


def _write(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def _id() -> str:
    return f"cmpl-{uuid.uuid4().hex}"
