"""One line of `srm score`: from JSON to token ids, and from the engine's scores to a result.

Prompt and completion are tokenized apart: the completion's tokens are those a model could have
generated behind the prompt.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Annotated, BinaryIO

import msgspec
from msgspec import Meta

from srm.engine.client.client import EngineClient
from srm.engine.messages import Output, Request, SamplingParams, join
from srm.errors import UNDECODABLE, InvalidRequest, RequestError, in_words, not_json_line
from srm.server.reply.scores import LOWEST
from srm.server.text.text import Text

_TokenIds = Annotated[list[Annotated[int, Meta(ge=0, le=2**31 - 1)]], Meta(min_length=1)]


MAX_LINE_BYTES = 32 * 1024 * 1024
"""Most bytes of a line."""


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of an input line."""

    prompt: str | _TokenIds
    completion: str | _TokenIds | None = None
    id: str | int | float | None = None


class LineScore(msgspec.Struct):
    """The result of a line. Log-probabilities are under the model at temperature 1."""

    id: str | int | float
    """The line's own, or its number in the file."""
    tokens: list[str]
    """Texts of the prompt's tokens, then of the completion's."""
    token_ids: list[int]
    token_logprobs: list[float | None]
    """Null for the first token, which nothing comes before."""
    num_prompt_tokens: int
    logprob: float
    """Sum over the completion's tokens, or without a completion over all but the first."""
    is_greedy: bool
    """Whether each of these is the model's likeliest."""


class Failure(msgspec.Struct):
    """Written in place of the result of a line that cannot be scored."""

    id: str | int | float
    error: dict[str, str | None]
    """message, param and code, as over HTTP."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """A line that can be scored."""

    id: str | int | float
    token_ids: bytes  # int32 little-endian, of prompt and completion
    num_prompt_tokens: int
    first_counted: int
    """Index of the first token in the sum; at least 1."""


def next_line(source: BinaryIO) -> bytes:
    """Read the next line; of one that is too long its beginning, which `parse` refuses. It is empty
    at the end of the file."""
    line = source.readline(MAX_LINE_BYTES + 1)
    rest = line
    while len(line) > MAX_LINE_BYTES and rest and not rest.endswith(b"\n"):
        rest = source.readline(MAX_LINE_BYTES)
    return line


def parse(data: bytes, number: int, text: Text) -> Scoring:
    """Parse a line. Raises InvalidRequest if it is not what `_Line` describes, or too long."""
    if len(data) > MAX_LINE_BYTES:
        raise InvalidRequest(f"the line must have at most {MAX_LINE_BYTES} bytes")
    try:
        line = msgspec.json.decode(data, type=_Line)
    except UNDECODABLE as error:
        fault = not_json_line(data) or in_words(error)
        raise InvalidRequest(
            f'not {{"prompt": text or ids, "completion"?: text or ids, "id"?}}: {fault}'
        ) from None
    prompt = _encode("prompt", line.prompt, text)
    completion = b""
    if line.completion is not None:
        completion = _encode("completion", line.completion, text)
    if not prompt:
        raise InvalidRequest("prompt must have at least one token", "prompt")
    num_prompt_tokens = len(prompt) // 4
    return Scoring(
        id=number if line.id is None else line.id,
        token_ids=prompt + completion,
        num_prompt_tokens=num_prompt_tokens,
        first_counted=1 if line.completion is None else num_prompt_tokens,
    )


def _encode(name: str, value: str | list[int], text: Text) -> bytes:
    if isinstance(value, list):
        return array("i", value).tobytes()
    if not text.has_tokenizer:
        raise InvalidRequest(f"{name} must be token ids: this model has no tokenizer", name)
    return text.encode([value], adds_special=name == "prompt")[0]


async def score(client: EngineClient, scoring: Scoring, number: int, text: Text) -> LineScore:
    """Score a line. Raises the RequestError with which the engine refuses it, or EngineError."""
    outputs = [Output("", 0)]
    if len(scoring.token_ids) > 4:
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        request = Request(str(number), scoring.token_ids, params)
        outputs = [output async for output in client.generate(request)]
    for output in outputs:
        if output.finish_reason == "error":
            raise RequestError(output.error or "the model's output was not finite")
    scores = join(outputs)
    logprobs = [max(value, LOWEST) for value in memoryview(scores.logprobs).cast("f")]
    ranks = memoryview(scores.ranks).cast("i")
    token_ids = memoryview(scoring.token_ids).cast("i").tolist()
    return LineScore(
        id=scoring.id,
        tokens=[text.labels[token] for token in token_ids],
        token_ids=token_ids,
        token_logprobs=[None, *logprobs],
        num_prompt_tokens=scoring.num_prompt_tokens,
        logprob=sum(logprobs[scoring.first_counted - 1 :]),
        is_greedy=all(rank == 1 for rank in ranks[scoring.first_counted - 1 :]),
    )


def failure(data: bytes, number: int, error: RequestError) -> Failure:
    """Return the failure of a line, with the line's id if it can be read."""
    try:
        given = msgspec.json.decode(data, type=_Named).id
    except UNDECODABLE:
        given = None
    detail = {"message": error.message, "param": error.param, "code": error.code}
    return Failure(number if given is None else given, detail)


class _Named(msgspec.Struct):
    """The only field of a line that a failure needs."""

    id: str | int | float | None = None
