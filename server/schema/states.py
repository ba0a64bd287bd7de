"""States: how long they are kept, and what clients are told of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

import msgspec
from msgspec import Meta, Raw

from srm.errors import InvalidRequest
from srm.server.schema.json_parts import prompts_of
from srm.server.schema.validation import Fields, show

MAX_TTL_S = 30 * 24 * 3600
DEFAULT_TTL_S = 24 * 3600
MAX_LISTED = 1_000


class StateQuery(Fields, frozen=True, kw_only=True):
    """The query of GET /v1/states."""

    after: Annotated[str, Meta(description="the id of one of your states")] | None = None
    """List the states that were made before this one."""
    limit: Annotated[int, Meta(ge=1, le=MAX_LISTED)] = 20
    """Most states in the reply."""


class StateObject(msgspec.Struct, frozen=True, kw_only=True):
    """A state without its content. Times are Unix seconds."""

    id: str
    object: Literal["state"] = "state"
    created_at: int
    expires_at: int
    num_tokens: int = msgspec.field(name="tokens")
    """Tokens that it knows; all but the last have been read."""
    num_bytes: int = msgspec.field(name="bytes")
    """Bytes that it counts for in the key's quota."""
    fingerprint: str
    """Fingerprint of the weights that made it."""
    arithmetic: str
    """Device and data type that made it: others make other bits."""
    metadata: dict[str, str] = {}


class Listing(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Any]
    first_id: str | None
    last_id: str | None
    has_more: bool

    @classmethod
    def begin(cls, objects: Sequence[Any], limit: int) -> Self:
        """Return a list of up to `limit` objects; a further one sets `has_more`."""
        data = [*objects[:limit]]
        ends = [data[place].id if data else None for place in (0, -1)]
        return cls(data=data, first_id=ends[0], last_id=ends[1], has_more=len(objects) > limit)


class StateList(Listing, kw_only=True):
    data: list[StateObject]


class StateDeleted(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["state"] = "state"
    deleted: bool = True


def prompt_of(given: dict[str, Raw]) -> dict[str, Any]:
    """Return the field `prompt` of a body, one text or token ids, if it is there. Raises
    InvalidRequest."""
    if "prompt" not in given:
        return {}
    try:
        (prompt,) = prompts_of(given["prompt"], 1)
    except (msgspec.ValidationError, ValueError):
        raise InvalidRequest(
            f"prompt must be a string or a list of token ids; got {show(given['prompt'])}", "prompt"
        ) from None
    return {"prompt": prompt}
