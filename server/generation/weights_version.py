"""With which weights a reply was made: their version and fingerprint. Knows no shape of replies."""

from __future__ import annotations

from typing import NamedTuple

from msgspec import UNSET, UnsetType

from engine.client.client import EngineClient
from server.generation.generation import Generation


class WeightsVersion(NamedTuple):
    """Of what there is of a reply so far."""

    fingerprint: str | None
    """Of the weights of that version."""
    version: int | None
    """Of those that the last token was made with; where nothing was made, of those in use."""
    first_version: int | UnsetType
    """Of those that the first token was made with, if they are others."""


def origin(client: EngineClient, generation: Generation) -> WeightsVersion:
    """None where nothing was made and the engine is not there."""
    version, first = generation.weights_version, generation.first_version
    if version is None and client.status is not None:
        version = client.status.weights_version
    if version is None:
        return WeightsVersion(None, None, UNSET)
    is_other = first is not None and first != version
    return WeightsVersion(
        client.fingerprint(version), version, first if is_other and first else UNSET
    )
