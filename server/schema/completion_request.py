"""The body of POST /v1/completions, checked field by field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
from msgspec import Meta, Raw

from srm.engine.messages import NAMED
from srm.errors import InvalidRequest
from srm.server.schema.conversation import ExactPrompt
from srm.server.schema.json_parts import TokenIds, prompts_of
from srm.server.schema.sampling_fields import NEUTRAL, Alternatives, SamplingRequest
from srm.server.schema.until import MAX_CHOICES
from srm.server.schema.validation import (
    SAMPLING,
    Fields,
    checked,
    defaults_of,
    given_fields,
    reading,
    refused,
    require,
    show,
)
from srm.server.schema.verify import rules_of

PROMPT_FORMS = (
    Annotated[str, Meta(description="a string, token ids, or a list of either; no list empty")],
    Annotated[list[str], Meta(min_length=1)],
    TokenIds,
    Annotated[list[TokenIds], Meta(min_length=1)],
)
"""Types that `prompt` may have on the wire."""
MaxTokens = Annotated[int, Meta(ge=1, description="an integer of at least 1; max_tokens if both")]
_BEST_OF = f"an integer from n to {MAX_CHOICES}; with stream, n"
BestOf = Annotated[int, Meta(ge=1, le=MAX_CHOICES, description=_BEST_OF)]


Place = Annotated[int, Meta(ge=0, description="an integer of at least 0")]


class CompletionRequest(SamplingRequest, frozen=True, kw_only=True):
    """Body of POST /v1/completions, checked."""

    successors: ClassVar = {
        **SamplingRequest.successors,
        "messages": "POST /v1/chat/completions takes them",
    }
    prompt: list[str] | list[bytes] | list[ExactPrompt]
    """One prompt or several; with `state`, what follows it, which may be nothing."""
    keep_states: bool = False
    """Keep the states of samples as those of prompts are kept: what goes on from one is fed one
    token."""
    use_beam_search: bool = False
    """Return the n likeliest texts that n beams find."""
    length_penalty: Annotated[float, Meta(ge=-10, le=10)] = 1.0
    """Beams are ranked by log-probability over length to this power."""
    best_of: BestOf | None = None
    """Sample this many, return the n likeliest per token."""
    max_tokens: Annotated[
        int, Meta(ge=0, description="an integer of at least 1, or 0 with echo or prompt_logprobs")
    ] = 16
    """Most tokens of a completion; 0 only scores the prompt."""
    max_completion_tokens: MaxTokens | None = None
    """The same as max_tokens."""
    add_special_tokens: bool = True
    """Add the tokenizer's special tokens to texts."""
    echo: bool = False
    """Put the prompt before the completion, also in logprobs."""
    logprobs: Alternatives | None = None
    """Return log-probabilities, with this many alternatives each."""
    prompt_logprobs: Alternatives | None = None
    """Return the same of the prompt's tokens."""
    return_packed: bool = False
    """Return base64 arrays and no text."""

    @property
    def num_samples(self) -> int:
        return self.best_of or self.n

    @property
    def num_prompts(self) -> int:
        return len(self.prompt)

    @property
    def makes_text(self) -> bool:
        """Whether text is made of the tokens: packed replies have none, but may have scores."""
        return not self.return_packed or self.says_samples

    def check(self) -> None:
        super().check()
        if not (self.max_tokens or self.echo or self.prompt_logprobs is not None):
            raise refused(CompletionRequest, "max_tokens", 0)
        self.refuse_beside({"receipt": self.receipt and not self.max_tokens}, "max_tokens = 0")
        if self.prompt_logprobs_start and self.logprobs is not None:
            self.refuse_beside({"echo": self.echo}, "prompt_logprobs_start and logprobs")
        for named in NAMED.values():
            self.refuse_beside({"echo": self.echo and bool(getattr(self, named))}, named)
        if self.num_samples < self.n or (self.stream and self.num_samples > self.n):
            raise refused(CompletionRequest, "best_of", self.best_of)
        if len(self.prompt) * self.num_samples > MAX_CHOICES:
            name = "n" if self.num_samples == self.n else "best_of"
            raise InvalidRequest(
                f"{name} = {self.num_samples} of {len(self.prompt)} prompts: at most "
                f"{MAX_CHOICES} completions may be asked for at once",
                name,
            )
        if not self.max_tokens and (source := self.constraint_source()) is not None:
            self.refuse_beside({"max_tokens": True}, source.field)
        if self.use_beam_search:
            refuse_drawing(self, "use_beam_search", _NOT_OF_BEAMS)
            self.refuse_beside({"logprobs": bool(self.logprobs)}, "use_beam_search")
            self.refuse_beside({"max_tokens": not self.max_tokens}, "use_beam_search")
        elif self.length_penalty != 1:
            raise InvalidRequest("length_penalty needs use_beam_search", "length_penalty")
        if self.return_packed:
            self._refuse_text()
        if self.says_samples:
            beside = {
                "best_of": self.num_samples > self.n,
                "echo": self.echo,
                "max_tokens": not self.max_tokens,
            }
            self.refuse_beside(beside, self.show_field)
            self.refuse_shown()

    def _refuse_text(self) -> None:
        """Refuse fields about text, where packed replies need none, and about how it is shown."""
        is_counted = {"return_packed": self.returns == "counts"}
        self.refuse_beside(is_counted, 'return = "counts", which has no choices')
        defaults = {field.name: field.default for field in msgspec.structs.fields(type(self))}
        for name in SHOWN_TEXT if self.makes_text else ABOUT_TEXT:
            value = getattr(self, name)
            if value != ([] if name == "stop" else defaults[name]):
                raise InvalidRequest(
                    f"{name} = {show(value)} is about text, and return_packed makes none", name
                )


