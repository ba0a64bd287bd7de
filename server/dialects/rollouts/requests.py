"""Bodies of the two dialects' rollout requests, as the CompletionRequest that they mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Raw

from srm.engine.messages import NAMED
from srm.errors import InvalidRequest
from srm.server.elsewhere import FIELDS
from srm.server.schema.completion_request import CompletionRequest
from srm.server.schema.json_parts import (
    TokenId,
    TokenIds,
    fields_of,
    first_byte,
    first_item_byte,
    prompts_of,
)
from srm.server.schema.sampling_fields import (
    NEUTRAL,
    STREAM_OPTIONS,
    CacheSalt,
    NamedTokens,
    RequestId,
    StateId,
    StreamOptions,
)
from srm.server.schema.until import MAX_CHOICES
from srm.server.schema.validation import (
    Fields,
    allowed,
    check_neutral,
    checked,
    given_fields,
    ids_of,
    naming,
    not_null,
    reading,
    require,
    show,
)

_PARAMS = Meta(description="an object with sampling parameters")
SamplingObject = Annotated[dict[str, Any], _PARAMS]
_OF_BOTH = (
    "n temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty seed "
    "stop stop_token_ids ignore_eos skip_special_tokens logit_bias"
).split()
VLLM_PARAMS = {
    **{name: name for name in _OF_BOTH},
    **{
        name: name
        for name in (
            "max_tokens min_tokens logprobs prompt_logprobs prompt_logprobs_start bad_words "
            "allowed_token_ids include_stop_str_in_output truncate_prompt_tokens "
            "structured_outputs logprob_token_ids"
        ).split()
    },
}
SGLANG_PARAMS = {
    **{name: name for name in (*_OF_BOTH, "regex", "ebnf", "json_schema")},
    **{"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"},
    **{"no_stop_trim": "include_stop_str_in_output"},
}
"""Sampling parameters, each with the name that it has in completions."""
TOKENS_NEUTRAL = {
    **NEUTRAL,
    **{"detokenize": (True, False), "output_kind": (0, 1, 2), "add_special_tokens": (True, False)},
}
"""NEUTRAL, where prompts are token ids, and so are completions."""
GENERATE_NEUTRAL = {**NEUTRAL, "add_special_tokens": (True,)}
"""NEUTRAL, of POST /generate."""
DEFAULT_NEW_TOKENS = 128
"""Most tokens of a completion by SGLang's default."""


class TokensRequest(Fields, frozen=True, kw_only=True):
    """Body of POST /inference/v1/generate, checked."""

    token_ids: bytes | None = None
    """The prompt, as token ids; with `state`, what follows it."""
    model: str | None = None
    """Name of the served model; others are refused."""
    sampling_params: SamplingObject | None = None
    """How to sample, by vLLM's names; `max_tokens` is 16 by default."""
    stream: bool = False
    """Send tokens as server-sent events."""
    stream_options: Annotated[StreamOptions, STREAM_OPTIONS] | None = None
    """Send the usage too, last or in every event."""
    request_id: RequestId | None = None
    """The reply's id, by which /abort_requests ends it."""
    cache_salt: CacheSalt | None = None
    """Only states of prompts with the same salt are used, such as a policy's version."""
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0
    """Of one key's requests, lower values go first."""
    state: StateId | None = None
    """Go on from this state."""
    refeed: bool = False
    """Feed the tokens of the state, if other weights made it."""


