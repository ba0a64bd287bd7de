"""`srm train sft`: trains a model on the completions of rows; prompts have no loss."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import torch

from srm.engine.config import DEMO_MODEL
from srm.engine.errors import ConfigError
from srm.engine.settings import build
from srm.engine.weights.checkpoint import read_model
from srm.server.text.text import Text
from srm.training.checkpoint import copy_text_files, load_model, save_model
from srm.training.events import check_events
from srm.training.finetuning.conversations import Chats, RowText, read
from srm.training.finetuning.examples import (
    Example,
    ExampleBatches,
    digest,
    encode,
    fitting,
    in_order,
    with_shots,
)
from srm.training.loop import Losses, Run, Schedule
from srm.training.loss_files import write_losses
from srm.training.precision import Precision
from srm.training.processes import processes
from srm.training.settings import check_numbers, select_fixed

log = logging.getLogger(__name__)


class SFTConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm train sft`; the defaults are the paper's recipe for GSM8K."""

    model: Path = DEMO_MODEL
    """Folder of the model that training begins with: config.json, model.safetensors,
    tokenizer.json."""
    output: Path = Path("runs/sft")
    """Folder of the run and of the new model; an existing run is resumed."""
    train: tuple[Path, ...] = ()
    """Files .jsonl and .parquet whose rows have messages, prompt and completion, or question and
    answer."""
    evaluation: tuple[Path, ...] = ()
    """Files like those of `train` for evaluation; empty: rows of `train` are held back."""
    evaluation_share: float = 0.05
    """Fraction of the rows of `train` that is held back for evaluation where `evaluation` is
    empty."""
    evaluate_every: int = 0
    """Updates between two evaluations; 0: one evaluation an epoch."""
    shots: int = 0
    """Number of other rows of `train`, drawn with the seed, put before each prompt as examples."""
    max_length: int = 0
    """Most tokens of a row; longer rows are left out. 0: the model's context."""
    epochs: int = 4
    """Number of times that each row is trained on."""
    batch_rows: int = 16
    """Rows of one update, all processes together."""
    micro_batches: int = 1
    """Parts into which a batch is split, computed one after the other to save memory."""
    learning_rate: float = 1e-4
    """Peak learning rate: reached after the warm-up, then falling to 0 along a cosine."""
    warmup_share: float = 0.1
    """Fraction of the updates over which the learning rate rises."""
    weight_decay: float = 0.1
    """Weight decay of the AdamW optimizer."""
    clip_norm: float = 0.1
    """Largest norm of all gradients together; larger gradients are scaled down to it."""
    save_every: int = 100
    """Updates between two saves of the run."""
    precision: Precision = "auto"
    """Precision of the matrix products in training, token mixing included; weights and optimizer
    stay float32. auto: bfloat16, or float32 on a processor without instructions for it."""
    device: Literal["cpu", "gpu"] = "cpu"
    """Device that trains the model."""
    shard: bool = False
    """Whether weights and optimizer state are divided among the processes (FSDP) instead of copied
    to each."""
    tensorboard: bool = False
    """Whether losses are also written for TensorBoard, into the folder `tensorboard` of
    `output`."""
    seed: int = 0
    """Seed of the order of rows, the choice of rows held back and the choice of shots."""
    threads: int = 0
    """CPU threads; 0: torch chooses."""

    def __post_init__(self) -> None:
        least = dict.fromkeys(("epochs", "batch_rows", "micro_batches"), 1)
        check_numbers(self, least | {"shots": 0, "max_length": 0})
        if not 0 <= self.warmup_share <= 1:
            raise ValueError(f"warmup_share must lie in [0, 1], got {self.warmup_share}")
        if not 0 < self.evaluation_share < 1:
            raise ValueError(f"evaluation_share must lie in (0, 1), got {self.evaluation_share}")


class Data(NamedTuple):
    """The rows of a run, as tokens."""

    train: list[Example]
    evaluation: list[Example]
    left_out: int
    """Number of rows left out because they are too long."""


