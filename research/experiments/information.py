"""`python -m research.experiments information`: how much of a text one embedding of a model has.

A causal encoder turns n tokens into the embedding of one position; from it alone a decoder of the
same kind and depth has to tell all of them. For retention, the encoder was trained to predict text,
or has the weights it began with, and is not trained further; for capacity, it is trained with the
decoder. As in the paper, the decoder's input at each position is a window of half the embedding's
channels, which begins a channel further on at each next position and goes round, projected to its
width; the embedding is that of the last position but one where the encoder is not trained, else of
the last.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from statistics import mean

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from research.experiments.harness.corpus import Corpus, standard_library
from research.experiments.harness.models import make_variant
from research.experiments.harness.ordering import ordering
from research.experiments.harness.report import beside, number, spread, table
from research.experiments.harness.result_cache import Numbers
from research.experiments.harness.runner import (
    Report,
    Results,
    fit,
    fit_text,
    run_cases,
    values_of,
)
from research.experiments.harness.settings import ExperimentSettings
from srm.training.huggingface.units_srm import Places
from srm.training.loop import TrainingBatches
from srm.training.model import SRM, LanguageModel

RETENTION = ("mixed decay", "Mamba 2", "masked mixer", "Transformer")
CAPACITY = (
    "mixed decay no projections",
    "mixed decay",
    "mixed",
    "plain heads",
    "parallel heads",
    "Mamba 2",
    "masked mixer",
    "Transformer",
)
UNTRAINED = " untrained"
UNIGRAM = "frequencies alone"
"""The case of a model that knows only how often each token is."""
CASES = (
    *(f"retention {variant}{end}" for variant in RETENTION for end in ("", UNTRAINED)),
    *(f"capacity {variant}" for variant in CAPACITY),
)
PAPER = {
    "retention mixed decay": (6.169, 0.317),
    "retention mixed decay untrained": (6.105, 0.324),
    "retention Mamba 2": (7.039, 0.220),
    "retention Mamba 2 untrained": (7.290, 0.193),
    "capacity mixed decay": (2.011, 0.777),
    "capacity mixed": (4.050, 0.551),
    "capacity mixed decay no projections": (1.295, 0.857),
    "capacity plain heads": (2.984, 0.670),
    "capacity parallel heads": (2.423, 0.732),
    "capacity Mamba 2": (3.357, 0.628),
    "capacity masked mixer": (0.440, 0.951),
}
"""The paper's losses and entropy ratios, all with d and n of 512."""
PAPER_RETENTION = ("mixed decay", "Mamba 2")
"""Cases that the paper has both with a trained encoder and with an untrained one."""
FROZEN, TRAINED = -2, -1
"""Position of the embedding: the last but one if the encoder is frozen, the last if it is
trained."""


class Settings(ExperimentSettings, frozen=True):
    """Settings of `python -m research.experiments information`."""

    seeds: tuple[int, ...] = (0, 1)
    rows: int = 32
    steps: int = 1_500
    """Updates of encoder and decoder together, or of the decoder alone."""
    encoder_steps: int = 500
    """Updates in which an encoder learns to predict text before it is frozen."""
    d_model: int = 64
    """Width of the models, which is the size of the embedding."""
    num_layers: int = 2
    """Number of blocks of the encoder, and of the decoder."""
    n_ctx: int = 32
    """Number of tokens to reconstruct from one embedding."""
    max_vocab_size: int = 512
    learning_rate: float = 5e-3


def hidden(model: LanguageModel, x: Tensor) -> Tensor:
    """Return the input of the output layer, [rows, length, d], for embedded tokens x."""
    places = Places(slice(x.shape[1]))
    for block in model.mixer_blocks:
        x = block(x, places)[0] if isinstance(model, SRM) else block(x)
    normed: Tensor = dict(model.named_children()).get("norm", nn.Identity())(x)
    return normed


