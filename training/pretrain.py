"""`srm train`: trains a tokenizer and a model from scratch on generated word problems."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import matplotlib as mpl
import msgspec
import torch
from matplotlib import pyplot as plt
from tokenizers import Tokenizer

from engine.config import ModelConfig
from engine.settings import build
from training.checkpoint import save_model, write_whole
from training.data import BEGIN_ID, END_ID, PACKED_EVERY, ProblemBatches, train_tokenizer
from training.loop import Schedule, train
from training.model import SRM
from training.tasks import problems

TOKENIZER_PROBLEMS = 100_000
MIN_VOCAB_SIZE = 258
"""Every byte, and the begin and end tokens."""

CHAT_TEMPLATE = r"""{%- for message in messages -%}
{%- if message.role == 'user' -%}
{{- '<|begin_of_text|>Question: ' ~ message.content | trim -}}
{%- elif message.role == 'assistant' -%}
{{- '\nAnswer: ' ~ message.content | trim ~ '<|end_of_text|>' -}}
{%- elif message.role != 'system' -%}
{{- raise_exception('this model knows questions and answers, no messages of ' ~ message.role) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '\nAnswer:' -}}
{%- endif -%}
"""
"""Formats chats as the training problems: a begin token, a question, its answer, an end token."""


class TrainConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm train`; the defaults are those of the bundled demo model."""

    output: Path = Path("runs/demo")
    """Folder of the run and of the model; a run that is there goes on."""
    steps: int = 1_800
    """Updates in all, those of a run that goes on included."""
    batch_tokens: int = 8_192
    """Tokens of one update, about."""
    learning_rate: float = 1.5e-3
    """Peak learning rate: reached after the warm-up, then falling in a line to 0."""
    warmup_steps: int = 200
    """Updates over which the learning rate rises."""
    weight_decay: float = 0.01
    """Of AdamW."""
    save_every: int = 100
    """Updates between two saves of the run."""
    seed: int = 0
    """Of weights and problems; another seed is another training set."""
    d_model: int = 256
    """Width of the model; num_heads must divide it."""
    num_layers: int = 8
    """Blocks of the model."""
    num_heads: int = 4
    """Heads of a token mixer; an even number."""
    n_ctx: int = 512
    """Context of the model, in tokens."""
    max_vocab_size: int = 2_048
    """Most entries of the tokenizer; every byte and two special tokens are always in it."""
    threads: int = 0
    """CPU threads; 0 is as many as torch chooses."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch_tokens", "warmup_steps", "save_every", "max_vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("learning_rate", "weight_decay", "seed", "threads"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        self.model(MIN_VOCAB_SIZE)  # reports an invalid shape before any work

    def model(self, vocab_size: int) -> ModelConfig:
        """Return the model's configuration. Raises ValueError for an invalid shape."""
        return ModelConfig(
            d_model=self.d_model,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            n_ctx=self.n_ctx,
            vocab_size=vocab_size,
            decay_constant=max(1, self.n_ctx // 512),
            bos_token_id=BEGIN_ID,
            eos_token_id=END_ID,
        )


def pretrain(config: TrainConfig) -> list[float]:
    """Train, or resume the run in `config.output`; leaves a model folder there."""
    torch.manual_seed(config.seed)
    if config.threads:
        torch.set_num_threads(config.threads)
    config.output.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(config)
    model = SRM(config.model(tokenizer.get_vocab_size()))
    batches = ProblemBatches(tokenizer, config.seed, config.batch_tokens, config.n_ctx)
    losses = train(model, batches, build(Schedule, msgspec.structs.asdict(config)), config.output)
    save_model(model, config.output)
    write_whole(config.output / "losses.json", msgspec.json.encode(losses))
    _plot(losses, config.output / "loss.svg")
    return losses


def _tokenizer(config: TrainConfig) -> Tokenizer:
    path = config.output / "tokenizer.json"
    if not path.exists():
        sample = islice(problems("train", config.seed), TOKENIZER_PROBLEMS)
        tokenizer = train_tokenizer((p.prompt + p.solution for p in sample), config.max_vocab_size)
        write_whole(path, tokenizer.to_str(pretty=True).encode())
        write_whole(config.output / "chat_template.jinja", CHAT_TEMPLATE.encode())
    return Tokenizer.from_file(str(path))


def _plot(losses: list[float], path: Path) -> None:
    """Plot cross-entropy in nats per token by step, on a log scale, one line per kind of batch."""
    mpl.use("svg")  # no display needed
    kinds = {
        "one problem per row": [i for i in range(len(losses)) if (i + 1) % PACKED_EVERY],
        "whole contexts of problems": list(range(PACKED_EVERY - 1, len(losses), PACKED_EVERY)),
    }
    with mpl.rc_context({"svg.hashsalt": "srm"}):  # the same picture for the same numbers
        figure, axes = plt.subplots(figsize=(7, 4))
        for label, steps in kinds.items():
            axes.plot(steps, [losses[step] for step in steps], linewidth=0.8, label=label)
        axes.set(yscale="log", xlabel="step", ylabel="loss (nats per token)")
        axes.grid(which="both", linewidth=0.3)
        axes.legend()
        figure.tight_layout()
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
