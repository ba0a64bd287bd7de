"""Log-probabilities as replies show them: of a text's tokens, and of a prompt's.

Numbers are the engine's float32 and the same wherever a token appears; only minus infinity, which
JSON does not have, becomes LOWEST. Knows no requests: how many alternatives are shown, and how a
token is named, is said by the caller.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec
from msgspec import Raw

from engine.messages import Output
from server.replies import Logprobs, PromptLogprob
from server.sample import Delta
from server.text import Text

LOWEST = -9999.0

Name = Callable[[int], str]


class _Scored(NamedTuple):
    """A token, and the likeliest ones in its place, the likeliest first."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


def naming(text: Text, as_ids: bool) -> Name:
    """How tokens are written: as their text, or as `token_id:17`."""
    return _id_name if as_ids else text.labels.__getitem__


def of_delta(delta: Delta, alternatives: int, name: Name, echoed: Logprobs | None) -> Logprobs:
    """Of the tokens that are new, behind those of the prompt where it is echoed."""
    scored = _scored(delta, alternatives)
    new = _logprobs(scored, name)
    before = echoed or Logprobs([], [], [], [])
    return Logprobs(
        tokens=before.tokens + new.tokens,
        token_logprobs=before.token_logprobs + new.token_logprobs,
        top_logprobs=before.top_logprobs + new.top_logprobs,
        text_offset=delta.text_offset,
    )


def of_prompt(first: int, rest: Output, alternatives: int, name: Name) -> Logprobs:
    """Of a whole prompt, but for its offsets: its first token, and the scores of the others."""
    found = _logprobs(_scored(rest, alternatives), name)
    return Logprobs(
        [name(first), *found.tokens], [None, *found.token_logprobs], [None, *found.top_logprobs], []
    )


def as_prompt_logprobs(rest: Output, alternatives: int, name: Name) -> Raw:
    """Of a whole prompt, as JSON: null for its first token, then an object by token id."""
    ranks = _ints(rest.ranks)
    entries: list[dict[str, PromptLogprob] | None] = [None]
    for (token, logprob, top), rank in zip(_scored(rest, alternatives), ranks, strict=True):
        entry = {
            str(other): PromptLogprob(p, i, name(other)) for i, (other, p) in enumerate(top, 1)
        }
        entry.setdefault(str(token), PromptLogprob(logprob, rank, name(token)))
        entries.append(entry)
    return Raw(msgspec.json.encode(entries))


def _logprobs(scored: list[_Scored], name: Name) -> Logprobs:
    return Logprobs(
        tokens=[name(one.token) for one in scored],
        token_logprobs=[one.logprob for one in scored],
        top_logprobs=[_by_name(one, name) for one in scored],
        text_offset=[],
    )


def _by_name(scored: _Scored, name: Name) -> dict[str, float]:
    """The likeliest tokens and the token itself; where two read the same, the second by its id."""
    found: dict[str, float] = {}
    chosen = [] if any(token == scored.token for token, _ in scored.top) else [scored[:2]]
    for token, logprob in [*scored.top, *chosen]:
        label = name(token)
        found[_id_name(token) if label in found else label] = logprob
    return found


def _scored(source: Delta | Output, alternatives: int) -> list[_Scored]:
    tokens, logprobs = _ints(source.token_ids), _floats(source.logprobs)
    top_ids, top_logprobs = _ints(source.top_ids), _floats(source.top_logprobs)
    kept = len(top_ids) // max(len(tokens), 1)  # of each token, at least `alternatives`
    found = []
    for i, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
        shown = slice(i * kept, i * kept + min(kept, alternatives))
        top = zip(top_ids[shown], top_logprobs[shown], strict=True)
        found.append(_Scored(token, logprob, [pair for pair in top if pair[0] >= 0]))
    return found


def _id_name(token: int) -> str:
    return f"token_id:{token}"


def _ints(data: bytes) -> list[int]:
    return memoryview(data).cast("i").tolist()


def _floats(data: bytes) -> list[float]:
    return [max(value, LOWEST) for value in memoryview(data).cast("f")]
