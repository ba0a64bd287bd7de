"""Log-probabilities as replies show them: of a text's tokens, and of a prompt's.

Numbers are the engine's float32 and the same wherever a token appears; only minus infinity, which
JSON does not have, becomes LOWEST. Knows no requests: how many alternatives are shown, and how a
token is named, is for the caller to say.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import NamedTuple

import msgspec
from msgspec import Raw

from engine.messages import Output
from server.schema.completion_response import Logprobs, PromptLogprob
from server.text.sample import Delta
from server.text.text import Text

LOWEST = -9999.0
_NOBODY = -1
"""Fills the place of a token where the vocabulary has no more."""

Name = Callable[[int], str]


class Scored(NamedTuple):
    """A token, and the likeliest ones in its place, the likeliest first."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


def naming(text: Text, as_ids: bool) -> Name:
    """How tokens are written: as their text, or as `token_id:17`."""
    return _id_name if as_ids else text.labels.__getitem__


def of_delta(delta: Delta, alternatives: int, name: Name, echoed: Logprobs | None) -> Logprobs:
    """Return the logprobs of the new tokens, after those of the prompt where it is echoed."""
    new = _logprobs(delta, alternatives, name)
    if echoed is None:
        new.text_offset = delta.text_offset
        return new
    return Logprobs(
        tokens=echoed.tokens + new.tokens,
        token_logprobs=echoed.token_logprobs + new.token_logprobs,
        top_logprobs=echoed.top_logprobs + new.top_logprobs,
        text_offset=delta.text_offset,
    )


def of_prompt(first: int, rest: Output, alternatives: int, name: Name) -> Logprobs:
    """Return a prompt's logprobs, without offsets, of its first token and the others' scores."""
    found = _logprobs(rest, alternatives, name)
    return Logprobs(
        [name(first), *found.tokens], [None, *found.token_logprobs], [None, *found.top_logprobs], []
    )


def as_prompt_logprobs(rest: Output, alternatives: int, name: Name) -> Raw:
    """Return a prompt's scores as JSON: null for its first token, then objects by token id."""
    ranks = _ints(rest.ranks)
    entries: list[dict[str, PromptLogprob] | None] = [None]
    for (token, logprob, top), rank in zip(scored(rest, alternatives), ranks, strict=True):
        entry = {
            str(other): PromptLogprob(p, i, name(other)) for i, (other, p) in enumerate(top, 1)
        }
        entry.setdefault(str(token), PromptLogprob(logprob, rank, name(token)))
        entries.append(entry)
    return Raw(msgspec.json.encode(entries))


def _logprobs(source: Delta | Output, alternatives: int, name: Name) -> Logprobs:
    """Return logprobs without offsets."""
    names = list(map(name, array("i", source.token_ids)))
    logprobs = _floats(source.logprobs)
    if not alternatives:
        top = [{token: logprob} for token, logprob in zip(names, logprobs, strict=True)]
    elif _NOBODY in _ints(source.top_ids):
        top = [_by_name(token, name) for token in scored(source, alternatives)]
    else:
        top = _top(source, alternatives, names, logprobs, name)
    return Logprobs(names, [*logprobs], [*top], [])


def _top(
    source: Delta | Output, alternatives: int, names: list[str], logprobs: list[float], name: Name
) -> list[dict[str, float]]:
    """As `_by_name` for each token, several times as fast; all places must be filled."""
    top_ids, top_logprobs = _ints(source.top_ids), _floats(source.top_logprobs)
    labels = list(map(name, top_ids))
    kept = len(top_ids) // max(len(names), 1)
    num_shown = min(kept, alternatives)
    found = []
    for i, token in enumerate(array("i", source.token_ids)):
        shown = slice(i * kept, i * kept + num_shown)
        one = dict(zip(labels[shown], top_logprobs[shown], strict=True))
        is_among = token in top_ids[shown]
        if len(one) == num_shown and (is_among or names[i] not in one):
            if not is_among:
                one[names[i]] = logprobs[i]
        else:
            pairs = list(zip(top_ids[shown], top_logprobs[shown], strict=True))
            one = _by_name(Scored(token, logprobs[i], pairs), name)
        found.append(one)
    return found


def _by_name(one: Scored, name: Name) -> dict[str, float]:
    """Return the likeliest tokens and the token itself; of two with one name, the second by id."""
    found: dict[str, float] = {}
    is_among = any(token == one.token for token, _ in one.top)
    for token, logprob in one.top if is_among else [*one.top, (one.token, one.logprob)]:
        label = name(token)
        found[_id_name(token) if label in found else label] = logprob
    return found


def scored(source: Delta | Output, alternatives: int) -> list[Scored]:
    """Return each token with its score and up to `alternatives` likeliest ones in its place."""
    tokens, logprobs = _ints(source.token_ids), _floats(source.logprobs)
    top_ids, top_logprobs = _ints(source.top_ids), _floats(source.top_logprobs)
    kept = len(top_ids) // max(len(tokens), 1)  # of each token, at least `alternatives`
    found = []
    for i, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
        shown = slice(i * kept, i * kept + min(kept, alternatives))
        top = zip(top_ids[shown], top_logprobs[shown], strict=True)
        found.append(Scored(token, logprob, [pair for pair in top if pair[0] != _NOBODY]))
    return found


def _id_name(token: int) -> str:
    return f"token_id:{token}"


def _ints(data: bytes) -> list[int]:
    return memoryview(data).cast("i").tolist()


def _floats(data: bytes) -> list[float]:
    values = array("f", data).tolist()
    if values and min(values) < LOWEST:
        return [max(value, LOWEST) for value in values]
    return values
