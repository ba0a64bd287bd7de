"""The body of POST /v1/chat/completions, checked field by field.

A chat completion is a completion of the one prompt that the chat template makes of the messages:
`as_completion` says which.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
from msgspec import Meta, Raw

from srm.errors import InvalidRequest
from srm.server.schema.completion_request import CompletionRequest
from srm.server.schema.conversation import (
    MAX_CHATS,
    MAX_MESSAGES,
    Conversation,
    ExactPrompt,
    Message,
    ReasoningEffort,
    chats_of,
    messages_of,
    naming_chat,
)
from srm.server.schema.json_parts import ID_FORMS, first_byte
from srm.server.schema.sampling_fields import NEUTRAL, Alternatives, SamplingRequest
from srm.server.schema.tools import Calls, Tool, ToolChoice, Tools, required_calls, tools_of
from srm.server.schema.validation import checked, given_fields, ids_of, show
from srm.server.schema.verify import rules_of

MaxTokens = Annotated[int, Meta(ge=1)]

MESSAGES_FORMS = (
    Annotated[
        list[Message],
        Meta(min_length=1, max_length=MAX_MESSAGES, description=f"a list of 1 to {MAX_MESSAGES}"),
    ],
)
"""Types that `messages` may have on the wire."""
PREFIX = "required_prefix_token_ids"
CHAT_FORMS = {"messages": MESSAGES_FORMS, PREFIX: ID_FORMS}
"""The fields that are read before the others, with their types on the wire."""


class ChatRequest(SamplingRequest, frozen=True, kw_only=True):
    """Body of POST /v1/chat/completions, checked."""

    successors: ClassVar = {
        **SamplingRequest.successors,
        "prompt": "POST /v1/completions takes it",
    }
    messages: list[Message]
    """The chat so far."""
    max_completion_tokens: MaxTokens | None = None
    """Most tokens of the answer."""
    max_tokens: MaxTokens | None = None
    """Older name; must be equal if both are given."""
    logprobs: bool = False
    """Return log-probabilities of the answer's tokens."""
    top_logprobs: Alternatives | None = None
    """Alternatives of each token; only with logprobs."""
    prompt_logprobs: Alternatives | None = None
    """Return log-probabilities of the rendered prompt, with this many alternatives each."""
    add_generation_prompt: bool | None = None
    """End the prompt with what the template writes before an answer."""
    continue_final_message: bool = False
    """Leave the last message open, so that the model continues it."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the template."""
    echo: bool = False
    """Begin the answer with the last message, if that is the assistant's."""
    add_special_tokens: bool = False
    """Add what the tokenizer prepends; most templates write it themselves."""
    required_prefix_token_ids: bytes | None = None
    """The tokens up to the end of the assistant's last message, in place of its text."""
    tools: Tools = []  # noqa: RUF012 - msgspec copies it
    """Functions that the model may call."""
    tool_choice: ToolChoice | None = None
    """Which of them it calls."""
    parallel_tool_calls: bool | None = None
    """With `required`: whether it may make several calls."""
    reasoning_effort: ReasoningEffort | None = None
    """A variable of the template, which may read it."""

    @property
    def conversation(self) -> Conversation:
        return Conversation.from_request(self)

    @property
    def calls(self) -> Calls | None:
        """What the answer must or may call. Raises InvalidRequest if it cannot be."""
        return required_calls(self.tools, self.tool_choice, self.parallel_tool_calls)

    @property
    def echoed(self) -> str:
        """The text that the answer begins with, by `echo`."""
        last = self.messages[-1]
        return last.text if self.echo and last.role == "assistant" else ""

    def check(self) -> None:
        super().check()
        self.conversation.check()
        check_special_tokens(self.conversation, self.add_special_tokens)
        if self.calls:
            self._refuse_beside_calls()
        if len({self.max_tokens, self.max_completion_tokens} - {None}) > 1:
            raise InvalidRequest(
                f"max_tokens = {self.max_tokens} and max_completion_tokens = "
                f"{self.max_completion_tokens} are two names of one limit: send one of them",
                "max_tokens",
            )
        self.refuse_shown()
        if self.says_samples:
            self.refuse_beside({"echo": self.echo}, self.show_field)
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest(
                f"top_logprobs = {self.top_logprobs} is allowed only with logprobs = true",
                "top_logprobs",
            )

    def _refuse_beside_calls(self) -> None:
        beside = {
            "continue_final_message": self.continue_final_message,
            "echo": self.echo,
            "ignore_eos": self.ignore_eos,
        }
        if (source := self.constraint_source()) is not None:
            beside[source.field.partition(".")[0]] = True
        given = {name: bool(value) for name, value in beside.items()}
        choice = show(self.tool_choice or "auto")
        self.refuse_beside(given, f"tool_choice = {choice}, by which tools are called")

    def as_completion(self, prompt: str | ExactPrompt, n_ctx: int) -> CompletionRequest:
        """Return the same request of the template's text; `n_ctx` is the model's context."""
        shared = {name: getattr(self, name) for name in SamplingRequest.__struct_fields__}
        return CompletionRequest(
            **shared,
            prompt=[prompt],  # type: ignore[arg-type]  # of either kind
            max_tokens=self.max_completion_tokens or self.max_tokens or n_ctx,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            prompt_logprobs=self.prompt_logprobs,
            add_special_tokens=self.add_special_tokens,
        )


