"""The one wiring of what answers request bodies, for the routes, for batches and for commands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from srm.engine.client.client import EngineClient
from srm.server.config import SpecialNames
from srm.server.dialects.chat.endpoint import Chat, ManyChats
from srm.server.dialects.completions.endpoint import Completions
from srm.server.dialects.completions.models import Models
from srm.server.dialects.messages.endpoint import Messages
from srm.server.dialects.responses.endpoint import Responses
from srm.server.dialects.rollouts.sglang import GenerateEndpoint
from srm.server.dialects.rollouts.vllm import TokensEndpoint
from srm.server.generation.states import States
from srm.server.reply.responder import Responder
from srm.server.text.chat_template import ChatTemplate
from srm.server.text.text import Text
from srm.server.text.tokenizer_files import chat_template


class Services(NamedTuple):
    """The list of models and the endpoints that generate, for the model of one folder."""

    models: Models
    completions: Completions
    chat: Chat
    chats: ManyChats
    responses: Responses
    messages: Messages
    tokens: TokensEndpoint
    generate: GenerateEndpoint


def services(
    client: EngineClient,
    text: Text,
    model_name: str,
    template: ChatTemplate | None,
    stream_max_rate: float = 0.0,
    stream_keepalive_s: float = 0.0,
    states: States | None = None,
) -> Services:
    """Make the services of a model called `model_name`. The caller closes `template` itself."""
    models = Models(model_name, text.model.n_ctx)
    responder = Responder(client, text, stream_max_rate, stream_keepalive_s)
    completions = Completions(client, text, models, responder, states)
    chat = Chat(text, models, completions, template, responder)
    chats = ManyChats(text, models, completions, template, responder)
    return Services(
        models,
        completions,
        chat,
        chats,
        Responses(chat, text, responder, states),
        Messages(text, models, chat, template, responder),
        TokensEndpoint(completions.start, responder),
        GenerateEndpoint(completions.start, client, responder),
    )


def template_of(
    folder: Path, text: Text, file: str = "", names: SpecialNames = "text"
) -> ChatTemplate | None:
    """Start the chat template in `file`, or else of the folder; None if it has none. `names` says
    what names of special tokens in messages are. Raises ConfigError and CheckpointError for one
    that cannot be read."""
    source = chat_template(folder, file)
    if source is None:
        return None
    literals = text.special_names if names == "text" else ()
    return ChatTemplate(source, text.special_tokens, literals=literals)


@contextmanager
def answering(
    client: EngineClient,
    text: Text,
    folder: Path,
    model_name: str = "",
    template_file: str = "",
    names: SpecialNames = "text",
    states: States | None = None,
) -> Iterator[tuple[Completions, Chat, Responses]]:
    """Yield the endpoints that lines of a batch may ask, for the block. Raises what `template_of`
    does."""
    template = template_of(folder, text, template_file, names)
    model_name = model_name or folder.resolve().name
    made = services(client, text, model_name, template, states=states)
    try:
        yield made.completions, made.chat, made.responses
    finally:
        made.completions.close()
        if template is not None:
            template.close()
