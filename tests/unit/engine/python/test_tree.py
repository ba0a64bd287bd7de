"""Trees of samples: their nodes are what the engine samples there, and the best are expanded."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from srm.engine.config import EngineConfig
from srm.engine.messages import Output, Request, SamplingParams
from srm.engine.process.engine import Engine as SteppedEngine
from srm.engine.python.offline import Engine
from srm.engine.tree_search import MAX_NODES, Tree, TreeNode, TreeSearch
from srm.errors import ContextTooLong, EngineUnavailable, InvalidRequest, StepFailed
from tests.kit.engines.numpy_runner import TINY, NumpyRunner, feed, tiny_weights

WEIGHTS = tiny_weights()
PROMPT = [3, 1, 4, 1, 5]
TOKEN = st.integers(0, TINY.vocab_size - 1)


def make(**settings: Any) -> tuple[Engine, SteppedEngine]:
    sizes: dict[str, Any] = {"num_slots": 16, "max_step_rows": 8, "max_step_tokens": 64}
    config = EngineConfig(**sizes | settings)
    steps = SteppedEngine(TINY, NumpyRunner(WEIGHTS, 16, config.prefix_slots), config)
    return Engine.over(steps, config), steps


def shown(nodes: list[TreeNode]) -> list[tuple[Any, ...]]:
    return [
        (
            node.parent and node.parent.number,
            node.token_ids.tolist(),
            node.logprobs.tolist(),
            node.ends,
            node.is_leaf,
        )
        for node in nodes
    ]


def log_probs(tokens: list[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Of what follows these tokens, from the first one on."""
    state = np.zeros(TINY.state_width)
    for position, token in enumerate(tokens):
        logits, state = feed(WEIGHTS, token, position, state)
        state = state.astype(np.float32).astype(np.float64)
    return np.asarray(logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max())


def search_beams(prompt: list[int], beams: int, depth: int) -> list[tuple[float, list[int]]]:
    """Beam search as the books have it; of each level it keeps the best, and ended ones aside."""
    live: list[tuple[float, list[int]]] = [(0.0, [])]
    ended: list[tuple[float, list[int]]] = []
    for level in range(depth):
        grown = []
        for total, tokens in live:
            scores = log_probs(prompt + tokens)
            for token in np.argsort(-scores, kind="stable")[: 2 * beams].tolist():
                grown.append((total + float(scores[token]), [*tokens, token]))
        ended += [item for item in grown if item[1][-1] in TINY.end_ids]
        grown = [item for item in grown if item[1][-1] not in TINY.end_ids]
        live = sorted(grown, key=lambda item: -item[0])
        live = live[:beams] if level < depth - 1 else live
    return sorted(ended + live, key=lambda item: -item[0] / len(item[1]))[:beams]


@settings(max_examples=30)
@given(prompt=st.lists(TOKEN, min_size=1, max_size=6), beams=st.integers(1, 4))
def test_beams_are_those_of_a_reference_in_numpy(prompt: list[int], beams: int) -> None:
    llm, _ = make()
    tree = Tree(candidates="likeliest", branching=2 * beams, width=beams, depth=5)
    leaves = [node for node in llm.tree(prompt, tree) if node.is_leaf]
    best = sorted(leaves, key=lambda node: -node.logprob / len(node.path))[:beams]
    expected = search_beams(prompt, beams, 5)
    assert [node.path.tolist() for node in best] == [tokens for _, tokens in expected]
    np.testing.assert_allclose([n.logprob for n in best], [e for e, _ in expected], rtol=1e-5)