def parse_tokens(body: bytes) -> CompletionRequest:
    """Read the body of POST /inference/v1/generate. Raises InvalidRequest naming field and
    value."""
    given = given_fields(body, TokensRequest, TOKENS_NEUTRAL)
    if "state" not in given:
        require(given, "token_ids", "a list of token ids")
    params = _params(given, VLLM_PARAMS, TOKENS_NEUTRAL)
    converted: dict[str, Any] = {**params.own}
    if "token_ids" in given:
        converted["token_ids"] = ids_of(given, "token_ids")
    asked = checked(TokensRequest, given, converted, TOKENS_NEUTRAL)
    named = params.given.get("logprob_token_ids", Raw(b"[]"))
    scored = {"logprobs": Raw(b"0")} if first_item_byte(named) not in (b"", b"]") else {}
    prompt = {"prompt": [asked.token_ids or b""], "state": asked.state, "refeed": asked.refeed}
    request = checked(CompletionRequest, scored | params.given, prompt, TOKENS_NEUTRAL)
    return msgspec.structs.replace(
        request,
        model=asked.model,
        stream=asked.stream,
        stream_options=asked.stream_options,
        request_id=asked.request_id,
        cache_salt=asked.cache_salt,
        priority=asked.priority,
        return_token_ids=True,
        return_weight_versions=True,
        return_packed=not request.stops,  # without stop strings no text is made
    )


_ONE_OR_MORE = "token ids, or a list of such lists; none empty"
TEXT_FORMS = (
    Annotated[str, Meta(description="a string, or a list of strings that is not empty")],
    Annotated[list[str], Meta(min_length=1)],
)
INPUT_FORMS = (
    Annotated[list[TokenId], Meta(min_length=1, description=_ONE_OR_MORE)],
    Annotated[list[TokenIds], Meta(min_length=1)],
)
"""Types that `text` and `input_ids` may have."""


class GenerateRequest(Fields, frozen=True, kw_only=True):
    """Body of POST /generate, checked. It has `text` or `input_ids`."""

    text: list[str] | None = None
    """One prompt or several, as text; with `state`, what follows it."""
    input_ids: list[bytes] | None = None
    """The same as token ids."""
    sampling_params: SamplingObject | None = None
    """How to sample, by SGLang's names; `max_new_tokens` is 128 by default."""
    return_logprob: bool = False
    """Return log-probabilities of the tokens sampled."""
    top_logprobs_num: Annotated[
        int,
        Meta(ge=0, le=2**31 - 1, description="an integer from 0 to the setting max_logprobs"),
    ] = 0
    """With `return_logprob`, return so many of the likeliest tokens in the place of each."""
    token_ids_logprob: NamedTokens = []  # noqa: RUF012 - msgspec copies it
    """With `return_logprob`, return the scores of these tokens in place of the likeliest."""
    logprob_start_len: Annotated[
        int, Meta(ge=-1, le=2**31 - 2, description="a place in the prompt, or -1")
    ] = -1
    """With `return_logprob`, return scores of the prompt's tokens after this one; -1: none."""
    stream: bool = False
    """Stream server-sent events, each with the whole completion so far."""
    rid: RequestId | None = None
    """The reply's id, by which /abort_request ends it."""
    model: str | None = None
    """Name of the served model; others are refused."""
    state: StateId | None = None
    """Go on from this state."""
    refeed: bool = False
    """Feed the tokens of the state, if other weights made it."""

    def check(self) -> None:
        asked = {
            "top_logprobs_num": self.top_logprobs_num != 0,
            "token_ids_logprob": bool(self.token_ids_logprob),
            "logprob_start_len": self.logprob_start_len > 0,
        }
        for name, is_asked in asked.items():
            if is_asked and not self.return_logprob:
                raise InvalidRequest(f"{name} is allowed only with return_logprob = true", name)
        if self.token_ids_logprob and self.top_logprobs_num:
            raise InvalidRequest(
                "token_ids_logprob does not go with top_logprobs_num: send two requests",
                "token_ids_logprob",
            )


class AskedToGenerate(NamedTuple):
    """What a body of POST /generate means."""

    request: CompletionRequest
    names: dict[str, str]
    """Its fields and parameters by those of completions, where these have other names."""
    is_list: bool
    """Whether that is a list of prompts, maybe of one."""


