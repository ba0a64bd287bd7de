"""`srm bench rollouts`: rollouts while weights change and the engine is killed, token by token.

A trainer changes the weights again and again, deletes each folder as soon as it has its answer, and
the engine is killed at random moments. Rollouts whose engine dies are asked for again. Afterwards
the log-probability of every token is computed again by torch's recurrent form in float32, with
other weights from where the reply's spans say so; and that of every eighth with weights of
another version, which must not agree.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from research.bench.frame import Record, run, table
from research.bench.host.serving import free_port, serving
from research.bench.peers.pauses import pauses_of, vllm_pauses
from research.bench.server.soak import CheckedRollout, RolloutsBenchConfig, Soak
from srm.engine.config import ModelConfig, parse_model_config
from srm.engine.weights.random_model import random_tensors, write_random_model
from srm.errors import ConfigError
from srm.training.model import SRM

F64 = npt.NDArray[np.float64]

WITHIN = 1e-4
"""Nats by which a log-probability may differ from torch's, in float32."""
OFF, OFF_SHARE = 1e-2, 0.95
"""Nats by which it must differ from that of other weights, and for how large a share of tokens."""
_EVERY = 8
"""One token in this many is also computed with other weights."""


def main(argv: list[str]) -> int:
    """Run, write a record, print its table. Exit code 1 if a rollout or a token is not right,
    or other weights would do as well."""
    return run(RolloutsBenchConfig, argv, "rollouts", measure, markdown, fault=fault)


def measure(config: RolloutsBenchConfig) -> Record:
    """Return what became of rollouts and changes, and how far log-probabilities are off."""
    shape = _shape_of(config)
    with tempfile.TemporaryDirectory() as name:
        soak = Soak(config, shape, Path(name))
        pauses = _run(soak, config, shape, Path(name))
    if config.peers_dir and pauses:
        sizes = config.paused_rollouts, config.pauses, config.max_tokens
        pauses.append(vllm_pauses(config.peers_dir, *sizes))
    if not soak.rollouts:
        raise ConfigError("no rollout was answered")
    spans = [len(set(rollout.versions)) for rollout in soak.rollouts]
    return {
        "rollouts": len(soak.rollouts),
        "unanswered": soak.num_unanswered,
        "asked_again": dict(soak.failures),
        "versions": len(soak.seeds),
        "spans": {"mean": float(np.mean(spans)), "most": max(spans)},
        "changes": soak.changes,
        "change_failures": dict(soak.change_failures),
        "kills": soak.num_kills,
        "seconds": soak.seconds,
        "mean_step_s": soak.mean_step_s,
        "pauses": pauses,
        **check(soak, shape),
    }


def fault(record: Record) -> str:
    """Say what is wrong with rollouts, tokens and the check of these; nothing if all are right."""
    counts = {
        "rollouts were not answered": record["unanswered"],
        f"tokens are off by more than {WITHIN:g} nats": record["beyond"],
    }
    faults = [f"{count:,} {what}" for what, count in counts.items() if count]
    if not record["wrong_off_share"] >= OFF_SHARE:  # nor is NaN enough
        share = f"{record['wrong_off_share']:.2%} of the tokens are off by more than {OFF:g} nats"
        faults.append(f"only {share} with other weights: the check shows nothing")
    return "; ".join(faults)


def _shape_of(config: RolloutsBenchConfig) -> ModelConfig:
    """Read the models' shape. Raises ConfigError where rollouts do not fit its context."""
    path = config.model / "config.json"
    shape = parse_model_config(path, path.read_bytes())
    if config.prompt_tokens + config.max_tokens > shape.n_ctx:
        raise ConfigError(
            f"prompt_tokens + max_tokens = {config.prompt_tokens + config.max_tokens} must be at "
            f"most n_ctx = {shape.n_ctx} of {config.model}"
        )
    return shape


def _run(soak: Soak, config: RolloutsBenchConfig, shape: ModelConfig, folder: Path) -> list[Record]:
    """Serve the first weights for the soak; return what pausing takes then, if all was answered."""
    write_random_model(folder / "model", shape, soak.seed(0))
    rows = max(config.rollouts, config.samples)
    admin_port = free_port()
    with serving(
        *(f"--model={folder}/model", f"--data-dir={folder}/data", f"--num-slots={rows}"),
        *(f"--max-step-rows={rows}", f"--admin-port={admin_port}", "--log-level=warning"),
    ) as server:
        admin_url = f"http://127.0.0.1:{admin_port}"
        asyncio.run(soak.run(server.pid, server.url, admin_url))
        if soak.num_unanswered:
            return []
        sizes = config.paused_rollouts, config.pauses, config.max_tokens
        measured = asyncio.run(pauses_of(server.url, admin_url, *sizes))
    return [{"engine": "srm", "model": config.model.name, **measured}]


