"""Turns rows of files into pieces of text, each marked as trained on or not.

Of a row of `prompt` and `completion`, or of `question` and `answer`, the second is trained on and
the end token behind it. Of a row of `messages` every turn of the assistant is: what the model's
chat template writes between the beginning of an answer and the end of that turn.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Raw

from srm.errors import ConfigError, InvalidRequest
from srm.server.schema.conversation import Conversation, Message, messages_of, names_in
from srm.server.text.template_process import TemplateFailed, compile_template, render
from srm.server.text.tokenizer_files import chat_template
from srm.training.questions.questions import Question
from srm.training.text.rows import Row, rows

FORMS: tuple[tuple[str, ...], ...] = (
    ("messages",),
    ("prompt", "completion"),
    ("question", "answer"),
)
"""Names of the members that identify each form of row."""


class RowPiece(NamedTuple):
    """A part of a row that is tokenized by itself."""

    text: str
    is_target: bool


class RowText(NamedTuple):
    """A row as text."""

    pieces: tuple[RowPiece, ...]
    is_chat: bool
    """Whether the chat template wrote the text, special tokens included."""


class Chats:
    """The chat template of a model folder; it may be missing as long as no chat is read."""

    def __init__(self, folder: Path, special_tokens: Mapping[str, str]) -> None:
        """Raises ConfigError for a template that is invalid."""
        self._folder, self._special_tokens = folder, special_tokens
        self._source = chat_template(folder)
        try:
            self._template = None if self._source is None else compile_template(self._source)
        except TemplateFailed as error:
            raise ConfigError(f"model: the chat template of {folder} is not one: {error}") from None

    def pieces(self, row: Row) -> tuple[RowPiece, ...]:
        """Return a chat as pieces. Raises ConfigError if it cannot be trained on."""
        if row.get("tools"):
            raise ConfigError("tools must be absent: no tool is shown to the model")
        try:
            given = Raw(json.dumps(row.get("messages")).encode())
            messages = messages_of({"messages": given})
        except InvalidRequest as error:
            raise ConfigError(error.message) from None
        except (TypeError, ValueError, RecursionError) as error:  # bytes in Parquet, and the like
            raise ConfigError(f"messages are not JSON: {error}") from None
        if messages[-1].role != "assistant":
            raise ConfigError(f"the last of messages must be assistant's, got {messages[-1].role}")
        try:
            return tuple(self._pieces(messages))
        except InvalidRequest as error:
            raise ConfigError(error.message) from None
        except TemplateFailed as error:
            raise ConfigError(f"the chat template: {error}") from None

    def _pieces(self, messages: Sequence[Message]) -> Iterator[RowPiece]:
        written = ""
        for count in (i for i, message in enumerate(messages) if message.role == "assistant"):
            for turns, is_target in ((messages[:count], False), (messages[: count + 1], True)):
                text = self._render(turns, adds_prompt=not is_target)
                if not text.startswith(written):
                    raise TemplateFailed(
                        f"it writes what comes before the end of messages[{count}] in another "
                        "way once that is there, so its text cannot be told from theirs"
                    )
                yield RowPiece(text[len(written) :], is_target)
                written = text

    def _render(self, messages: Sequence[Message], adds_prompt: bool) -> str:
        if self._template is None or self._source is None:
            raise TemplateFailed(f"{self._folder} has none, so messages cannot be read")
        variables: dict[str, Any] = {
            **self._special_tokens,
            "tools": None,
            "documents": None,
            "messages": Conversation(messages=[*messages]).for_template(names_in(self._source)),
            "add_generation_prompt": adds_prompt,
        }
        return render(self._template, variables)


def read(paths: Sequence[Path], setting: str, chats: Chats) -> list[RowText]:
    """Read the rows of .jsonl and .parquet files; members besides those of its form are ignored.

    Raises ConfigError, with file and line, for a row of no form or of several, and for no row.
    """
    results = []
    for path in paths:
        for where, row in rows(path, setting):
            try:
                results.append(_render(row, chats))
            except ConfigError as error:
                raise ConfigError(f"{setting}: {where}: {error.message}") from None
    if not results:
        raise ConfigError(f"{setting}: {', '.join(map(str, paths))} has no row")
    return results


def _render(row: Row, chats: Chats) -> RowText:
    there = {name for name, value in row.items() if value is not None}
    forms = [form for form in FORMS if there.issuperset(form)]
    if len(forms) != 1:
        raise ConfigError(
            "a row must have either messages, or prompt and completion, or question and answer; "
            f"it has {', '.join(sorted(there)) or 'nothing'}"
        )
    if forms == [("messages",)]:
        return RowText(chats.pieces(row), is_chat=True)
    for name in forms[0]:
        if not isinstance(row[name], str):
            raise ConfigError(f"{name!r} must be a text, got {row[name]!r:.80}")
    prompt, completion = (row[name] for name in forms[0])
    if not completion:
        raise ConfigError(f"{forms[0][1]!r} must not be empty")
    if forms == [("question", "answer")]:
        prompt, completion = Question(prompt, completion).prompt(), f" {completion}"
    return RowText((RowPiece(prompt, False), RowPiece(completion, True)), is_chat=False)
