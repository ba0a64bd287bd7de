"""Messages between a server that runs a batch and one that answers lines of it."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta, Raw

from srm.engine.messages import MAX_PRIORITY, MIN_WEIGHT, Refusal
from srm.errors import UNDECODABLE
from srm.server.schema.json_parts import first_byte, items_of
from srm.server.schema.validation import (
    Fields,
    checked,
    given_fields,
    hints_of,
    not_json,
    refused,
    require,
)

Url = Literal["/v1/completions", "/v1/chat/completions", "/v1/responses"]
MAX_LINES = 64
"""Most lines of a request, each of which is a task of its own."""
Identity = dict[str, str]
"""By name, all that must be equal on two servers for a line to have the same answer on both."""


Sequences = Annotated[int, Meta(ge=0, le=2**24)]


class WorkerStatus(msgspec.Struct):
    """A server that answers lines, and what it runs."""

    instance: Annotated[str, Meta(min_length=1)]
    """Identifier of this server, by which others recognise it at any of its addresses."""
    identity: Identity
    num_slots: Sequences
    max_waiting: Sequences
    running: Sequences
    """Sequences that hold a slot."""
    waiting: Sequences
    """Sequences accepted and not yet started."""


class WorkerLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line, to be answered under an id that no other request has."""

    id: Annotated[str, Meta(min_length=1, max_length=128)]
    body: str
    """JSON of a request for `url`."""


class LinesRequest(Fields, frozen=True, kw_only=True):
    """Body of POST /v1/worker/lines, checked."""

    url: Annotated[Url, Meta(description=f"one of {', '.join(get_args(Url))}")]
    """The route that all lines ask."""
    identity: Annotated[Identity, Meta(description="an object of strings")]
    """Identity of the sender, which must equal this server's."""
    share: Annotated[
        str,
        Meta(
            max_length=128, pattern="^batch:", description="a string of batch: and the batch's id"
        ),
    ]
    """Name of the batch."""
    weight: Annotated[float, Meta(ge=MIN_WEIGHT, le=1)]
    """Weight of the batch: an owner's batches have 1 together."""
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=-1)]
    """Priority in the engine: higher is first."""
    created_unix: Annotated[int, Meta(ge=0, le=2**53)]
    """`created` of replies."""
    lines: Annotated[
        list[WorkerLine],
        Meta(
            min_length=1,
            max_length=MAX_LINES,
            description=f"a list of 1 to {MAX_LINES} objects of id and body, strings",
        ),
    ]
    """The lines, each with a unique id and a body, a request's JSON as a string."""


_decode_line = msgspec.json.Decoder(WorkerLine).decode


def parse_lines(body: bytes) -> LinesRequest:
    """Check the body of POST /v1/worker/lines. Raises InvalidRequest naming field and value."""
    given = given_fields(body)
    for name in hints_of(LinesRequest):
        require(given, name)
    return checked(LinesRequest, given, {"lines": _lines(given["lines"])}, {})


def _lines(value: Raw) -> list[WorkerLine]:
    items = items_of(value, MAX_LINES) if first_byte(value) == b"[" else None
    try:
        lines = list(map(_decode_line, items or ()))
    except msgspec.ValidationError:
        lines = []
    except UNDECODABLE as error:
        raise not_json(value, error) from None
    if not lines:
        raise refused(LinesRequest, "lines", value)
    return lines


class LineAnswer(msgspec.Struct, omit_defaults=True):
    """An event of the reply: the answer to a line, or why it has none; an empty one says only that
    the connection is alive."""

    id: str = ""
    body: Raw = Raw(b"null")
    """The reply that the line would have had over HTTP."""
    refusal: Refusal | None = None
