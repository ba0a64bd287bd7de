"""Each token is of the weights that its version names: torch's recurrent form says so."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from srm.engine.messages import Output, Request, SamplingParams
from srm.engine.process.engine import Engine
from srm.engine.weights.checkpoint import load_checkpoint
from srm.engine.weights.random_model import write_random_model
from srm.training.checkpoint import load_model
from srm.training.model import SRM
from tests.kit.engines.numpy_runner import SMALL
from tests.kit.models.demo import engine_on_max

PROMPT_IDS = [5, 17, 3, 40, 8]
LENGTH = 24
CHANGES = {7: 1, 16: 2, 36: 0}  # by step: the folder whose weights are then put to use
WITHIN = 1e-4
OFF = 1e-2


def run_through_changes(
    engine: Engine, folders: list[Path], refeeds: bool
) -> list[tuple[Output, int]]:
    """40 samples on 16 slots, while weights change thrice: each with the version in use at its
    end."""
    params = SamplingParams(n=40, max_tokens=LENGTH, ignore_eos=True, logprobs=0, seed=3)
    prompt = np.array(PROMPT_IDS, "<i4").tobytes()
    engine.add(Request("r", prompt, params))
    outputs: list[tuple[Output, int]] = []
    for step in range(1_000):
        if not engine.has_work:
            break
        if step in CHANGES:
            outputs += [(output, engine.weights_version) for output in engine.settle()]
            engine.load_weights(load_checkpoint(folders[CHANGES[step]]), refeeds=refeeds)
        outputs += [(output, engine.weights_version) for output in engine.step_overlapped()]
    assert not engine.has_work
    return outputs


def recomputed(
    models: dict[int, SRM], tokens: list[int], versions: list[int], refeeds: bool
) -> npt.NDArray[np.float64]:
    """The log-probability of each token, by the recurrent form, each step of these weights. The
    prompt was fed once, by the first ones, for samples that began later too; with `refeeds` each of
    these weights has been fed all tokens before."""
    if refeeds:
        result = np.empty(len(tokens))
        for version in set(versions):
            own = recomputed({1: models[version]}, tokens, [1] * len(tokens), refeeds=False)
            is_own = np.array(versions) == version
            result[is_own] = own[is_own]
        return result
    first = len(PROMPT_IDS) - 1
    fed = [*PROMPT_IDS, *tokens[:-1]]
    state, logprobs = models[1].empty_state(1), []
    for position, token in enumerate(fed):
        model = models[versions[position - first] if position >= first else 1]
        with torch.no_grad():
            logits, state = model.step(torch.tensor([token]), state, position)
        if position >= first:
            logprobs.append(float(logits[0].log_softmax(-1)[tokens[position - first]]))
    return np.array(logprobs)


@pytest.mark.parametrize("refeeds", [False, True])
def test_each_token_is_of_the_version_that_is_said(tmp_path: Path, refeeds: bool) -> None:
    folders = [tmp_path / name for name in ("a", "b", "c")]
    for seed, folder in enumerate(folders):
        write_random_model(folder, SMALL, seed=seed)
    by_folder = [load_model(folder).double() for folder in folders]
    used = [0, *CHANGES.values()]
    models = {number: by_folder[at] for number, at in enumerate(used, 1)}
    sizes = {"num_slots": 16, "max_step_rows": 16, "max_step_tokens": 64}
    with engine_on_max(load_checkpoint(folders[0]), **sizes) as engine:
        outputs = run_through_changes(engine, folders, refeeds)
    assert len(outputs) == 40
    num_switches, off = set(), []
    for output, at_end in outputs:
        tokens = np.frombuffer(output.token_ids, "<i4").tolist()
        versions = np.frombuffer(output.versions, "<i4").tolist() or [at_end] * LENGTH
        assert len(tokens) == len(versions) == LENGTH and versions == sorted(versions)
        num_switches.add(len(set(versions)) - 1)
        assert output.first_version == 1
        expected = np.frombuffer(output.logprobs, "<f4")
        np.testing.assert_allclose(
            recomputed(models, tokens, versions, refeeds), expected, atol=WITHIN, rtol=0
        )
        if len(set(versions)) > 1:  # one token earlier than it was: that one token is off
            for at in np.flatnonzero(np.diff(versions)).tolist():
                wrong = [*versions[:at], versions[at + 1], *versions[at + 1 :]]
                off.append(abs(recomputed(models, tokens, wrong, refeeds)[at] - expected[at]))
    assert num_switches >= {0, 1}, "some samples met a change, and some none"
    assert np.mean(np.array(off) > OFF) >= 0.95


def test_what_meets_no_change_says_nothing(tmp_path: Path) -> None:
    write_random_model(tmp_path / "a", SMALL)
    with engine_on_max(load_checkpoint(tmp_path / "a"), num_slots=4) as engine:
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        (outputs,) = engine.generate([PROMPT_IDS], params)
    assert outputs[-1].versions == b""
