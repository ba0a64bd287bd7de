"""The one wiring of what answers request bodies, for the routes, for batches and for commands.

Knows no files and no lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from engine.client.client import EngineClient
from server.generation.responder import Responder
from server.routes.chat import Chat
from server.routes.completions import Completions
from server.routes.models import Models
from server.text.chat_template import ChatTemplate
from server.text.text import Text
from server.text.tokenizer_files import chat_template as chat_template_source


class Services(NamedTuple):
    """What answers requests for one model."""

    models: Models
    completions: Completions
    chat: Chat


def services(
    client: EngineClient, text: Text, model_name: str, template: ChatTemplate | None
) -> Services:
    """Wire them up; `template` stays the caller's to close."""
    models, responder = Models(model_name, text.model.n_ctx), Responder(client)
    completions = Completions(client, text, models, responder)
    chat = Chat(client, text, models, completions, template, responder)
    return Services(models, completions, chat)


@contextmanager
def answering(
    client: EngineClient, text: Text, folder: Path, model_name: str = "", chat_template: str = ""
) -> Iterator[tuple[Completions, Chat]]:
    """Yield Completions and Chat for the block. Raises ConfigError and CheckpointError for a chat
    template that cannot be read."""
    source = chat_template_source(folder, chat_template)
    template = None if source is None else ChatTemplate(source, text.special_tokens)
    try:
        found = services(client, text, model_name or folder.resolve().name, template)
        yield found.completions, found.chat
    finally:
        if template is not None:
            template.close()
