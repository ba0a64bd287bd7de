"""Fields that every request for completions may have."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from srm.engine.messages import (
    MAX_BIAS,
    MAX_PENALTY,
    MAX_PRIORITY,
    MAX_TEMPERATURE,
    NAMED,
    REPETITION_PENALTIES,
)
from srm.errors import InvalidRequest
from srm.server.schema.json_parts import TokenId
from srm.server.schema.structured_outputs import ConstrainedRequest
from srm.server.schema.until import MAX_CHOICES
from srm.server.schema.validation import defaults_of, refused

MAX_SCORES = 2_000_000
"""Most log-probabilities of one reply, besides those of the tokens sampled."""
MAX_STOPS = 128
MAX_STOP_LENGTH = 256
MAX_CUT_LENGTH = 250_000
"""Most characters of a text that is longer than the context and to be cut to its last tokens."""
MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512
MAX_BIASES = 1024
MAX_ALLOWED = 2**20
"""Most ids of a list of allowed tokens: more than any vocabulary has."""
MAX_BAD_WORDS = 128
MAX_BAD_WORD_LENGTH = 256

Alternatives = Annotated[
    int,
    Meta(
        ge=-1,
        le=2**31 - 1,
        description="an integer from 0 to the setting max_logprobs; -1: the whole vocabulary",
    ),
]
"""How many there may be the engine says."""
ScoredFrom = Annotated[
    int,
    Meta(
        ge=-(2**31),
        le=2**31 - 1,
        description="a token's place, below 0 from the end; only with prompt_logprobs",
        extra_json_schema={"minimum": -(2**31), "maximum": 2**31 - 1},
    ),
]
Temperature = Annotated[
    float,
    Meta(ge=0, le=MAX_TEMPERATURE, description=f"a number from 0 (greedy) to {MAX_TEMPERATURE:g}"),
]
Probability = Annotated[float, Meta(ge=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, description="an integer of at least 0 (0 or -1: all tokens)")]
Penalty = Annotated[float, Meta(ge=-MAX_PENALTY, le=MAX_PENALTY)]
RepetitionPenalty = Annotated[float, Meta(ge=REPETITION_PENALTIES[0], le=REPETITION_PENALTIES[1])]
Stop = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LENGTH)]
Stops = Annotated[
    Stop | Annotated[list[Stop], Meta(max_length=MAX_STOPS)],
    Meta(
        description=f"a string of 1 to {MAX_STOP_LENGTH} characters, "
        f"or a list of at most {MAX_STOPS} of them"
    ),
]
Metadata = Annotated[
    dict[
        Annotated[str, Meta(max_length=MAX_METADATA_KEY)],
        Annotated[str, Meta(max_length=MAX_METADATA_VALUE)],
    ],
    Meta(
        max_length=MAX_METADATA,
        description=f"an object of at most {MAX_METADATA} strings of at most "
        f"{MAX_METADATA_VALUE} characters, their names of at most {MAX_METADATA_KEY}",
    ),
]
AllowedTokens = Annotated[
    list[TokenId],
    Meta(
        min_length=1,
        max_length=MAX_ALLOWED,
        description=f"a list of 1 to {MAX_ALLOWED} token ids",
        extra={"most_bytes": 4 * 1024 * 1024},
    ),
]
Biases = Annotated[
    dict[TokenId, Annotated[float, Meta(ge=-MAX_BIAS, le=MAX_BIAS)]],
    Meta(
        max_length=MAX_BIASES,
        description=f"an object of at most {MAX_BIASES} token ids, each with a number "
        f"from -{MAX_BIAS:g} to {MAX_BIAS:g}",
    ),
]
NamedTokens = Annotated[
    list[TokenId],
    Meta(
        max_length=MAX_ALLOWED,
        description="a list of different token ids, at most the setting max_logprobs of them",
    ),
]
Seed = Annotated[
    int,
    Meta(
        description="an integer from -2**63 to 2**64 - 1",
        extra_json_schema={"minimum": -(2**63), "maximum": 2**64 - 1},
    ),
]
TruncatedTo = Annotated[
    int, Meta(ge=-1, description="an integer of at least 1, or -1 for the context")
]
StreamInterval = Annotated[
    int, Meta(ge=1, description="an integer of at least 1; only with stream")
]
RequestId = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9._:-]{1,128}\Z",
        description="a string of 1 to 128 of A-Z a-z 0-9 . _ : -",
    ),
]
CacheSalt = Annotated[
    str, Meta(min_length=1, max_length=256, description="a string of 1 to 256 characters")
]
STATE_ID = r"^state_[0-9a-f]{32}\Z"
StateId = Annotated[
    str, Meta(pattern=STATE_ID, description="the id of a state, state_ and 32 hexadecimal digits")
]
MAX_SAVED = 1_024
"""Most states that one request may make."""
Positions = Annotated[
    list[Annotated[int, Meta(ge=1)]],
    Meta(
        max_length=MAX_SAVED,
        description=f"a list of at most {MAX_SAVED} different integers of at least 1",
    ),
]
STREAM_OPTIONS = Meta(
    description="an object with include_usage, continuous_usage_stats and include_obfuscation, "
    "each true or false"
)


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False
    """A last event with the usage of the whole request."""
    continuous_usage_stats: bool = False
    """The usage so far in every event; counts only with `include_usage`."""
    include_obfuscation: bool = False
    """Accepted and not used: events are not padded."""

    @property
    def is_neutral(self) -> bool:
        """Whether it asks for nothing."""
        return not (self.include_usage or self.continuous_usage_stats)


class SamplingRequest(ConstrainedRequest, frozen=True, kw_only=True):
    """The fields that completions and chat completions have in common."""

    model: str | None = None
    """Name of the served model; others are refused."""
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    """Completions of each prompt."""
    temperature: Temperature = 1.0
    """Divides the logits; below 0.0001 is greedy."""
    top_p: Probability = 1.0
    """Keep the fewest likeliest tokens of this total probability, and ties."""
    top_k: TopK = 0
    """Keep this many of the likeliest tokens, and ties."""
    min_p: Probability = 0.0
    """Drop tokens below this fraction of the largest probability."""
    presence_penalty: Penalty = 0.0
    """Subtracted once from the logit of each sampled token."""
    frequency_penalty: Penalty = 0.0
    """Subtracted from a token's logit each time it is sampled."""
    repetition_penalty: RepetitionPenalty = 1.0
    """Divides positive logits of prompt and sampled tokens, multiplies negative ones."""
    logit_bias: Biases = {}
    """Added to these tokens' logits."""
    allowed_token_ids: AllowedTokens | None = None
    """The only tokens that are sampled."""
    bad_words: Annotated[
        list[Annotated[str, Meta(max_length=MAX_BAD_WORD_LENGTH, pattern="[^ ]")]],
        Meta(
            max_length=MAX_BAD_WORDS,
            description=f"a list of at most {MAX_BAD_WORDS} strings of 1 to "
            f"{MAX_BAD_WORD_LENGTH} characters, none of spaces only",
        ),
    ] = []
    """Strings that are not sampled."""
    min_tokens: Annotated[
        int, Meta(ge=0, description="an integer of at least 0, at most max_tokens")
    ] = 0
    """Fewest tokens of a completion."""
    seed: Seed | None = None
    """Makes the samples repeatable."""
    stop: Stops = []
    """The text ends before the first of these."""
    stop_token_ids: Annotated[
        list[TokenId],
        Meta(max_length=MAX_STOPS, description=f"a list of at most {MAX_STOPS} token ids"),
    ] = []
    """A completion ends at any of these."""
    include_stop_str_in_output: bool = False
    """Keep the stop string or token in the text."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    ignore_eos: bool = False
    """Do not end at the end-of-text token."""
    truncate_prompt_tokens: TruncatedTo | None = None
    """Keep only this many tokens of the prompt, by default the last."""
    truncation_side: Literal["left", "right"] = "left"
    """Side that truncate_prompt_tokens cuts: left keeps the last tokens."""
    stream: bool = False
    """Send tokens as server-sent events."""
    stream_options: Annotated[StreamOptions, STREAM_OPTIONS] | None = None
    """Send the usage too, last or in every event."""
    stream_interval: StreamInterval | None = None
    """Fewest tokens of an event, except the first and last."""
    prompt_logprobs_start: ScoredFrom = 0
    """First prompt token that prompt_logprobs scores: -9 scores the last nine."""
    logprob_token_ids: NamedTokens = []
    """With logprobs, score these tokens in each one's place, instead of the likeliest."""
    prompt_logprob_token_ids: NamedTokens = []
    """With prompt_logprobs, the same for the prompt's tokens."""
    return_token_ids: bool = False
    """Add token_ids and prompt_token_ids to choices."""
    return_tokens_as_token_ids: bool = False
    """Write tokens in logprobs as token_id:17."""
    return_weight_versions: bool = False
    """Add weight_versions to choices: which weights made which tokens."""
    receipt: bool = False
    """Add to each choice a receipt, which srm replay makes its tokens again from."""
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    """Of one key's requests, lower values go first."""
    request_id: RequestId | None = None
    """The reply's id; 409 while another request of the key has it."""
    cache_salt: CacheSalt | None = None
    """Only states of prompts with the same salt are used, such as a policy's version."""
    state: StateId | None = None
    """Go on from this state: prompts follow its tokens, and a chat begins with them."""
    refeed: bool = False
    """Feed the tokens of the state, if other weights made it."""
    save_state: bool = False
    """Return a state of each choice, after all its tokens but the last."""
    save_at: Positions = []
    """Return such states of the first so many tokens of prompt and choice, too."""
    user: str | None = None
    """Accepted and not used."""
    safety_identifier: str | None = None
    """Accepted and not used."""
    prompt_cache_key: str | None = None
    """Accepted and not used; all prompts are cached."""
    metadata: Metadata = {}
    """Accepted and not used or returned."""

    @property
    def num_samples(self) -> int:
        """How many completions of each prompt are sampled."""
        return self.n

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def refuse_shown(self) -> None:
        """Raise InvalidRequest for what choices show, where only counts are asked for."""
        if self.returns == "counts":
            for name in _SHOWN_OF_CHOICES:
                value = getattr(self, name)
                is_asked = value is not None and value is not False
                self.refuse_beside({name: is_asked}, 'return = "counts", which has no choices')

    @property
    def needs_versions(self) -> bool:
        """Whether it must be known which weights made which tokens."""
        return self.return_weight_versions or self.receipt

    def check(self) -> None:
        self.refuse_beside({"receipt": self.receipt and self.stream}, "stream")
        for name, named in NAMED.items():
            wanted = getattr(self, name, None)
            if getattr(self, named) and (wanted is None or wanted is False):
                raise InvalidRequest(f"{named} is allowed only with {name}", named)
        if self.prompt_logprobs_start and getattr(self, "prompt_logprobs", None) is None:
            raise InvalidRequest(
                f"prompt_logprobs_start = {self.prompt_logprobs_start} is allowed only with "
                "prompt_logprobs",
                "prompt_logprobs_start",
            )
        self.check_wanted(self.n, self.stream)
        if (source := self.constraint_source()) is not None:
            self.refuse_beside({"ignore_eos": self.ignore_eos}, source.field)
        if self.stream_whole and self.stream_interval is not None:
            self.refuse_beside({"stream_interval": True}, "stream_whole, which sends whole choices")
        asks_for_usage = self.stream_options is not None and not self.stream_options.is_neutral
        for name, is_asked in (
            ("stream_options", asks_for_usage),
            ("stream_interval", self.stream_interval not in (None, 1)),
        ):
            if is_asked and not self.stream:
                raise InvalidRequest(f"{name} is allowed only with stream = true", name)
        if self.truncate_prompt_tokens == 0:
            raise refused(type(self), "truncate_prompt_tokens", 0)
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise refused(type(self), "seed", self.seed)
        if self.refeed and self.state is None:
            raise InvalidRequest("refeed = true needs a state", "refeed")
        if self.state is not None:
            beside = {"truncate_prompt_tokens": self.truncate_prompt_tokens is not None}
            self.refuse_beside(beside, "state")
        if self.save_state or self.save_at:
            self._check_saved("save_at" if self.save_at else "save_state")

    def _check_saved(self, name: str) -> None:
        beside = {
            "stream": self.stream,
            "max_tokens": getattr(self, "max_tokens", None) == 0,
            "return": self.returns != "choices",
        }
        self.refuse_beside(beside, name)
        if len(set(self.save_at)) < len(self.save_at):
            raise refused(type(self), "save_at", self.save_at)
        each, choices = self.save_state + len(self.save_at), self.num_prompts * self.n
        if each * choices > MAX_SAVED:
            raise InvalidRequest(
                f"n = {self.n} of {self.num_prompts} prompts: {name} makes at most {MAX_SAVED} "
                f"states at once, got {each * choices}",
                "n" if choices > 1 else name,
            )