def parse_generate(body: bytes) -> AskedToGenerate:
    """Read the body of POST /generate. Raises InvalidRequest naming field and value."""
    given = given_fields(body, GenerateRequest, GENERATE_NEUTRAL)
    names_given = given.keys() & {"text", "input_ids"}
    if len(names_given) == 2 or not names_given | given.keys() & {"state"}:
        got = "both" if names_given else "neither"
        raise InvalidRequest(f"one of text and input_ids must be given; got {got}", "input_ids")
    name = "text" if "text" in given else "input_ids"
    prompts, is_list = _prompts(name, given[name]) if names_given else ([b""], False)
    params = _params(given, SGLANG_PARAMS, GENERATE_NEUTRAL)
    asked = checked(GenerateRequest, given, {name: prompts, **params.own}, GENERATE_NEUTRAL)
    longest = {} if "max_tokens" in params.given else {"max_tokens": DEFAULT_NEW_TOKENS}
    converted: dict[str, Any] = {"prompt": prompts, **longest}
    converted |= {"state": asked.state, "refeed": asked.refeed}
    if asked.return_logprob and asked.logprob_start_len >= 0:
        converted["prompt_logprobs"] = asked.top_logprobs_num
        converted["prompt_logprob_token_ids"] = asked.token_ids_logprob
        converted["prompt_logprobs_start"] = asked.logprob_start_len + 1
    names = {ours: theirs for theirs, ours in SGLANG_PARAMS.items() if ours not in _OF_BOTH}
    names |= {"prompt": name, "logprobs": "top_logprobs_num", "request_id": "rid", **params.names}
    names |= {"prompt_logprobs": "top_logprobs_num", "prompt_logprobs_start": "logprob_start_len"}
    names |= dict.fromkeys(NAMED.values(), "token_ids_logprob")
    with naming(names):
        request = checked(CompletionRequest, params.given, converted, GENERATE_NEUTRAL)
        changed = msgspec.structs.replace(
            request,
            model=asked.model,
            stream=asked.stream,
            request_id=asked.rid,
            logprobs=asked.top_logprobs_num if asked.return_logprob else None,
            logprob_token_ids=asked.token_ids_logprob,
            return_token_ids=True,
            return_weight_versions=True,
        )
        changed.check()
    return AskedToGenerate(changed, names, is_list)


def _prompts(name: str, value: Raw) -> tuple[list[str] | list[bytes], bool]:
    what = "a string or a list of strings" if name == "text" else "token ids or lists of them"
    with reading(name, value, f"be {what}, none empty"):
        prompts = prompts_of(value, MAX_CHOICES)
        if isinstance(prompts[0], str) != (name == "text"):
            raise msgspec.ValidationError
    of_lists = b'"' if name == "text" else b"["
    return prompts, first_byte(value) == b"[" and first_item_byte(value) == of_lists


class _Params(msgspec.Struct):
    given: dict[str, Raw]
    own: dict[str, Any]
    """The field of the body that they were in, as checked."""
    names: dict[str, str]
    """What they are called there, by their names in completions."""


def _params(
    given: dict[str, Raw],
    names: Mapping[str, str],
    neutral: Mapping[str, tuple[Any, ...]],
) -> _Params:
    """Return the sampling parameters of a body by their names in completions."""
    value = given.get("sampling_params")
    if value is None:
        return _Params({}, {}, {})
    with reading("sampling_params", value, f"be {allowed(SamplingObject)}"):
        params = not_null(fields_of(value))
    renamed: dict[str, Raw] = {}
    called: dict[str, str] = {}
    for name, param in params.items():
        if name not in names:
            if name not in neutral:
                instead = FIELDS.get(name, f"it is none of {', '.join(names)}")
                message = f"sampling_params has {show(name)}: {instead}"
                raise InvalidRequest(message, "sampling_params")
            check_neutral(name, param, neutral[name], {})
            continue
        ours = names[name]
        if other := called.get(ours):
            raise InvalidRequest(f"{name} and {other} are the same parameter: send one", name)
        renamed[ours], called[ours] = param, name
    return _Params(renamed, {"sampling_params": None}, called)