CHATS_FORMS = (
    Annotated[
        list[Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]],
        Meta(
            min_length=1,
            max_length=MAX_CHATS,
            description=f"a list of 1 to {MAX_CHATS} lists of messages",
        ),
    ],
)
"""Types that `messages` may have on the wire, of several chats."""


class ChatsRequest(ChatRequest, frozen=True, kw_only=True):
    """Body of POST /v1/chat/completions/batch, checked: several chats, each answered by itself."""

    messages: list[list[Message]]  # type: ignore[assignment]  # of each chat
    """The chats so far."""

    @property
    def first(self) -> ChatRequest:
        """The first chat as a request of its own."""
        given = {name: getattr(self, name) for name in ChatRequest.__struct_fields__}
        return ChatRequest(**{**given, "messages": self.messages[0]})

    @property
    def conversations(self) -> list[Conversation]:
        """All chats."""
        first = self.first.conversation
        return [msgspec.structs.replace(first, messages=messages) for messages in self.messages]

    def check(self) -> None:
        beside = {
            "stream": self.stream,
            "echo": self.echo,
            "prompt_logprobs": self.prompt_logprobs is not None,
            "tools": self.calls is not None,
            PREFIX: self.required_prefix_token_ids is not None,
        }
        self.refuse_beside(beside, "several chats in one request")
        for i, chat in enumerate(self.conversations):
            with naming_chat(i):
                chat.check()
                check_special_tokens(chat, self.add_special_tokens)
        self.first.check()


_Asked = TypeVar("_Asked", bound=ChatRequest)

_UNLESS = {"tools": "tool_choice", "functions": "function_call"}
"""Lists of what may be called, and the field that says `"none"` of it may."""


def parse_chat(body: bytes) -> ChatRequest:
    """Check the body of POST /v1/chat/completions. Raises InvalidRequest naming field and value."""
    given = given_fields(body, ChatRequest, NEUTRAL)
    return chat_of(given, _converted(given, messages_of(given), 1), ChatRequest)


def parse_chats(body: bytes) -> ChatsRequest:
    """Check the body of POST /v1/chat/completions/batch. Raises as `parse_chat`."""
    given = given_fields(body, ChatsRequest, NEUTRAL)
    chats = chats_of(given)
    return chat_of(given, _converted(given, chats, len(chats)), ChatsRequest)


def chat_of(given: dict[str, Raw], converted: dict[str, Any], kind: type[_Asked]) -> _Asked:
    """Return the request of these fields, which is one of chats; those in `converted` have been
    checked already. Raises InvalidRequest naming field and value."""
    converted = {**converted, **callable_tools(given)}
    return checked(kind, given, converted, NEUTRAL)


def callable_tools(given: dict[str, Raw]) -> dict[str, list[Tool]]:
    """The field `tools` of a body, if it has one; takes lists out of what nothing is called of.
    Raises InvalidRequest."""
    for name, choice in _UNLESS.items():
        if bytes(given.get(choice, b"")) == b'"none"' and first_byte(given.get(name, b"")) == b"[":
            del given[name]
    return {"tools": tools_of(given)} if "tools" in given else {}


def _converted(given: dict[str, Raw], messages: list[Any], num_chats: int) -> dict[str, Any]:
    rules = {"verify": rules_of(given["verify"], num_chats)} if "verify" in given else {}
    return {"messages": messages, **rules, **prefix_of(given)}


def prefix_of(given: dict[str, Raw]) -> dict[str, bytes]:
    """The field `required_prefix_token_ids` of a body, if it has one. Raises InvalidRequest."""
    return {PREFIX: ids_of(given, PREFIX)} if PREFIX in given else {}


def check_special_tokens(chat: Conversation, are_added: bool | None) -> None:
    """Refuse special tokens before a chat that begins with given ids. Raises InvalidRequest."""
    if are_added and (exact := chat.exact()) is not None:
        raise InvalidRequest(
            f"add_special_tokens = true is not for chats that begin with token ids, as "
            f"{exact[1].source} has them: these have all that comes first",
            "add_special_tokens",
        )
