"""The wire contract between API processes and the engine: msgspec structs, msgpack encoded.

Token ids and log-probabilities travel as little-endian bytes (int32, float32), so that neither side
makes a Python object per token.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, Literal, TypeVar

import msgspec

from srm.errors import (
    ContextTooLong,
    EngineUnavailable,
    IdInUse,
    InvalidRequest,
    NotFound,
    Overloaded,
    RequestError,
    SnapshotError,
    SRMError,
    StepFailed,
    StoreError,
    StoreFull,
    SwapInProgress,
    TimedOut,
    did_you_mean,
)

FinishReason = Literal["stop", "length", "error", "abort"]

Running = Literal["abort", "continue", "drop", "finish", "refeed"]
"""How a change of weights treats requests that run."""

MAX_LOGPROBS = 20  # most alternatives to a token that can be asked for, by default
MAX_TEMPERATURE = 100.0
GREEDY_BELOW = 1e-4  # lower temperatures count as 0: dividing by them would overflow float32
LEAST_TOP_P = 1e-30
"""Smaller `top_p` count as this, which float32 has; it keeps the likeliest token alone."""
MAX_PENALTY = 2.0  # largest presence and frequency penalty, of either sign
REPETITION_PENALTIES = (0.01, 100.0)
"""Smallest and largest repetition penalty, within which logits stay finite."""
MAX_BIAS = 100.0  # largest bias of a token, of either sign
PROMPT = -1  # index of the Outputs that are about the prompt and not about a completion of it


_Made = TypeVar("_Made")


class Spelled(msgspec.StructMeta):
    """Metaclass of structs that users make: refuses an unknown argument with the nearest field.
    Returning the class's own type is what has pyright check the fields."""

    def __call__(cls: type[_Made], *args: Any, **fields: Any) -> _Made:
        names = cls.__struct_fields__  # type: ignore[attr-defined]  # a metaclass of structs alone
        for name in fields.keys() - names:
            near = did_you_mean(name, names)
            raise TypeError(f"{name!r} is not a field of {cls.__name__}{near}")
        return super().__call__(*args, **fields)  # type: ignore[misc, no-any-return]


class SamplingParams(
    msgspec.Struct,
    metaclass=Spelled,
    frozen=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
):
    """How to sample the completions of one prompt.

    Order: biases, penalties (repetition, frequency, presence), bans; then temperature, min_p,
    top_k, top_p. Together the bans must leave a token that may always be sampled.
    """

    max_tokens: int = 16
    """Longest completion in tokens; cut to what the context has left. At least 1, or 0 to do
    nothing but score a prompt of 2 tokens or more."""
    n: int = 1
    """Completions of this prompt, at least 1. Sample i draws from the random stream (seed, i)."""
    temperature: float = 1.0
    """Logits are divided by it, at most MAX_TEMPERATURE; 0, and below GREEDY_BELOW, is greedy."""
    top_k: int = 0
    """Keep the k most likely tokens (ties with the k-th are kept); 0 keeps all."""
    top_p: float = 1.0
    """Keep the fewest most likely tokens whose probabilities reach it; 1 keeps all, 0 the most
    likely one (ties are kept)."""
    min_p: float = 0.0
    """Drop tokens less likely than this fraction of the most likely one; 0 keeps all."""
    seed: int = 0
    """Seed of the random stream, 0 … 2**64 - 1; drawn by the server if the caller gives none."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion, besides the end-of-text token."""
    ignore_eos: bool = False
    """Do not end at the end-of-text token."""
    min_tokens: int = 0
    """Ban the end-of-text token and `stop_token_ids` until so many tokens were sampled; at most
    `max_tokens`. The end-of-text token also with `ignore_eos`."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token sampled so far, at most MAX_PENALTY."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time it was sampled, at most MAX_PENALTY."""
    repetition_penalty: float = 1.0
    """Logits of tokens of the prompt or sampled so far are divided by it if positive, else
    multiplied; within REPETITION_PENALTIES."""
    logit_bias: dict[int, float] = {}
    """Added to the logits of these tokens; at most MAX_BIAS."""
    allowed_token_ids: tuple[int, ...] = ()
    """If any are given, all other tokens are banned."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences, each of whose last token is banned where the others were just sampled."""
    constraint: str = ""
    """What a completion may be: a grammar in llguidance's JSON; empty: anything. Tokens it does
    not allow are banned, the end-of-text token where it is not complete."""
    logprobs: int | None = None
    """Send each sampled token's log-probability, and this many of the likeliest tokens in its
    place, 0 … the setting max_logprobs. The engine keeps no alternatives: more than 0 needs
    `emit` = "delta" or "tokens"."""
    prompt_logprobs: int | None = None
    """The same for each prompt token but the first, in Outputs of index PROMPT."""
    prompt_logprobs_start: int = 0
    """First prompt token that is scored; below 0 it counts from the end. What is before it may
    begin from a kept state."""
    logprob_token_ids: tuple[int, ...] = ()
    """If any are given, send the log-probabilities of these tokens in each sampled token's place,
    in this order, and not of the likeliest; each once, at most max_logprobs. `logprobs` is how
    many they are."""
    prompt_logprob_token_ids: tuple[int, ...] = ()
    """The same for each prompt token that is scored; `prompt_logprobs` is how many they are."""


