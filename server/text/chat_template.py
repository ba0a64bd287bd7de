"""The chat template of the model that is served: from messages to the prompt they stand for.

Owns the process that renders, and ends it when a chat takes too long; the next chat gets a new one.
Knows what variables a template expects, and no tokens.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import msgspec

from srm.errors import CheckpointError, InvalidRequest
from srm.limited_process import Died, LimitedProcess, ProcessFailed
from srm.server.schema.conversation import ROLES, Conversation, ExactPrompt, names_in
from srm.tokenizer_file import LITERAL

RENDER_S = 5.0
"""Seconds a template may take for one chat."""
_WORDS = [f"word{secrets.token_hex(8)}" for _ in range(3)]
"""Words that no template has: a tool, what it is asked, and what it returns."""
_QUESTION = {"role": "user", "content": "Hello"}
_CALLING = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "abcdefghi",  # of the length that some templates want
            "type": "function",
            "function": {"name": _WORDS[0], "arguments": {"x": _WORDS[1]}},
        }
    ],
}
_RESULT = {"role": "tool", "name": _WORDS[0], "tool_call_id": "abcdefghi", "content": _WORDS[2]}


class ChatTemplate:
    """One template, and the process in which it runs."""

    def __init__(
        self,
        source: str,
        special_tokens: dict[str, str],
        render_s: float = RENDER_S,
        literals: Collection[str] = (),
    ) -> None:
        """Starts the process. `literals`: names of special tokens that are text where the template
        does not write them. Raises CheckpointError for an invalid template."""
        self.source = source
        self.render_s = render_s
        """Seconds that a chat may take."""
        self._names = names_in(source)
        first = {  # a TemplateSource, without the import of Jinja
            "source": source,
            "variables": special_tokens,
            "names": [*literals],
            "roles": [*{*ROLES, *self._names}],
            "literal": LITERAL,
        }
        self._process = LimitedProcess("srm.server.text.template_process", first)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="chat template")
        """One thread, so one chat at a time has the process; it waits instead of the event loop."""
        try:
            self._process.start()
        except ProcessFailed as error:
            self.close()
            raise CheckpointError(f"the chat template is not one: {error}") from None

    async def render(self, chat: Conversation) -> str | ExactPrompt:
        """Return the prompt; an ExactPrompt where messages have token ids. Raises InvalidRequest
        with the template's objection."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, self._rendered, chat)
        except ProcessFailed as error:
            raise InvalidRequest(f"the chat template: {error}", "messages") from None
        except RecursionError:
            raise InvalidRequest(
                "messages: the arguments of a tool call nest too deep", "messages"
            ) from None

    def _rendered(self, chat: Conversation) -> str | ExactPrompt:
        exact, ids_end = chat.exact(), f"ids-{secrets.token_hex(16)}"
        if exact is not None:
            chat = chat.marked(exact[0], ids_end)
        if chat.has_calls and not self._shows_calls:
            chat = chat.as_text()
        if chat.tells_tools and not self._shows_tools:
            chat = chat.with_tools_as_text()
        shown = {"tools": chat.tools} if chat.tools and self._shows_tools else {}
        messages = chat.for_template(self._names)
        marker = ""
        if chat.continue_final_message:
            # Templates trim and close the last message, each in its way: what comes before a word
            # that nobody knows is what the model is to continue.
            marker = f"continue-{secrets.token_hex(16)}"
            messages[-1]["content"] += marker
        variables: dict[str, Any] = {
            **chat.chat_template_kwargs,
            **shown,
            "messages": messages,
            "add_generation_prompt": chat.adds_generation_prompt,
        }
        text = self._text_of(variables)
        text = _before(marker, text) if marker else text
        if exact is None:
            return text
        _, mark, rest = text.rpartition(ids_end)
        if not mark:
            raise InvalidRequest(
                f"{exact[1].source} has token ids, and the chat template does not show what the "
                "assistant said there: send the messages without ids",
                exact[1].field,
            )
        return msgspec.structs.replace(exact[1], rest=rest)

    @cached_property
    def _shows_calls(self) -> bool:
        """Whether it writes calls of tools, and what they returned. Asked of the template itself:
        many take any message, and write of it what they know."""
        text = self._tried(messages=[_QUESTION, _CALLING, _RESULT])
        return all(word in text for word in _WORDS)

    @cached_property
    def _shows_tools(self) -> bool:
        """Whether it writes which tools there are."""
        parameters = {"type": "object", "properties": {}}
        function = {"name": _WORDS[0], "description": "", "parameters": parameters}
        tools = [{"type": "function", "function": function}]
        return _WORDS[0] in self._tried(messages=[_QUESTION], tools=tools)

    def _tried(self, **variables: Any) -> str:
        """Return what it makes of these; nothing if it objects."""
        try:
            return self._text_of({"add_generation_prompt": False, **variables})
        except Died:  # which says nothing of the template, and is not to be remembered
            raise
        except ProcessFailed:
            return ""

    def _text_of(self, variables: dict[str, Any]) -> str:
        """Return what it makes of these. Raises ProcessFailed."""
        absent = {"tools": None, "documents": None}
        return self._process.ask({**absent, **variables}, self.render_s).text

    def close(self) -> None:
        """End the process, whatever it does."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._process.close()


def _before(marker: str, text: str) -> str:
    """The text up to where the marker shows that the last message ends."""
    end = text.rfind(marker)
    if end < 0:
        raise InvalidRequest(
            "continue_final_message = true: the chat template does not show the last message as it "
            "is, so there is nothing to continue",
            "continue_final_message",
        )
    return text[:end]