_SHOWN_OF_CHOICES = (
    *("logprobs", "prompt_logprobs", "return_token_ids", "return_weight_versions", "receipt"),
)
"""Fields that say what a choice shows beside its text."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    **{name: (value,) for name, value in defaults_of(SamplingRequest).items() if value is not None},
    "top_k": (0, -1),
    "response_format": ({"type": "text"},),
    "stream_options": (
        {},
        *(
            {"include_usage": usage, "include_obfuscation": padded, "continuous_usage_stats": False}
            for usage in (True, False)
            for padded in (True, False)
        ),
    ),
    "stream_interval": (1,),
    "parallel_tool_calls": (True, False),
    "tools": ([],),
    "tool_choice": ("auto", "none"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "text": ({"format": {"type": "text"}, "verbosity": "medium"}, {}),
    "include": ([],),
    "reasoning": ({}, {"effort": "none", "summary": None, "generate_summary": None}),
    "reasoning_effort": ("none",),
    "thinking": ({"type": "disabled"}, {"type": "adaptive"}),
    "output_config": ({}, {"effort": None, "format": None}),
    "context_management": ([], {"edits": []}),
    "stop_sequences": ([],),
    "chat_template_kwargs": ({},),
    **dict.fromkeys(("documents", "mcp_servers", "token_ids_logprob"), ([],)),
    "modalities": (["text"],),
    "truncation": ("disabled",),
    "verbosity": ("medium",),
    "service_tier": ("auto", "default", "standard_only"),
    "speed": ("standard",),
    "suffix": ("",),
    "best_of": (1,),
    **dict.fromkeys(("length_penalty", "typical_p"), (1,)),
    **dict.fromkeys(("no_repeat_ngram_size", "xtc_probability", "mirostat"), (0,)),
    "thinking_token_budget": (-1,),
    "logprob_start_len": (-1, 0),
    **dict.fromkeys(("top_logprobs", "top_logprobs_num", "routed_experts_prompt_start"), (0,)),
    **dict.fromkeys(
        (
            *("logprobs", "return_logprob", "echo", "continue_final_message"),
            *("keep_states", "background", "use_beam_search", "early_stopping", "watermarking"),
            *("return_packed", "return_token_offsets", "return_prompt_text", "return_token_strs"),
            *("no_stop_trim", "return_hidden_states", "return_text_in_logprobs", "return_bytes"),
            *("return_entropy", "flat_logprobs", "return_routed_experts"),
        ),
        (False,),
    ),
    **dict.fromkeys(
        (
            *("spaces_between_special_tokens", "return_mm_kwargs", "log_metrics", "no_logs"),
            *("separate_reasoning", "stream_reasoning", "include_reasoning", "store"),
        ),
        (True, False),
    ),
    **dict.fromkeys(("extra_args", "custom_params", "sampling_params", "vllm_xargs"), ({},)),
    **dict.fromkeys(("detokenize", "cache_prompt"), (True,)),
    "prompt_cache_retention": ("in_memory", "in-memory", "24h"),
    "prompt_cache_options": ({"mode": "implicit"}, {}),
    "cache_control": tuple(
        {"type": "ephemeral", **ttl} for ttl in ({}, {"ttl": "5m"}, {"ttl": "1h"})
    ),
    **dict.fromkeys(
        (
            *("audio", "prediction", "web_search_options", "moderation", "chat_template"),
            *("previous_response_id", "conversation", "max_tool_calls", "container"),
            *("inference_geo", "diagnostics", "thread", "user_profile_id", "workspace_id"),
            *("kv_transfer_params", "features", "stop_regex", "structural_tag"),
        ),
        (),
    ),
}
"""Fields of any dialect, with the values (besides null) that ask for nothing: the reply is the same
without them. A route that does not have the field takes these values and no others. An object may
lack any of its fields, and have them at null."""