NAMED = {"logprobs": "logprob_token_ids", "prompt_logprobs": "prompt_logprob_token_ids"}
"""Numbers of alternatives, and what names them."""
_Asked = TypeVar("_Asked", bound=msgspec.Struct)


def count_alternatives(asked: _Asked, vocab_size: int) -> _Asked:
    """Return SamplingParams, or a request with the same fields of NAMED, with the number of
    alternatives in place of -1, which is all tokens, and beside tokens that are named."""
    counts = {}
    for name, named in NAMED.items():
        if token_ids := getattr(asked, named):
            counts[name] = len(token_ids)
        elif getattr(asked, name) == -1:
            counts[name] = vocab_size
    return msgspec.structs.replace(asked, **counts) if counts else asked


MIN_WEIGHT, MAX_WEIGHT = 1e-3, 1e3
"""Range of a share's weight: even 10,000 of the largest leave the smallest a countable part."""


MAX_PRIORITY = 1_000
"""Largest priority and precedence of a request, of either sign."""


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="request"):
    """One prompt and the `params.n` completions wanted of it."""

    id: str
    prompt_token_ids: bytes
    """int32 little-endian, at least one token."""
    params: SamplingParams
    priority: int = 0
    """Higher is served first, whoever else waits: for the server to say, never for a client."""
    precedence: int = 0
    """Among the requests of its share and priority higher is served first; to others it is all the
    same."""
    emit: Literal["final", "delta", "tokens"] = "final"
    """`final` sends each completion once, when done; `delta` and `tokens` send new tokens after
    each step, as an Output a completion or all together as Tokens. Scores of the prompt, and the
    ends of completions that never began to sample, are Outputs in any case."""
    stream: int = 0
    """With `emit` = "tokens": completion 0's stream number, 0 … 2**40 - n; the others' follow."""
    share: str = ""
    """Name of its share: waiting shares of a priority get slots in turn, so that none starves."""
    weight: float = 1.0
    """Weight of its share when slots are divided, MIN_WEIGHT … MAX_WEIGHT; the last sent counts."""
    durable: bool = False
    """Its caller sends it again under this id until it has been answered: its sequences go on
    where a snapshot, or the caller's predecessor, left them. Not with `emit` = "tokens"."""
    samples: bytes = b""
    """int32 little-endian, `params.n` numbers that ascend: where several engines share a request,
    completion i here is sample `samples[i]` of it, which decides its random stream and its stream
    number. Empty: sample i."""
    name: str = ""
    """The name that its client gave it, for `EndRequests`; other requests may have the same one."""
    salt: str = ""
    """Kept states of prompts are only used among requests of the same salt."""
    state: bytes = b""
    """float32 little-endian, the state after the first `state_length` tokens of the prompt, which
    are then not fed. It is not used once the weights are not those of `state_of` any more."""
    state_length: int = 0
    """Number of these tokens; 0: no state is given."""
    state_of: str = ""
    """Fingerprint of the weights that made it."""
    returns_state: bool = False
    """Send the state after all tokens of the prompt but the last, as an Output of index PROMPT, and
    sample nothing: n must be 1 and `max_tokens` 0."""
    keeps_ends: bool = False
    """Keep the state after all tokens but the last of each completion that ends by its length or at
    one of `stop_token_ids`, as those of prompts are kept: what goes on from it feeds one token."""
    first_wave: int | None = None
    """So many completions, the first ones, may start until a StartSamples lets more start: for who
    may soon want no more of them. None: all start as soon as there are slots."""


