"""Replies whose work is done while the client waits, and is dropped when the client goes away.

Both kinds watch the connection: at `http.disconnect` whatever is being awaited is cancelled, so the
engine gets its slots back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from functools import partial
from inspect import isawaitable
from typing import Any, cast

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from srm.errors import SRMError
from srm.server import errors
from srm.server.http import request_log
from srm.server.http.bodies import json_reply, read_body
from srm.server.schema.openapi import Operation, Router
from srm.server.schema.validation import Fields, from_text

log = logging.getLogger(__name__)

CONNECT = "srm.connect"
"""ASGI extension: a function that gives an outlet the connection to which the reply goes."""


class WhileConnected(Response):
    """Makes a reply and sends it; raises ClientDisconnect once the client is gone, and the error of
    a body that breaks the limits meanwhile."""

    def __init__(self, make: Callable[[], Awaitable[Response | msgspec.Struct]]) -> None:
        """`make` returns the reply, or the struct of its JSON. The request's body must have been
        read, if a reply depends on it: what comes from here on is dropped."""
        super().__init__()
        self._make = make

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        has_left = False

        def leave(gone: asyncio.Task[None]) -> None:
            nonlocal has_left
            if not gone.cancelled():  # as all tasks are when the loop ends
                has_left = task.cancel()

        gone = asyncio.create_task(until_gone(receive))
        gone.add_done_callback(leave)
        try:
            await _as_response(await self._make())(scope, receive, send)
        except asyncio.CancelledError:  # which a stop of the server sends too
            if not has_left:
                raise
        finally:
            gone.remove_done_callback(leave)
            gone.cancel()
            if has_left:
                task.uncancel()
        if has_left:  # what was being awaited may have held the cancellation back
            gone.result()  # raises what is wrong with a body that nobody had read
            raise ClientDisconnect


def _as_response(made: Response | msgspec.Struct) -> Response:
    return made if isinstance(made, Response) else json_reply(made)


def add_operations(
    router: Router,
    operations: Iterable[Operation],
    actions: Iterable[Callable[..., Any]],
    max_body_bytes: int = 0,
) -> None:
    """Add the routes of these operations; an action answers each, by a Response or the struct of
    its JSON. It is given the parameters of the path by their names, behind the body, a query, or
    the Request of a form. With a body it works while the client waits. Methods of one path with
    the same action are one route."""
    routes: dict[Any, list[Operation]] = {}
    for operation, action in zip(operations, actions, strict=True):
        routes.setdefault((operation.path, action), []).append(operation)
    for (path, action), own in routes.items():
        route = _route(own[0], action, max_body_bytes)
        router.add_api_route(path, route, methods=[operation.method for operation in own])


def _route(
    operation: Operation, action: Callable[..., Any], max_body_bytes: int
) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        if operation.body is not None:
            body = await read_body(request, max_body_bytes)
            return WhileConnected(partial(action, body, **request.path_params))
        given: list[Any] = [request] if operation.form is not None else []
        if operation.query is not None:
            query, items = cast(type[Fields], operation.query), request.query_params.multi_items()
            own = [item for item in items if item[0] not in operation.queries]
            given.append(from_text(query, own))
        made = action(*given, **request.path_params)
        return _as_response(await made if isawaitable(made) else made)

    return answer


async def until_gone(receive: Receive) -> None:
    """Return when the client has left; passes over what else it sends."""
    while (await receive())["type"] != "http.disconnect":
        pass


def escape_line_ends(data: bytes) -> bytes:
    """Return JSON without characters that it allows in strings, but `str.splitlines` takes for ends
    of lines."""
    if b"\xe2\x80" in data or b"\xc2\x85" in data:
        for character in ("\x85", "\u2028", "\u2029"):
            data = data.replace(character.encode(), b"\\u%04x" % ord(character))
    return data


def frame(documents: Sequence[bytes]) -> bytes:
    """Return JSON documents as server-sent events."""
    joined = b"\n\ndata: ".join(documents)
    return b"data: %b\n\n" % escape_line_ends(joined) if documents else b""


WAITING = b": waiting\n\n"
"""A comment: readers of events pass over it, and proxies see that the connection is in use."""


DONE = b"data: [DONE]\n\n"
"""The last event of most streams."""


def frame_error(body: errors.ErrorBody) -> bytes:
    """Return an error as an event of most streams."""
    return frame([msgspec.json.encode(body)])


_PART = {"type": "http.response.body", "more_body": True}


class EventStream(Response):
    """Server-sent events, sent in parts of one or more, which `frame` makes.

    It ends with `last`, whatever ended it.

    The status is sent when the first event is there: what goes wrong until then is an HTTP error.
    Always closes `events`.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        outlet: object = None,
        frame_error: Callable[[errors.ErrorBody], bytes] = frame_error,
        last: bytes = DONE,
    ) -> None:
        """`outlet` is connected after the first event, where the server has the extension for it;
        whoever makes `events` may write events there, framed as chunks, while none is asked for.
        `frame_error` makes the event for an error that ends them."""
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._outlet = outlet
        self._frame_error = frame_error
        self._last = last

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        async with aclosing(self._events) as events:
            first = await anext(events)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send(_PART | {"body": first})
            if self._outlet is not None and CONNECT in scope.get("extensions", ()):
                scope["extensions"][CONNECT](self._outlet)
            try:
                async for event in events:
                    await send(_PART | {"body": event})
            except SRMError as error:
                await self._break_off(send, errors.status_of(error), errors.body_of(error))
            except asyncio.CancelledError:  # by a stop; or the client has left, and hears nothing
                stopping = errors.stopping()
                await self._break_off(send, errors.status_of(stopping), errors.body_of(stopping))
            except ClientDisconnect:  # of `send`, behind which nothing can be sent
                raise
            except Exception:
                log.exception("stream failed")
                await self._break_off(send, 500, errors.INTERNAL)
        await send({"type": "http.response.body", "body": self._last})

    async def _break_off(self, send: Send, status: int, body: errors.ErrorBody) -> None:
        request_log.note_broken_off(status)
        await send(_PART | {"body": self._frame_error(body)})
