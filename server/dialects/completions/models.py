"""GET /v1/models: what is served, and what requests may call it."""

from __future__ import annotations

import time

from msgspec.structs import replace

from srm.errors import cut
from srm.server.errors import ModelNotFound
from srm.server.http.responses import add_operations
from srm.server.schema.completion_response import ModelCard, ModelList
from srm.server.schema.openapi import Operation, Router

_SHOWN_NAME = 200
"""Most characters of an unknown model's name in its error."""
OPERATIONS = (
    Operation("GET", "/v1/models", "The model that is served, as a list.", ModelList),
    Operation("GET", "/v1/models/{name}", "The model that is served.",
              ModelCard, parameters={"name": "The name of the model; it may have slashes."},
              errors=(404,)),
)  # fmt: skip


class Models:
    """The one model of this server."""

    def __init__(self, name: str, max_model_len: int) -> None:
        """`max_model_len` is the context, in tokens."""
        self.name = name
        self._card = ModelCard(
            id=name, created=int(time.time()), root=name, max_model_len=max_model_len
        )

    def card(self, name: str) -> ModelCard:
        """The card of the model. Raises ModelNotFound for any other name."""
        if name != self.name:
            raise ModelNotFound(
                f"model {cut(name, _SHOWN_NAME)!r} is not served; this server has {self.name!r}",
                "model",
            )
        return self._card

    def check(self, name: str | None) -> None:
        """Raise ModelNotFound if a request names another model."""
        if name is not None:
            self.card(name)

    def all(self) -> ModelList:
        return ModelList(data=[self._card])


def add_routes(router: Router, models: Models) -> None:
    """Add the routes of this module."""
    named = replace(OPERATIONS[1], path="/v1/models/{name:path}")  # a name may have slashes
    add_operations(router, (OPERATIONS[0], named), (models.all, models.card))