def begin_from(state: bytes, length: int, of: str, salt: str = "") -> dict[str, Any]:
    """Return the fields of a Request that begins from a state of its first `length` tokens, of the
    weights `of`, in place of its `salt`. Other prompts do not begin from what it leaves, since the
    state is only its giver's word."""
    own = f"{salt}\n{blake2b(state, digest_size=16).hexdigest()}"
    return {"state": state, "state_length": length, "state_of": of, "salt": own}


class Abort(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="abort"):
    """Forget the request; no further Output is sent for it. Unknown ids are ignored."""

    id: str
    is_counted: bool = False
    """Answer with a Done whose `tokens` counts what its completions that ran had sampled."""


class StopSamples(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="stop_samples"):
    """End these completions of a request and free their slots; nothing more is sent of them.

    Ended ones, those without a slot and unknown ids are ignored. With nothing left, it is over.
    """

    id: str
    indices: bytes
    """int32 little-endian, each 0 … n - 1."""
    cut: int | None = None
    """End every completion from this index on too, started or not: none of them starts any more."""


class StartSamples(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="start_samples"):
    """Let completions of a request start, whose Request held them back; unknown ids are ignored."""

    id: str
    below: int
    """Those before this index, and no fewer than before."""


class ControlMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message that asks for no completion. Its reply has its id."""

    id: str
    """Id of this message, which no running request has."""


class TakeSnapshot(ControlMessage, frozen=True, tag="take_snapshot"):
    """Write the progress of durable requests to disk; answered with a Done or a Refusal."""


class LoadWeights(ControlMessage, frozen=True, tag="load_weights"):
    """Go on with other weights of the same configuration. Answered with a Done, or a Refusal: then
    nothing has changed."""

    path: str
    """A model folder, absolute."""
    running: Running = "finish"
    """How running sequences are treated. `continue`: they go on from their states; `refeed`: they
    are fed their tokens again, and go on; `drop`: all requests end with an error; `abort`: all but
    durable ones end with their tokens so far, as by EndRequests; `finish`: nothing starts until
    they have ended."""
    is_staged: bool = False
    """Of several engines, all change or none does: the Done says that this one can, and with which
    version, and it does when PutWeights comes. Until then an Abort of this id drops the change, and
    so does that its sender is gone, or has said no HoldWeights for a while."""
    label: str = ""
    """The trainer's own name of these weights."""
    within: str = ""
    """Folder that links in it may not lead outside of; empty: the model folder itself."""


class HoldWeights(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="hold_weights"):
    """Keep what is staged: its sender still waits for others. Not answered."""

    id: str
    """That of the LoadWeights."""


class PutWeights(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="put_weights"):
    """Put weights to use that are staged. Answered with a Done, or a Refusal if they are not."""

    id: str
    """That of the LoadWeights."""


class Pause(ControlMessage, frozen=True, tag="pause"):
    """Make no step until Resume: sequences stay where they are, and new ones wait. Answered with a
    Done once no step is under way, or a Refusal while a change of weights waits for what runs."""

    lease_s: float
    """Seconds without a Pause, LoadWeights or PutWeights after which steps are made again."""
    refeeds: bool = False
    """Whether weights that are changed meanwhile with `continue` are changed with `refeed`."""
    waits: bool = False
    """Whether what runs ends first, and nothing else begins. The Done comes when all has ended, or
    a Refusal when steps are made again before."""


