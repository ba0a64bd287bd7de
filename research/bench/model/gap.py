"""How far the engine's log-probabilities are from a trainer's: the second part of `srm bench
precision`.

The engine samples whole contexts from the begin token, and then scores what it sampled as prompts.
torch computes the same in float32 of the same weights, in the parallel form that trainers use and
in the recurrent one; and in the parallel form as trainers do that multiply in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from research.bench.frame import table
from srm.engine.config import Dtype
from srm.engine.messages import SamplingParams
from srm.engine.python.offline import Engine
from srm.training.checkpoint import load_model
from srm.training.model import SRM

F32 = npt.NDArray[np.float32]
_HALVINGS = 3
"""How often a context is halved: it is measured up to each of these lengths."""


def _parallel(model: SRM, ids: Tensor) -> Tensor:
    logits: Tensor = model(ids)
    return logits


def _recurrent(model: SRM, ids: Tensor) -> Tensor:
    state, logits = model.empty_state(len(ids)), []
    for position in range(ids.shape[1]):
        measured, state = model.step(ids[:, position], state, position)
        logits.append(measured)
    return torch.stack(logits, 1)


def _autocast(model: SRM, ids: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return _parallel(model, ids).float()


FORMS: dict[str, Callable[[SRM, Tensor], Tensor]] = {
    "parallel": _parallel,
    "recurrent": _recurrent,
    "parallel, bfloat16": _autocast,
}
"""What torch makes of ids, int64 [rows, length]: logits, float32 [rows, length, vocab]."""


@torch.inference_mode()
def measure_gap(folder: Path, dtype: Dtype, sequences: int, seed: int) -> dict[str, Any]:
    """Return differences in nats between the engine in this dtype and each of FORMS, by length."""
    model = load_model(folder)
    with Engine(folder, dtype=dtype, num_slots=sequences) as engine:
        ids, sampled, scored = _samples(engine, model, sequences, seed)
    targets = torch.tensor(ids[:, 1:], dtype=torch.int64)[..., None]
    fed, forms = torch.tensor(ids[:, :-1], dtype=torch.int64), {}
    for name, run in FORMS.items():
        logprobs = run(model, fed).log_softmax(-1).gather(2, targets)[..., 0].numpy()
        gap = np.abs(sampled.astype(np.float64) - logprobs)
        forms[name] = [
            {"length": stop, "max": float(part.max()), "mean": float(part.mean())}
            for stop, part in _by_length(gap, model.config.n_ctx)
        ]
    same = np.count_nonzero(sampled.view(np.int32) == scored.view(np.int32))
    about = {"model": folder.name, "dtype": dtype, "tokens": sampled.size}
    return about | {"same_bits": int(same), "forms": forms}


def _samples(
    engine: Engine, model: SRM, sequences: int, seed: int
) -> tuple[npt.NDArray[np.int32], F32, F32]:
    """Return ids [sequences, n_ctx], and log-probabilities of all but the first, as they were told
    when they were sampled and when they were scored."""
    begin = [model.config.bos_token_id]
    params = SamplingParams(
        n=sequences, max_tokens=model.config.n_ctx - 1, ignore_eos=True, logprobs=0, seed=seed
    )
    (made,) = engine.generate([begin], params)
    ids = np.stack(
        [np.append(begin, completion.token_ids) for completion in made.completions]
    ).astype(np.int32)
    scoring = SamplingParams(max_tokens=0, prompt_logprobs=0)
    prompts = [prompt.prompt_scores for prompt in engine.generate(ids.tolist(), scoring)]
    scored = [prompt.logprobs for prompt in prompts if prompt is not None]
    sampled = [
        completion.logprobs for completion in made.completions if completion.logprobs is not None
    ]
    return ids, np.stack(sampled), np.stack(scored)


def _by_length(gap: npt.NDArray[np.float64], n_ctx: int) -> Iterator[tuple[int, Any]]:
    """Yield lengths that double up to `n_ctx`, each with what is behind the one before."""
    start = 0
    for halvings in range(_HALVINGS, -1, -1):
        stop = n_ctx >> halvings
        yield stop, gap[:, start : stop - 1]
        start = stop - 1


def markdown_gap(measured: list[dict[str, Any]]) -> list[str]:
    """Render a table of all models and dtypes."""
    rows = []
    for case in measured:
        for name, parts in case["forms"].items():
            cells = (f"{part['max']:.1e} / {part['mean']:.1e}" for part in parts)
            whole = f"{case['model']}, to {parts[-1]['length']}"
            rows.append(" | ".join([whole, case["dtype"], name, *cells]))
    lengths = ("an eighth", "a quarter", "half", "all")
    heads = " | ".join(["model", "engine", "torch", *(f"to {part}" for part in lengths)])
    counts = (
        f"{case['model']} in {case['dtype']}: {case['same_bits']:,} of {case['tokens']:,}"
        for case in measured
    )
    return [
        *("", "## The engine beside a trainer", ""),
        "Largest and mean difference of log-probabilities in nats, at temperature 1, of tokens",
        "that the engine sampled; by their place in the context, each column from where the one",
        "before ends. torch has float32 weights.",
        *("", *table(heads, rows), ""),
        f"Scored afterwards as prompts, with the same bits: {'; '.join(counts)}.",
    ]
