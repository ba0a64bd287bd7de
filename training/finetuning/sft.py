"""`srm train sft`: trains a model on the completions of rows; prompts have no loss."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from srm.engine.weights.checkpoint import read_model
from srm.errors import ConfigError
from srm.server.text.text import Text
from srm.settings import build
from srm.tokenizer_file import read_tokenizer
from srm.training.checkpoint import load_model
from srm.training.finetuning.config import SFTConfig
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
from srm.training.instruments.events import check_events
from srm.training.loop import Losses, Run
from srm.training.loss_files import write_losses
from srm.training.processes import processes
from srm.training.schedule import Schedule
from srm.training.settings import select_fixed
from srm.training.watch import ShownSamples

log = logging.getLogger(__name__)


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
    check_events(config)
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
        run = Run(model, schedule, config.output, own, source, select_fixed(config), config.model)
        first = data.evaluation[0]
        prompt = first.ids[: int(first.is_target.argmax())].tolist() or [base.config.bos_token_id]
        tokenizer = read_tokenizer(config.model / "tokenizer.json")
        shown = (base.config.n_ctx, schedule.save_every, schedule.steps)
        samples = ShownSamples(run, tokenizer, prompt, *shown)
        run.train(
            ExampleBatches(data.train, config.batch_rows, config.seed),
            in_order(data.evaluation, config.batch_rows),
            (samples,),
        )
        if own.is_first:
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