class Resume(ControlMessage, frozen=True, tag="resume"):
    """Make steps again. Answered with a Done, also where there was no pause."""


class EndRequests(ControlMessage, frozen=True, tag="end_requests"):
    """End what runs and waits of some requests, each completion with its tokens so far and the
    reason `abort`. Answered with a Done that counts them; none is no error."""

    names: frozenset[str] | None = None
    """`Request.name` of those that are meant; None: all. Durable ones never are."""
    share: str = ""
    """Their `Request.share`, where there are names."""


class DropPrefixes(ControlMessage, frozen=True, tag="drop_prefixes"):
    """Forget the kept states of prompts: later prompts are fed whole. Answered with a Done."""


class ReadSample(ControlMessage, frozen=True, tag="read_sample"):
    """Say which tokens a running sample has, and keep the state before the last of them for what
    goes on from there. Answered with a Done that has them, or a Refusal where none such runs."""

    of: str
    """Id of its request, which several engines may share; or its name and `-` and what this id has
    behind its last `-`, the number of a prompt."""
    index: int
    """Which of the request's samples, also where several engines share it."""
    share: str
    """Its `Request.share`."""


HEARTBEAT_S = 1.0
"""How often a client sends a Hello."""


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="hello"):
    """First message of a client, and its heartbeat; answered with a Status."""

    id: str = ""
    """Id of this message, if the Status is to be followed by a Done of it."""


