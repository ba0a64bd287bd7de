"""Prompts from a file, one JSON object a line, in an order that the seed fixes.

Each pass through the file has an order of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from srm.loadtest import lines
from srm.loadtest.counter_rng import ORDER, Draws
from srm.loadtest.workload.words import Words

_Length = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_Token = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_ALLOWED = (
    "an object with prompt (text or token ids) or messages, and perhaps max_tokens and n; "
    "a chat takes text or messages, completions take text or token ids"
)


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    prompt: str | Annotated[list[_Token], Meta(min_length=1)] | None = None
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)] | None = None
    max_tokens: _Length | None = None
    n: _Length | None = None


class WorkloadPrompt(msgspec.Struct, frozen=True):
    """One prompt of the file. Fields that it lacks are None."""

    fields: dict[str, Any]
    """The body's member `prompt` or `messages`."""
    num_tokens: int
    """-1: unknown."""
    max_tokens: int | None
    n: int | None


class Prompts:
    """All prompts of a file."""

    def __init__(
        self, path: Path, api: Literal["completions", "chat"], words: Words | None, draws: Draws
    ) -> None:
        """`words` count tokens, if there is a tokenizer. Raises ConfigError."""
        self._generator = draws
        self._prompts = [
            _checked(path, number, line, api, words)
            for number, line in lines.read(path, _Line, _ALLOWED)
        ]
        self._pass = -1
        self._order: NDArray[np.intp] = np.arange(0)

    def make_prompt(self, index: int) -> WorkloadPrompt:
        """Return the prompt of one request."""
        which, place = divmod(index, len(self._prompts))
        if which != self._pass:
            numbers = self._generator.raw(ORDER, which, len(self._prompts))
            self._pass, self._order = which, np.argsort(numbers, kind="stable")
        return self._prompts[int(self._order[place])]


def _checked(path: Path, number: int, line: _Line, api: str, words: Words | None) -> WorkloadPrompt:
    prompt, messages, is_chat = line.prompt, line.messages, api == "chat"
    if is_chat and isinstance(prompt, str) and messages is None:
        prompt, messages = None, [{"role": "user", "content": prompt}]
    wanted, other = (messages, prompt) if is_chat else (prompt, messages)
    if wanted is None or other is not None:
        raise lines.bad_line(path, number, f"not for api = {api}", _ALLOWED)
    fields = {"messages" if is_chat else "prompt": wanted}
    texts = [message.get("content") for message in messages] if messages else [prompt]
    if isinstance(prompt, list):
        num_tokens = len(prompt)
    elif words and all(isinstance(text, str) for text in texts):
        num_tokens = sum(words.count(str(text), special=not is_chat) for text in texts)
    else:
        num_tokens = -1
    return WorkloadPrompt(fields, num_tokens, line.max_tokens, line.n)
