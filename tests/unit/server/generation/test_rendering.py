"""Whatever the steps and whenever somebody reads, what is read adds up to the whole."""

from __future__ import annotations

import json
import random
from array import array
from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.messages import FinishReason, Output
from engine.steps.token_deltas import TokenDeltas, of_outputs
from server.generation.rendering import Choices, Pieces, Template
from server.schema.completion_response import Choice
from server.text.text import Text
from tests.serving import TEXT_MODEL

STOP_TOKEN = 7
NUM_CHOICES = 6
token_lists = st.lists(st.integers(2, TEXT_MODEL.vocab_size - 1), min_size=1, max_size=40)
completions = st.lists(token_lists, min_size=NUM_CHOICES, max_size=NUM_CHOICES)
reasons = st.lists(st.sampled_from(["stop", "length"]), min_size=NUM_CHOICES, max_size=NUM_CHOICES)
randoms = st.randoms(use_true_random=False)


def deliveries(
    completions: list[list[int]],
    reasons: list[FinishReason],
    rng: random.Random,
    stopped: Collection[int] = (),
) -> Iterator[TokenDeltas]:
    """All tokens, some of some completions at a time; none of those that were `stopped`."""
    left = dict(enumerate(completions))
    while left:
        outputs = []
        for index in rng.sample([*left], rng.randint(1, len(left))):
            size = rng.randint(1, 9)
            ids, left[index] = left[index][:size], left[index][size:]
            reason = None if left[index] else reasons[index]
            output = Output("", index, array("i", ids).tobytes(), finish_reason=reason)
            outputs.append((index, output))
        yield of_outputs(outputs)
        left = {i: ids for i, ids in left.items() if ids and i not in stopped}


def encode_choice(
    index: int, text: str, finish_reason: str | None, stop_reason: str | int | None
) -> bytes:
    choice = Choice(index=index, text=text, finish_reason=finish_reason, stop_reason=stop_reason)
    return msgspec.json.encode(choice)


@settings(max_examples=60)
@given(completions, reasons, randoms, st.booleans())
def test_events_add_up_to_the_text(
    text: Text,
    completions: list[list[int]],
    reasons: list[FinishReason],
    rng: random.Random,
    has_stop_token: bool,
) -> None:
    completions = [[*tokens, *[STOP_TOKEN] * has_stop_token] for tokens in completions]
    choices = Choices(Pieces(text), Template(encode_choice), NUM_CHOICES, (STOP_TOKEN,))
    said: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    for news in deliveries(completions, reasons, rng):
        parts = choices.render(news)
        for choice in json.loads(b"[" + b",".join(parts) + b"]"):
            said[choice["index"]].append(choice)
    for index, tokens in enumerate(completions):
        is_stop = reasons[index] == "stop"
        spoken = array("i", tokens[: len(tokens) - is_stop]).tobytes()
        whole = "".join(choice["text"] for choice in said[index])
        assert whole == text.decode(spoken).decode(errors="replace")
        *before, last = said[index]
        assert all(choice["finish_reason"] is None and choice["text"] for choice in before)
        stop_reason = STOP_TOKEN if is_stop and tokens[-1] == STOP_TOKEN else None
        assert (last["finish_reason"], last["stop_reason"]) == (reasons[index], stop_reason)
        assert set(last) == set(json.loads(encode_choice(0, "", None, None)))
