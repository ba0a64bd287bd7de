"""Receipts of tokens that several weights made, replayed with their folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from srm.engine.messages import Output, Request, SamplingParams
from srm.engine.process.engine import Engine
from srm.engine.python.replay import main
from srm.engine.receipt import Receipt, cover_versions, params_that_decide, sha256
from srm.engine.weights.checkpoint import load_checkpoint
from srm.engine.weights.random_model import write_random_model
from srm.server.generation.version_spans import spans_of
from tests.kit.engines.numpy_runner import SMALL
from tests.kit.models.demo import engine_on_max

PROMPT = np.array([5, 17, 3, 40, 8], "<i4").tobytes()
LENGTH = 24
CHANGES = {7: 1, 16: 2, 36: 0}
"""By step: the folder whose weights are then put to use."""
PARAMS = [
    SamplingParams(n=40, max_tokens=LENGTH, ignore_eos=True, logprobs=0, seed=3),
    SamplingParams(n=3, max_tokens=LENGTH, logprobs=0, seed=2**64 - 1, temperature=0.7,
                   presence_penalty=1.5, repetition_penalty=1.3, frequency_penalty=-0.5,
                   min_tokens=20, top_k=30, top_p=0.95, logit_bias={3: 2.0},
                   bad_words=((4, 5), (9,))),
    SamplingParams(n=2, max_tokens=LENGTH, ignore_eos=True, logprobs=0, temperature=0.0),
]  # fmt: skip


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Folders of three models of the same shape."""
    root = tmp_path_factory.mktemp("changed")
    for seed, name in enumerate("abc"):
        write_random_model(root / name, SMALL, seed=seed)
    return [root / name for name in "abc"]


def receipts_through_changes(engine: Engine, folders: list[Path], refeeds: bool) -> list[Receipt]:
    """Of 45 samples on 16 slots, some of which begin after a change."""
    for number, params in enumerate(PARAMS):
        engine.add(Request(str(number), PROMPT, params))
    weights = [load_checkpoint(folder) for folder in folders]
    fingerprints = dict(enumerate([weights[at].fingerprint for at in (0, *CHANGES.values())], 1))
    receipts: list[Receipt] = []

    def keep(outputs: list[Output]) -> None:
        for output in outputs:
            size = len(output.token_ids) // 4
            versions = np.frombuffer(output.versions, "<i4")
            if not len(versions):
                versions = np.full(size, engine.weights_version)
            made = [(span.version, span.start, span.end) for span in spans_of(versions, 0)]
            spans = cover_versions(made, output.first_version or versions[0], fingerprints)
            params = params_that_decide(PARAMS[int(output.id)])
            receipts.append(
                Receipt(
                    arithmetic="cpu float32", spans=spans, prompt_token_ids=PROMPT,
                    prompt_sha256=sha256(PROMPT), params=params, sample=output.index,
                    token_ids=output.token_ids, logprobs=output.logprobs,
                    finish_reason=output.finish_reason,
                )
            )  # fmt: skip

    for step in range(1_000):
        if not engine.has_work:
            break
        if step in CHANGES:
            keep(engine.settle())
            engine.load_weights(weights[CHANGES[step]], refeeds=refeeds)
        keep(engine.step_overlapped())
    assert len(receipts) == sum(params.n for params in PARAMS)
    return receipts


def replay(
    folder: Path, receipts: list[Receipt], weights: list[Path], capsys: Any
) -> tuple[int, list[str]]:
    """Return the exit code and the lines that `srm replay` prints."""
    file = folder / "receipts.jsonl"
    file.write_bytes(b"\n".join(map(msgspec.json.encode, receipts)))
    code = main([str(file), "--weights", *map(str, weights)])
    return code, capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("refeeds", [False, True])
def test_changes_of_weights_replay(
    changed: list[Path], refeeds: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"num_slots": 16, "max_step_rows": 16, "max_step_tokens": 64}
    with engine_on_max(load_checkpoint(changed[0]), **sizes) as engine:
        receipts = receipts_through_changes(engine, changed, refeeds)
    spans = [span for receipt in receipts for span in receipt.spans]
    assert {span.version for span in spans if span.start == span.end} >= {1, 2}, "idle ones too"
    code, lines = replay(tmp_path, receipts, changed, capsys)
    assert lines == ["45 of 45 receipts replay bit for bit"] and code == 0