@settings(max_examples=25)
@given(
    branching=st.integers(1, 3),
    node_tokens=st.integers(1, 4),
    width=st.none() | st.integers(1, 3),
    seed=st.integers(0, 2**64 - 1),
    stops=st.sampled_from([(), (1, 2, 3, 4, 5, 6, 7, 8)]),
    prefix_slots=st.sampled_from([1, 64]),
)
def test_children_are_what_is_sampled_after_a_node(
    branching: int,
    node_tokens: int,
    width: int | None,
    seed: int,
    stops: tuple[int, ...],
    prefix_slots: int,
) -> None:
    tree = Tree(branching=branching, node_tokens=node_tokens, depth=3, width=width)
    params = SamplingParams(seed=seed, stop_token_ids=stops, temperature=1.5)
    llm, steps = make(prefix_slots=prefix_slots)
    nodes = llm.tree(PROMPT, tree, params)
    assert steps.scheduler.table.num_free == 16 and not steps.scheduler.prefixes.num_pinned
    assert shown(nodes) == shown(make(overlap=False)[0].tree(PROMPT, tree, params))
    for node in nodes:
        before = [] if node.parent is None else node.parent.path.tolist()
        assert node.path.tolist() == before + node.token_ids.tolist()
        assert node.depth == 1 + (0 if node.parent is None else node.parent.depth)
        scores = [log_probs(PROMPT + before)]
        for token in node.token_ids[:-1].tolist():
            before.append(token)
            scores.append(log_probs(PROMPT + before))
        own = np.array(scores) / 1.5
        own -= np.log(np.exp(own).sum(axis=1, keepdims=True))
        expected = own[np.arange(len(own)), node.token_ids]
        np.testing.assert_allclose(node.logprobs, expected, rtol=1e-4, atol=1e-5)
        last = int(node.token_ids[-1])
        ends = "stop" if last in TINY.end_ids else "split" if last in stops else "length"
        assert node.ends == ends and (ends != "length" or len(node.token_ids) == node_tokens)
        assert node.is_leaf == (ends == "stop" or node.depth == 3)
    by_parent: dict[int, list[TreeNode]] = {}
    for node in nodes:
        by_parent.setdefault(node.parent.number if node.parent else -1, []).append(node)
    assert {len(own) for own in by_parent.values()} == {branching}
    for depth in (1, 2):
        level = [node for node in nodes if node.depth == depth and not node.is_leaf]
        best = sorted(level, key=lambda node: -node.logprob)[:width]
        expanded = [node.number for node in level if node.number in by_parent]
        assert expanded == sorted(node.number for node in best)


def test_each_node_costs_its_tokens_and_no_more() -> None:
    llm, steps = make()
    llm.tree(PROMPT, Tree(branching=2, node_tokens=5, depth=4), SamplingParams(ignore_eos=True))
    prefixes, latencies = steps.scheduler.prefixes, steps.scheduler.latencies
    num_nodes = 2 + 4 + 8 + 16
    assert latencies.num_sampled == 5 * num_nodes
    fed = latencies.num_prompt_tokens - prefixes.num_cached_tokens
    assert fed <= len(PROMPT) + num_nodes  # of each expanded node one, which is its first row


def test_children_of_equal_nodes_differ() -> None:
    llm, _ = make()
    nodes = llm.tree(PROMPT, Tree(branching=8, node_tokens=8, depth=2), SamplingParams(top_k=1))
    first = [node for node in nodes if node.depth == 1]
    assert len({tuple(node.token_ids.tolist()) for node in first}) == 1  # top_k = 1
    free = SamplingParams(temperature=100, ignore_eos=True)
    nodes = llm.tree(PROMPT, Tree(branching=8, node_tokens=8, depth=2), free)
    second = [tuple(node.token_ids.tolist()) for node in nodes]
    assert len(set(second)) == len(second)


def test_scores_of_the_caller_decide_what_is_expanded() -> None:
    llm, _ = make()
    tree = Tree(branching=4, node_tokens=2, depth=3, width=1)
    seen: list[int] = []

    def smallest(node: TreeNode) -> float:
        seen.append(node.number)
        return -float(node.token_ids[0])

    nodes = llm.tree(PROMPT, tree, SamplingParams(ignore_eos=True, temperature=9), score=smallest)
    assert seen == list(range(12))
    for depth in (1, 2):
        level = [node for node in nodes if node.depth == depth]
        best = min(level, key=lambda node: (int(node.token_ids[0]), node.number))
        assert {node.parent for node in nodes if node.depth == depth + 1} == {best}
        assert best.score == -float(best.token_ids[0])


