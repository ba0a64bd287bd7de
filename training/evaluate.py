"""`srm evaluate`: greedy accuracy and pass@k on held-out problems, sampled by the engine."""

from __future__ import annotations

import hashlib
import time
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
from tokenizers import Tokenizer

from srm.engine.config import EngineConfig
from srm.engine.device.runner import make_runner
from srm.engine.messages import Output, SamplingParams
from srm.engine.process.engine import Engine
from srm.engine.weights.checkpoint import load_checkpoint
from srm.errors import UNDECODABLE, ConfigError, in_words
from srm.files import read_file
from srm.progress import show_progress
from srm.tokenizer_file import read_tokenizer
from srm.training.problems.drawn import problems
from srm.training.problems.problem import Problem, reward
from srm.training.settings import EvaluateConfig
from srm.training.statistics.coverage import Floats, Tally, pass_table, standard_errors

COMPLETION_TOKENS = 96
"""Most tokens of a completion, more than any solution needs."""
KS = (1, 10, 100, 1_000, 10_000)
"""The values of k for pass@k, up to the number of samples."""


class Gains(msgspec.Struct, frozen=True):
    """Gain in pass@k over another model on the same problems."""

    than: str
    """The other model."""
    fingerprint: str
    pass_at: dict[str, float]
    """Difference in pass@k for each k, mean over problems."""
    pass_at_error: dict[str, float]
    """Standard error over problems, for each k."""


class Evaluation(msgspec.Struct, frozen=True):
    """The result of `srm evaluate`; written as JSON."""

    model: str
    fingerprint: str
    problems: int
    digest: str
    """Hash that identifies these problems."""
    samples: int
    temperature: float
    greedy: float
    right: list[int]
    """Number of right samples of each problem."""
    pass_at: dict[str, float]
    """pass@k for each k, mean over problems."""
    pass_at_error: dict[str, float]
    """Standard error over problems, for each k."""
    pass_at_1_by_kind: dict[str, float]
    generated_tokens: int
    seconds: float
    gains: Gains | None = None
    """Gain over the model of `against`; null without it."""


def evaluate(config: EvaluateConfig) -> Evaluation:
    """Sample every held-out problem `samples` times, and once greedily.

    Raises ConfigError for a model that cannot be read, and if `against` has other problems or
    fewer samples.
    """
    drawn = list(islice(problems("held-out", config.seed), config.problems))
    digest = hashlib.sha256(msgspec.json.encode([token.prompt for token in drawn])).hexdigest()[:16]
    other = None if config.against is None else _read(config.against, digest, config)
    weights = load_checkpoint(config.model)
    tokenizer = read_tokenizer(config.model / "tokenizer.json")
    engine_config = EngineConfig(model=config.model)
    engine = Engine(weights.config, make_runner(weights, engine_config), engine_config)
    prompts = [tokenizer.encode(problem.prompt).ids for problem in drawn]

    greedily = SamplingParams(max_tokens=COMPLETION_TOKENS, temperature=0.0)
    greedy = engine.generate(prompts, greedily)
    started, wanted = time.monotonic(), {"n": config.samples, "seed": config.seed}
    drawing = msgspec.structs.replace(greedily, temperature=config.temperature, **wanted)
    with show_progress("sampling", config.samples * len(prompts)) as tell:
        sampled = engine.generate(prompts, drawing, lambda come: tell(come, f"{come:,} samples"))
    seconds = time.monotonic() - started

    right = count_right(tokenizer, drawn, sampled)
    rates: dict[str, list[float]] = {}
    for problem, count in sorted(zip(drawn, right, strict=True), key=lambda pair: pair[0].kind):
        rates.setdefault(problem.kind, []).append(count / config.samples)
    table = _table(config.samples, right, config.samples)
    pass_at, pass_at_error = _by_k(table)
    gains = None
    if other is not None:
        less = _by_k(table - _table(other.samples, other.right, config.samples))
        gains = Gains(other.model, other.fingerprint, *less)
    return Evaluation(
        model=config.model.name,
        fingerprint=weights.fingerprint,
        problems=config.problems,
        digest=digest,
        samples=config.samples,
        temperature=config.temperature,
        greedy=sum(count_right(tokenizer, drawn, greedy)) / len(drawn),
        right=right,
        pass_at=pass_at,
        pass_at_error=pass_at_error,
        pass_at_1_by_kind={kind: float(np.mean(rate)) for kind, rate in rates.items()},
        generated_tokens=sum(len(o.token_ids) // 4 for outputs in sampled for o in outputs),
        seconds=seconds,
        gains=gains,
    )


def _read(path: Path, digest: str, config: EvaluateConfig) -> Evaluation:
    """Read what `srm evaluate` printed for another model. Raises ConfigError if it cannot be read
    or has other problems, another temperature or fewer samples."""
    try:
        decoded = msgspec.json.decode(read_file(path), type=Evaluation)
    except OSError as error:
        raise ConfigError(f"against: {path} cannot be read: {error.strerror}") from error
    except UNDECODABLE as error:
        raise ConfigError(
            f"against: {path} is no output of srm evaluate: {in_words(error)}"
        ) from None
    if decoded.digest != digest:
        raise ConfigError(
            f"against: {path} has {decoded.problems} problems that are not those of problems and "
            "seed here: give both as they were for that file"
        )
    if decoded.temperature != config.temperature:
        raise ConfigError(
            f"against: {path} was sampled at temperature {decoded.temperature:g}: give that here "
            f"too, got {config.temperature:g}"
        )
    if decoded.samples < config.samples:
        raise ConfigError(
            f"against: {path} must have at least {config.samples} samples of each problem, got "
            f"{decoded.samples}"
        )
    if len(decoded.right) != decoded.problems or not all(
        0 <= n <= decoded.samples for n in decoded.right
    ):
        raise ConfigError(f"against: {path} must have the right samples of each problem")
    return decoded


def _table(samples: int, right: list[int], most: int) -> Floats:
    """Return each problem's estimate of pass@k, for k up to `most`, [problems, ks]."""
    ks = [k for k in KS if k <= most]
    return pass_table([Tally(samples, count) for count in right], ks)


def _by_k(table: Floats) -> tuple[dict[str, float], dict[str, float]]:
    """Return the mean of each column, and its standard error, by k."""
    columns = table.mean(axis=0).tolist(), standard_errors(table).tolist()
    means, errors = ({str(k): x for k, x in zip(KS, column, strict=False)} for column in columns)
    return means, errors


def count_right(
    tokenizer: Tokenizer, drawn: list[Problem], outputs: list[list[Output]]
) -> list[int]:
    """Count the right completions of each problem."""
    counts = []
    for problem, samples in zip(drawn, outputs, strict=True):
        ids = [np.frombuffer(output.token_ids, "<i4").tolist() for output in samples]
        texts = tokenizer.decode_batch(ids, skip_special_tokens=True)
        counts.append(int(sum(reward(problem, text) for text in texts)))
    return counts
