"""Engines and requests as hypothesis draws them: small, and short of everything."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from hypothesis import strategies as st
from llguidance import LLMatcher

from srm.engine.config import EngineConfig
from srm.engine.constraints.constraint import choice_constraint, regex_constraint
from srm.engine.messages import NAMED
from tests.kit.bodies.edit_strategies import wanted
from tests.kit.engines.making import request_of
from tests.kit.engines.numpy_runner import TINY
from tests.kit.models.tiny_tokenizer import tiny_folder

MAX_N = 9
EMITS: tuple[Literal["final", "delta", "tokens"], ...] = ("final", "delta", "tokens")
WEIGHTS_OF = {"": 1.0, "heavy": 1e3, "light": 0.1}
HEADERS = np.random.default_rng(1).integers(0, 31, (2, TINY.n_ctx)).tolist()
HEADERS[1][:20] = HEADERS[0][:20]


def configs(min_waiting: int = 1) -> st.SearchStrategy[EngineConfig]:
    return st.builds(
        lambda rows, spare_tokens, prefill_step_tokens, **others: EngineConfig(
            max_step_rows=rows,
            max_step_tokens=rows + spare_tokens,
            model=tiny_folder(),  # whose tokenizer constraints are compiled for
            prefill_step_tokens=min(prefill_step_tokens, rows + spare_tokens),
            **others,
        ),
        rows=st.integers(1, 5),
        spare_tokens=st.integers(1, 12),
        prefill_step_tokens=st.sampled_from([0, 2, 3, 5, 8]),
        max_prefill_share=st.sampled_from([0.1, 0.5, 0.9, 1.0]),
        num_slots=st.integers(1, 6),
        max_waiting=st.integers(min_waiting, min_waiting + 24),
        prefix_slots=st.integers(1, 5),
        max_parked_bytes=st.sampled_from([0, 2_000, 2**32, 2**32]),
    )


tokens = st.integers(0, TINY.vocab_size - 1)
constraints = st.sampled_from(
    [
        "start: /[a-c]{2,4}/",
        "start: /(ab|a)*c?/",
        'start: "a" start "b" | "c"',
        "start: /[0-9]{1,3}(,[0-9]{1,3}){0,4}/",
        'start: "[" (start ("," start)*)? "]"',
        "start: /./",
        "start: /[xyz]/",  # no token spells it
    ]
).map(LLMatcher.grammar_from_lark) | st.sampled_from(
    [
        *map(regex_constraint, ("[a-c]{2,4}", "(ab|a)*c?", "[0-9]{1,3}(,[0-9]{1,3}){0,4}", ".")),
        choice_constraint(["a", "ab", "abcabc"]),
    ]
)
"""For TINY's tokenizer: of one text, of many, without end, and of none. Grammars are masked by the
host, the others have tables."""
BESIDE_CONSTRAINTS = {"allowed_token_ids", "bad_words", "ignore_eos"}


def constrained(constraint: str, **fields: Any) -> dict[str, Any]:
    """Return fields of a request that has this constraint, if any, without what does not go with
    it."""
    if not constraint:
        return fields
    others = {name: value for name, value in fields.items() if name not in BESIDE_CONSTRAINTS}
    return {**others, "constraint": constraint, "ignore_eos": False}


def scored_from(**fields: Any) -> dict[str, Any]:
    """Return fields of a request, which score a part of its prompt if they score it; its seed says
    which."""
    is_scored = fields["prompt_logprobs"] is not None
    starts = (0, 2, -2, -30) if is_scored else (0,)
    return {**fields, "prompt_logprobs_start": starts[fields["seed"] % len(starts)]}


def scored_by_name(named: tuple[int, ...], **fields: Any) -> dict[str, Any]:
    """Return fields of a request, whose alternatives are these tokens, if there are any."""
    for count, name in NAMED.items():
        if named and fields[count]:
            fields |= {count: len(named), name: named}
    return fields


alike = st.builds(
    lambda header, length, rest: header[:length] + rest,
    st.sampled_from(HEADERS),
    st.sampled_from([3, 18, 21, 40, 60]),
    st.lists(st.integers(0, 1), max_size=3),
)
"""Prompts of which many begin alike."""
prompts = st.one_of(
    st.lists(tokens, min_size=1, max_size=12),
    st.lists(tokens, min_size=58, max_size=TINY.n_ctx),
    alike,
)
requests = st.builds(
    lambda prompt, edits, named, share, constraint, **others: request_of(
        *("", prompt),
        share=share,
        weight=WEIGHTS_OF[share],
        **constrained(constraint, **edits, **scored_by_name(named, **scored_from(**others))),
    ),
    prompts,
    wanted(TINY.vocab_size),
    st.just(()) | st.lists(tokens, min_size=1, max_size=4, unique=True).map(tuple),
    st.sampled_from(sorted(WEIGHTS_OF)),
    st.just("") | constraints,
    priority=st.integers(-1, 1),
    precedence=st.integers(-1, 1),
    emit=st.sampled_from(EMITS),
    durable=st.booleans(),
    first_wave=st.sampled_from([None, 0, 1, 1, 2]),
    max_tokens=st.integers(0, 12),
    n=st.integers(1, MAX_N),
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 1, 4]),
    top_p=st.sampled_from([0.5, 1.0]),
    min_p=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 5),
    stop_token_ids=st.lists(tokens, max_size=6).map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, None, 0, 1, 20]),
    prompt_logprobs=st.sampled_from([None, None, 0, 3]),
)
"""Without a name."""
