"""Penalties, biases and bans as hypothesis draws them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st


def wanted(vocab_size: int) -> st.SearchStrategy[dict[str, Any]]:
    """Fields of SamplingParams that edit logits; half the time none."""
    # Few tokens, so that what is asked for happens.
    some = st.integers(0, min(vocab_size, 8) - 1) | st.integers(0, vocab_size - 1)
    fields = st.fixed_dictionaries(
        {},
        optional={
            "presence_penalty": st.sampled_from([-2.0, 0.5, 2.0]),
            "frequency_penalty": st.sampled_from([-0.7, 0.25, 2.0]),
            "repetition_penalty": st.sampled_from([0.5, 1.3, 50.0]),
            "logit_bias": st.dictionaries(
                some, st.sampled_from([-100.0, -1.5, 3.0, 7.0]), max_size=4
            ),
            "allowed_token_ids": st.lists(some, min_size=3, max_size=9).map(tuple),
            "bad_words": st.lists(
                st.lists(some, min_size=1, max_size=4).map(tuple), max_size=5
            ).map(tuple),
            "min_tokens": st.integers(0, 6),
        },
    )
    return st.just({}) | fields