def sft(config: SFTConfig) -> Losses:
    """Train, or resume the run in `config.output`; leaves the model of least evaluation loss there.

    Raises ConfigError for settings that do not fit the model, the rows or the run that is there.
    """
    if not config.train:
        raise ConfigError("train must be files .jsonl or .parquet, got none")
    if config.output.resolve() == config.model.resolve():
        raise ConfigError(f"output must be another folder than model, got {config.output} for both")
    check_events(config.tensorboard)
    torch.manual_seed(config.seed)
    if config.threads:
        torch.set_num_threads(config.threads)
    base = read_model(config.model)
    data = prepared(config, Text(config.model))
    with processes(config.device) as own, own.alone_in(config.output):
        if config.batch_rows % (config.micro_batches * own.count):
            raise ConfigError(
                f"batch_rows must be a multiple of micro_batches = {config.micro_batches} times "
                f"the {own.count} processes, got {config.batch_rows}"
            )
        if data.left_out and own.is_first:
            total = len(data.train) + len(data.evaluation) + data.left_out
            log.warning("%d of %d rows are left out: too many tokens", data.left_out, total)
        source = {"model": base.fingerprint, "rows": digest(data.train, data.evaluation)}
        model, schedule = load_model(config.model), _schedule(config, data)
        run = Run(model, schedule, config.output, own, source, select_fixed(config))
        run.train(
            ExampleBatches(data.train, config.batch_rows, config.seed),
            in_order(data.evaluation, config.batch_rows),
        )
        weights = run.weights()
        if own.is_first:
            copy_text_files(config.model, config.output)
            save_model(base.config, weights, config.output)
            write_losses(run.losses, config.output)
    return run.losses


def _schedule(config: SFTConfig, data: Data) -> Schedule:
    most = config.epochs * len(data.train)
    if config.batch_rows > most:
        raise ConfigError(
            f"batch_rows must be at most epochs = {config.epochs} times the {len(data.train)} rows "
            f"of train, got {config.batch_rows}"
        )
    steps = math.ceil(most / config.batch_rows)
    derived = {
        "steps": steps,
        "warmup_steps": math.ceil(config.warmup_share * steps),
        "decline": "cosine",
        "evaluate_every": config.evaluate_every or math.ceil(len(data.train) / config.batch_rows),
        "keep_best": True,
    }
    return build(Schedule, msgspec.structs.asdict(config) | derived)


def prepared(config: SFTConfig, text: Text) -> Data:
    """Read and tokenize the rows. Raises ConfigError for rows that cannot be used."""
    n_ctx = text.model.n_ctx
    if config.max_length > n_ctx:
        raise ConfigError(
            f"max_length must be at most the model's context of {n_ctx} tokens, "
            f"got {config.max_length}"
        )
    if not text.has_tokenizer:
        raise ConfigError(f"model: {config.model} has no tokenizer.json")
    chats = Chats(config.model, text.special_tokens)
    train, evaluation_name = read(config.train, "train", chats), "evaluation"
    if config.evaluation:
        evaluation = read(config.evaluation, evaluation_name, chats)
    else:
        train, evaluation = _held_back(train, config)
        evaluation_name = "the part of train that is held back"
    prepared_rows = {}
    for rows, name in ((train, "train"), (evaluation, evaluation_name)):
        examples = encode(with_shots(rows, train, config.shots, config.seed, name), text)
        prepared_rows[name] = fitting(examples, config.max_length or n_ctx, name)
    left_out = len(train) + len(evaluation) - sum(map(len, prepared_rows.values()))
    return Data(prepared_rows["train"], prepared_rows[evaluation_name], left_out)


def _held_back(rows: Sequence[RowText], config: SFTConfig) -> tuple[list[RowText], list[RowText]]:
    """Return the rows to train on and the rows held back, both in file order."""
    count = max(1, round(config.evaluation_share * len(rows)))
    if count >= len(rows):
        raise ConfigError(
            f"evaluation_share = {config.evaluation_share} holds back {count} of {len(rows)} rows "
            "of train: give more rows, or files for evaluation"
        )
    drawn = set(np.random.default_rng(config.seed).permutation(len(rows))[:count].tolist())
    parts: tuple[list[RowText], list[RowText]] = [], []
    for number, row in enumerate(rows):
        parts[number in drawn].append(row)
    return parts