def refuse_drawing(request: Fields, beside: str, names: Sequence[str] = ()) -> None:
    """Raise InvalidRequest for fields that say how to draw samples, and those of these names, where
    the likeliest tokens are taken. What the model's folder says counts as left out."""
    defaults = {**defaults_of(type(request)), **SAMPLING}
    for name in ("top_p", "top_k", "min_p", "seed", *names):
        if (value := getattr(request, name)) != defaults[name]:
            raise InvalidRequest(f"{name} = {show(value)} does not go with {beside}", name)


_NOT_OF_BEAMS = (
    *("stream", "best_of", "stop", "stop_token_ids", "min_tokens", "keep_states", "echo"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "bad_words"),
    *("response_format", "structured_outputs", "json_schema", "regex", "ebnf"),
    *("until", "prompt_logprobs", "return_weight_versions", "receipt"),
)
SHOWN_TEXT = ("echo", "return_tokens_as_token_ids")
"""Fields that mean nothing where replies are packed."""
ABOUT_TEXT = ("stop", "include_stop_str_in_output", "skip_special_tokens", *SHOWN_TEXT)
"""The same, where no text is made either."""


class ForkRequest(CompletionRequest, frozen=True, kw_only=True):
    """Body of POST /v1/completions/{completion_id}/fork, checked."""

    index: Place = 0
    """Which sample of its prompt to go on from."""
    prompt_index: Place = 0
    """Which of its prompts that is of."""

    def check(self) -> None:
        super().check()
        for name in ("state", "cache_salt", "truncate_prompt_tokens"):
            self.refuse_beside({name: getattr(self, name) is not None}, "a fork")


_Completing = TypeVar("_Completing", bound=CompletionRequest)


def parse_completion(body: bytes) -> CompletionRequest:
    """Check the body of POST /v1/completions. Raises InvalidRequest naming field and value."""
    return _parse(body, CompletionRequest)


def parse_fork(body: bytes) -> ForkRequest:
    """Check the body of a fork. Raises InvalidRequest naming field and value."""
    return _parse(body, ForkRequest)


def _parse(body: bytes, kind: type[_Completing]) -> _Completing:
    given = given_fields(body, kind, NEUTRAL)
    if "state" not in given and kind is CompletionRequest:
        require(given, "prompt", "text, token ids, or a list of either")
    prompts = _prompts(given["prompt"]) if "prompt" in given else [b""]
    converted: dict[str, Any] = {"prompt": prompts}
    if "verify" in given:
        converted["verify"] = rules_of(given["verify"], len(converted["prompt"]))
    request = checked(kind, given, converted, NEUTRAL)
    longest = request.max_completion_tokens
    if longest is None:
        return request
    if "max_tokens" in given and request.max_tokens != longest:
        raise refused(kind, "max_completion_tokens", longest)
    return msgspec.structs.replace(request, max_tokens=longest)


def _prompts(value: Raw) -> list[str] | list[bytes]:
    must = (
        "be a string, a list of strings, a list of token ids, or a list of such lists, none of "
        "them empty"
    )
    with reading("prompt", value, must, says_why=True):
        prompts = prompts_of(value, MAX_CHOICES)
    return prompts
