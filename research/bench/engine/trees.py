"""`srm bench trees`: what a node of a tree costs, and what a search finds with as many tokens.

A tree without selection is beside independent samples of as many tokens, in turns. Searches of the
likeliest answers to tasks are beside plain samples, in their order, until the same tokens are
computed. The interval of a difference is resampled over tasks and the samples' seeds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from research.bench.frame import Record, Settings, note, run, table
from srm.engine.config import EngineConfig
from srm.engine.messages import SamplingParams
from srm.engine.python.offline import Engine
from srm.engine.tree_search import MAX_NODES, Tree, TreeNode
from srm.loadtest.records import ROOT
from srm.training.questions.questions import Question, read_questions
from srm.training.questions.rewards import load_reward, rewarded

PROMPT = "Question: Ava has 6 boxes"
CANDIDATES = 16
LONGEST = 66
"""Most tokens of an answer."""
RESAMPLED = 10_000


class TreesBenchConfig(Settings, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm bench trees`."""

    model: Path = ROOT / "models/demo"
    """Checkpoint whose nodes are timed."""
    depth: int = 16
    """Levels of the tree, whose nodes have two children each."""
    node_tokens: int = 8
    """Tokens of a node."""
    repetitions: int = 2
    """Trees that are timed, each beside independent samples."""
    searched: Path = ROOT / "models/regex"
    """Checkpoint that answers tasks."""
    tasks: Path = ROOT / "models/regex/drawn.jsonl"
    """Tasks, as `srm evaluate passk --input` takes them."""
    reward: str = "srm.training.questions.rewards:regex"
    """Function that says whether an answer is right."""
    count: int = 100
    """Tasks, the first ones."""
    budgets: tuple[int, ...] = (500, 2_000, 8_000)
    """Tokens that are computed for a task."""
    width: int = 8
    """Nodes that a round of a best-first search expands."""
    seeds: int = 3
    """Seeds of plain samples."""
    cache_dir: Path = EngineConfig().cache_dir
    """Folder where compiled graphs are kept between runs."""


def main(argv: list[str]) -> int:
    """Measure, write a record, print its tables."""
    return run(TreesBenchConfig, argv, "trees", measure, markdown)


def measure(config: TreesBenchConfig) -> Record:
    """Return the rates, and which tasks each way solves."""
    return {"rates": _time(config), "found": _search(config)}


def _time(config: TreesBenchConfig) -> list[dict[str, Any]]:
    tree = Tree(depth=config.depth, node_tokens=config.node_tokens)
    nodes = 2 ** (config.depth + 1) - 2
    timed = []
    sizes = {"num_slots": 16_384, "prefix_slots": 2**config.depth, "max_waiting": 2 * MAX_NODES}
    with Engine(config.model, cache_dir=config.cache_dir, **sizes) as llm:
        ways: dict[str, Callable[[], int]] = {
            "tree": lambda: sum(
                len(node.token_ids)
                for node in llm.tree(PROMPT, tree, SamplingParams(ignore_eos=True))
            ),
            "samples of a node": lambda: _sample(llm, nodes, config.node_tokens),
            "samples of a path": lambda: _sample(
                llm, nodes // config.depth, config.node_tokens * config.depth
            ),
        }
        _sample(llm, 1_024, config.node_tokens)  # warms up
        for repetition in range(config.repetitions):
            for turn in range(len(ways)):
                way = [*ways][(turn + repetition) % len(ways)]
                began = time.perf_counter()
                tokens = ways[way]()
                seconds = time.perf_counter() - began
                timed.append(note({"way": way, "tokens": tokens, "seconds": seconds}))
    return timed


def _sample(llm: Engine, count: int, tokens: int) -> int:
    params = SamplingParams(n=count, max_tokens=tokens, ignore_eos=True)
    (made,) = llm.generate([PROMPT], params, progress=False)
    return sum(len(completion.token_ids) for completion in made.completions)


