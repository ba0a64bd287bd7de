"""`srm train`: a tokenizer and a model, from nothing, on generated word problems."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import msgspec
import torch
from tokenizers import Tokenizer

from engine.config import ModelConfig
from training.checkpoint import save_model, write_whole
from training.data import ProblemBatches
from training.loop import Schedule, train
from training.model import SRM
from training.tasks import problems
from training.tokenizer import BEGIN_ID, END_ID, train_tokenizer

TOKENIZER_PROBLEMS = 100_000

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'user' %}"
    "{{ '' if loop.first else '<|begin_of_text|>' }}Question: {{ message.content }}\\nAnswer:"
    "{% elif message.role == 'assistant' %} {{ message.content }}<|end_of_text|>"
    "{% endif %}{% endfor %}"
)


class TrainConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm train`; the defaults are those of the bundled demo model."""

    output: Path = Path("runs/demo")
    steps: int = 4_500
    batch_tokens: int = 8_192
    learning_rate: float = 1.5e-3
    warmup_steps: int = 200
    weight_decay: float = 0.01
    save_every: int = 100
    seed: int = 0
    d_model: int = 256
    num_layers: int = 8
    num_heads: int = 4
    n_ctx: int = 512
    max_vocab_size: int = 2_048
    threads: int = 0
    """CPU threads; 0 is as many as torch chooses."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch_tokens", "n_ctx", "warmup_steps", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def pretrain(config: TrainConfig) -> list[float]:
    """Train, or go on with the run in `config.output`; leaves a model folder there."""
    torch.manual_seed(config.seed)
    if config.threads:
        torch.set_num_threads(config.threads)
    config.output.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(config)
    model = SRM(
        ModelConfig(
            d_model=config.d_model,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            n_ctx=config.n_ctx,
            vocab_size=tokenizer.get_vocab_size(),
            decay_constant=max(1, config.n_ctx // 512),
            bos_token_id=BEGIN_ID,
            eos_token_id=END_ID,
        )
    )
    batches = ProblemBatches(tokenizer, config.seed, config.batch_tokens, config.n_ctx)
    schedule = Schedule(
        steps=config.steps,
        learning_rate=config.learning_rate,
        warmup_steps=config.warmup_steps,
        weight_decay=config.weight_decay,
        save_every=config.save_every,
    )
    losses = train(model, batches, schedule, config.output)
    save_model(model, config.output)
    write_whole(config.output / "losses.json", msgspec.json.encode(losses))
    return losses


def _tokenizer(config: TrainConfig) -> Tokenizer:
    path = config.output / "tokenizer.json"
    if not path.exists():
        sample = islice(problems("train", config.seed), TOKENIZER_PROBLEMS)
        tokenizer = train_tokenizer((p.prompt + p.solution for p in sample), config.max_vocab_size)
        write_whole(path, tokenizer.to_str(pretty=True).encode())
        write_whole(config.output / "chat_template.jinja", CHAT_TEMPLATE.encode())
    return Tokenizer.from_file(str(path))
