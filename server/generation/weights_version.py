"""Version and fingerprint of the weights that made a reply. Knows no shape of replies."""

from __future__ import annotations

from typing import NamedTuple

from msgspec import UNSET, UnsetType

from engine.client.client import EngineClient
from server.generation.generation import Generation


class WeightsVersion(NamedTuple):
    """The weights that made a reply, so far."""

    fingerprint: str | None
    """Fingerprint of the weights of `version`."""
    version: int | None
    """Version that made the last token; where nothing was made, the one in use."""
    first_version: int | UnsetType
    """Version that made the first token, if it is another."""


def origin(client: EngineClient, generation: Generation) -> WeightsVersion:
    """Return the weights of a reply; None where nothing was made and the engine is not there."""
    version, first = generation.weights_version, generation.first_version
    if version is None and client.status is not None:
        version = client.status.weights_version
    if version is None:
        return WeightsVersion(None, None, UNSET)
    is_other = first is not None and first != version
    return WeightsVersion(
        client.fingerprint(version), version, first if is_other and first else UNSET
    )
