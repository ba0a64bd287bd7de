"""States: their ids, the body that makes one, and what clients are told of them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from srm.errors import InvalidRequest
from srm.server.schema.json_parts import prompts_of
from srm.server.schema.sampling_fields import Metadata
from srm.server.schema.validation import Fields, checked, given_fields, require, show

STATE_ID = r"^state_[0-9a-f]{32}\Z"
StateId = Annotated[
    str, Meta(pattern=STATE_ID, description="the id of a state, state_ and 32 hexadecimal digits")
]
MAX_TTL_S = 30 * 24 * 3600
DEFAULT_TTL_S = 24 * 3600
MAX_LISTED = 1_000


class StateRequest(Fields, frozen=True, kw_only=True):
    """Body of POST /v1/states, checked."""

    prompt: str | bytes | None = None
    """Text or token ids to read; with `state`, what follows it."""
    model: str | None = None
    """The served model."""
    state: StateId | None = None
    """Go on from this state."""
    refeed: bool = False
    """Feed the tokens of the state, if other weights made it."""
    add_special_tokens: bool = True
    """Add the tokenizer's special tokens to a text that follows no state."""
    metadata: Metadata = msgspec.field(default_factory=dict)
    """Labels, which are returned."""
    ttl_s: Annotated[int, Meta(ge=1, le=MAX_TTL_S)] = DEFAULT_TTL_S
    """Seconds until the state is deleted."""

    def check(self) -> None:
        if self.refeed and self.state is None:
            raise InvalidRequest("refeed = true needs a state", "refeed")


class StateQuery(Fields, frozen=True, kw_only=True):
    """The query of GET /v1/states."""

    after: Annotated[str, Meta(description="the id of one of your states")] | None = None
    """List the states that were made before this one."""
    limit: Annotated[int, Meta(ge=1, le=MAX_LISTED)] = 20
    """Most states in the reply."""


class StateObject(msgspec.Struct, kw_only=True):
    """Times are Unix seconds."""

    id: str
    object: Literal["state"] = "state"
    created_at: int
    expires_at: int
    tokens: int
    """Tokens that it knows; all but the last have been read."""
    bytes: int
    """Bytes that it counts for in the key's quota."""
    fingerprint: str
    """Fingerprint of the weights that made it."""
    arithmetic: str
    """Device and data type that made it."""
    metadata: dict[str, str]


class StateList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[StateObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class StateDeleted(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["state"] = "state"
    deleted: bool = True


def parse_state_request(body: bytes) -> StateRequest:
    """Check the body of POST /v1/states. Raises InvalidRequest naming field and value."""
    given = given_fields(body, StateRequest, {})
    if "state" not in given:
        require(given, "prompt", "text or token ids")
    return checked(StateRequest, given, prompt_of(given), {})


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
