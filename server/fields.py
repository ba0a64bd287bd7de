"""What every request for completions may say, and how a body is checked field by field.

Null is the same as absent. A field that is not understood, or that asks for what the server does
not do, is refused by name and never ignored. Knows no tokenizer and no engine.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from engine.errors import InvalidRequest
from engine.messages import MAX_BIAS, MAX_LOGPROBS, MAX_PENALTY, REPETITION_PENALTIES

MAX_CHOICES = 100_000
"""Most completions of one request: prompts x n."""
MAX_SCORES = 2_000_000
"""Most log-probabilities of one reply, besides those of the tokens sampled."""
MAX_STOPS = 128
MAX_STOP_LENGTH = 256
MAX_CUT_LENGTH = 250_000
"""Most characters of a text that is longer than the context and to be cut to its last tokens."""
MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512
MAX_PRIORITY = 2**31 - 1
MAX_BIASES = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_LENGTH = 256

Flag = Annotated[bool, Meta(description="true or false")]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Alternatives = Annotated[
    int, Meta(ge=0, le=MAX_LOGPROBS, description=f"an integer from 0 to {MAX_LOGPROBS}")
]
Penalty = Annotated[
    float,
    Meta(
        ge=-MAX_PENALTY,
        le=MAX_PENALTY,
        description=f"a number from -{MAX_PENALTY:g} to {MAX_PENALTY:g}",
    ),
]
Stop = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LENGTH)]
Metadata = dict[
    Annotated[str, Meta(max_length=MAX_METADATA_KEY)],
    Annotated[str, Meta(max_length=MAX_METADATA_VALUE)],
]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False
    """A last event with the usage of the whole request."""
    continuous_usage_stats: bool = False
    """The usage so far in every event."""
    include_obfuscation: bool = False
    """Padding of events, which there is none of: only false is taken."""


class Fields(msgspec.Struct, frozen=True, kw_only=True):
    """A request's body, checked. The description of a field is what it allows."""

    def check(self) -> None:
        """Raise InvalidRequest for fields that do not go together."""


class SamplingRequest(Fields, frozen=True, kw_only=True):
    """What completions and chat completions have in common."""

    model: Annotated[str, Meta(description="a string")] | None = None
    n: Annotated[
        int, Meta(ge=1, le=MAX_CHOICES, description=f"an integer from 1 to {MAX_CHOICES}")
    ] = 1
    temperature: Annotated[
        float, Meta(ge=0, le=100, description="a number from 0 (greedy) to 100")
    ] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1, description="a number above 0, at most 1")] = 1.0
    top_k: Annotated[
        int, Meta(ge=-1, description="an integer of at least 0 (0 or -1: all tokens)")
    ] = 0
    min_p: Annotated[float, Meta(ge=0, le=1, description="a number from 0 to 1")] = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[
        float,
        Meta(
            ge=REPETITION_PENALTIES[0],
            le=REPETITION_PENALTIES[1],
            description="a number from {:g} to {:g}".format(*REPETITION_PENALTIES),
        ),
    ] = 1.0
    logit_bias: Annotated[
        dict[TokenId, Annotated[float, Meta(ge=-MAX_BIAS, le=MAX_BIAS)]],
        Meta(
            max_length=MAX_BIASES,
            description=f"an object of at most {MAX_BIASES} token ids, each with a number "
            f"from -{MAX_BIAS:g} to {MAX_BIAS:g}",
        ),
    ] = {}
    allowed_token_ids: (
        Annotated[list[TokenId], Meta(min_length=1, description="a list of at least one token id")]
        | None
    ) = None
    bad_words: Annotated[
        list[Annotated[str, Meta(max_length=MAX_BAD_WORD_LENGTH, pattern="[^ ]")]],
        Meta(
            max_length=MAX_BAD_WORDS,
            description=f"a list of at most {MAX_BAD_WORDS} strings of 1 to "
            f"{MAX_BAD_WORD_LENGTH} characters, none of spaces only",
        ),
    ] = []
    min_tokens: Annotated[
        int, Meta(ge=0, description="an integer of at least 0, at most max_tokens")
    ] = 0
    seed: (
        Annotated[
            int,
            Meta(
                description="an integer from -2**63 to 2**64 - 1",
                extra_json_schema={"minimum": -(2**63), "maximum": 2**64 - 1},
            ),
        ]
        | None
    ) = None
    stop: Annotated[
        Stop | Annotated[list[Stop], Meta(max_length=MAX_STOPS)],
        Meta(
            description=f"a string of 1 to {MAX_STOP_LENGTH} characters, "
            f"or a list of at most {MAX_STOPS} of them"
        ),
    ] = []
    stop_token_ids: Annotated[
        list[TokenId],
        Meta(max_length=MAX_STOPS, description=f"a list of at most {MAX_STOPS} token ids"),
    ] = []
    include_stop_str_in_output: Flag = False
    skip_special_tokens: Flag = True
    ignore_eos: Flag = False
    truncate_prompt_tokens: (
        Annotated[int, Meta(ge=-1, description="an integer of at least 1, or -1 for the context")]
        | None
    ) = None
    stream: Flag = False
    stream_options: (
        Annotated[
            StreamOptions,
            Meta(
                description="an object with include_usage, continuous_usage_stats: true or false; "
                "include_obfuscation: false"
            ),
        ]
        | None
    ) = None
    stream_interval: (
        Annotated[int, Meta(ge=1, description="an integer of at least 1; only with stream")] | None
    ) = None
    return_token_ids: Flag = False
    return_tokens_as_token_ids: Flag = False
    priority: Annotated[
        int,
        Meta(
            ge=-MAX_PRIORITY,
            le=MAX_PRIORITY,
            description=f"an integer from -{MAX_PRIORITY} to {MAX_PRIORITY}",
        ),
    ] = 0
    request_id: (
        Annotated[
            str,
            Meta(
                pattern=r"^[A-Za-z0-9._:-]{1,128}\Z",
                description="a string of 1 to 128 of A-Z a-z 0-9 . _ : -",
            ),
        ]
        | None
    ) = None
    user: Annotated[str, Meta(description="a string")] | None = None
    metadata: Annotated[
        Metadata,
        Meta(
            max_length=MAX_METADATA,
            description=f"an object of at most {MAX_METADATA} strings of at most "
            f"{MAX_METADATA_VALUE} characters, their names of at most {MAX_METADATA_KEY}",
        ),
    ] = {}

    @property
    def num_samples(self) -> int:
        """How many completions of each prompt are sampled."""
        return self.n

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def check(self) -> None:
        for name in ("stream_options", "stream_interval"):
            if getattr(self, name) is not None and not self.stream:
                raise InvalidRequest(f"{name} is allowed only with stream = true", name)
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            raise refused(type(self), "stream_options", {"include_obfuscation": True})
        if self.truncate_prompt_tokens == 0:
            raise refused(type(self), "truncate_prompt_tokens", 0)
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise refused(type(self), "seed", self.seed)


