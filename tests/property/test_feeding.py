"""The MAX blocks are torch's parallel form, in whatever batches, slots, chunks and order fed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from srm.engine.steps.batch import F32, I32
from tests.kit.engines.logits_model import NUM_SLOTS, Row
from tests.kit.models.forms import CONFIGS, TOLERANCE, Forms, all_forms, error

Feed = tuple[I32, list[int]]
"""A text, and the lengths of the chunks it is fed in."""


@st.composite
def feeds(draw: st.DrawFn, forms: Forms) -> Feed:
    """Texts of few kinds, so that many of them begin alike."""
    n_ctx = forms.max.config.n_ctx
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    begin, end = (forms.random_ids(draw(st.integers(0, 2)), n_ctx) for _ in range(2))
    same = draw(st.integers(0, n_ctx))
    text = np.concatenate([begin[:same], end[same:]])[: sum(lengths)]
    cuts = np.minimum(np.cumsum(lengths), len(text))
    return text, [int(count) for count in np.diff(cuts, prepend=0) if count]


def feed_as_drawn(forms: Forms, given: list[Feed], draw: Callable[..., int]) -> list[F32]:
    """Logits of each text: any of them in a step, in any order, from slot to slot."""
    pool, slots = forms.max.pool(), list(range(len(given)))
    free = list(range(len(given), NUM_SLOTS))
    done = [0] * len(given)
    left = [list(chunks) for _, chunks in given]
    results: list[list[F32]] = [[] for _ in given]
    while any(left):
        waiting = [i for i, chunks in enumerate(left) if chunks]
        rows: list[Row] = []
        who = []
        for _ in range(draw(st.integers(1, len(waiting)))):
            i = waiting.pop(draw(st.integers(0, len(waiting) - 1)))
            count, read = left[i].pop(0), slots[i]
            if draw(st.booleans()):  # writes a slot that nobody reads in this step
                slots[i] = free.pop(draw(st.integers(0, len(free) - 1)))
            rows.append((given[i][0][done[i] : done[i] + count], read, slots[i], done[i]))
            who.append(i)
            done[i] += count
        free += [row[1] for row in rows if row[1] != row[2]]
        ends = np.cumsum([len(row[0]) for row in rows])[:-1]
        for i, part in zip(who, np.split(forms.max.run_batch(pool, rows), ends), strict=True):
            results[i].append(part)
    return [np.concatenate(parts) for parts in results]


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=5)
@given(data=st.data())
def test_texts_give_torchs_logits_and_the_same_bits_however_fed(
    name: str, data: st.DataObject
) -> None:
    forms = all_forms()[name]
    given = data.draw(st.lists(feeds(forms), min_size=1, max_size=6))
    result = feed_as_drawn(forms, given, data.draw)
    for (text, _), logits in zip(given, result, strict=True):
        assert error(logits, forms.expected(text)) < TOLERANCE
        whole = forms.max.run_batch(forms.max.pool(), [(text, 0, 0, 0)])
        assert np.array_equal(logits, whole)