class Autoencoder(LanguageModel):
    """ids -> encoder -> the embedding of one position -> windows of it -> decoder -> logits."""

    def __init__(
        self, encoder: LanguageModel, decoder: LanguageModel, width: int, *, is_frozen: bool
    ) -> None:
        """With `is_frozen` the encoder is not trained, and its weights are no parameters of this
        model."""
        super().__init__()
        self.config: msgspec.Struct = decoder.config
        self._encoder, self._position = (encoder,), FROZEN  # modules in a tuple are not this one's
        if is_frozen:
            encoder.requires_grad_(requires_grad=False)
        else:
            self.encoder, self._position = encoder, TRAINED
        self.decoder = decoder
        self.widen = nn.Linear(width // 2, width)
        encoder.output_layer = decoder.input_layer = nn.Identity()  # neither is used

    def embedding(self, ids: Tensor) -> Tensor:
        """Return the embedding of one position, [rows, d], of ids int64 [rows, n]."""
        (encoder,) = self._encoder
        x = encoder.get_submodule("input_layer")(ids)
        return hidden(encoder, x)[:, self._position]

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids int64 [rows, n] to logits [rows, n, vocab] of the same tokens."""
        x = self.widen(windows(self.embedding(ids), ids.shape[1]))
        x = x.to(self.widen.weight.dtype)  # which embedded tokens have whatever the precision is
        logits: Tensor = self.decoder.get_submodule("output_layer")(hidden(self.decoder, x))
        return logits


def windows(embedding: Tensor, count: int) -> Tensor:
    """Return windows [rows, count, d // 2] of an embedding [rows, d]: window i begins at channel i
    and wraps around after the last channel."""
    width = embedding.shape[-1]
    starts = torch.arange(count, device=embedding.device)[:, None]
    channels = torch.arange(width // 2, device=embedding.device)
    return embedding[:, (starts + channels) % width]


class Repeated:
    """Batches whose targets are their inputs."""

    def __init__(self, batches: TrainingBatches) -> None:
        self._batches = batches

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, _ = self._batches[index]
        return inputs, inputs


def train_case(config: Settings, corpus: Corpus, case: str, seed: int) -> Numbers:
    """Train a case; return its loss on held-out text in nats per token, and its entropy ratio.

    The ratio is 1 - loss / ln(vocabulary size): 0 where nothing is known of the tokens.
    """
    what, variant = case.removesuffix(UNTRAINED).split(" ", 1)
    sizes = (config.d_model, config.num_layers, config.n_ctx, corpus.vocab_size)
    is_frozen, before, rate = what == "retention", {}, config.learning_rate
    make = partial(make_variant, variant, *sizes)
    encoder: LanguageModel | None = None
    if is_frozen and not case.endswith(UNTRAINED):
        _, encoder, took = fit_text(corpus, config, make, seed, config.encoder_steps, rate)
        seconds = took["processor_seconds"]
        before = {"encoder_loss": took["loss"], "encoder_processor_seconds": seconds}

    def joined() -> LanguageModel:
        return Autoencoder(encoder or make(), make(), config.d_model, is_frozen=is_frozen)

    batches = Repeated(corpus.batches(config.rows, config.n_ctx, seed))
    run, _, took = fit(joined, batches, seed, config.steps, learning_rate=rate)
    loss = run.evaluate([(ids, ids) for ids, _ in corpus.evaluation(config.rows, config.n_ctx)])
    return {"loss": loss, "ratio": 1 - loss / math.log(corpus.vocab_size), **before, **took}


def page(config: Settings, results: Results) -> list[str]:
    """Return the record's text: a table for each part, and what agrees."""
    (unigram,) = results[UNIGRAM]
    results = {case: of for case, of in results.items() if case != UNIGRAM}
    losses, ratios = values_of(results, "loss"), values_of(results, "ratio")
    seconds = values_of(results, "processor_seconds")
    blocks = [
        f"{config.n_ctx} tokens from one embedding of {config.d_model} numbers. The entropy ratio "
        "is 1 - loss / ln(entries of the tokenizer). Who knows only how often each token is has a "
        f"loss of {unigram['loss']:.3f}."
    ]
    for part, title in (
        ("retention", "Retention, the encoder not trained further"),
        ("capacity", "Capacity, the encoder trained too"),
    ):
        cases = [case for case in results if case.startswith(part)]
        rows = (
            [
                case.removeprefix(f"{part} "),
                *(spread(losses[case]), number(loss), spread(ratios[case]), number(ratio)),
                f"{mean(seconds[case]):.0f}",
            ]
            for case in cases
            for loss, ratio in [PAPER.get(case, (None, None))]
        )
        heads = ["case", "loss", "the paper's", "entropy ratio", "the paper's", "processor s"]
        ours = {case: losses[case] for case in cases}
        theirs = {case: loss for case, (loss, _) in PAPER.items()}
        blocks += [f"{title}:", table(heads, rows), ordering(ours, theirs).sentence()]
    return [*blocks, *(trained_beside_untrained(losses, variant) for variant in PAPER_RETENTION)]


def trained_beside_untrained(losses: Mapping[str, list[float]], variant: str) -> str:
    """Say by how much training the encoder changes the loss, here and in the paper."""
    case = f"retention {variant}"
    ours = mean(losses[case]) - mean(losses[case + UNTRAINED])
    theirs = PAPER[case][0] - PAPER[case + UNTRAINED][0]
    is_same = "the same" if ours * theirs > 0 else "another"
    return (
        f"Having learned to predict text changes what {variant} retains by {ours:+.3f} nats per "
        f"token, in the paper by {theirs:+.3f}: {is_same} direction."
    )


def unigram_loss(corpus: Corpus) -> float:
    """Return the loss on held-out text, in nats per token, of the token frequencies of the training
    text."""
    counts = np.bincount(corpus.training, minlength=corpus.vocab_size) + 1
    return float(-np.log(counts / counts.sum())[np.asarray(corpus.held_out)].mean())


def run(config: Settings) -> Report:
    """Run all cases."""
    corpus = standard_library(config.max_vocab_size)
    cases = {case: partial(train_case, config, corpus, case) for case in CASES}
    texts = {"texts": corpus.sha256}
    results = run_cases(config, cases, texts)
    theirs = {case: ratio for case, (_, ratio) in PAPER.items()}
    figure = beside(values_of(results, "ratio"), theirs, "entropy ratio")
    alone = {UNIGRAM: lambda _: {"loss": unigram_loss(corpus)}}
    results |= run_cases(config, alone, texts, config.seeds[:1])
    return results, page(config, results), figure
