"""Samples under biases, penalties and bans are those of a plain loop over the model's logits."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from srm.engine.config import EngineConfig
from srm.engine.constraints.grammars import Grammars
from srm.engine.messages import Request, SamplingParams
from srm.engine.process.engine import Engine
from srm.engine.random_streams import sample_seeds
from srm.errors import InvalidRequest
from tests.kernels import oracle
from tests.kit.bodies.edit_strategies import wanted
from tests.kit.bodies.edited import F64, edited
from tests.kit.engines.making import engine_of, ints, request_of
from tests.kit.engines.numpy_runner import TINY, feed, tiny_weights
from tests.kit.engines.strategies import configs, constrained, constraints, tokens
from tests.kit.engines.torch_runner import RUNNERS
from tests.kit.models.tiny_tokenizer import tiny_folder

GRAMMARS = Grammars(TINY, tiny_folder() / "tokenizer.json")
WEIGHTS = tiny_weights()
EOS = TINY.end_id


def plain(prompt: list[int], params: SamplingParams, index: int) -> list[int]:
    """Sample `index` of a prompt, one token after the other."""
    seed = int(sample_seeds(params.seed, np.array([index]))[0])
    state = np.zeros(TINY.state_width)
    for position, token in enumerate(prompt):
        logits, state = feed(WEIGHTS, token, position, state)
    sampled: list[int] = []
    ends = {*params.stop_token_ids} | (set() if params.ignore_eos else {EOS})
    while True:
        position = len(prompt) + len(sampled) - 1
        if params.constraint:
            free = edited(logits, replace(params, min_tokens=0), EOS, prompt, sampled)
            left = min(params.max_tokens - len(sampled), TINY.n_ctx - position)
            allowed = masked(free, params, sampled, left)
        else:
            allowed = edited(logits, params, EOS, prompt, sampled)
        token, _ = oracle.sample(
            allowed,
            params.temperature,
            params.top_k,
            params.top_p,
            0.0,
            oracle.uniform(seed, position),
        )
        sampled += [token] if token >= 0 else []
        if (
            token < 0
            or token in ends
            or len(sampled) == params.max_tokens
            or position + 1 == TINY.n_ctx
        ):
            return sampled
        logits, state = feed(WEIGHTS, token, position + 1, state)


def masked(logits: F64, params: SamplingParams, sampled: list[int], left: int) -> F64:
    """The logits of the tokens that the constraint allows; before min_tokens the end only where
    nothing else is. `left` tokens may follow, which a table's texts keep to."""
    grammar = GRAMMARS.compile(params.constraint)
    if grammar.automaton and not params.min_tokens:
        state = grammar.automaton.walk(np.array(sampled, np.int32))
        return np.where(grammar.automaton.allowed(state, left), logits, -np.inf)
    matcher = grammar.start(np.array(sampled, "<i4").tobytes())
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    is_allowed = np.unpackbits(bits, bitorder="little").astype(bool)[: TINY.vocab_size]
    is_allowed &= not matcher.is_error()
    if len(sampled) < params.min_tokens:
        others = is_allowed.copy()
        others[[EOS, *params.stop_token_ids]] = False
        is_allowed = others if others.any() else is_allowed
    return np.where(is_allowed, logits, -np.inf)


def test_words_of_three_and_four_tokens_are_not_sampled() -> None:
    """Of four tokens that are about as likely, a quarter of all sequences of three are bad."""
    words: list[tuple[int, ...]] = [(a, b, (a + b) % 3) for a in range(4) for b in range(4)]
    words += [(3, 3, b, (b + 1) % 3) for b in range(4)] + [(3, 0)]
    params = SamplingParams(
        n=40,
        max_tokens=40,
        temperature=100.0,
        allowed_token_ids=(0, 1, 2, 3),
        bad_words=tuple(words),
        ignore_eos=True,
    )
    engine = engine_of(num_slots=7, max_step_rows=5, max_step_tokens=9)
    without = replace(params, bad_words=())
    samples, free = (
        [ints(output.token_ids) for output in engine.generate([[5, 6]], each)[0]]
        for each in (params, without)
    )
    assert samples == [plain([5, 6], params, index) for index in range(params.n)]
    for word in words:
        texts = [tuple(item[at : at + len(word)]) for item in free for at in range(40)]
        assert word in texts, "they would be sampled, or this test says nothing"


asked = st.builds(
    lambda prompt, edits, constraint, **fields: request_of(
        "", prompt, **constrained(constraint, **edits, **fields)
    ),
    st.lists(tokens, min_size=1, max_size=9),
    wanted(TINY.vocab_size),
    st.just("") | constraints,
    max_tokens=st.integers(6, 20),
    n=st.integers(1, 4),
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([0.7, 1.0]),
    seed=st.integers(0, 9),
    stop_token_ids=st.lists(tokens, max_size=2).map(tuple),
    ignore_eos=st.booleans(),
)


@pytest.mark.parametrize("runner", RUNNERS)
@settings(max_examples=60)
@given(st.lists(asked, min_size=1, max_size=3), configs(min_waiting=20), st.booleans())
def test_samples_are_those_of_a_plain_loop(
    runner: str, given: list[Request], config: EngineConfig, is_overlapped: bool
) -> None:
    with closing(RUNNERS[runner](WEIGHTS, config.num_slots, config.prefix_slots)) as running:
        compare_with_a_plain_loop(given, Engine(TINY, running, config), is_overlapped)


def compare_with_a_plain_loop(given: list[Request], engine: Engine, is_overlapped: bool) -> None:
    try:
        for at, request in enumerate(given):
            engine.add(replace(request, id=str(at)))
    except InvalidRequest as error:  # could be left without a token: see the tests of accepting
        assert error.param in {"allowed_token_ids", "bad_words", "min_tokens"}
        assume(False)
    entries = {}
    while engine.has_work:
        for output in engine.step_overlapped() if is_overlapped else engine.step():
            is_constrained = given[int(output.id)].params.constraint
            assert output.finish_reason in {"stop", "length", *["error"][: bool(is_constrained)]}
            entries[output.id, output.index] = ints(output.token_ids)
    for at, request in enumerate(given):
        for index in range(request.params.n):
            expected = plain(ints(request.prompt_token_ids), request.params, index)
            assert entries[str(at), index] == expected
