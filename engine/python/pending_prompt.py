"""Prompts of the Python API: from what a caller gives to requests, from Outputs to results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from srm.engine.messages import PROMPT, Output, Request, SamplingParams, join
from srm.engine.python.request_output import Completion, Decode, Generated, token_scores
from srm.engine.python.tokenizer import FolderTokenizer
from srm.engine.steps.batch import I32
from srm.errors import InvalidRequest, RequestError, show_value

Prompt = str | Sequence[int] | npt.NDArray[np.integer[Any]]  # a text, or token ids
_AT_ONCE = 64  # prompts that are read and tokenized together


@dataclass(slots=True, eq=False)
class PendingPrompt:
    """A prompt whose completions are still to come."""

    number: int
    request: Request
    unfinished: int
    parts: dict[int, list[Output]] = field(default_factory=dict)

    def add_output(self, output: Output, decode: Decode) -> Completion | None:
        """Add an Output; return the completion that it ends, if it does."""
        self.parts.setdefault(output.index, []).append(output)
        if output.finish_reason is None:
            return None
        self.unfinished -= 1
        whole = join(self.parts.pop(output.index))
        is_scored = self.request.params.logprobs is not None
        return Completion(
            prompt=self.number,
            index=whole.index,
            token_ids=np.frombuffer(whole.token_ids, np.int32),
            finish_reason=output.finish_reason,
            scores=token_scores(whole) if is_scored else None,
            decode=decode,
        )

    def generated(self, completions: list[Completion]) -> Generated:
        """Return the prompt's result, once nothing is unfinished."""
        scores = self.parts.get(PROMPT)
        return Generated(
            prompt_token_ids=np.frombuffer(self.request.prompt_token_ids, np.int32),
            completions=sorted(completions, key=lambda completion: completion.index),
            prompt_scores=token_scores(join(scores)) if scores else None,
        )


def in_turn(
    given: Iterator[tuple[Prompt, SamplingParams]],
    tokenizer: FolderTokenizer,
    before: I32 | None = None,
    **fields: Any,
) -> Iterator[PendingPrompt]:
    """Yield the prompts, behind the tokens `before`, as requests with these `fields`. Raises
    InvalidRequest for anything that is not a prompt."""
    first, head = 0, b"" if before is None else before.astype("<i4").tobytes()
    while some := list(islice(given, _AT_ONCE)):
        for number, (prompt, _) in enumerate(some, first):
            try:
                prompt.encode() if isinstance(prompt, str) else None
            except UnicodeEncodeError:
                raise InvalidRequest(
                    f"prompt {number} must be Unicode, got half a surrogate pair: "
                    f"{show_value(prompt)}",
                    "prompts",
                ) from None
        texts = [prompt for prompt, _ in some if isinstance(prompt, str)]
        encoded = iter(tokenizer.encode(texts, adds_special=not head) if texts else ())
        for number, (prompt, params) in enumerate(some, first):
            ids = next(encoded) if isinstance(prompt, str) else prompt
            request = Request(
                id=str(number),
                prompt_token_ids=head + _as_bytes(ids, number),
                params=params,
                emit="delta" if params.logprobs else "final",
                **fields,
            )
            yield PendingPrompt(number, request, params.n)
        first += len(some)


def _as_bytes(token_ids: Any, number: int) -> bytes:
    try:
        ids = np.asarray(token_ids)
    except (ValueError, TypeError, OverflowError):  # lists of unequal length
        ids = np.zeros((1, 1))
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
        raise InvalidRequest(
            f"prompt {number} must be a text or a list of token ids, got {show_value(token_ids)}",
            "prompts",
        )
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < 2**31:
        raise InvalidRequest(f"prompt {number} has ids beyond 0 … 2**31 - 1", "prompts")
    return ids.astype("<i4").tobytes()


@contextmanager
def naming(asked: PendingPrompt) -> Iterator[None]:
    """Have a RequestError of the block name the prompt."""
    try:
        yield
    except RequestError as error:
        error.message = f"prompt {asked.number}: {error.message}"
        error.args = (error.message,)
        raise
