"""Scores straight from arrays: the bytes that objects made of the same numbers have."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.schema.chat_response import ChatLogprobs, TokenLogprob, TopLogprob
from server.text.logprobs import naming, of_delta, scored
from server.text.sample import Delta
from server.text.score_columns import ChatScores, CompletionScores, score_columns
from server.text.text import Text

VOCAB = 300
tokens = st.integers(0, VOCAB - 1)
logprobs = st.floats(-1e5, 0, width=32) | st.just(-np.inf)
rows = st.integers(0, 5).flatmap(
    lambda k: st.lists(
        st.tuples(
            *(
                tokens,
                logprobs,
                st.lists(tokens | st.just(-1), min_size=k, max_size=k, unique=True),
            ),
            *(st.lists(logprobs, min_size=k, max_size=k), st.integers(0, 9_999)),
        ),
        min_size=1,
        max_size=4,
    )
)


def delta_of(token: int, logprob: float, ids: list[int], tops: list[float], offset: int) -> Delta:
    ints, floats = (np.array([token], "<i4"), np.array(ids, "<i4")), ([logprob], tops)
    own, top = (np.array(one, "<f4").tobytes() for one in floats)
    own_id, top_ids = (one.tobytes() for one in ints)
    return Delta(0, False, "", own_id, own, top_ids, top, [offset], None, None)


def chat_logprobs(text: Text, as_ids: bool, k: int, delta: Delta) -> ChatLogprobs:
    name = naming(text, as_ids)

    def spelled(token: int) -> list[int] | None:
        return list(text.pieces(token.to_bytes(4, "little"))[0]) or None

    (one,) = scored(delta, k)
    top = [TopLogprob(name(other), p, spelled(other)) for other, p in one.top]
    return ChatLogprobs([TokenLogprob(name(one.token), one.logprob, spelled(one.token), top)])


@pytest.mark.parametrize("as_ids", [False, True])
@given(rows=rows)
def test_they_read_as_objects_do(text: Text, as_ids: bool, rows: list[Any]) -> None:
    text = copy.copy(text)
    text.labels = [*text.labels]
    text.labels[40:60] = 20 * ["the same"]
    arrays = [np.array(column) for column in zip(*rows, strict=True)]
    ids, values, top_ids, top_values, offsets = arrays
    k = top_ids.shape[1] if top_ids.ndim == 2 else 0
    columns = (
        *(ids.astype(np.int32), values.astype(np.float32)),
        *(
            top_ids.reshape(len(rows), k).astype(np.int32),
            top_values.reshape(len(rows), k).astype(np.float32),
        ),
        offsets.tolist(),
    )
    completions = CompletionScores(text, as_ids).render(*columns)
    chats = ChatScores(text, as_ids).render(*columns)
    for row, completion, chat in zip(rows, completions, chats, strict=True):
        delta = delta_of(*row)
        is_shared = not as_ids and any(40 <= token < 60 for token in (row[0], *row[2]))
        assert (completion is None) == (chat is None) == (is_shared or -1 in row[2])
        if completion is not None and chat is not None:
            expected = of_delta(delta, k, naming(text, as_ids), None)
            assert completion == msgspec.json.encode(expected)
            assert chat == msgspec.json.encode(chat_logprobs(text, as_ids, k, delta))


def test_requests_of_a_model_share_one(text: Text) -> None:
    assert score_columns(ChatScores, text, True) is score_columns(ChatScores, text, True)
    assert score_columns(ChatScores, text, True) is not score_columns(ChatScores, text, False)