def test_best_first_finds_the_likeliest_texts_in_order() -> None:
    """With one node a round, nodes are expanded in the order of their probability."""
    llm, _ = make()
    tree = Tree(candidates="likeliest", branching=8, width=1, search="best_first", budget=30)
    nodes = llm.tree(PROMPT, tree, SamplingParams(ignore_eos=True))
    assert len(nodes) == 8 * 30
    expanded = list(dict.fromkeys(node.parent for node in nodes if node.parent is not None))
    order = [node.logprob for node in expanded]
    left = [node.logprob for node in nodes if node not in expanded and not node.is_leaf]
    assert order == sorted(order, reverse=True) and max(left) <= min(order)


def test_a_tree_ends_at_the_context() -> None:
    llm, _ = make()
    tree = Tree(branching=1, node_tokens=7, depth=100, width=1)
    nodes = llm.tree([1] * 60, tree, SamplingParams(ignore_eos=True))
    assert [len(node.token_ids) for node in nodes] == [5] and nodes[0].is_leaf
    for length in (65, 200):
        with pytest.raises(ContextTooLong, match=f"^prompt 0: .* your prompt has {length} tokens"):
            llm.tree([1] * length, tree)


def test_a_tree_goes_on_from_a_state() -> None:
    llm, steps = make()
    tree, params = Tree(branching=2, node_tokens=3, depth=2), SamplingParams(seed=5)
    expected = shown(make()[0].tree(PROMPT, tree, params))
    state = llm.state(PROMPT)
    steps.scheduler.prefixes.forget()
    before = steps.scheduler.prefixes.num_cached_tokens
    assert shown(llm.tree([], tree, params, state=state)) == expected
    assert steps.scheduler.prefixes.num_cached_tokens - before >= len(PROMPT) - 1


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"branching": 0}, "tree.branching must be an integer >= 1; got 0"),
        ({"branching": 1.5}, "tree.branching must be an integer; got 1.5"),
        ({"candidates": "all"}, "tree.candidates must be samples or likeliest; got 'all'"),
        ({"candidates": "likeliest", "node_tokens": 2}, "tree.node_tokens must be 1 with"),
        ({"search": "best_first", "budget": 9}, "tree.width must be given with search"),
        ({"search": "best_first", "width": 9}, "tree.budget must be given with search"),
        ({"budget": 9}, "tree.width must be given with a budget, and is missing"),
        (
            {"branching": 101},
            "tree.branching must be at most max_waiting = 100 with candidates = samples, got 101",
        ),
        (
            {"branching": 33, "candidates": "likeliest", "width": 1},
            "tree.branching must be at most max_logprobs = 20 with candidates = likeliest, got 33",
        ),
        ({"depth": 17}, "tree could have more than 131072 nodes: lower"),
        ({"depth": 2**30, "width": 1}, "tree could have more than 131072 nodes"),
        (
            {"search": "best_first", "width": 1, "budget": 2**53},
            "tree could have more than 131072 nodes",
        ),
    ],
)
def test_a_tree_that_cannot_be_is_refused(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        make(max_waiting=100)[0].tree(PROMPT, Tree(**{"depth": 2, **tree}))
    assert message in str(refused.value)


def test_the_largest_tree_has_as_many_nodes_as_it_may() -> None:
    Tree(branching=2, depth=15).check()
    Tree(branching=1, depth=MAX_NODES).check()
    Tree(branching=8, depth=100, width=1, search="best_first", budget=20_000).check()
    Tree(branching=1_000, depth=200, width=1, budget=10).check()


def test_a_sample_that_was_ended_ends_the_search() -> None:
    """Its tokens are no node: more of them were to come."""
    request = Request("", np.array(PROMPT, "<i4").tobytes(), SamplingParams())
    search = TreeSearch(Tree(), TINY, request, repr)
    (prompt,) = search.next_round()
    with pytest.raises(StepFailed, match="not finite"):
        search.children(prompt, [Output("", 0, finish_reason="error", error="not finite")])
    for ids in (b"", bytes(4)):
        with pytest.raises(EngineUnavailable, match="what ran was ended"):
            search.children(prompt, [Output("", 0, ids, bytes(len(ids)), finish_reason="abort")])


def test_the_likeliest_tokens_are_not_drawn() -> None:
    llm, _ = make()
    for fields in ({"top_p": 0.5}, {"top_k": 1}, {"min_p": 0.1}, {"seed": 1}):
        with pytest.raises(InvalidRequest, match="is not honoured in a tree"):
            llm.tree(PROMPT, Tree(candidates="likeliest"), SamplingParams(**fields))


def test_a_deep_node_can_be_shown() -> None:
    llm, _ = make()
    nodes = llm.tree([1], Tree(branching=1, depth=60), SamplingParams(ignore_eos=True))
    assert len(repr(nodes[-1])) < 1_000 and nodes[-1].depth == 60


def test_nodes_of_any_depth_are_pickled_and_copied() -> None:
    nodes: list[TreeNode] = []
    for depth in range(1, 5_001):
        own = np.array([depth], np.int32), np.array([-0.5], np.float32)
        more: Any = (-0.5 * depth, depth, "length", depth == 5_000, -0.5 * depth, depth, repr)
        nodes.append(TreeNode(depth - 1, nodes[-1] if nodes else None, depth, *own, *more))
    for again in (pickle.loads(pickle.dumps(nodes[-1])), copy.deepcopy(nodes[-1])):
        assert again.path.tolist() == [*range(1, 5_001)]
        assert shown([again]) == shown(nodes[-1:])
    for node, before in itertools.pairwise(pickle.loads(pickle.dumps(nodes[::-1]))):
        assert node.parent is before


@pytest.mark.parametrize(
    "params",
    [
        {"n": 2},
        {"max_tokens": 3},
        {"min_tokens": 1},
        {"logprobs": 1},
        {"presence_penalty": 1.0},
        {"constraint": "x"},
        {"bad_words": ((1,),)},
    ],
)
def test_a_parameter_that_is_not_honoured_is_refused(params: dict[str, Any]) -> None:
    (name,) = params
    with pytest.raises(InvalidRequest, match=f"params.{name} is not honoured in a tree"):
        make()[0].tree(PROMPT, Tree(), SamplingParams(**params))


def test_wrong_types_and_scores_are_named() -> None:
    llm, _ = make()
    with pytest.raises(InvalidRequest, match="tree must be a Tree, got"):
        llm.tree(PROMPT, {})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="'widht' is not a field of Tree"):
        Tree(widht=1)  # type: ignore[call-arg]
    with pytest.raises(InvalidRequest, match="score must be a function of a TreeNode, got 'high'"):
        llm.tree(PROMPT, Tree(), score="high")  # type: ignore[arg-type]
    for score in (float("nan"), "high", None):
        with pytest.raises(InvalidRequest, match="score must return a finite number"):
            llm.tree(PROMPT, Tree(depth=2), score=lambda _, score=score: score)  # type: ignore[misc]
    assert len(llm.tree(PROMPT, Tree(branching=np.int32(2), depth=1))) == 2  # type: ignore[arg-type]


def test_what_a_score_raises_ends_the_tree() -> None:
    llm, steps = make()
    with pytest.raises(EngineUnavailable, match="another generate"):
        llm.tree(PROMPT, Tree(depth=2), score=lambda _: float(len(llm.generate([PROMPT]))))
    assert not steps.has_work
    assert len(llm.generate([PROMPT])) == 1
