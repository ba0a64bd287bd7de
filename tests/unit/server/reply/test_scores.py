"""Log-probabilities as JSON: the bytes of objects made of the same numbers; and packed ones."""

from __future__ import annotations

import base64
import copy
from array import array
from dataclasses import replace
from itertools import accumulate, chain, pairwise
from math import inf, nan
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from srm.engine.messages import FinishReason, Output
from srm.engine.steps.tokens import from_outputs
from srm.server.dialects.chat.reply import ChatLogprobs, TokenLogprob, TopLogprob
from srm.server.dialects.completions.format import CompletionFormat
from srm.server.generation.detokenize import ChoicePart
from srm.server.generation.prompts import Prompt
from srm.server.reply.prompt import ShownPrompt
from srm.server.reply.scores import (
    LOWEST,
    ChatScores,
    CompletionScores,
    naming,
    render_prompt,
    scores_of,
)
from srm.server.schema.completion_response import Logprobs
from srm.server.text.text import Text
from tests.kit.bodies.refusals import completion
from tests.unit.server.text.test_stream import detokenizer_of

tokens = st.integers(0, 299)
logprobs = st.floats(-1e5, 0, width=32) | st.just(-inf)
rows = st.integers(0, 5).flatmap(
    lambda k: st.lists(
        st.tuples(
            *(tokens, logprobs, st.integers(0, 9_999)),
            st.lists(tokens | st.just(-1), min_size=k, max_size=k, unique=True),
            st.lists(logprobs, min_size=k, max_size=k),
        ),
        max_size=4,
    )
)


def output(
    tokens: list[int], logprobs: list[float], top: list[int], top_logprobs: list[float]
) -> Output:
    return Output(
        *("a", -1, array("i", tokens).tobytes()),
        logprobs=array("f", logprobs).tobytes(),
        ranks=array("i", [9] * len(tokens)).tobytes(),
        top_ids=array("i", top).tobytes(),
        top_logprobs=array("f", top_logprobs).tobytes(),
    )


NOTHING = output([], [], [], [])
OUTPUT = output([5, 6], [-1, -inf], [7, 5, 8, -1], [-0.5, -1, 0, 0])


def named(text: Text, **names: slice) -> Text:
    """The text with these tokens called so."""
    result = copy.copy(text)
    result.labels = [*text.labels]
    for name, place in names.items():
        result.labels[place] = [name] * len(result.labels[place])
    return result


def by_name(pairs: list[tuple[int, float]], text: Text, as_ids: bool) -> dict[str, float]:
    """Where tokens read the same, the likeliest has the name."""
    entries: dict[str, float] = {}
    for token, logprob in pairs:
        name = naming(text, as_ids)(token)
        entries[f"token_id:{token}" if name in entries else name] = logprob
    return entries


@pytest.mark.parametrize("as_ids", [False, True])
@given(rows=rows, num_top=st.integers(0, 5))
def test_they_read_as_objects_do(text: Text, as_ids: bool, rows: list[Any], num_top: int) -> None:
    """However many tokens are rendered at once, each has its own alternatives; these do not hide
    each other."""
    text = named(text, same=slice(40, 60))
    ids, values, offsets, top_ids, top_values = zip(*rows, strict=True) if rows else 5 * ((),)
    all_top, all_top_values = [*chain(*top_ids)], [*chain(*top_values)]
    completions, chats = CompletionScores(text, as_ids), ChatScores(text, as_ids)
    name = naming(text, as_ids)

    def spelled(token: int) -> list[int] | None:
        return list(text.pieces(token.to_bytes(4, "little"))[0]) or None

    def expected(rows: list[Any], num_top: int) -> tuple[bytes, bytes]:
        content, tops = [], list[dict[str, float]]()
        for token, value, _, top, its_values in rows:
            pairs = [(t, max(p, LOWEST)) for t, p in zip(top, its_values, strict=True)][:num_top]
            pairs, own = [pair for pair in pairs if pair[0] >= 0], (token, max(value, LOWEST))
            shown = [TopLogprob(name(t), p, spelled(t)) for t, p in pairs]
            content.append(TokenLogprob(name(token), own[1], spelled(token), shown))
            tops.append(by_name(pairs + [own] * (token not in dict(pairs)), text, as_ids))
        numbers = [item.logprob for item in content]
        places = [offset for _, _, offset, _, _ in rows]
        message = Logprobs([item.token for item in content], [*numbers], [*tops], places)
        return msgspec.json.encode(message), msgspec.json.encode(ChatLogprobs(content))

    scored = output([*ids], [*values], all_top, all_top_values)
    rendered = (bytes(item.render(scored, num_top, [*offsets])) for item in (completions, chats))
    assert tuple(rendered) == expected(rows, num_top)
    columns = [*ids], [*values], all_top, all_top_values
    half = len(rows) // 2
    for counts in ([1] * len(rows), [half, len(rows) - half] if half else []):
        ends = [*accumulate(counts, initial=0)]
        parts = [rows[begin:end] for begin, end in pairwise(ends)]
        if parts:
            each = [item.render_each(columns, offsets, counts) for item in (completions, chats)]
            assert [*zip(*each, strict=True)] == [expected(own, len(own[0][3])) for own in parts]