class Output(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """New tokens of one completion. A set `finish_reason` makes it the completion's last.

    With index PROMPT: the tokens of the prompt that are scored, each once and in order, as they
    are; all of them come before any completion's. Arrays are little-endian.
    """

    id: str
    index: int
    """Which of the request's completions, 0 … n - 1, or PROMPT."""
    token_ids: bytes = b""
    """int32[tokens]; includes the stop token that ended the completion."""
    logprobs: bytes = b""
    """float32[tokens], when asked for: log-probability under the model's distribution after
    biases, penalties, bans and temperature (before top-k, top-p and min-p); temperature 0 reads as
    1. The prompt's is the model's own, of temperature 1."""
    ranks: bytes = b""
    """int32[tokens], for the prompt and with alternatives: 1 is the likeliest, ties go by id."""
    top_ids: bytes = b""
    """int32[tokens, k] where k alternatives were asked for: the likeliest tokens in each one's
    place, the likeliest first, ties by id; -1 where the vocabulary has no more. Or those named."""
    top_logprobs: bytes = b""
    """float32[tokens, k]: log-probabilities of `top_ids`, under the same distribution."""
    versions: bytes = b""
    """int32[tokens] version of the weights that made each, where they are not all the one that the
    message names."""
    finish_reason: FinishReason | None = None
    error: str | None = None
    """Why, when `finish_reason` is "error"."""
    cached_tokens: int = 0
    """Prompt tokens that were not fed, since their state was cached; set for each completion."""
    first_version: int = 0
    """Version of the weights that the request's first completion began with, where that is not the
    one that the message names."""
    state: bytes = b""
    """float32[state_width], with index PROMPT, where `returns_state` asks for it; empty after no
    tokens."""


_PER_TOKEN = ("token_ids", "logprobs", "ranks", "top_ids", "top_logprobs", "versions")
"""Arrays of an Output with as much for each of its tokens."""


def join(outputs: list[Output]) -> Output:
    """Join several Outputs of one index, in order, into one."""
    if len(outputs) == 1:
        return outputs[0]
    joined = {name: b"".join(getattr(output, name) for output in outputs) for name in _PER_TOKEN}
    return msgspec.structs.replace(outputs[-1], **joined)


def part_of(output: Output, begin: int, end: int) -> Output:
    """Return the Output with its tokens begin … end - 1 alone."""
    total = len(output.token_ids) // 4
    if end - begin == total:
        return output
    arrays = {name: getattr(output, name) for name in _PER_TOKEN}
    sizes = {name: len(data) // total for name, data in arrays.items()}
    part = {name: data[sizes[name] * begin : sizes[name] * end] for name, data in arrays.items()}
    return msgspec.structs.replace(output, **part)


REASONS: tuple[FinishReason | None, ...] = (None, "stop", "length", "error", "abort")
"""Finish reasons, by their number in Tokens."""


class Outputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="outputs"):
    """Everything one step has for one API process. The Outputs come before the tokens."""

    outputs: list[Output]
    tokens: list[bytes] | None = None
    """A step's `engine.steps.tokens.Tokens` of requests with `emit` = "tokens", as `to_wire` makes
    them. An owner is `Request.stream` plus the completion's index."""
    cached: list[tuple[int, int]] = []
    """`Request.stream` and cached prompt tokens, if any, of requests that begin to sample."""
    weights_version: int = 1
    """Version of the weights that the step used."""


class Refusal(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="refusal"):
    """The request was not accepted, or the engine can no longer finish it. Ends all of it."""

    id: str
    code: str
    """An SRMError code."""
    message: str
    param: str | None = None
    retry_after_s: int | None = None
    tokens: int = 0
    """Tokens that its completions had sampled."""


def refusal(request_id: str, error: SRMError, tokens: int = 0) -> Refusal:
    """Make the Refusal that reports this error."""
    return Refusal(
        id=request_id,
        code=error.code,
        message=error.message,
        param=getattr(error, "param", None),
        retry_after_s=getattr(error, "retry_after_s", None),
        tokens=tokens,
    )


_ERRORS: dict[str, type[SRMError]] = {
    kind.code: kind
    for kind in (
        *(InvalidRequest, ContextTooLong, NotFound, IdInUse, SwapInProgress),
        *(EngineUnavailable, SnapshotError, StepFailed, StoreError, StoreFull, TimedOut),
    )
}


def error_of(refusal: Refusal) -> SRMError:
    """Make the error that the Refusal reports."""
    if refusal.code == Overloaded.code:
        return Overloaded(refusal.message, refusal.retry_after_s or 1)
    kind = _ERRORS.get(refusal.code, SRMError)
    if issubclass(kind, RequestError):
        return kind(refusal.message, refusal.param)
    return kind(refusal.message)


class Done(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="done"):
    """The message of this id, which is not a request, has been carried out."""

    id: str
    detail: dict[str, str | int | float] = {}
    """Facts about the result, by name."""
    token_ids: bytes = b""
    """int32 little-endian, of a sample that was to be read: its prompt's and its own."""


class Status(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="status"):
    """The engine's model, load and progress."""

    state: Literal["ready", "draining"]
    num_slots: int
    running: int
    """Sequences that hold a slot."""
    waiting: int
    """Sequences accepted and not yet started, but for those that no first wave lets start yet."""
    max_waiting: int
    """Most of these; a caller that asks for more at once can never be served."""
    retry_after_s: int
    """Seconds until those that wait now will have started, at the recent rate; 1 … 120."""
    steps: int
    """Steps since the engine started."""
    n_ctx: int
    vocab_size: int
    fingerprint: str
    """Fingerprint of config and weights, hexadecimal."""
    weights_version: int = 1
    """Number of weights put to use so far, the first ones included."""
    sampled: int = 0
    """Tokens sampled since the engine started, with those that snapshots had."""
    arithmetic: str = ""
    """Device, dtype and a GPU's product, such as "cpu float32" and "gpu bfloat16 own"."""
    changing: str = ""
    """Folder of the weights that a change is under way to; empty: none is."""
    held_s: float = 0.0
    """Seconds for which nothing has started because of it; 0 where things start."""
    paused: bool = False
    """Whether no step is made, because of a Pause."""
    label: str = ""
    """The trainer's own name of the weights in use; empty: it gave none."""
    max_logprobs: int = MAX_LOGPROBS
    """Most alternatives to a token that may be asked for."""


AboutWeights = LoadWeights | HoldWeights | PutWeights
Control = Pause | Resume | EndRequests | DropPrefixes | ReadSample
AboutRequest = Request | Abort | StopSamples | StartSamples
ToEngine = AboutRequest | TakeSnapshot | AboutWeights | Hello | Control
FromEngine = Outputs | Refusal | Done | Status