def _search(config: TreesBenchConfig) -> list[dict[str, Any]]:
    """Return, of each way, seed and task, after how many tokens a right answer was there."""
    reward = load_reward(config.reward)
    asked = read_questions(config.tasks)[: config.count]
    most, firsts = max(config.budgets), []
    with Engine(config.searched, cache_dir=config.cache_dir, prefix_slots=8_192) as llm:
        for number, question in enumerate(asked):
            ways = {
                f"samples {seed}": _plain(llm, question, most, seed) for seed in range(config.seeds)
            }
            ways["best first"] = _likeliest(llm, question, most, config.width, "best_first")
            ways["beams"] = _likeliest(llm, question, most, most // LONGEST, "levels")
            for way, answers in ways.items():
                right = (tokens for tokens, text in answers if rewarded(reward, text, question) > 0)
                first = next(right, None)
                firsts.append(note({"task": number, "way": way, "tokens": first}))
    return firsts


def _plain(llm: Engine, question: Question, most: int, seed: int) -> list[tuple[int, str]]:
    """Return samples, each with the tokens computed up to its end, until these are `most`."""
    answers: list[tuple[int, str]] = []
    tokens = 0
    params = SamplingParams(n=most // 16, max_tokens=LONGEST, seed=seed)
    (made,) = llm.generate([question.question], params, progress=False)
    for completion in made.completions:
        tokens += len(completion.token_ids)
        if tokens > most:
            break
        answers.append((tokens, completion.text))
    return answers


def _likeliest(
    llm: Engine, question: Question, most: int, width: int, search: Any
) -> list[tuple[int, str]]:
    """Return the leaves of a tree of likeliest tokens, in the order in which they came."""
    expanded: set[TreeNode | None] = set()
    answers = []
    tree = Tree(candidates="likeliest", branching=CANDIDATES, depth=LONGEST, width=width,
                search=search, budget=most)  # fmt: skip
    for node in llm.tree(question.question, tree):
        expanded.add(node.parent)  # a token each
        if node.ends == "stop":
            answers.append((len(expanded), node.text))
    return answers


def markdown(record: Record) -> list[str]:
    """Render the record as tables."""
    settings, rates = record["settings"], record["rates"]
    ways = list(dict.fromkeys(entry["way"] for entry in rates))
    speeds = {
        way: [own["tokens"] / own["seconds"] for own in rates if own["way"] == way] for way in ways
    }
    trees = np.array(speeds["tree"])
    nodes = 2 ** (settings["depth"] + 1) - 2
    return [
        f"A tree of {nodes:,} nodes of {settings['node_tokens']} tokens of "
        f"{Path(settings['model']).name}, and as many tokens of independent samples, "
        f"{settings['repetitions']} times in turns.",
        "",
        *table(
            "way | tokens/s, median | tree's to it, median",
            (f"{w} | {median(own):,.0f} | {median(trees / own):.2f}" for w, own in speeds.items()),
        ),
        "",
        f"Tasks of {Path(settings['tasks']).name}, {settings['count']}, that "
        f"{Path(settings['searched']).name} solves within so many tokens: by plain samples, "
        f"{settings['seeds']} seeds, and by trees of the {CANDIDATES} likeliest next tokens, best "
        f"first with a width of {settings['width']}, and as beams. In brackets the difference to "
        f"samples, with its interval of 95 %, resampled over tasks and seeds.",
        "",
        *table("tokens | samples | best first | beams", _solved_rows(record)),
    ]


def _solved_rows(record: Record) -> list[str]:
    settings, first = record["settings"], {}
    for entry in record["found"]:
        first[entry["way"], entry["task"]] = entry["tokens"] or np.inf
    count, seeds = settings["count"], settings["seeds"]
    tasks = range(len({task for _, task in first}))
    rng, rows = np.random.default_rng(0), []
    drawn = rng.integers(0, len(tasks), (RESAMPLED, len(tasks)))
    chosen = rng.integers(0, seeds, (RESAMPLED, seeds))
    for budget in settings["budgets"]:
        solved = {
            way: np.array([first[way, task] <= budget for task in tasks])
            for way in dict.fromkeys(way for way, _ in first)
        }
        plain = np.array([solved[f"samples {seed}"] for seed in range(seeds)], np.float64)
        cells = [f"{budget:,}", f"{plain.mean():.3f}"]
        for way in ("best first", "beams"):
            gaps = (solved[way] - plain)[chosen].mean(axis=1)  # by draw and task
            low, high = np.quantile(np.take_along_axis(gaps, drawn, 1).mean(axis=1), (0.025, 0.975))
            gap = solved[way].mean() - plain.mean()
            cells.append(f"{solved[way].mean():.3f} ({gap:+.3f}, {low:+.3f} … {high:+.3f})")
        rows.append(" | ".join(cells))
    assert len(tasks) == count
    return rows