def test_requests_of_a_model_share_one(text: Text) -> None:
    assert scores_of(ChatScores, text, True) is scores_of(ChatScores, text, True)
    assert scores_of(ChatScores, text, True) is not scores_of(ChatScores, text, False)


def test_minus_infinity_is_a_number_of_json(text: Text) -> None:
    completions = CompletionScores(named(text, three=slice(3, 4), five=slice(5, 6)), False)
    five = {"logprob": 0, "rank": 1, "decoded_token": "five"}
    for scores, num_top, three in (
        (output([3], [-inf], [5, 3], [0, -inf]), 2, {"logprob": -9999, "rank": 2}),
        # A token beyond the alternatives has its own rank.
        (output([3], [-7], [5, 6], [0, -1]), 1, {"logprob": -7, "rank": 9}),
    ):
        echoed = completions.entries_of_prompt(0, scores, num_top)
        shown = msgspec.json.decode(completions.render(NOTHING, num_top, [], echoed))
        assert shown["top_logprobs"] == [None, {"five": 0, "three": three["logprob"]}]
        (_, entry) = msgspec.json.decode(render_prompt(1, scores, num_top, completions.name))
        assert entry == {"5": five, "3": {**three, "decoded_token": "three"}}
    # Places without a token are left out.
    scores = output([5], [0], [5, -1], [0, 0])
    (_, entry) = msgspec.json.decode(render_prompt(1, scores, 2, completions.name))
    assert entry == {"5": five}
    # What has no tokens has no entries of its own.
    echoed = completions.entries_of_prompt(5, output([3], [-1], [], []), 0)
    assert msgspec.json.decode(completions.render(NOTHING, 0, [0, 4], echoed), type=Logprobs) == (
        Logprobs(["five", "three"], [None, -1], [None, {"three": -1}], [0, 4])
    )


# Packed arrays are the engine's own, and a prompt's begin with what its first token has not


def unpacked(packed: Any) -> dict[str, list[Any]]:
    kinds = {"token_ids": "<i4", "ranks": "<i4", "top_token_ids": "<i4"}
    return {
        name: np.frombuffer(base64.b64decode(value), kinds.get(name, "<f4")).tolist()
        for name, value in msgspec.json.decode(msgspec.json.encode(packed)).items()
    }


def test_packed_samples_have_what_is_asked_for(text: Text) -> None:
    def feed(*stop_token_ids: int, end: FinishReason | None = None) -> list[ChoicePart]:
        detokenizer = detokenizer_of(text, None, *stop_token_ids, return_packed=True)
        outputs = [OUTPUT, msgspec.structs.replace(OUTPUT, finish_reason=end)]
        return [*chain(*(detokenizer.decode(from_outputs([(0, item)])) for item in outputs))]

    part = feed()[0]
    assert (part.text, part.text_offset) == ("", [])
    asked = {}
    for k in (None, 0, 2):
        request = completion(return_packed=True, logprobs=k)
        form: Any = CompletionFormat(SimpleNamespace(request=request, text=text))  # type: ignore[arg-type]
        asked[k] = unpacked(form.make_choice(part, is_event=False).packed)
    assert asked[None] == {"token_ids": [5, 6]}
    assert asked[0] == {"token_ids": [5, 6], "logprobs": [-1, -inf]}
    assert asked[2] == asked[0] | {"top_token_ids": [7, 5, 8, -1], "top_logprobs": [-0.5, -1, 0, 0]}
    for stop_token_id, expected in ((6, 6), (9, None)):
        stopped = replace(part, is_first=False, finish_reason="stop", stop_reason=expected)
        assert feed(stop_token_id, end="stop") == [part, stopped]


def test_a_packed_prompt_has_an_entry_for_every_token(text: Text) -> None:
    def pack(num_top: int | None) -> dict[str, list[Any]]:
        prompt = Prompt(array("i", [4, 5, 6]).tobytes())
        prompt.scores.append(OUTPUT)
        request = completion(prompt_logprobs=num_top)
        return unpacked(ShownPrompt(prompt, request, CompletionScores(text, False)).packed)

    ids = {"token_ids": [4, 5, 6]}
    assert pack(None) == ids
    scores = ids | {"logprobs": [nan, -1, -inf], "ranks": [0, 9, 9]}
    tops = {"top_token_ids": [-1, -1, 7, 5, 8, -1], "top_logprobs": [nan, nan, -0.5, -1, 0, 0]}
    for num_top, expected in ((0, scores), (2, scores | tops)):
        np.testing.assert_equal(pack(num_top), expected)
