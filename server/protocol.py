"""The body of POST /v1/completions, checked field by field.

Null is the same as absent. A field that is not understood, or that asks for what the server does
not do, is refused by name and never ignored. Knows no tokenizer and no engine.
"""

from __future__ import annotations

from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from engine.errors import InvalidRequest
from engine.messages import MAX_LOGPROBS

MAX_CHOICES = 100_000
"""Most completions of one request: prompts x n."""
MAX_SCORES = 2_000_000
"""Most log-probabilities of one reply, besides those of the tokens sampled."""
MAX_STOPS = 128
MAX_STOP_LENGTH = 256

_Flag = Annotated[bool, Meta(description="true or false")]
_TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_Alternatives = Annotated[
    int, Meta(ge=0, le=MAX_LOGPROBS, description=f"an integer from 0 to {MAX_LOGPROBS}")
]
_Stop = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LENGTH)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False
    """A last event with the usage of the whole request."""
    continuous_usage_stats: bool = False
    """The usage so far in every event."""


class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /v1/completions, checked. The description of a field is what it allows."""

    prompt: list[str] | list[list[int]]
    """One entry per prompt, texts or token ids."""
    model: Annotated[str, Meta(description="a string")] | None = None
    n: Annotated[
        int, Meta(ge=1, le=MAX_CHOICES, description=f"an integer from 1 to {MAX_CHOICES}")
    ] = 1
    max_tokens: Annotated[
        int, Meta(ge=0, description="an integer of at least 1; 0 with echo or prompt_logprobs")
    ] = 16
    temperature: Annotated[
        float, Meta(ge=0, le=100, description="a number from 0 (greedy) to 100")
    ] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1, description="a number above 0, at most 1")] = 1.0
    top_k: Annotated[
        int, Meta(ge=-1, description="an integer of at least 0 (0 or -1: all tokens)")
    ] = 0
    min_p: Annotated[float, Meta(ge=0, le=1, description="a number from 0 to 1")] = 0.0
    seed: Annotated[int, Meta(description="an integer from -2**63 to 2**64 - 1")] | None = None
    stop: Annotated[
        _Stop | Annotated[list[_Stop], Meta(max_length=MAX_STOPS)],
        Meta(
            description=f"a string of 1 to {MAX_STOP_LENGTH} characters, "
            f"or a list of at most {MAX_STOPS} of them"
        ),
    ] = []
    stop_token_ids: Annotated[
        list[_TokenId],
        Meta(max_length=MAX_STOPS, description=f"a list of at most {MAX_STOPS} token ids"),
    ] = []
    ignore_eos: _Flag = False
    stream: _Flag = False
    stream_options: (
        Annotated[
            StreamOptions,
            Meta(description="an object with include_usage, continuous_usage_stats: true or false"),
        ]
        | None
    ) = None
    echo: _Flag = False
    logprobs: _Alternatives | None = None
    prompt_logprobs: _Alternatives | None = None
    return_token_ids: _Flag = False
    return_tokens_as_token_ids: _Flag = False
    user: Annotated[str, Meta(description="a string")] | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop


_HINTS = get_type_hints(CompletionRequest, include_extras=True)

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_tokens": (0,),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "add_special_tokens": (True,),
    "bad_words": ([],),
    "priority": (0,),
    "allowed_token_ids": (),
    "truncate_prompt_tokens": (),
    "structured_outputs": (),
    "metadata": ({},),
}
"""Fields that clients send and we do not honour, with the values (besides null) that ask for
nothing. `best_of` is one too: its neutral value is n."""


def parse_completion(body: bytes) -> CompletionRequest:
    """Check the body of POST /v1/completions. Raises InvalidRequest naming field and value."""
    given = {name: value for name, value in _json_object(body).items() if value is not None}
    n = given.get("n", 1)
    fields: dict[str, Any] = {}
    for name, value in given.items():
        if name == "prompt":
            fields[name] = _prompts(value)
        elif name in _HINTS:
            fields[name] = _convert(name, value)
        elif name in NEUTRAL or name == "best_of":
            _check_neutral(name, value, (n,) if name == "best_of" else NEUTRAL[name])
        else:
            raise InvalidRequest(f"{name!r} is not a field of this request", name)
    if "prompt" not in fields:
        raise InvalidRequest("prompt is required: text, token ids, or a list of either", "prompt")
    request = CompletionRequest(**fields)
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options is allowed only with stream = true", "stream_options")
    if request.seed is not None and not -(2**63) <= request.seed < 2**64:
        raise _refused("seed", request.seed)
    if not (request.max_tokens or request.echo or request.prompt_logprobs is not None):
        raise _refused("max_tokens", 0)
    if len(request.prompt) * request.n > MAX_CHOICES:
        raise InvalidRequest(
            f"n = {request.n} of {len(request.prompt)} prompts: at most {MAX_CHOICES} completions "
            "may be asked for at once",
            "n",
        )
    return request


def _json_object(body: bytes) -> dict[str, Any]:
    if not body.strip():
        raise InvalidRequest("the body is empty; it must be a JSON object")
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON in UTF-8: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body must be a JSON object; got {_show(value)}")
    return value


def _prompts(value: Any) -> list[str] | list[list[int]]:
    if isinstance(value, str):
        return [value]
    first = value[0] if isinstance(value, list) and value else None
    try:
        if isinstance(first, str):
            return msgspec.convert(value, list[str])
        if isinstance(first, list):
            return msgspec.convert(value, list[Annotated[list[_TokenId], Meta(min_length=1)]])
        return [msgspec.convert(value, Annotated[list[_TokenId], Meta(min_length=1)])]
    except msgspec.ValidationError as error:
        raise InvalidRequest(
            "prompt must be a string, a list of strings, a list of token ids, or a list of such "
            f"lists, none of them empty; got {_show(value)} ({error})",
            "prompt",
        ) from None


def _convert(name: str, value: Any) -> Any:
    try:
        return msgspec.convert(value, _HINTS[name])
    except msgspec.ValidationError:
        raise _refused(name, value) from None


def _refused(name: str, value: Any) -> InvalidRequest:
    return InvalidRequest(f"{name} must be {_allowed(_HINTS[name])}; got {_show(value)}", name)


def _allowed(hint: Any) -> str:
    """The description in a field's annotation."""
    optional = next((arg for arg in get_args(hint) if get_origin(arg) is Annotated), hint)
    meta = get_args(hint if get_origin(hint) is Annotated else optional)[-1]
    return str(meta.description)


def _check_neutral(name: str, value: Any, neutral: tuple[Any, ...]) -> None:
    for one in neutral:
        if value == one and isinstance(value, bool) == isinstance(one, bool):
            return
    raise InvalidRequest(
        f"{name} = {_show(value)} is not supported; "
        + (f"leave it out or send {_show(neutral[0])}" if neutral else "leave it out"),
        name,
    )


def _show(value: Any) -> str:
    """A value as JSON, cut to what fits a message."""
    if isinstance(value, list | dict) and len(value) > 16:
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 80 else text[:80] + "…"
