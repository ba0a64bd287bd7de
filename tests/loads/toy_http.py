"""What the toy server writes: replies, events and chunks, in the shapes of OpenAI's routes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 429: "Too Many Requests",
            500: "Internal Server Error", 503: "Service Unavailable"}  # fmt: skip
FAILED = {"error": {"message": "as was asked for", "type": "api_error", "code": "toy"}}
JSON, SSE = "application/json", "text/event-stream"


def part(
    chat: bool,
    delta: Any,
    indices: range,
    reason: str | None = None,
    whole: bool = False,
) -> dict[str, Any]:
    """An event of a stream, or a whole reply, with the same for all samples."""
    key = ("message" if whole else "delta") if chat else "text"
    if chat and whole:
        delta = {"role": "assistant", "content": delta}
    kind = "chat.completion" + ("" if whole else ".chunk") if chat else "text_completion"
    choices = [{"index": index, key: delta, "finish_reason": reason} for index in indices]
    return {"id": "toy-1", "object": kind, "created": 1, "model": "toy", "choices": choices}


def usage(body: dict[str, Any], tokens: int) -> dict[str, int]:
    """Of a reply with so many tokens. Words of prompts that are text count as tokens."""
    prompt = body.get("prompt")
    if prompt is None:
        prompt = " ".join(str(message["content"]) for message in body["messages"])
    count = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
    return {"prompt_tokens": count, "completion_tokens": tokens, "total_tokens": count + tokens}


async def send(
    writer: asyncio.StreamWriter,
    status: int,
    body: str,
    kind: str = JSON,
    more: dict[str, str] | None = None,
) -> bool:
    headers = {"Content-Type": kind, "Content-Length": str(len(body.encode())), **(more or {})}
    writer.write(head(status, headers) + body.encode())
    await writer.drain()
    return True


def head(status: int, headers: dict[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status} {REASONS[status]}", *(f"{k}: {v}" for k, v in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode()


async def begin(writer: asyncio.StreamWriter) -> None:
    writer.write(head(200, {"Content-Type": SSE, "Transfer-Encoding": "chunked"}))
    await writer.drain()


async def chunk(writer: asyncio.StreamWriter, content: bytes) -> None:
    if writer.is_closing():
        raise ConnectionResetError
    writer.write(b"%x\r\n%s\r\n" % (len(content), content))
    await writer.drain()


async def event(writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
    await chunk(writer, b"data: " + json.dumps(event).encode() + b"\n\n")


async def end_stream(
    writer: asyncio.StreamWriter,
    body: dict[str, Any],
    usage: dict[str, int],
    chat: bool,
    failed: bool,
) -> None:
    if failed:
        await event(writer, FAILED)
    elif (body.get("stream_options") or {}).get("include_usage"):
        await event(writer, {**part(chat, "", range(0)), "usage": usage})
    if not failed:
        await chunk(writer, b"data: [DONE]\n\n")
    writer.write(b"0\r\n\r\n")
    await writer.drain()