NEUTRAL: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "cache_salt": (),
}
"""Fields that clients send and we do not honour, with the values (besides null) that ask for
nothing."""


_Asked = TypeVar("_Asked", bound=Fields)


def given_fields(body: bytes) -> dict[str, Any]:
    """The fields of a body that are not null. Raises InvalidRequest if it is no JSON object."""
    return {name: value for name, value in _json_object(body).items() if value is not None}


def checked(
    kind: type[_Asked],
    given: dict[str, Any],
    converted: dict[str, Any],
    neutral: dict[str, tuple[Any, ...]] = NEUTRAL,
) -> _Asked:
    """The request that the fields given make; those in `converted` have been checked already.

    Raises InvalidRequest naming field and value.
    """
    hints = hints_of(kind)
    fields = dict(converted)
    for name, value in given.items():
        if name in converted:
            continue
        if name in hints:
            fields[name] = _convert(kind, name, value)
        elif name in neutral:
            _check_neutral(name, value, neutral[name])
        else:
            raise InvalidRequest(f"{name!r} is not a field of this request", name)
    request = kind(**fields)
    request.check()
    return request


@cache
def hints_of(kind: type[Fields]) -> dict[str, Any]:
    """The annotation of every field, whole."""
    return get_type_hints(kind, include_extras=True)


def refused(kind: type[Fields], name: str, value: Any) -> InvalidRequest:
    """That a field of a request may not have a value."""
    hint = hints_of(kind)[name]
    return InvalidRequest(f"{name} must be {_allowed(hint)}; got {show(value)}", name)


def _json_object(body: bytes) -> dict[str, Any]:
    if not body.strip():
        raise InvalidRequest("the body is empty; it must be a JSON object")
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON in UTF-8: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body must be a JSON object; got {show(value)}")
    return value


def convert(value: Any, hint: Any) -> Any:
    """A value from JSON as annotated; 16.0 is an integer too. Raises msgspec.ValidationError."""
    try:
        return msgspec.convert(value, hint, str_keys=True)
    except msgspec.ValidationError:
        return msgspec.convert(_integral(value), hint, str_keys=True)


def _integral(value: Any, depth: int = 2) -> Any:
    """With integers for the floats that are some, in lists of lists too."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list) and depth:
        return [_integral(one, depth - 1) for one in value]
    return value


def _convert(kind: type[Fields], name: str, value: Any) -> Any:
    try:
        return convert(value, hints_of(kind)[name])
    except msgspec.ValidationError:
        raise refused(kind, name, value) from None


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
        f"{name} = {show(value)} is not supported; "
        + (f"leave it out or send {show(neutral[0])}" if neutral else "leave it out"),
        name,
    )


def show(value: Any) -> str:
    """A value as JSON, cut to what fits a message."""
    if isinstance(value, list | dict) and len(value) > 16:
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    try:
        text = msgspec.json.encode(value).decode()
    except RecursionError:  # it could be read, a few calls further up
        return "a value in too many others"
    return text if len(text) <= 80 else text[:80] + "…"
