"""`srm serve` gives the log-probabilities of the published code: a server for every fixture.

Log-probabilities are held to 1e-5 of the largest logit of the file's case, as logits are elsewhere.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from tests.kit.models.forms import TOLERANCE
from tests.kit.models.published import cases, convert_fixture, parametrized
from tests.kit.serving import Server

F64 = npt.NDArray[np.float64]

TOP = 20
FLAGS = ("--num-slots=16", "--max-step-rows=4", "--max-step-tokens=150")
"""So few that long prompts are cut, and share steps."""
START_S = 300


def log_softmax(logits: npt.NDArray[np.float32]) -> F64:
    z = logits.astype(np.float64)
    z -= z.max(-1, keepdims=True)
    result: F64 = z - np.log(np.exp(z).sum(-1, keepdims=True))
    return result


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


def check_case(
    server: Server,
    ids: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    logits: npt.NDArray[np.float32],
) -> None:
    """The prompts scored, and the first token after each."""
    fields = {"prompt": ids.tolist(), "temperature": 0, "logprobs": TOP}
    replies = [
        server.post(**fields, **more)
        for more in ({"echo": True, "max_tokens": 0}, {"ignore_eos": True, "max_tokens": 1})
    ]
    scored, sampled = (reply.raise_for_status().json()["choices"] for reply in replies)
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


@parametrized(quick=1)
def test_every_prompt_position_has_the_published_log_probabilities(
    name: str, tmp_path: Path
) -> None:
    folder = convert_fixture(name, tmp_path)
    with Server(folder, *FLAGS, engine_module="srm.engine", start_s=START_S) as server:
        for case in cases(name):
            check_case(server, *case)
