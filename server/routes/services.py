"""Answers request bodies without HTTP, by the same objects as behind the routes.

Knows no files and no lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.client.client import EngineClient
from server.generation.responder import Responder
from server.routes.chat import Chat
from server.routes.completions import Completions
from server.routes.models import Models
from server.text.chat_template import ChatTemplate
from server.text.text import Text
from server.text.tokenizer_files import chat_template as chat_template_source


@contextmanager
def answering(
    client: EngineClient, text: Text, folder: Path, model_name: str = "", chat_template: str = ""
) -> Iterator[tuple[Completions, Chat]]:
    """Yield Completions and Chat for the block. Raises ConfigError and CheckpointError for a chat
    template that cannot be read."""
    source = chat_template_source(folder, chat_template)
    template = None if source is None else ChatTemplate(source, text.special_tokens)
    models = Models(model_name or folder.resolve().name, text.model.n_ctx)
    answers = Responder(client)
    completions = Completions(client, text, models, answers)
    try:
        yield completions, Chat(client, text, models, completions, template, answers)
    finally:
        if template is not None:
            template.close()
