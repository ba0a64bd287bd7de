"""`srm serve` gives the log-probabilities of the published code: a server for every fixture.

Log-probabilities are held to 1e-5 of the largest logit of the file's case, as logits are elsewhere.
Servers of one shape come one after the other, so that the first compiles for all; shapes are served
side by side, as many as there are processors.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from max.dtype import DType

from engine.device.model import graph_shape
from engine.weights.checkpoint import read_model
from tests.models.published import NAMES, TOLERANCE, cases, convert_fixture, parametrized
from tests.serving import Server

F64 = npt.NDArray[np.float64]
Choices = list[dict[str, Any]]
Answers = list[tuple[Choices, Choices]]

TOP = 20
FLAGS = ("--num-slots=16", "--max-step-rows=4", "--max-step-tokens=150")
"""So few that long prompts are cut, and share steps."""
START_S = 300


def replies(folder: Path, name: str) -> Answers:
    """For each case of the fixture: its prompts scored, and the first token after each."""
    found = []
    with Server(folder, *FLAGS, engine_module="engine", start_s=START_S) as server:
        for ids, _, _ in cases(name):
            fields = {"prompt": ids.tolist(), "temperature": 0, "logprobs": TOP}
            scored = server.post(**fields, echo=True, max_tokens=0)
            sampled = server.post(**fields, ignore_eos=True, max_tokens=1)
            assert scored.status_code == sampled.status_code == 200, scored.text + sampled.text
            found.append((scored.json()["choices"], sampled.json()["choices"]))
    return found


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Answers]]]:
    """Answers of a server for each fixture that a selected test needs."""
    groups: defaultdict[object, dict[str, Path]] = defaultdict(dict)
    here = [item for item in request.session.items if item.path == request.path]
    wanted = {name for name in NAMES if any(f"[{name}]" in item.name for item in here)}
    for name in sorted(wanted):
        folder = convert_fixture(name, tmp_path_factory.mktemp(name))
        groups[graph_shape(read_model(folder).config, DType.float32)][name] = folder
    answers: dict[str, Future[Answers]] = {}
    with ExitStack() as stack:
        pools = [stack.enter_context(ThreadPoolExecutor(1)) for _ in range(os.cpu_count() or 1)]
        for pool, group in zip(cycle(pools), groups.values(), strict=False):
            for name, folder in group.items():
                answers[name] = pool.submit(replies, folder, name)
        yield answers


def log_softmax(logits: npt.NDArray[np.float32]) -> F64:
    z = logits.astype(np.float64)
    z -= z.max(-1, keepdims=True)
    found: F64 = z - np.log(np.exp(z).sum(-1, keepdims=True))
    return found


def check_position(
    expected: F64, token: int, logprob: float, top: dict[str, float], tolerance: float
) -> None:
    """One position's reply: expected log-probabilities [V], and the token that stands there."""
    assert abs(logprob - expected[token]) < tolerance
    assert top[f"token_id:{token}"] == logprob
    at_ids = expected[[int(name.removeprefix("token_id:")) for name in top]]
    given = np.array(list(top.values()))
    assert np.abs(given - at_ids).max() < tolerance
    likeliest = -np.sort(-expected)[:TOP]
    assert np.abs(-np.sort(-given)[:TOP] - likeliest).max() < tolerance


@parametrized(quick=1)
def test_every_prompt_position_has_the_published_log_probabilities(
    name: str, served: dict[str, Future[Answers]]
) -> None:
    for (ids, positions, logits), (scored, sampled) in zip(
        cases(name), served[name].result(), strict=True
    ):
        expected, tolerance = log_softmax(logits), TOLERANCE * float(np.abs(logits).max())
        assert positions[-1] == ids.shape[1] - 1
        for row, tokens in enumerate(ids.tolist()):
            echoed, last = scored[row]["logprobs"], sampled[row]["logprobs"]
            assert echoed["tokens"] == [f"token_id:{token}" for token in tokens]
            assert echoed["token_logprobs"][0] is echoed["top_logprobs"][0] is None
            every = [value for top in echoed["top_logprobs"][1:] for value in top.values()]
            assert np.isfinite([*echoed["token_logprobs"][1:], *every]).all()
            for column, position in enumerate(positions[:-1].tolist()):
                after, values = position + 1, expected[row, column]
                logprob, top = (echoed[f"{kind}_logprobs"][after] for kind in ("token", "top"))
                check_position(values, tokens[after], logprob, top, tolerance)
            token = int(last["tokens"][0].removeprefix("token_id:"))
            assert expected[row, -1].max() - expected[row, -1, token] < tolerance
            (logprob,), (top,) = last["token_logprobs"], last["top_logprobs"]
            check_position(expected[row, -1], token, logprob, top, tolerance)