def check(soak: Soak, shape: ModelConfig) -> Record:
    """Compute all tokens' log-probabilities again, and compare."""
    began = time.monotonic()

    def load(version: int) -> SRM:
        model = SRM(shape)
        tensors = random_tensors(shape, soak.seed(soak.seeds[version]))
        model.load_state_dict({key: torch.tensor(value) for key, value in tensors.items()})
        return model

    right, wrong = recompute(soak.rollouts, load, soak.seeds)
    given = np.concatenate([np.array(rollout.logprobs) for rollout in soak.rollouts])
    errors, wrong_errors = np.abs(right - given), np.abs(wrong - given)[~np.isnan(wrong)]
    return {
        "tokens": len(given),
        "largest_error": float(errors.max()),
        "beyond": int(np.count_nonzero(~(errors <= WITHIN))),  # nor is NaN within
        "compared": len(wrong_errors),
        "wrong_off_share": float(np.mean(wrong_errors > OFF)),
        "recompute_s": time.monotonic() - began,
    }


def markdown(record: Record) -> list[str]:
    """Render the table."""
    stops = [change["pause_seconds"] for change in record["changes"]]
    whole = [change["seconds"] for change in record["changes"]]
    step_s = record["mean_step_s"]
    tokens, spans = record["tokens"], record["spans"]
    rows = {
        "rollouts answered": f"{record['rollouts']:,}",
        "rollouts not answered": f"{record['unanswered']:,}",
        "requests asked again": f"{sum(record['asked_again'].values()):,}",
        "changes of weights": f"{len(stops):,} in {record['seconds']:.0f} s",
        "kills of the engine": str(record["kills"]),
        "versions in a rollout": f"{spans['mean']:.1f}, {spans['most']} at most",
        "tokens": f"{tokens:,}",
        f"off by more than {WITHIN:g} nats": f"{record['beyond']:,}",
        "largest error": f"{record['largest_error']:.1e} nats",
        f"off by more than {OFF:g} with other weights": f"{record['wrong_off_share']:.2%}",
        "mean step": f"{1e3 * step_s:.1f} ms",
        "without a step at a change, p50": _lasted(stops, step_s, 0.5),
        "without a step at a change, p99": _lasted(stops, step_s, 0.99),
        "from asking to use, p50": f"{float(np.median(whole)):.2f} s",
    }
    paused = (
        f"{server['engine']}, {server['model']} | {1e3 * server['step_s']:.1f} ms "
        f"| {_lasted(server['seconds'], server['step_s'], 0.5)} "
        f"| {_lasted(server['seconds'], server['step_s'], 0.99)}"
        for server in record["pauses"]
    )
    return [
        *table(" | ", (f"{name} | {value}" for name, value in rows.items())),
        "",
        "`/pause` and `/resume` with nothing between them, as a client waits for both, under "
        f"{record['settings']['paused_rollouts']} running completions; a step is the time between "
        "two tokens of one:",
        "",
        *table("engine, model | step | p50 | p99", paused),
    ]


def _lasted(times_s: Sequence[float], step_s: float, quantile: float) -> str:
    seconds = float(np.quantile(times_s, quantile))
    return f"{1e3 * seconds:.1f} ms, {seconds / step_s:.2f} steps"


def recompute(
    rollouts: Sequence[CheckedRollout], load: Callable[[int], SRM], seeds: Mapping[int, int]
) -> tuple[F64, F64]:
    """Compute all tokens' log-probabilities, rollout by rollout, at temperature 1: with the weights
    that their versions name, and every eighth with other ones instead, of the nearest version
    before (the first ones: after); others are NaN there.

    `load` returns a version's model; versions of one of `seeds` have the same weights. There must
    be two of these. All prompts have the same length.
    """
    first = len(rollouts[0].prompt) - 1
    lengths = np.array([len(rollout.tokens) for rollout in rollouts])
    shape = len(rollouts), first + int(lengths.max())
    fed, made = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    version_at = np.zeros(shape, np.int64)  # 0: nothing is fed
    for row, rollout in enumerate(rollouts):
        stop = first + len(rollout.tokens)
        fed[row, :stop] = [*rollout.prompt, *rollout.tokens[:-1]]
        made[row, first:stop] = rollout.tokens
        version_at[row, :stop] = [rollout.prompt_version] * first + rollout.versions
    if (np.diff(np.where(version_at == 0, np.iinfo(np.int64).max, version_at)) < 0).any():
        raise ConfigError("the versions of a rollout's tokens fall")
    right, wrong = np.zeros(shape), np.full(shape, np.nan)
    models: dict[int, SRM] = {}
    state = None
    for version in np.unique(version_at[version_at > 0]).tolist():  # a rollout's versions ascend
        others = [number for number, seed in seeds.items() if seed != seeds[version]]
        other = max((number for number in others if number < version), default=min(others))
        models = {number: models.get(number) or load(number) for number in (other, version)}
        if state is None:
            state = models[version].empty_state(len(rollouts))
        for position in range(shape[1]):
            rows = np.flatnonzero(version_at[:, position] == version)
            if not len(rows):
                continue
            tokens, before = torch.tensor(fed[rows, position]), state[:, :, rows]
            target = torch.tensor(made[rows, position])[:, None]
            uses = [(version, right)]
            if position % _EVERY == version % _EVERY:
                uses.append((other, wrong))
            for number, logprobs in uses:
                with torch.inference_mode():
                    logits, after = models[number].step(tokens, before, position)
                if number == version:
                    state[:, :, rows] = after
                at_target = logits.log_softmax(-1).gather(1, target)[:, 0]
                logprobs[rows, position] = at_target.numpy()
    is_made = np.arange(shape[1]) >= first
    is_made = is_made & (np.arange(shape[1]) < first + lengths[:, None])
    return right[is_made], wrong[is_made]
